"""What a GGUF file holds beyond what transformers reads of it.

transformers 5.23 leaves out tensors and metadata that it has no place for. Some of them change the model: biases, the
frequency factors of rotary embeddings, rotary scaling. A file that holds any is refused.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantization.stored import GGUF_TYPES
from runtime.gateway.text.sampling_defaults import checked_defaults
from tapeout.errors import ExportError, one_line
from tapeout.tensor_files import FLOATS, few

# Metadata that says what the tensors or other keys say too. ``_implied`` compares some of them.
IMPLIED = frozenset({"vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count"})
NEUTRAL = (None, 0, 0.0, False, "", "none")  # of a key that has no place: nothing is asked for
# No tensor's shape says these, and transformers fills what is missing with the defaults of its own classes.
NEEDED = ("context_length", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base")
FREQ_BASE = 10000.0  # of rotary embeddings where a file says none, by llama.cpp
TOKENS = "tokenizer.ggml.tokens"
SAMPLING = {  # what llama.cpp's converter makes of generation_config.json, as general.sampling.*
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
REMEDY = "take the safetensors checkpoint that the file was made from"


@dataclass(frozen=True)
class GgufHeader:
    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, str]  # type by name
    shapes: dict[str, tuple[int, ...]]

    @property
    def elements(self) -> tuple[int, ...]:
        """Of each tensor."""
        return tuple(map(math.prod, self.shapes.values()))


def read_header(path: Path) -> GgufHeader:
    """:class:`ExportError` for a file that is damaged, or cut off."""
    import gguf
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(str(path), (TOKENS,))
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ExportError(f"{path.name} stores {few(twice)} twice", expected="every tensor once", remedy=REMEDY)
        with quickly_read():
            reader = gguf.GGUFReader(path)
    except (ValueError, LookupError, OverflowError, MemoryError, OSError, struct.error) as error:
        raise ExportError(
            f"{path.name} is not a GGUF file that can be read: {error}",
            expected="a complete GGUF file of version 2 or 3",
            remedy="fetch it again: it is empty, cut off or of another format",
        ) from error
    if not names:
        raise ExportError(f"{path.name} holds no tensor", expected="a model", remedy=REMEDY)
    if metadata.get("split.count") not in (None, 0, 1):
        raise ExportError(
            f"{path.name} is one of {metadata['split.count']} parts of a model",
            expected="a model in one file",
            remedy="join the parts with llama-gguf-split --merge, or " + REMEDY,
        )
    _require_whole(path, reader)
    if not isinstance(metadata.get(TOKENS), list):
        raise ExportError(f"{path.name} has no tokenizer", expected=TOKENS, remedy=REMEDY)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    shapes = {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in reader.tensors}
    return GgufHeader(metadata["general.architecture"], metadata, types, shapes)


def _require_whole(path: Path, reader: Any) -> None:
    """Tensors lie one behind the other. A type or a shape that is not the one that was written leaves gaps."""
    start, alignment = int(reader.data_offset), int(reader.alignment)
    end, free, stored = 0, 0, ""
    for tensor in reader.tensors:
        shape, kind, offset = tensor.shape.tolist()[::-1], tensor.tensor_type.name, int(tensor.data_offset) - start
        stored = f"{tensor.name} of {path.name} ({kind}, {shape})"
        if kind not in GGUF_TYPES:
            raise ExportError(f"{stored} cannot be read", expected=f"a type of {', '.join(GGUF_TYPES)}", remedy=REMEDY)
        values, size = GGUF_TYPES[kind]
        if not shape or 0 in shape or shape[-1] % values:
            raise ExportError(f"{stored} cannot be read", expected=f"rows of whole blocks of {values}", remedy=REMEDY)
        # A few values are shorter than the padding behind them, so that no gap shows another type.
        if len(shape) == 1 and kind != "F32":
            raise ExportError(f"{stored} cannot be read", expected="vectors in F32", remedy=REMEDY)
        if offset != free:
            raise ExportError(
                f"{stored} begins at byte {offset} of the data, and the tensors before it end at {free}",
                expected="tensors one behind the other, each of the type and the shape that the file says",
                remedy="fetch it again, or " + REMEDY,
            )
        end = free + math.prod(shape) // values * size
        free = -(-end // alignment) * alignment
    found = path.stat().st_size - start
    if found < end:
        raise ExportError(
            f"{path.name} is cut off: {start + found} bytes", expected=f"{start + end}", remedy="fetch it again"
        )
    if found > free:
        raise ExportError(
            f"{path.name} has {found - end} bytes behind its last tensor, {stored}",
            expected="tensors to the end, each of the type and the shape that the file says",
            remedy="fetch it again, or " + REMEDY,
        )


def tokens(path: Path) -> list[str]:
    """The tokens of a file that was read before, by id."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    return read_gguf_metadata(str(path), (TOKENS,))[0][TOKENS]


