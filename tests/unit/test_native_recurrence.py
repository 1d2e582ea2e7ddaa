"""GatedDelta and SelectiveScan, the operators: their definition, the same bits however sequences are cut and mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.kernels import cpu as native
from engines.kernels.operators import DOMAIN, OPERATORS
from engines.sessions import cpu_options, open_session
from engines.state_buffers import BFLOAT16
from engines.targets.ort_cpu import library
from tests import recurrences
from tests.lowering import model_of, named, parameter, value
from tests.native import Array, Matrix
from tests.recurrences import Double

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
SLOTS = 5
Halves = NDArray[np.uint16]  # numbers in bfloat16
BY_CHANNEL = "GatedDelta by channel"  # of keys, each with its own decay
DEFINITIONS: dict[str, Callable[..., tuple[Double, Double]]] = {
    "GatedDelta": recurrences.gated_delta,
    BY_CHANNEL: recurrences.gated_delta,
    "SelectiveScan": recurrences.selective_scan,
}


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    groups: int = 2
    keys: int = 8
    values: int = 20

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.keys, self.values

    def of_token(self, operator: str, name: str) -> tuple[int, ...]:
        return {
            "value": (self.heads, self.values),
            "query": (self.groups, self.keys),
            "key": (self.groups, self.keys),
            "decay": (self.heads, self.keys) if operator == BY_CHANNEL else (self.heads,),
        }.get(name, (self.heads,))


SHAPES = (
    Shape(),
    Shape(heads=2, groups=2, keys=128, values=128),
    Shape(heads=3, groups=1, keys=17, values=65),
    Shape(heads=1, groups=1, keys=1, values=1),
    Shape(heads=2, groups=1, keys=16, values=64),
)


def arguments(operator: str) -> list[str]:
    return [argument.name for argument in OPERATORS[operator.partition(" ")[0]].inputs]


def per_token(operator: str) -> list[str]:
    """The inputs before the state."""
    names = arguments(operator)
    return names[: names.index("state")]


def node_of(operator: str, inputs: list[ir.Value], attributes: dict[str, int | float]) -> ir.Node:
    name, _, by_channel = operator.partition(" ")
    attributes = {**attributes, "by_channel": 1} if by_channel else attributes
    node = ir.node(name, inputs, attributes=attributes, domain=DOMAIN)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return node


def opened_with(node: ir.Node, inputs: list[ir.Value], threads: int = 1) -> ort.InferenceSession:
    model = model_of(inputs, [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    return open_session(ir.to_proto(model).SerializeToString(), cpu_options(threads, library(), [node.op_type]))


@cache
def session(operator: str, shape: Shape, threads: int = 1, *, half: bool = False) -> ort.InferenceSession:
    widths = {name: int(np.prod(shape.of_token(operator, name))) for name in per_token(operator)}
    inputs = [value(name, ["batch", "tokens", width]) for name, width in widths.items()]
    element = ir.DataType.BFLOAT16 if half else ir.DataType.FLOAT
    inputs.append(value("state", ["slots", *shape.state], element))
    inputs += [value(name, [name], ir.DataType.INT32) for name in ("offsets", "starts", "slots")]
    return opened_with(node_of(operator, inputs, {"groups": shape.groups}), inputs, threads)


def run(
    opened: ort.InferenceSession,
    tokens: dict[str, Matrix],
    state: Matrix | Halves,
    counts: list[int],
    starts: list[int],
    slots: list[int],
) -> Matrix:
    """``tokens``: each ``[M, ..]``; ``state`` is changed in place. Returns ``[M, H, V]``."""
    held: dict[str, NDArray[Any]] = {name: array.reshape(1, len(array), -1) for name, array in tokens.items()} | {
        "state": state
    }
    for name, numbers in {"offsets": np.cumsum([0, *counts]), "starts": starts, "slots": slots}.items():
        held[name] = np.array(numbers, np.int32)
    binding = opened.io_binding()
    for name, array in held.items():  # bound by address
        element = BFLOAT16 if array.dtype == np.uint16 else array.dtype.type
        binding.bind_input(name, "cpu", 0, element, array.shape, array.ctypes.data)
    binding.bind_output("y", "cpu")
    opened.run_with_iobinding(binding)
    y = binding.copy_outputs_to_cpu()[0][0]
    return y.reshape(len(y), state.shape[1], state.shape[3])


def drawn(operator: str, shape: Shape, count: int, seed: int) -> dict[str, Matrix]:
    draw = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for name in per_token(operator):
        found[name] = draw.standard_normal((count, *shape.of_token(operator, name)))
    found["decay"] = -np.abs(found["decay"]) * 0.2
    if "beta" in found:
        found["beta"] = 1 / (1 + np.exp(-found["beta"]))
    return {name: array.astype(np.float32) for name, array in found.items()}


def unknown(shape: Shape) -> Matrix:
    """What a sequence before may have left: nothing that a new one may read."""
    return np.full((SLOTS, *shape.state), np.nan, np.float32)


def halves(floats: Matrix) -> Halves:
    """To the nearest bfloat16, of two as near the larger magnitude."""
    return ((np.ascontiguousarray(floats).view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)


def floats(halves: Halves) -> Matrix:
    return (halves.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("operator", DEFINITIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_is_computed_from_zeros_whatever_its_slot_held(operator: str, shape: Shape) -> None:
    tokens, state = drawn(operator, shape, 33, 1), unknown(shape)
    y = run(session(operator, shape), tokens, state, [33], [0], [3])
    expected, kept = DEFINITIONS[operator](*tokens.values())
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state[3], kept, rtol=1e-5, atol=1e-5)
    assert np.isnan(state[[0, 1, 2, 4]]).all()


@pytest.mark.parametrize("operator", DEFINITIONS)
def test_the_state_after_thousands_of_tokens_is_near_the_definition(operator: str) -> None:
    """Where little decays, errors add up."""
    shape = Shape(heads=2, groups=2, keys=32, values=16)
    tokens, state = drawn(operator, shape, 4096, 2), unknown(shape)
    tokens["decay"] *= np.float32(1e-3)
    run(session(operator, shape), tokens, state, [4096], [0], [0])
    kept = DEFINITIONS[operator](*tokens.values())[1]
    assert np.abs(state[0] - kept).max() < 1e-4 * np.abs(kept).max()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    operator=st.sampled_from(sorted(DEFINITIONS)),
    shape=st.sampled_from(SHAPES[:3]),
    threads=st.sampled_from((1, 2)),
    half=st.booleans(),
)
def test_a_token_is_the_same_to_the_bit_however_sequences_are_cut_and_mixed(
    seed: int, operator: str, shape: Shape, threads: int, half: bool
) -> None:
    """Sequences grow by pieces of any size, none too, in any order, beside each other."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 13, 3).tolist()
    texts = [drawn(operator, shape, length, 10 + n) for n, length in enumerate(lengths)]
    slots, state = [4, 0, 2], halves(unknown(shape)) if half else unknown(shape)
    alone = [
        run(session(operator, shape, half=half), text, state.copy(), [length], [0], [1])
        for text, length in zip(texts, lengths, strict=True)
    ]
    done, found = [0, 0, 0], [np.empty((0, shape.heads, shape.values), np.float32)] * 3
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        chosen = draw.permutation(3)[: draw.integers(1, 4)].tolist()
        counts = [int(draw.integers(0, lengths[n] - done[n] + 1)) for n in chosen]
        if not any(counts):
            continue
        pieces = {
            name: np.concatenate(
                [texts[n][name][done[n] : done[n] + count] for n, count in zip(chosen, counts, strict=True)]
            )
            for name in texts[0]
        }
        starts = [done[n] for n in chosen]
        y = run(session(operator, shape, threads, half=half), pieces, state, counts, starts, [slots[n] for n in chosen])
        for n, part in zip(chosen, np.split(y, np.cumsum(counts)[:-1]), strict=True):
            found[n] = np.concatenate([found[n], part])
            done[n] += len(part)
    for whole, parts in zip(alone, found, strict=True):
        assert (whole == parts).all()


