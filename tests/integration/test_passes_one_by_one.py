"""Every pass of every target, one after another: the graph after it computes what the graph before it computed.

Both graphs run on ONNX Runtime as they stand between passes (tests/between_passes.py), those of `cuda` with kernels of
processors: prompts, prompts that go on, and decoded rows of different length, logits and caches. A pass that rounds is
compared with the graph before it over the weights as they are decoded, its inputs (or the cache) rounded to the same
grid: what is left is that sums are added in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from engines.bundle import PassReport
from engines.compile import lower
from engines.kernels.cpu.kernel_set import CpuKernels
from engines.load import find_target, known_targets
from engines.passes.base import Lowering, PassResult
from engines.passes.onnxruntime import cached_attention, silu
from quantization import qdq
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.formats.fp8 import FORMAT
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import FP8, STATIC_INT8, Scheme
from tests.between_passes import FloatArray, GraphRunner, written_out
from tests.exported import family_graph
from tests.lowering import FixedWeights

FAMILIES = (
    "llama-odd-sizes",  # five queries to a KV head, a tied head
    "llama-biases",
    "gpt2",  # learned positions, weights stored [in, out], layer norms
    "mistral-short-window",
    "qwen3",  # norms of query and key heads
    "gemma2",  # soft caps, norms after the blocks
    "phi",  # partial rotary, parallel blocks, a biased head
    "cohere2",  # interleaved rotary that the exporter writes out
)
CASES = (
    ("ort-cpu", "float"),
    ("ort-cpu", "quantized"),
    ("ort-cpu", "quantized, stock"),  # linears and embeddings of ONNX Runtime
    ("ort-cpu", "quantized, int4 cache"),
    ("cuda", "weight-only"),
    ("tensorrt", "fp16"),
    ("tensorrt", "int4"),
    ("tensorrt", "fp8"),
)

# What a pass finds nothing of: in weights of this kind, in models of this family. Everything else must match somewhere.
IDLE = {
    "float": {
        "static_int8_linears",
        "block_linears",
        "greedy_head",
        "linear_inputs",
        "norm_rows",
        "embedding",
    },
    "quantized": {"linear_kernels", "gated_norms"},
    "quantized, int4 cache": {"linear_kernels", "gated_norms"},
    "quantized, stock": {"block_linears", "greedy_head", "linear_inputs", "norm_rows", "gated_norms"},
    "weight-only": set[str](),
    "fp16": {"int4_linears", "fp8_linears"},
    "int4": {"fp8_linears"},
    "fp8": {"int4_linears"},
    "gpt2": {"rotary_tables", "merge_linears", "silu", "linear_inputs", "norm_rows", "gated_norms"},
    "gemma2": {"silu", "greedy_head"},
    "phi": {"silu", "linear_inputs", "norm_rows", "gated_norms"},
    "cohere2": {"greedy_head"},
}

# Of layers that none of these families has.
OTHER_LAYERS = {
    "latent_keys",
    "transposes",
    "linear_parts",
    "recurrences",
    "recurrent_conv",
    "native_experts",
    "routers",
    "token_rows",
    "native_norms",
    "folded",
}

# What a pass finds in models of this family, whatever the weights, unless our own operators are left out.
FOUND = {"gemma2": {"folded", "gated_norms"}, "cohere2": {"gated_norms"}}  # sums of weights and 1, constant factors

# Families with norms that several linears read, or no linear right behind them.
READ_NORMS = ("gemma2", "cohere2")

# What a sentence of a report begins with, if anything: what users know, no names that only the exporter knows.
SUBJECT = re.compile(
    r"|every linear|every layer|layer \d+|layers\.\d+\.\w+|lm_head"
    r"|(model|transformer)\.[a-z_.\d]+\.weight|(MatMul|Mul|Sigmoid|RotaryEmbedding) \w+"
)

CODES = ("quantized", "weight-only")  # weights in blocks of codes, the cache in codes, too

BLOCK_PRODUCTS = ("BlockLinear", "GatedLinear", "NormLinear", "ResidualNormLinear")

# Differences are relative to the largest value of a row of logits, or of a position of the cache.
# A sum of n products in another order moves by at most n · 2^-24 of the sum of their magnitudes; n is 256 at most here,
# and the largest difference over all families and passes was 1e-6 when this was written.
FLOAT32 = 256 * 2.0**-24
# An input within float32's rounding of the middle between two codes may fall on either, and what follows it moves by a
# step: 2e-2 was seen, in one position of a hundred. So this bounds the worst position, and FLOAT32 nine of ten.
FLIPPED, MOST = 0.1, 0.9
FLIPPED_INT4 = 0.3  # a code of a 4-bit cache, whose steps are 16 times as large; 2e-3 was seen with AVX2
# With AVX-512 attention over codes rounds queries and weights of the softmax to 16 bits, which moves more of the inputs
# after it to another code. 2e-4 was seen in one position of ten.
SIXTEEN_BITS = 1e-3
# Some forty roundings to 2^-11 follow each other. Over FP8 inputs every one of them moves some to another code, an
# eighth away: 0.14 was seen.
FLOAT16 = {"fp16": 40 * 2.0**-11, "int4": 40 * 2.0**-11, "fp8": 0.25}

PROMPTS = {0: (20,), 1: (5,), 2: (17, 19, 3)}  # pieces fed to each slot
DECODED = 4


@dataclass(frozen=True)
class Answers:
    logits: FloatArray  # [rows, V]
    cache: dict[str, FloatArray]  # layer and part -> [positions, H·D]

    def apart(self, other: Answers) -> FloatArray:
        """Largest difference of every row, relative to its largest value; rows of logits, then cache positions."""
        pairs = [(self.logits, other.logits), *((self.cache[name], other.cache[name]) for name in self.cache)]
        return np.concatenate([np.abs(a - b).max(axis=1) / np.abs(b).max(axis=1) for a, b in pairs])


def answers(lowering: Lowering, model: bytes) -> Answers:
    runner = GraphRunner(lowering, model, slots=len(PROMPTS))
    rng = np.random.default_rng(0)

    def words(rows: int, tokens: int) -> list[list[int]]:
        return rng.integers(3, lowering.graph.vocab_size, (rows, tokens)).tolist()

    logits: list[FloatArray] = []
    for slot, pieces in PROMPTS.items():
        start = 0
        for tokens in pieces:
            logits.append(runner.step(slot, words(1, tokens), [start], range(tokens - 1, -1, -1)))
            start += tokens
    lengths = [sum(pieces) for pieces in PROMPTS.values()]
    for step in range(DECODED):
        rows = range(len(PROMPTS))
        logits.append(runner.step(0, words(len(PROMPTS), 1), [length + step for length in lengths], rows))
    caches = [runner.cached(slot, length + DECODED) for slot, length in enumerate(lengths)]
    return Answers(np.concatenate(logits), {name: np.concatenate([c[name] for c in caches]) for name in caches[0]})


def compare_each(lowering: Lowering, passes: Sequence[Any]) -> tuple[PassReport, ...]:
    """Lower by ``passes``; AssertionError naming the first after which the graph computes something else."""
    known = Known()
    steps = [SimpleNamespace(__name__=step.__name__, run=_compared(step, known)) for step in passes]
    return lower(lowering, steps, lambda _: None)


class Known:
    """What the last graph gave. The same graph, after a pass and before the next one, is not run again."""

    def __init__(self) -> None:
        self._last: tuple[bytes, Answers] | None = None

    def answers(self, lowering: Lowering, model: ir.Model) -> Answers:
        content = ir.to_proto(model).SerializeToString(deterministic=True)
        if self._last is None or self._last[0] != content:
            self._last = content, answers(lowering, content)
        return self._last[1]


def _compared(step: Any, known: Known) -> Callable[[Lowering], PassResult]:
    name = step.__name__.rpartition(".")[2]

    def run(lowering: Lowering) -> PassResult:
        before = known.answers(lowering, written_out(lowering, name))
        outcome: PassResult = step.run(lowering)
        lowering.model.graph.sort()
        apart = known.answers(lowering, written_out(lowering)).apart(before)
        if name == "half_precision":
            assert apart.max() <= FLOAT16[lowering.precision], f"{name}: {apart.max():.1e}"
        else:
            most = SIXTEEN_BITS if name == "cached_attention" and lowering.kv_scales else FLOAT32
            assert np.quantile(apart, MOST) <= most, f"{name}: {np.quantile(apart, MOST):.1e} in one row of ten"
            flipped = FLIPPED_INT4 if lowering.kv_dtype == "int4" else FLIPPED
            assert apart.max() <= (flipped if rounds(lowering) else FLOAT32), f"{name}: {apart.max():.1e}"
        return outcome

    return run


def rounds(lowering: Lowering) -> bool:
    """Whether something in the graph rounds to codes while it runs: keys and values, or the inputs of products."""
    operators = {node.op_type for node in lowering.model.graph.all_nodes()}
    return bool(
        lowering.kv_scales or operators & {"QuantizeLinear", "QuantizeActivations", "MatMulNBits", *BLOCK_PRODUCTS}
    )


def lowering_of(graph: Artifact[PortableGraph], precision: str, *, kv_bits: int = 8) -> Lowering:
    record, rng = graph.record, np.random.default_rng(1)
    lowering = Lowering(
        ir.load(graph.folder / "model.onnx"),
        record,
        FixedWeights(tensors_of(graph, precision)),
        record.max_positions,
        CpuKernels(),
        kv_dtype=f"int{kv_bits}",
        float_type="fp16" if precision in FLOAT16 else "fp32",
        precision=precision,
        formats=frozenset({precision} & {"int4", "fp8"}),
        qdq=qdq,
    )
    if precision in CODES:
        shape = (record.kv_heads, record.head_size)
        lowering.kv_scales = {
            f"layers.{layer}.{part}_scale": rng.uniform(0.01, 0.04, shape).astype(np.float32) * 2 ** (8 - kv_bits)
            for layer in range(record.layers)
            for part in "kv"
        }
    return lowering


def tensors_of(graph: Artifact[PortableGraph], precision: str) -> dict[str, Any]:
    """The float checkpoint's parameters, linears in the formats of the case."""
    checkpoint = open_checkpoint(graph.folder)
    tensors: dict[str, Any] = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    record = graph.record
    for number, group in enumerate(record.groups):
        for name in group.members:
            weight = tensors[name].T if group.transposed else tensors[name]  # [out, in]
            if precision == "fp8" and group.name != "lm_head":
                step = FORMAT.storable(np.array([(4 + number) / 448], np.float32))  # in float16 it is the same
                tensors[name] = replace(round_to_nearest(weight, FP8), input_scale=float(step[0]))
            elif precision == "int4" and group.name != "lm_head":
                int4 = Scheme(bits=4, group_size=32, symmetric=True, positive_scales=True)
                tensors[name] = round_to_nearest(weight, int4.fitted(group.in_features))
            elif precision in CODES:
                static = (4 + number) / 127 if precision == "quantized" else None
                tensors[name] = mixed(group, weight, step=static)
    if precision in CODES and not isinstance(tensors[record.embedding], QuantizedWeight):
        tensors[record.embedding] = round_to_nearest(
            tensors[record.embedding], Scheme(bits=8, group_size=16, symmetric=True)
        )
    return tensors


