"""Export: a stock transformers decoder to a PortableGraph, with no code per architecture.

The model runs unchanged but for one registered attention implementation, which emits a single operator,
``tapeout::Attention``, with explicit scale, soft cap, window and KV cache. The operator is an ONNX function with a
standard-opset body, so the graph runs on any ONNX runtime, and a target lowers that one node as it likes.

Everything else is what ``torch.onnx.export(dynamo=True)`` makes of the module at opset 23, where the exporter's
own rules recognize RMSNormalization and RotaryEmbedding. Parameters are hidden from constant folding, so each
keeps its checkpoint name and a build can bind other tensors in its place.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from pipeline import artifact
from pipeline.attention_function import ATTENTION_DOMAIN, attention_function
from pipeline.errors import ExportError
from pipeline.graph import PortableGraph
from pipeline.graph_analysis import find_groups, find_rotary

IMPLEMENTATION = "tapeout"
MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "model.safetensors"
OPSET = 23


@dataclass(frozen=True)
class KVShape:
    """One layer's cache: ``[batch, kv_heads, tokens, head_size]`` for keys and for values."""

    query_heads: int
    kv_heads: int
    head_size: int


@dataclass
class _Trace:
    """What the attention implementation shares with the wrapper while the model runs once."""

    past: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    mask: torch.Tensor | None = None
    presents: list[torch.Tensor] = field(default_factory=list)
    shapes: list[KVShape] = field(default_factory=list)
    module_stack: list[str] = field(default_factory=list)


_trace = _Trace()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: ``query [B, heads, S, head]`` in, ``[B, S, heads, head]`` out."""
    layer = len(_trace.shapes)
    heads, kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
    if value.shape[3] != head_size:
        raise ExportError(
            f"attention {layer} has keys of size {head_size} and values of size {value.shape[3]}",
            expected="keys and values of one size",
            remedy="choose a dense decoder with standard or grouped-query attention",
        )
    _trace.shapes.append(KVShape(int(heads), int(kv_heads), int(head_size)))
    if not _trace.past:  # the probing run before export only collects shapes
        return torch.zeros_like(query).transpose(1, 2), None
    past_key, past_value = _trace.past[layer]
    assert _trace.mask is not None
    total = past_key.shape[2] + query.shape[2]
    cache = (query.shape[0], kv_heads, total, head_size)
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        f"{ATTENTION_DOMAIN}::Attention",
        [query, key, value, _trace.mask, past_key, past_value],
        attrs={
            "scale": float(scaling if scaling is not None else head_size**-0.5),
            "softcap": float(softcap or 0.0),
            "window": int(sliding_window or 0),
        },
        dtypes=[query.dtype] * 3,
        shapes=[query.shape, cache, cache],
        version=1,
    )
    _trace.presents += [present_key, present_value]
    return output.transpose(1, 2), None


class _Wrapper(torch.nn.Module):
    """The flat signature of the portable graph around a causal language model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        _trace.shapes.clear()
        _trace.presents.clear()
        _trace.mask = attention_mask
        _trace.past = [(past[2 * i], past[2 * i + 1]) for i in range(len(past) // 2)]
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return (logits, *_trace.presents)


def load_checkpoint(folder: Path, entry: str = "") -> Any:
    """A causal language model in float32 from a checkpoint folder, or from the GGUF file ``entry`` in it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = {"gguf_file": entry} if entry.endswith(".gguf") else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf)
    except (ValueError, KeyError, OSError) as error:
        raise ExportError(
            f"transformers cannot load {folder / entry}: {error}",
            expected="a decoder that transformers.AutoModelForCausalLM knows",
            remedy="check model.source; a model with remote code is not supported",
        ) from error
    # A dequantized GGUF file is a float model: what it was read from must not reach the exported config.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    return model.eval()


def trace(model: Any, progress: Callable[[str], None] = lambda _: None) -> ir.Model:
    """Trace ``model`` (float32, eval mode) to an ONNX IR model whose parameters keep their checkpoint names.

    Inputs ``input_ids [B, S]``, ``attention_mask [B, P+S]`` (0 marks left padding), ``position_ids [B, S]`` (all
    int64), ``past_key_values.N.key|value [B, kv_heads, P, head_size]``; outputs ``logits [B, S, V]`` and
    ``present.N.key|value [B, kv_heads, P+S, head_size]``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)
    previous = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        progress("tracing")
        program = _export_program(model)
    finally:
        model.set_attn_implementation(previous)
    graph_model = program.model
    progress("simplifying the graph")
    _simplify(graph_model, {name for name, _ in model.named_parameters(remove_duplicate=False)})
    graph_model.functions[("tapeout", "Attention", "")] = attention_function()
    graph_model.opset_imports[ATTENTION_DOMAIN] = 1
    return graph_model


def _probe_shapes(model: Any) -> list[KVShape]:
    """The KV shape of each attention call, in call order, from one run over three tokens."""
    _trace.past, _trace.mask = [], None
    _trace.shapes.clear()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64), position_ids=torch.arange(3)[None], use_cache=False)
    shapes = list(_trace.shapes)
    if len(shapes) != model.config.get_text_config().num_hidden_layers:
        raise ExportError(
            f"{type(model).__name__} called the attention interface {len(shapes)} times",
            expected=f"once for each of its {model.config.get_text_config().num_hidden_layers} layers",
            remedy="recurrent, hybrid and encoder-decoder models are not supported",
        )
    return shapes