def sampling(header: GgufHeader, path: Path) -> dict[str, float]:
    """Settings of requests that do not name their own, by the names of generation_config.json.

    :class:`tapeout.errors.ArtifactError` for a value that no request may have.
    """
    found = {name: header.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    values = {name: decimal(value) if isinstance(value, float) else value for name, value in found.items()}
    return checked_defaults(values, path.name)


def decimal(value: float) -> float:
    """What was written, of a number that is stored as float32.

    >>> decimal(0.949999988079071)
    0.95
    """
    return float(str(np.float32(value)))


def require_known(header: GgufHeader, config: Any, path: Path) -> None:
    """Refuse metadata of the model that transformers has no place for, and those that are missing or no numbers."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    prefix = f"{header.architecture}."
    keys = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if keys.get("pooling_type"):
        raise ExportError(
            f"{path.name} is an embedding model: it pools its outputs (pooling_type {keys['pooling_type']})",
            expected="a causal language model",
            remedy="choose a model that predicts tokens",
        )
    if header.architecture in GGUF_CONFIG_ARCHS:
        raise ExportError(
            f"{path.name} holds a model of architecture {header.architecture}, which keeps a state beside its KV cache",
            expected="a dense decoder with attention in every layer",
            remedy="choose another model",
        )
    places = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    known = {*places.get(header.architecture, {}), *places.get(config.model_type, {})} | IMPLIED
    unknown = [key for key, value in keys.items() if key not in known and value not in NEUTRAL]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    implied = [key for key in sorted(IMPLIED - {"vocab_size"}) if places.get(header.architecture, {}).get(key) is None]
    unknown += [key for key in implied if keys.get(key) not in (None, head_size)]
    _require_numbers(keys, {**places.get(header.architecture, {}), **places.get(config.model_type, {})}, config, path)
    if unknown:
        raise ExportError(
            f"{path.name} says {few(f'{prefix}{key} = {keys[key]}' for key in unknown)}, which transformers does not "
            "read from a GGUF file",
            expected="metadata that the model's configuration has a place for",
            remedy=REMEDY,
        )


def _require_numbers(keys: Mapping[str, Any], places: Mapping[str, Any], config: Any, path: Path) -> None:
    """``places``: the name in the configuration of each key that transformers reads."""
    for key in NEEDED:
        name, value = places.get(key), keys.get(key)
        if name is None or (key == "rope.freq_base" and value is None and _has_base(config, FREQ_BASE)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ExportError(
                f"{path.name} says no positive number for {key} of the model ({value})",
                expected=f"{key}, which llama.cpp's converter writes for this architecture",
                remedy=REMEDY,
            )


def _has_base(config: Any, base: float) -> bool:
    """Whether all rotary embeddings of a configuration have it."""
    parameters: dict[str, Any] = config.rope_parameters or {}
    # Models whose layers differ have parameters by the type of the layer.
    sets = [parameters] if "rope_theta" in parameters else list(parameters.values())
    return all(one["rope_theta"] == base for one in sets)


@contextmanager
def quickly_read() -> Generator[None]:
    """Let transformers read GGUF files without two delays, which were most of the time to load a small model.

    It asks for the same map of names at every module. And gguf slices a memory map for every string of the vocabulary,
    which takes 3.1 seconds for 49,152 tokens; slices of a plain array over the same map take 0.8.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> NDArray[Any]:
            return self._data

        @data.setter
        def data(self, mapped: NDArray[Any]) -> None:
            self._data = mapped.view(np.ndarray)

    found = gguf.get_tensor_name_map, gguf.GGUFReader
    gguf.get_tensor_name_map, gguf.GGUFReader = cache(gguf.get_tensor_name_map), Reader
    try:
        yield
    finally:
        gguf.get_tensor_name_map, gguf.GGUFReader = found


def dequantized(path: Path, header: GgufHeader, model: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """By name of the parameter in ``model``, what reads it in float32. Refused: tensors that have no place in it.

    ``model`` may be on the meta device. transformers' own loader holds all tensors in memory; its names and its order
    of the weights are used here.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    try:
        config = load_gguf_checkpoint(str(path))["config"]
        processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config)
        places = get_gguf_hf_weights_map(model, processor)
    except MemoryError:
        raise
    except Exception as error:  # a library's own words about a file that it cannot read
        raise ExportError(
            f"transformers has no names for the tensors of {path.name}: {one_line(error)}",
            expected="a file of an architecture that transformers and gguf know",
            remedy=REMEDY,
        ) from error
    if unused := [name for name in header.tensors if name not in places]:
        reason = " (rotary scaling)" if any(name.startswith("rope_") for name in unused) else ""
        raise ExportError(
            f"{path.name} holds {few(unused)}{reason}, which transformers has no place for in {type(model).__name__}",
            expected="tensors of this model only",
            remedy=REMEDY,
        )
    return {places[tensor.name]: partial(_read, tensor, processor, path) for tensor in GGUFReader(path).tensors}


def _read(tensor: Any, processor: Any, path: Path) -> torch.Tensor:
    from gguf import dequantize

    # Some families have their heads' channels in another order, transposed weights, or norms that lack 1.
    kept: dict[str, Any] = {"tensors": {}}
    try:
        weights = dequantize(tensor.data, tensor.tensor_type)
        ordered = processor.process(weights=weights, name=tensor.name, parsed_parameters=kept, tensor_key_mapping={})
    except MemoryError:
        raise
    except Exception as error:  # a type that is not known, or a shape that the metadata contradict
        raise ExportError(
            f"{tensor.name} of {path.name} ({tensor.tensor_type.name}, {tensor.shape.tolist()}) cannot be read: "
            f"{one_line(error)}",
            expected="a type that the gguf package reads, and the shape that the file's metadata say",
            remedy=REMEDY,
        ) from error
    weights = ordered.weights if ordered.name is not None else next(iter(kept["tensors"].values()))
    return torch.from_numpy(np.require(weights, np.float32, ("C", "W")))


def describe(header: GgufHeader) -> str | None:
    """The quantized types of the file's tensors, the commonest first; None for a file of floats."""
    types = Counter(kind for kind in header.tensors.values() if kind not in FLOATS)
    return f"GGUF {', '.join(kind for kind, _ in types.most_common())}" if types else None
