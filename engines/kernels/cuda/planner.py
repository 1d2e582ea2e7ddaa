"""Makes the plan of launches of a lowered graph, when a bundle is built.

A graph with an operator that has no kernel here has no plan: there is nothing else on the device to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from engines.bundle import NEXT_TOKENS
from engines.kernels.cuda import parameters
from engines.kernels.cuda.parameters import ARGMAX_PARTS
from engines.kernels.cuda.plan import (
    CONSTANTS_FILE,
    ENDED,
    LINEAR_ENDED,
    LINEAR_SUMS,
    RANKING,
    VERSION,
    WEIGHTS_FILE,
    LaunchPlan,
    PlacedTensor,
    PlanOperation,
    PlanValue,
)
from engines.kernels.operators import DOMAIN
from tapeout.errors import BuildError

ALIGNMENT = 256  # of constants in their file
# What kernels read of an operator, and how many inputs at most. What passes add later is refused until they do.
WEIGHT = frozenset(("N", "K", "bits", "block_size", "half_scales", "symmetric", "e4m3"))
ATTENTION = frozenset(
    (
        *("num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved", "query_period", "softcap"),
        *("local_window_size", "epsilon"),
    )
)
READ: Mapping[str, tuple[frozenset[str], int]] = {
    "BlockGather": (WEIGHT, 4),
    "BlockLinear": (WEIGHT, 5),
    "NormLinear": (WEIGHT | {"epsilon"}, 6),
    "ResidualNormLinear": (WEIGHT | {"epsilon"}, 7),
    "GatedLinear": (WEIGHT, 5),
    "NormRows": (frozenset(("epsilon",)), 4),
    "HeadLinear": (WEIGHT, 6),
    "CachedAttention": (ATTENTION, 15),
}


def make_plan(model: ir.Model) -> LaunchPlan:
    """Of a lowered graph, without tensors. :class:`BuildError` names what has no kernel."""
    return _Maker().run(model)


def with_tensors(plan: LaunchPlan, model: ir.Model) -> tuple[LaunchPlan, bytes]:
    """The plan with all tensors where they were written, and the contents of a file of those that lie in the graph."""
    named = {name for operation in plan.operations for name in operation.pointers.values()} - plan.values.keys()
    tensors, constants = dict[str, PlacedTensor](), bytearray()
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if name not in named or tensor is None:
            continue
        if isinstance(tensor, ir.ExternalTensor):
            tensors[name] = PlacedTensor(file=WEIGHTS_FILE, offset=tensor.offset or 0, nbytes=tensor.nbytes)
        else:
            constants.extend(bytes(-len(constants) % ALIGNMENT))
            tensors[name] = PlacedTensor(file=CONSTANTS_FILE, offset=len(constants), nbytes=tensor.nbytes)
            constants.extend(tensor.tobytes())
    return plan.model_copy(update={"tensors": tensors}), bytes(constants)


class _Maker:
    def __init__(self) -> None:
        self._operations: list[PlanOperation] = []
        self._values: dict[str, PlanValue] = {}
        self._heads = self._head_size = self._vocabulary = 0
        self._logits = ""
        self._makers: dict[str, Callable[[ir.Node], None]] = {
            "BlockGather": self._gather,
            "BlockLinear": self._block_linear,
            "NormLinear": self._norm_linear,
            "ResidualNormLinear": self._residual_norm_linear,
            "GatedLinear": self._gated_linear,
            "NormRows": self._norm_rows,
            "HeadLinear": self._head_linear,
            "CachedAttention": self._attention,
        }

    def run(self, model: ir.Model) -> LaunchPlan:
        lacking = [node for node in model.graph if node.domain != DOMAIN or node.op_type not in self._makers]
        if lacking:
            raise _no_kernel(lacking[0], f"CUDA kernels have no {', '.join(sorted({n.op_type for n in lacking}))}")
        for node in model.graph:
            make = self._makers[node.op_type]
            known, inputs = READ[node.op_type]
            if unknown := sorted(set(node.attributes) - known):
                raise _no_kernel(node, f"CUDA kernels read no {', '.join(unknown)} of it")
            if len(node.inputs) > inputs:
                raise _no_kernel(node, f"it has {len(node.inputs)} inputs, of which CUDA kernels read {inputs}")
            make(node)
        if not self._vocabulary:
            raise BuildError(
                "the graph has no HeadLinear, so nothing on the device gives logits",
                expected="an lm_head whose output are the logits",
                remedy="build this model for ort-cpu",
            )
        return LaunchPlan(
            version=VERSION,
            operations=tuple(self._operations),
            values=self._values,
            tensors={},
            heads=self._heads,
            head_size=self._head_size,
            vocabulary=self._vocabulary,
            logits=self._logits,
        )

    def _gather(self, node: ir.Node) -> None:
        _, *weight = node.inputs
        pointers, numbers = _weight(weight, node)
        self._add("gather", node, pointers | {"y": self._value(node.outputs[0], False, _int(node, "K"), 4)}, numbers)

    def _block_linear(self, node: ir.Node) -> None:
        x, *weight = node.inputs
        name = _name(x)
        self._require_half(node, name)
        self._linear(node, name, weight, node.outputs[0])

    def _norm_linear(self, node: ir.Node) -> None:
        x, norm, *weight = node.inputs
        self._linear(node, self._norm(node, [x, None, norm], None), weight, node.outputs[0])

    def _residual_norm_linear(self, node: ir.Node) -> None:
        a, b, norm, *weight = node.inputs
        self._linear(node, self._norm(node, [a, b, norm], node.outputs[1]), weight, node.outputs[0])

    def _gated_linear(self, node: ir.Node) -> None:
        x, *weight = node.inputs
        columns = _int(node, "K")
        y, scales = self._activations(node, "gated", columns)
        self._add("gated", node, {"x": self._read(x), "y": y} | scales, {"K": columns}, writes=("y", *scales))
        self._linear(node, y, weight, node.outputs[0])

    def _norm_rows(self, node: ir.Node) -> None:
        a, b, norm, _ = node.inputs
        assert norm is not None and norm.shape is not None
        summed = {"a": self._read(a)} | ({} if b is None else {"b": self._read(b)})
        self._add("finite", node, summed, {"K": int(norm.shape[0])}, writes=())  # type: ignore[arg-type]
        y = self._value(node.outputs[0], True, int(norm.shape[0]), 2)  # type: ignore[arg-type]
        self._norm_of(node, [a, b, norm], None, y, int(norm.shape[0]), wanted=True)  # type: ignore[arg-type]

    def _head_linear(self, node: ir.Node) -> None:
        x, _, *weight = node.inputs
        name = _name(x)
        if name not in self._values or not self._values[name].wanted:
            raise _no_kernel(node, "the last norm is not computed for tokens with results alone")
        outputs = _int(node, "N")
        self._vocabulary, self._logits = outputs, _name(node.outputs[0])
        self._linear(node, name, weight, node.outputs[0], wanted=True)
        self._values |= {
            NEXT_TOKENS: PlanValue(wanted=True, row_bytes=8),
            "argmax.max": PlanValue(wanted=True, row_bytes=4 * ARGMAX_PARTS),
            "argmax.index": PlanValue(wanted=True, row_bytes=4 * ARGMAX_PARTS),
            RANKING: PlanValue(wanted=True, row_bytes=parameters.RANKING.itemsize),
        }
        self._add(
            "choose",
            node,
            {
                "logits": _name(node.outputs[0]),
                "part_max": "argmax.max",
                "part_index": "argmax.index",
                "ranking": RANKING,
                "y": NEXT_TOKENS,
            },
            {"N": outputs},
            writes=("y", "ranking", "part_max", "part_index"),
            wanted=True,
        )

    def _attention(self, node: ir.Node) -> None:
        query, key, _, key_cache, value_cache, *rest = node.inputs
        if key is not None:
            raise _no_kernel(node, "queries, keys and values are not the output of one linear")
        cosines, sines, *scales, query_norm, key_norm, sinks = [*rest[3:], *[None] * 7][:7]
        if sinks is not None:
            raise _no_kernel(node, "attention of the CUDA kernels has no sinks")
        heads, kv_heads = _int(node, "num_heads"), _int(node, "kv_num_heads")
        assert key_cache is not None and key_cache.shape is not None
        size = int(key_cache.shape[3])  # type: ignore[arg-type]
        if cosines is not None and cosines.shape is not None and cosines.shape[-1] != size // 2:
            raise _no_kernel(node, "attention of the CUDA kernels has no partial rotary")
        if _int(node, "query_period", size) != size:
            raise _no_kernel(node, "attention of the CUDA kernels has no gates between queries")
        self._heads, self._head_size = max(self._heads, heads), max(self._head_size, size)
        pointers = {
            "qkv": self._read(query),
            "key_cache": _name(key_cache),
            "value_cache": _name(value_cache),
            "query": self._scratch(node, "query", False, 2 * heads * size),
            "part_sums": "attention.sums",
            "part_rows": "attention.rows",
            "ended": ENDED,
            "y": self._value(node.outputs[0], False, heads * size, 2),
        }
        names = ("cosines", "sines", "key_scales", "value_scales", "query_norm", "key_norm")
        for field, value in zip(names, (cosines, sines, *scales, query_norm, key_norm), strict=True):
            if value is not None:
                pointers[field] = _name(value)
        numbers = {
            "H": heads,
            "KV": kv_heads,
            "D": size,
            "fp8": int(key_cache.dtype == ir.DataType.FLOAT8E4M3FN),
            "interleaved": _int(node, "rotary_interleaved", 0),
            "window": _int(node, "local_window_size", 0),
            "scale": _number(node, "scale", 0.0),
            "softcap": _number(node, "softcap", 0.0),
            "epsilon": _number(node, "epsilon", 0.0),
        }
        self._add("attention", node, pointers, numbers, writes=("y", "query"))

    def _norm(self, node: ir.Node, inputs: Sequence[ir.Value | None], total: ir.Value | None) -> str:
        columns = _int(node, "K")
        y, scales = self._activations(node, "norm", columns)
        self._norm_of(node, inputs, total, y, columns, scales=scales)
        return y

    def _require_half(self, node: ir.Node, name: str) -> None:
        if name not in self._values or self._values[name].row_bytes != 2 * _int(node, "K"):
            raise _no_kernel(node, f"{name}, which it reads, is not in half")

    def _activations(
        self, node: ir.Node, what: str, columns: int, *, wanted: bool = False
    ) -> tuple[str, dict[str, str]]:
        """What the linear of a node reads: values in half; or codes in E4M3, and where their scales lie."""
        if not _int(node, "e4m3", 0):
            return self._scratch(node, what, wanted, 2 * columns), {}
        return self._scratch(node, what, wanted, columns), {
            "scales": self._scratch(node, f"{what}.scales", wanted, 4),
        }

    def _norm_of(
        self,
        node: ir.Node,
        inputs: Sequence[ir.Value | None],
        total: ir.Value | None,
        y: str,
        columns: int,
        *,
        scales: dict[str, str] | None = None,
        wanted: bool = False,
    ) -> None:
        a, b, weight = inputs
        pointers = {"a": self._read(a), "weight": _name(weight), "y": y} | (scales or {})
        if b is not None:
            pointers["b"] = self._read(b)
        if total is not None and total.uses():
            pointers["sum"] = self._value(total, False, columns, 4)
        epsilon = _number(node, "epsilon", 1e-5)
        numbers = {"K": columns, "epsilon": epsilon}
        self._add("norm", node, pointers, numbers, writes=("y", "sum", *(scales or {})), wanted=wanted)

    def _linear(
        self, node: ir.Node, x: str, weight: Sequence[ir.Value | None], y: ir.Value, *, wanted: bool = False
    ) -> None:
        codes, scales, zero_points, bias = [*weight, None, None, None][:4]
        pointers, numbers = _weight([codes, scales, zero_points], node)
        if numbers["weight.e4m3"] and f"{x}.scales" not in self._values:
            columns = _int(node, "K")
            self._require_half(node, x)
            fed, made = self._activations(node, "codes", columns, wanted=wanted)
            self._add(
                "quantize",
                node,
                {"x": x, "y": fed} | made,
                {"K": columns},
                writes=("y", *made),
                wanted=wanted,
            )
            x = fed
        if numbers["weight.e4m3"]:
            pointers["x_scales"] = f"{x}.scales"
        pointers |= {"x": x, "y": self._value(y, wanted, _int(node, "N"), 4)}
        pointers |= {"sums": LINEAR_SUMS, "ended": LINEAR_ENDED}
        if bias is not None:
            pointers["bias"] = _name(bias)
        self._add("linear", node, pointers, numbers, wanted=wanted)

    def _add(
        self,
        kind: str,
        node: ir.Node,
        pointers: dict[str, str],
        numbers: dict[str, int | float],
        *,
        writes: tuple[str, ...] = ("y",),
        wanted: bool = False,
    ) -> None:
        name = _name(node.outputs[0])
        self._operations.append(
            PlanOperation(kind=kind, name=name, pointers=pointers, numbers=numbers, writes=writes, wanted=wanted)
        )

    def _read(self, value: ir.Value | None) -> str:
        """A value that is there, in float."""
        name = _name(value)
        if name not in self._values:
            raise BuildError(
                f"{name} is read before anything on the device writes it",
                expected="a value of an operation before",
                remedy="build this model for ort-cpu",
            )
        return name

    def _value(self, value: ir.Value, wanted: bool, columns: int, size: int) -> str:
        self._values[_name(value)] = PlanValue(wanted=wanted, row_bytes=columns * size)
        return _name(value)

    def _scratch(self, node: ir.Node, what: str, wanted: bool, row_bytes: int) -> str:
        name = f"{_name(node.outputs[0])}.{what}"
        self._values[name] = PlanValue(wanted=wanted, row_bytes=row_bytes)
        return name


def _weight(inputs: Sequence[ir.Value | None], node: ir.Node) -> tuple[dict[str, str], dict[str, int | float]]:
    names = ("weight.codes", "weight.scales", "weight.zero_points")
    pointers = {name: _name(value) for name, value in zip(names, inputs, strict=False) if value is not None}
    return pointers, {
        "weight.N": _int(node, "N"),
        "weight.K": _int(node, "K"),
        "weight.bits": _int(node, "bits"),
        "weight.group_shift": _int(node, "block_size").bit_length() - 1,
        "weight.half_scales": _int(node, "half_scales"),
        "weight.e4m3": _int(node, "e4m3", 0),
    }


def _int(node: ir.Node, name: str, default: int | None = None) -> int:
    found = node.attributes.get(name)
    if found is None:
        assert default is not None, f"{node.op_type} has no {name}"
        return default
    return int(found.value)


def _number(node: ir.Node, name: str, default: float) -> float:
    """As the float that kernels get."""
    found: Any = node.attributes.get(name)
    return default if found is None else float(np.float32(found.value))


def _name(value: ir.Value | None) -> str:
    assert value is not None and value.name is not None
    return value.name


def _no_kernel(node: ir.Node, reason: str) -> BuildError:
    return BuildError(
        f"{node.op_type} of {_name(node.outputs[0])} cannot run on a GPU: {reason}",
        expected="a graph of operators that CUDA kernels compute (docs/cuda-kernels.md)",
        remedy="build this model for ort-cpu",
    )