@pytest.mark.parametrize("operator", DEFINITIONS)
@pytest.mark.parametrize("shape", [*SHAPES, Shape(heads=2, groups=1, keys=300, values=70)], ids=str)
def test_a_state_in_bfloat16_is_rounded_after_each_token(operator: str, shape: Shape) -> None:
    """To the bit what comes of a state in float32 that is rounded between two runs of one token."""
    tokens, state, single = drawn(operator, shape, 12, 3), halves(unknown(shape)), unknown(shape)
    y = run(session(operator, shape, half=True), tokens, state, [12], [0], [3])
    for token in range(12):
        one = {name: array[token : token + 1] for name, array in tokens.items()}
        assert (run(session(operator, shape), one, single, [1], [token], [3])[0] == y[token]).all()
        single[3] = floats(halves(single[3]))
    assert (floats(state[3]) == single[3]).all()
    assert (state[[0, 1, 2, 4]] == halves(unknown(shape))[0]).all()


def test_numbers_are_rounded_to_the_nearest_bfloat16() -> None:
    """Sequences of one token, whose state is its value: ties, subnormals and what is not finite among them."""
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 1 << 32, 4000, np.uint32)
    ties = draw.integers(0, 1 << 16, 4000, np.uint32) << 16 | 0x8000
    numbers = np.concatenate([bits, ties, np.array([0, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)])
    given = np.where(np.isnan(numbers.view(np.float32)), np.float32(np.nan), numbers.view(np.float32))
    count, ones = len(given), np.ones((len(given), 1), np.float32)
    tokens = {"value": given[:, None], "query": ones, "key": ones, "decay": 0 * ones}
    state = np.zeros((count, 1, 1, 1), np.uint16)
    run(
        session("SelectiveScan", Shape(1, 1, 1, 1), half=True), tokens, state, [1] * count, [0] * count, [*range(count)]
    )
    found = floats(state).ravel()
    np.testing.assert_array_equal(found, floats(halves(given)))
    with np.errstate(over="ignore", invalid="ignore"):
        to_even = given.astype(ml_dtypes.bfloat16).astype(np.float32)
    tied = (given.view(np.uint32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(found[~tied], to_even[~tied])


@pytest.mark.parametrize(
    ("counts", "starts", "slots"),
    [
        ([3], [0], [SLOTS]),
        ([3], [0], [-1]),
        ([3], [-1], [0]),
        ([4], [0], [0]),
        ([2], [0], [0]),
        ([3, 1, -1], [0] * 3, [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("operator", DEFINITIONS)
def test_what_lies_outside_the_tokens_or_the_state_is_refused(
    operator: str, counts: list[int], starts: list[int], slots: list[int]
) -> None:
    shape = Shape()
    with pytest.raises(Exception, match="offsets, starts or slots do not fit"):
        run(session(operator, shape), drawn(operator, shape, 3, 0), unknown(shape), counts, starts, slots)


@pytest.mark.parametrize("operator", DEFINITIONS)
@pytest.mark.parametrize("name", ["value", "query", "key", "decay"])
def test_inputs_of_another_shape_are_refused(operator: str, name: str) -> None:
    tokens = drawn(operator, Shape(), 3, 0)
    tokens[name] = tokens[name][:2]
    with pytest.raises(Exception, match="a recurrence: "):
        run(session(operator, Shape()), tokens, unknown(Shape()), [3], [0], [0])


# Of what is computed with a recurrence: the numbers of each head, and the bounds of a time step.
H, G, K, V = 4, 2, 16, 24
BOUNDS = {"least_step": 0.4, "most_step": 0.9}


def fused(operator: str, widths: dict[str, int], firsts: dict[str, int], **settings: float) -> ort.InferenceSession:
    """All inputs of a token are columns of tensors of these ``widths``, from ``firsts`` on."""
    inputs = [value(name, ["batch", "tokens", widths[name]]) for name in per_token(operator)]
    inputs.append(value("state", [SLOTS, H, K, V]))
    inputs += [value(name, [name], ir.DataType.INT32) for name in ("offsets", "starts", "slots")]
    names = arguments(operator)
    numbers = [parameter(f"a.{name}", heads(operator, name)) for name in names[names.index("slots") + 1 :]]
    attributes = {"groups": G, **{f"{name}_first": first for name, first in firsts.items()}, **settings}
    return opened_with(node_of(operator, [*inputs, *numbers], attributes), inputs)


def heads(operator: str, name: str) -> Matrix:
    numbers = {"rate": [-1.5, -0.3, -0.01, -4], "bias": [0.5, -2, 1, 0], "skip": [1, -0.5, 2, 0]}
    found = np.array(numbers[name], np.float32)
    if operator == BY_CHANNEL and name == "bias":
        found = found[:, None] + np.linspace(-1, 1, K, dtype=np.float32)
    return found


@pytest.mark.parametrize("bounds", [{}, BOUNDS], ids=["any step", "steps within bounds"])
@pytest.mark.parametrize("operator", DEFINITIONS)
def test_time_steps_rates_and_gates_are_computed_with_the_recurrence(operator: str, bounds: dict[str, float]) -> None:
    """Of columns that lie between others: those that are not its own are NaN."""
    tokens, y = computed(operator, bounds)
    step = np.log1p(np.exp(tokens["decay"].astype(np.float64) + heads(operator, "bias")))
    step = step.clip(bounds.get("least_step", 0), bounds.get("most_step", np.inf))
    skipped: Array = np.zeros_like(y)
    given: dict[str, Array] = {**tokens, "decay": step * rates(operator)}
    if operator == "SelectiveScan":
        given["value"] = tokens["value"] * step[:, :, None]
        skipped = tokens["value"] * heads(operator, "skip")[:, None]
    np.testing.assert_allclose(y, DEFINITIONS[operator](*given.values())[0] + skipped, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("operator", ["GatedDelta", BY_CHANNEL])
def test_a_decay_can_have_a_least(operator: str) -> None:
    tokens, y = computed(operator, {"least_decay": -0.7})
    inner = rates(operator) * (tokens["decay"].astype(np.float64) + heads(operator, "bias"))
    given: dict[str, Array] = {**tokens, "decay": -0.7 / (1 + np.exp(-inner))}
    np.testing.assert_allclose(y, recurrences.gated_delta(*given.values())[0], rtol=2e-5, atol=2e-5)


def rates(operator: str) -> Matrix:
    found = heads(operator, "rate")
    return found[:, None] if operator == BY_CHANNEL else found


def computed(operator: str, settings: dict[str, float]) -> tuple[dict[str, Matrix], Matrix]:
    """Tokens whose beta is taken as it is once its sigmoid is, and ``[M, H, V]`` of them."""
    shape = Shape(H, G, K, V)
    tokens = drawn(operator, shape, 21, 5)
    raw = np.random.default_rng(6).standard_normal(tokens["decay"].shape).astype(np.float32) * 3
    tokens["decay"] = raw
    firsts = {name: 3 + 2 * n for n, name in enumerate(tokens)}
    spread: dict[str, Matrix] = {}
    for name, array in tokens.items():
        flat = array.reshape(21, -1)
        spread[name] = np.full((21, flat.shape[1] + firsts[name] + 5), np.nan, np.float32)
        spread[name][:, firsts[name] : firsts[name] + flat.shape[1]] = flat
    widths = {name: array.shape[1] for name, array in spread.items()}
    opened = fused(operator, widths, firsts, squash=1, most_beta=1.5, **settings)
    y = run(opened, spread, unknown(shape), [21], [0], [3])
    if "beta" in tokens:
        tokens["beta"] = (1.5 / (1 + np.exp(-tokens["beta"].astype(np.float64)))).astype(np.float32)
    return tokens, y


@pytest.mark.parametrize(
    ("operator", "settings", "keys"),
    [
        ("SelectiveScan", {"by_channel": 1}, 8),
        ("SelectiveScan", {"least_decay": -1.0}, 8),
        ("GatedDelta", {"least_decay": 1.0}, 8),
        (BY_CHANNEL, {}, 1025),
    ],
    ids=str,
)
def test_decays_that_no_kernel_has_are_refused(operator: str, settings: dict[str, float], keys: int) -> None:
    shape = Shape(keys=keys)
    widths = {name: int(np.prod(shape.of_token(operator, name))) for name in per_token(operator)}
    inputs = [value(name, ["batch", "tokens", width]) for name, width in widths.items()]
    inputs.append(value("state", ["slots", *shape.state]))
    inputs += [value(name, [name], ir.DataType.INT32) for name in ("offsets", "starts", "slots")]
    with pytest.raises(Exception, match=r"a recurrence: .* (decays|decay)"):
        opened = opened_with(node_of(operator, inputs, {"groups": shape.groups, **settings}), inputs)
        run(opened, drawn(operator, shape, 3, 0), unknown(shape), [3], [0], [0])


def test_softplus_keeps_small_steps_and_large_ones() -> None:
    """Sequences of one token whose value, key and query are ones: what is read is the time step."""
    raw = np.concatenate([np.linspace(-80, 80, 2001), [0.0, 1e-30, -1e-3, 19.9, 20.1]]).astype(np.float32)
    inputs = [value(name, ["batch", "tokens", 1]) for name in per_token("SelectiveScan")]
    inputs.append(value("state", ["slots", 1, 1, 1]))
    inputs += [value(name, [name], ir.DataType.INT32) for name in ("offsets", "starts", "slots")]
    rate = parameter("a.rate", np.full(1, -1, np.float32))
    opened = opened_with(node_of("SelectiveScan", [*inputs, rate], {"groups": 1}), inputs)
    ones = np.ones((len(raw), 1), np.float32)
    tokens = {"value": ones, "query": ones, "key": ones, "decay": raw[:, None]}
    count = len(raw)
    state = np.zeros((count, 1, 1, 1), np.float32)
    y = run(opened, tokens, state, [1] * count, [0] * count, list(range(count))).ravel()
    np.testing.assert_allclose(y, np.logaddexp(0, raw.astype(np.float64)), rtol=5e-7)