def _export_program(model: Any) -> Any:
    with _module_stack(model):
        try:
            shapes = _probe_shapes(model)
            past = [torch.randn(2, s.kv_heads, 5, s.head_size) for s in shapes for _ in range(2)]
            cache_names = [f"{i}.{part}" for i in range(len(shapes)) for part in ("key", "value")]
            dynamic, row = torch.export.Dim.DYNAMIC, {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
            return torch.onnx.export(
                _Wrapper(model).eval(),
                (
                    torch.ones(2, 3, dtype=torch.int64),
                    torch.ones(2, 8, dtype=torch.int64),
                    torch.arange(5, 8)[None].repeat(2, 1),
                    *past,
                ),
                input_names=[
                    "input_ids",
                    "attention_mask",
                    "position_ids",
                    *(f"past_key_values.{name}" for name in cache_names),
                ],
                output_names=["logits", *(f"present.{name}" for name in cache_names)],
                dynamic_shapes=(row, row, row, tuple({0: dynamic, 2: dynamic} for _ in past)),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except ExportError:
            raise
        except Exception as error:
            where = _trace.module_stack[-1] if _trace.module_stack else "its top level"
            reason = str(error).strip().splitlines()
            raise ExportError(
                f"{type(model).__name__} cannot be exported: module {where} stopped it ({type(error).__name__}: "
                f"{reason[0] if reason else 'no message'})",
                expected="a dense decoder whose forward torch.export can trace",
                remedy="report the module above; the model itself is untouched",
            ) from error


@contextlib.contextmanager
def _module_stack(model: torch.nn.Module) -> Generator[None]:
    """Keep the names of the modules being run; on an exception the innermost stays on the stack."""
    _trace.module_stack.clear()
    handles: list[Any] = []
    for name, module in model.named_modules():
        label = f"{name or 'model'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: _trace.module_stack.append(label)))
        handles.append(module.register_forward_hook(lambda *_: _pop(_trace.module_stack)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pop(stack: list[str]) -> None:
    stack.pop()


def _simplify(model: ir.Model, parameters: set[str]) -> None:
    """Fold constants and fuse norms and rotary embeddings, with parameters hidden from folding."""
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    graph = model.graph
    hidden: list[ir.Value] = []
    for name in list(graph.initializers):
        value = graph.initializers[name]
        short = name.removeprefix("model.")  # the wrapper's own attribute
        if short in parameters:
            del graph.initializers[name]
            value.name = short
            value.const_value, tensor = None, value.const_value
            assert tensor is not None
            value.shape, value.type = ir.Shape(tensor.numpy().shape), ir.TensorType(tensor.dtype)
            hidden.append(value)
    graph.inputs.extend(hidden)
    _split_gemm(graph)
    optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)
    optimizer.optimize_ir(model)
    # The fold may have left parameters without a consumer (an unused head, say); those are dropped here.
    del graph.inputs[len(graph.inputs) - len(hidden) :]
    for value in hidden:
        if value.uses():
            graph.initializers[value.name or ""] = value


def _split_gemm(graph: ir.Graph) -> None:
    """Write ``Gemm(x, weight, bias)`` over a linear's ``[out, in]`` weight as the product and sum other linears are."""
    for node in list(graph):
        if node.op_type != "Gemm" or "transB" not in node.attributes or not node.attributes["transB"].as_int():
            continue
        x, weight, *bias = node.inputs
        transpose = ir.node("Transpose", [weight], attributes={"perm": [1, 0]})
        product = ir.node("MatMul", [x, transpose.outputs[0]])
        nodes = [transpose, product]
        if bias and bias[0] is not None:
            nodes.append(ir.node("Add", [product.outputs[0], bias[0]]))
        output = node.outputs[0]
        nodes[-1].outputs[0].shape, nodes[-1].outputs[0].type = output.shape, output.type
        product.outputs[0].shape, product.outputs[0].type = output.shape, output.type
        graph.insert_before(node, nodes)
        ir.convenience.replace_all_uses_with(output, nodes[-1].outputs[0])
        graph.remove(node, safe=True)


def bind_weights(model: ir.Model, weights: Path, aliases: dict[str, str]) -> None:
    """Point every parameter at its bytes in a safetensors file, as ONNX external data.

    ``aliases`` maps a tied parameter to the name its bytes are stored under.
    """
    with weights.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_bytes))
    start = 8 + header_bytes
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None:
            continue  # a buffer that is not in the checkpoint, such as rotary frequencies: kept inline
        stored = aliases.get(name, name)
        if stored != name:
            del graph.initializers[name]
            known = graph.initializers.get(stored)
            if known is not None:
                ir.convenience.replace_all_uses_with(value, known)
                continue
            value.name = stored
            graph.initializers[stored] = value
        if stored not in header:
            raise ExportError(
                f"parameter {name} is not in {weights.name}", expected="every parameter in the checkpoint"
            )
        begin, end = header[stored]["data_offsets"]
        value.const_value = ir.ExternalTensor(
            weights.name,
            start + begin,
            end - begin,
            ir.DataType.FLOAT,
            shape=ir.Shape(header[stored]["shape"]),
            name=stored,
            base_dir=weights.parent,
        )


def tied_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that share storage with an earlier one: ``{later name: first name}``."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter.data_ptr(), name)
        if known != name:
            aliases[name] = known
    return aliases


def export(
    checkpoint: Path,
    entry: str,
    folder: Path,
    *,
    max_positions: int,
    tolerance: float,
    seed: int,
    parents: dict[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> artifact.Artifact[PortableGraph]:
    """Export a checkpoint and check it: max relative logit error of the graph on ONNX Runtime at most ``tolerance``."""
    from transformers import AutoTokenizer

    progress("loading the checkpoint")
    model = load_checkpoint(checkpoint, entry)
    gguf = {"gguf_file": entry} if entry.endswith(".gguf") else {}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **gguf)
    graph_model = trace(model, progress)
    with artifact.create(folder, PortableGraph) as draft:
        progress("writing the weights")
        # Under the module's own names, which the graph carries, not those of the family's first release.
        model.save_pretrained(draft.folder, max_shard_size="10TB", save_original_format=False)
        tokenizer.save_pretrained(draft.folder)
        aliases = tied_parameters(model)
        bind_weights(graph_model, draft.folder / WEIGHTS_FILE, aliases)
        for node in graph_model.graph:
            node.metadata_props.clear()  # the exporter's stack traces, with paths of this machine
        ir.save(graph_model, draft.folder / MODEL_FILE)
        progress("comparing with transformers")
        error = compare(model, draft.folder / MODEL_FILE, seed=seed)
        if not error <= tolerance:
            raise ExportError(
                f"the exported graph's logits differ from transformers by {error:.2e} (relative)",
                expected=f"at most {tolerance:.0e} (export.tolerance)",
                remedy="report the model; its graph was not kept",
            )
        config = model.config.get_text_config()
        shapes = _cache_shapes(graph_model)
        record = PortableGraph(
            architecture=type(model).__name__,
            layers=len(shapes),
            hidden_size=config.hidden_size,
            heads=shapes[0].query_heads,
            kv_heads=shapes[0].kv_heads,
            head_size=shapes[0].head_size,
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            tied_embeddings=bool(aliases),
            embedding=_parameter_name(model, model.get_input_embeddings().weight),
            rotary=find_rotary(graph_model),
            max_positions=min(max_positions, int(config.max_position_embeddings)),
            groups=find_groups(graph_model, aliases),
            stop_tokens=_stop_tokens(model, tokenizer),
            max_relative_error=float(f"{error:.1e}"),
            versions={name: version(name) for name in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")},
        )
        draft.finish(record, parents=parents)
    return artifact.load(folder, PortableGraph)


def _parameter_name(model: torch.nn.Module, parameter: torch.Tensor) -> str:
    return next(name for name, p in model.named_parameters() if p is parameter)


def _stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    found = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(int(token) for token in found if token is not None))


def _cache_shapes(model: ir.Model) -> list[KVShape]:
    shapes: list[KVShape] = []
    for node in model.graph:
        if (node.domain, node.op_type) == (ATTENTION_DOMAIN, "Attention"):
            query, past = node.inputs[0], node.inputs[4]
            assert query is not None and query.shape is not None and past is not None and past.shape is not None
            shapes.append(KVShape(*(int(n) for n in (query.shape[1], past.shape[1], past.shape[3]))))  # type: ignore[arg-type]
    return shapes


def compare(model: Any, path: Path, *, seed: int = 0, steps: int = 4) -> float:
    """Largest relative logit error of the graph on ONNX Runtime against transformers' own attention.

    Runs a prefill, ``steps`` decode steps over the cache, and all of it for a ragged batch of three prompts with
    left padding. Relative to the largest absolute reference logit of the row.
    """
    import onnxruntime as ort

    config = model.config.get_text_config()
    generator = np.random.default_rng(seed)
    lengths = (9, 14, 21)
    limit = min(int(config.max_position_embeddings), 64)
    lengths = tuple(min(n, limit - steps) for n in lengths)
    prompts = [generator.integers(1, config.vocab_size, size=n + steps).tolist() for n in lengths]
    reference = [_reference_logits(model, tokens) for tokens in prompts]

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    width = max(lengths)
    ids = np.ones((len(prompts), width), np.int64)
    mask = np.zeros((len(prompts), width), np.int64)
    for row, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, width - length :] = tokens[:length]
        mask[row, width - length :] = 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    past: dict[str, NDArray[Any]] = {
        i.name: np.zeros((len(prompts), i.shape[1], 0, i.shape[3]), np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past_key_values.")
    }
    names = [o.name for o in session.get_outputs()]
    worst = 0.0
    for step in range(steps + 1):
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        known = {i.name for i in session.get_inputs()}
        outputs = dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in known}), strict=True))
        logits = np.asarray(outputs["logits"])
        for row, length in enumerate(lengths):
            first = 0 if step == 0 else length + step - 1
            expected = reference[row][first : length + step]
            actual = logits[row, logits.shape[1] - len(expected) :]
            worst = max(worst, _relative_error(actual, expected))
        past = {
            f"past_key_values.{n.removeprefix('present.')}": np.asarray(v) for n, v in outputs.items() if n != "logits"
        }
        if step < steps:
            ids = np.array([[p[length + step]] for p, length in zip(prompts, lengths, strict=True)], np.int64)
            mask = np.concatenate([mask, np.ones((len(prompts), 1), np.int64)], axis=1)
            positions = np.array([[length + step] for length in lengths], np.int64)
    return worst


def _reference_logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def _relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    if not np.isfinite(actual).all():
        return float("inf")
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    return float((np.abs(actual - expected) / np.maximum(scale, 1e-6)).max())