def mixed(group: LinearGroup, weight: NDArray[np.float32], *, step: float | None) -> QuantizedWeight:
    """A weight ``[out, in]`` in a format that depends on what its group is for, so that there is one of every kind.

    ``step``: of static inputs, which the linear behind attention has; None: it has none.
    """
    unit = group.name.rpartition(".")[2]
    if unit == "o" and step is not None:
        return replace(round_to_nearest(weight, STATIC_INT8), input_scale=step)
    schemes = {"qkv": Scheme(bits=4), "down": Scheme(bits=4, symmetric=True), "o": Scheme(bits=5, symmetric=True)}
    return round_to_nearest(weight, schemes.get(unit, Scheme(bits=8, symmetric=True)).fitted(group.in_features))


@pytest.mark.parametrize(("target", "precision"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_each_pass_the_graph_computes_the_same(
    request: pytest.FixtureRequest,
    family: str,
    target: str,
    precision: str,
) -> None:
    if target in ("ort-cpu", "cuda"):
        request.getfixturevalue("stock_operators" if precision.endswith("stock") else "native_operators")
    kind, _, more = precision.partition(", ")
    lowering = lowering_of(family_graph(family), kind, kv_bits=4 if more == "int4 cache" else 8)
    reports = compare_each(lowering, [step for step in find_target(target).passes().every if not of_gpus(step)])
    idle = {report.name for report in reports if not report.matched}
    expected = IDLE[precision] | IDLE.get(family, set()) | OTHER_LAYERS
    found = FOUND.get(family, set()) - ({"gated_norms"} if precision.endswith("stock") else set())
    if family in READ_NORMS and precision in ("quantized", "quantized, int4 cache"):
        found |= {"native_norms"}
    assert idle == (expected - found) & {report.name for report in reports}
    assert all(report.declined for report in reports if not report.matched)
    for sentence in (sentence for report in reports for sentence in report.declined):
        subject, _, reason = sentence.rpartition(": ")
        assert SUBJECT.fullmatch(subject) and len(reason.split()) > 3, sentence


@pytest.mark.parametrize(
    ("step", "operator", "attribute"),
    [(cached_attention, "CachedAttention", "scale"), (silu, "QuickGelu", "alpha")],
)
def test_a_pass_that_changes_what_is_computed_is_named(step: Any, operator: str, attribute: str) -> None:
    """By a hundredth of one attribute in the first layer."""

    def run(lowering: Lowering) -> PassResult:
        outcome = step.run(lowering)
        node = next(n for n in lowering.model.graph.all_nodes() if n.op_type == operator)
        node.attributes[attribute] = ir.AttrFloat32(attribute, node.attributes[attribute].as_float() * 1.01)
        return outcome

    broken = SimpleNamespace(__name__=step.__name__, run=run)
    passes = [broken if known is step else known for known in find_target("ort-cpu").passes().every]
    name = step.__name__.rpartition(".")[2]
    with pytest.raises(AssertionError, match=name):
        compare_each(lowering_of(family_graph("llama-odd-sizes"), "float"), passes)


def test_the_passes_of_every_target_are_compared() -> None:
    """Those of GPUs' own operators are compared by test_cuda_engine.py and test_ort_cuda_engine.py."""
    compared = {step for target, _ in CASES for step in find_target(target).passes().every}
    known = {step for target in known_targets() for step in find_target(target).passes().every}
    left_out = {step for step in known if of_gpus(step)}
    assert known - left_out == compared - left_out and len(left_out) == 3


def of_gpus(step: Any) -> bool:
    """Whether a pass leaves a graph that no processor runs, or only asks whether kernels of a GPU have all of it."""
    return step.__name__.split(".")[2] in ("cuda", "onnxruntime_cuda")
