"""Load a checkpoint as a causal language model that computes in float32, with every stored tensor in its place.

Float checkpoints stay in their files (:mod:`pipeline.export.mapped`), as do experts in MXFP4
(:mod:`tapeout.coded_parameters`). Other quantized ones and GGUF files are dequantized into files, and experts that are
stored one by one are stacked into files, so that no model is held in memory.

transformers fills a missing tensor with random numbers, drops a tensor that it does not know, and goes on. Here each is
an error that names the tensor. What can be refused from ``config.json`` and from the headers of the weights files is
refused before any weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pipeline.export import gguf, gguf_experts, gguf_mixtures
from pipeline.export.composed import composed, is_composed
from pipeline.export.mapped import place_stored, stand_ins
from pipeline.export.weights import write_weights
from quantization.dequantize import dequantized, describe, keeps_codes
from runtime.gateway.text.sampling_defaults import GENERATION_CONFIG, read_defaults
from tapeout.coded_parameters import StoredCodes, with_codes
from tapeout.errors import ExportError, one_line
from tapeout.mapped_weights import CodedParameter, compute_in_float32, is_finite
from tapeout.operators.experts.in_torch import require_interface
from tapeout.tensor_files import FLOATS, StoredTensor, few, stored_tensors

CONFIG = "config.json"
# Buffers of old releases that transformers computes by itself: masks, positions and rotary frequencies.
BUFFERS = re.compile(r"(^|\.)(position_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$")
DECODER = "a decoder that transformers.AutoModelForCausalLM knows"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """``dequantized``: how the checkpoint stored its weights, where they were quantized; but for codes that stay, those
    are float32 then.

    ``weights``: the folder whose files the parameters are mapped from; without a scratch folder it may be gone.
    """

    model: Any
    dequantized: str | None
    weights: Path


def load_checkpoint(folder: Path, entry: str = "", scratch: Path | None = None) -> LoadedCheckpoint:
    """The model of a checkpoint folder, or of the GGUF file ``entry`` in it.

    ``scratch``: where the weights of a quantized checkpoint or GGUF file are written in float32, and stacked experts as
    they are stored, one at a time, and mapped from; default: files without a name in the system's temporary folder.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    with ExitStack() as stack:
        scratch = scratch or Path(stack.enter_context(TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        loaded = _load_gguf(folder, entry, scratch) if entry.endswith(".gguf") else _load_folder(folder, scratch)
    _require_finite(loaded.model)
    compute_in_float32(loaded.model)
    return loaded


def _load_folder(folder: Path, scratch: Path) -> LoadedCheckpoint:
    from transformers.generation.configuration_utils import GenerationConfig

    written = _read_config(folder)
    _require_one_rotary(written, str(folder))
    config = _config(folder)
    skeleton = _require_decoder(config, written.get("architectures"), str(folder))
    tensors, weights = stored_tensors(folder), folder
    quantization = written.get("quantization_config") or written.get("compression_config")
    reads = {name: tensor.read for name, tensor in tensors.items()}
    if quantization is None:
        _require_floats(tensors)
    else:
        reads = dequantized(tensors, quantization, tied=bool(_text(config).tie_word_embeddings))
        if all(tensor.dtype in FLOATS for tensor in tensors.values()):
            quantization = None  # left beside weights that somebody has dequantized
    if not (quantization is None or keeps_codes(quantization)) or is_composed(skeleton, reads):
        write_weights(scratch, composed(skeleton, reads))
        tensors, weights = stored_tensors(scratch), scratch
    vars(config).pop("quantization_config", None)
    vars(config).pop("compression_config", None)
    model = _placed(type(skeleton), config, with_codes(tensors), str(folder))
    if (folder / GENERATION_CONFIG).is_file():
        read_defaults(folder)  # so that what no request may have is refused here, and not by the server
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return LoadedCheckpoint(model, None if quantization is None else describe(quantization), weights)


def _placed(kind: Any, config: Any, stored: Mapping[str, StoredTensor | StoredCodes], where: str) -> Any:
    """The model, its parameters mapped from their files."""
    tensors = stand_ins(stored, _text(config).vocab_size)
    model = _filled(kind, config, tensors, where)
    if not place_stored(model, tensors, stored):
        # transformers computes parameters of this family from stored ones
        model = _filled(kind, config, {name: tensor.read() for name, tensor in stored.items()}, where)
    return model


def _load_gguf(folder: Path, entry: str, scratch: Path) -> LoadedCheckpoint:
    path = folder / entry
    header = gguf.read_header(path)
    with gguf.quickly_read():
        if gguf_mixtures.is_mixture(header.metadata):
            mixture = gguf_mixtures.describe(path, header)
            config, skeleton = mixture.config, _require_decoder(mixture.config, None, entry)
            reads = gguf_experts.reads(mixture, skeleton)
        else:
            config = _config(folder, gguf_file=entry)
            gguf.require_known(header, config, path)
            skeleton = _require_decoder(config, None, entry)
            reads = gguf.dequantized(path, header, skeleton)
    write_weights(scratch, reads)
    # How the file stored the model must not reach the exported config.
    vars(config).pop("quantization_config", None)
    model = _placed(type(skeleton), config, with_codes(stored_tensors(scratch)), entry)
    if sampling := gguf.sampling(header, path):
        # transformers saves no settings of sampling for a model that does not sample.
        model.generation_config.update(do_sample=bool(sampling.keys() - {"repetition_penalty"}), **sampling)
    return LoadedCheckpoint(model, gguf.describe(header), scratch)


def _read_config(folder: Path) -> dict[str, Any]:
    """``config.json``. Files that transformers would leave out when they are damaged are read too."""
    config = _read_json(folder / CONFIG)
    if (folder / GENERATION_CONFIG).is_file():
        _read_json(folder / GENERATION_CONFIG)
    if "transformers_weights" in config:
        raise ExportError(
            f"{CONFIG} of {folder} names another weights file: transformers_weights is "
            f"{config['transformers_weights']!r}",
            expected="weights in model.safetensors, or in shards with their index",
            remedy="rename the file, and remove transformers_weights",
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ExportError(
            f"no {path.name} in {path.parent}", expected="a checkpoint folder", remedy="check model.source"
        ) from error
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error}", remedy="fix its permissions, or fetch it again") from error
    except ValueError as error:
        raise ExportError(
            f"{path} is not JSON: {error}", expected="the file of the checkpoint", remedy="fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} holds {type(content).__name__}", expected="a mapping", remedy="fetch it again")
    return content


def _config(folder: Path, **options: str) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # a library's own words about a file that it cannot read
        raise ExportError(
            f"transformers cannot read the configuration of {folder / options.get('gguf_file', CONFIG)}: "
            f"{one_line(error)}",
            expected=DECODER,
            remedy="check model.source; a model with remote code is not supported",
        ) from error


def _require_decoder(config: Any, architectures: Any, where: str) -> Any:
    """The model, on the meta device. Refused: anything that is no causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        raise ExportError(
            f"{where} is an encoder-decoder model ({config.model_type})", expected=DECODER, remedy="choose a decoder"
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ExportError(
            f"transformers has no causal language model of type {config.model_type} ({where})",
            expected=DECODER,
            remedy="choose a decoder",
        )
    if architectures is not None or not where.endswith(".gguf"):
        named = architectures if isinstance(architectures, list) else []
        if [str(name).casefold() for name in named] != [kind.__name__.casefold()]:
            raise ExportError(
                f"{CONFIG} of {where} names the architecture {', '.join(map(str, named)) or 'none'}",
                expected=f"{kind.__name__}, the causal language model of type {config.model_type}",
                remedy="choose a checkpoint with a language-model head: classifiers, reward models and embedding "
                "models predict no tokens",
            )
    _require_sizes(config, where)
    try:
        with torch.device("meta"):
            skeleton = kind(config)
    except Exception as error:  # what a model's own code says of sizes that do not fit
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        known = {"default", *ROPE_INIT_FUNCTIONS}
        if unknown := _unknown_rotary(config, known):
            raise ExportError(
                f"{where} scales its rotary embeddings by an unknown rope_type: {unknown}",
                expected=f"one of {', '.join(sorted(known))}",
                remedy="correct rope_type in the configuration, or choose another checkpoint",
            ) from error
        raise ExportError(
            f"{where} describes a {kind.__name__} that cannot be built: {one_line(error)}",
            expected="a configuration whose sizes fit together",
            remedy="correct the configuration, or choose another checkpoint",
        ) from error
    require_interface(skeleton)
    return skeleton


def _require_one_rotary(written: Mapping[str, Any], where: str) -> None:
    """Refuse rotary embeddings on which ``config.json`` contradicts itself. transformers would choose."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    problems: list[str] = []
    for level in [written, *(value for value in written.values() if isinstance(value, dict))]:
        sets = {name: level[name] for name in ("rope_scaling", "rope_parameters") if isinstance(level.get(name), dict)}
        bases = [one["rope_theta"] for one in (level, *sets.values()) if one.get("rope_theta") is not None]
        if different := [base for base in bases if base != bases[0]]:
            problems.append(f"rope_theta {bases[0]} and {different[0]}")
        scalings = [_scaling(value) for value in sets.values()]
        if scalings[1:] and scalings[0] != scalings[1]:
            problems.append(" and ".join(f"{name} {value}" for name, value in sets.items()))
        # Models whose layers differ have parameters by the type of the layer.
        for one in (one for value in sets.values() for one in (value, *value.values()) if isinstance(one, dict)):
            kind, old = _scaling(one)["rope_type"], one.get("type")
            # Types that are unknown here are names of older releases, such as su.
            if isinstance(old, str) and old in ROPE_INIT_FUNCTIONS and old != kind:
                problems.append(f"type {old} and rope_type {kind}")
            if kind == "default" and one.get("factor") not in (None, 1):
                problems.append(f"factor {one['factor']} and rope_type {kind}, which scales nothing")
    if problems:
        raise ExportError(
            f"{CONFIG} of {where} contradicts itself on rotary embeddings: {'; '.join(problems)}",
            expected="one description, in rope_parameters or in rope_theta and rope_scaling",
            remedy="keep what the model was trained with, and remove the rest",
        )


def _scaling(described: Mapping[str, Any]) -> dict[str, Any]:
    """With one name of its type, and without what may stand elsewhere, too."""
    kind = described.get("rope_type", described.get("type", "default"))
    elsewhere = ("rope_theta", "partial_rotary_factor", "type")
    return {name: value for name, value in described.items() if name not in elsewhere} | {"rope_type": kind}


def _unknown_rotary(config: Any, known: Collection[str]) -> str:
    """A rope_type that transformers has no function for, or ""."""
    parameters: Any = getattr(_text(config), "rope_parameters", None) or {}
    # Models whose layers differ have parameters by the type of the layer.
    sets: list[Any] = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    named = [str(values["rope_type"]) for values in sets if "rope_type" in values]
    return ", ".join(repr(name) for name in named if name not in known)


def _require_sizes(config: Any, where: str) -> None:
    """Numbers of heads that transformers divides without looking at the remainder."""
    text = _text(config)
    heads, kv_heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if heads is None:
        return  # a model without attention: the export refuses it by what it does
    if not isinstance(heads, int) or heads < 1:
        raise ExportError(f"{where} has num_attention_heads {heads!r}", expected="a number of heads of at least 1")
    problems: list[str] = []
    if isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        problems.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    # An attribute that varies across layers cannot be read from the configuration as a whole, but from its mapping.
    if text.to_dict().get("head_dim") is None and isinstance(hidden, int) and hidden % heads:
        problems.append(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim")
    if problems:
        raise ExportError(
            f"{where}: {'; '.join(problems)}",
            expected="sizes that divide one another",
            remedy="correct the configuration, or choose another checkpoint",
        )


def _require_floats(stored: Mapping[str, StoredTensor]) -> None:
    """Codes without their scales would be read as weights."""
    codes = [name for name, tensor in stored.items() if tensor.dtype not in FLOATS and not BUFFERS.search(name)]
    if codes:
        raise ExportError(
            f"{few(f'{name} ({stored[name].dtype})' for name in codes)} are no floats, and {CONFIG} has no "
            "quantization_config that says how to read them",
            expected=f"tensors of type {', '.join(sorted(FLOATS))}",
            remedy="choose the float checkpoint, or restore its quantization_config",
        )


def _filled(kind: Any, config: Any, tensors: Mapping[str, Any], where: str) -> Any:
    """The model with its weights. Refused by name: tensors that are missing, unknown or of another shape."""
    try:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # a library's own words about a file that it cannot read
        raise ExportError(
            f"transformers cannot load {where}: {one_line(error)}",
            expected=DECODER,
            remedy="check model.source: the files may be damaged or incomplete",
        ) from error
    if mismatched := sorted(report["mismatched_keys"], key=str):
        shapes = few(f"{name} {list(stored)} where the model has {list(shape)}" for name, stored, shape in mismatched)
        raise ExportError(
            f"tensors of {where} do not have the shapes of its configuration: {shapes}",
            expected="the configuration that the weights were saved with",
            remedy="restore that configuration, or choose another checkpoint",
        )
    if missing := sorted(report["missing_keys"]):
        raise ExportError(
            f"{where} lacks {_count(missing)} of {type(model).__name__}: {few(missing)}",
            expected="every parameter of the model; only an lm_head that shares the embedding may be left out",
            remedy="complete the checkpoint; a configuration with too many layers looks the same",
        )
    if unexpected := sorted(report["unexpected_keys"]):
        raise ExportError(
            f"{where} holds {_count(unexpected)} that {type(model).__name__} does not have: {few(unexpected)}",
            expected="tensors of this model only",
            remedy="restore the configuration that they were saved with (too few layers look like this); or choose a "
            "checkpoint of this architecture",
        )
    _require_tied(model, where)
    return model.eval()


def _require_tied(model: Any, where: str) -> None:
    """transformers unties what a file stores twice with different values, and leaves the configuration as it is."""
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(target).data_ptr() != model.get_parameter(source).data_ptr():
            raise ExportError(
                f"{where} stores {target} and {source} with different values, and its configuration ties them",
                expected="one tensor, or tie_word_embeddings: false",
                remedy="set tie_word_embeddings: false in the configuration if both were trained, else remove the "
                "stale one",
            )


def _require_finite(model: Any) -> None:
    broken = [
        name
        for name, tensor in model.named_parameters()
        if not (tensor.stored.is_finite() if isinstance(tensor, CodedParameter) else is_finite(tensor))
    ]
    broken += [name for name, tensor in model.named_buffers() if not is_finite(tensor)]
    if broken:
        raise ExportError(
            f"NaN or infinite weights in {few(broken)}",
            expected="finite numbers in every tensor",
            remedy="choose another checkpoint: this one is damaged, or its training diverged",
        )


def _text(config: Any) -> Any:
    return config.get_text_config()


def _count(names: Collection[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''}"
