"""CausalConv, the operator: each channel's convolution over its own sequence, however the sequence was cut."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.kernels.operators import DOMAIN
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tests.lowering import model_of, named, parameter, value
from tests.native import Array, Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
SLOTS = 5


def session(
    weight: Matrix, bias: Matrix | None = None, *, threads: int = 1, width: int = 0, **attributes: int
) -> ort.InferenceSession:
    """``weight [K, C]``. ``width``: columns of x, 0: C."""
    taps, channels = weight.shape
    x = value("x", ["batch", "tokens", width or channels])
    state = value("state", [SLOTS, taps - 1, channels])
    whole = [value(name, [name], ir.DataType.INT32) for name in ("offsets", "starts", "slots")]
    parameters = [parameter("conv.weight", weight), None if bias is None else parameter("conv.bias", bias)]
    node = ir.node("CausalConv", [x, *parameters, state, *whole], attributes=attributes, domain=DOMAIN)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of([x, state, *whole], [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    return open_session(ir.to_proto(model).SerializeToString(), cpu_options(threads, library(), ["CausalConv"]))


def run(
    opened: ort.InferenceSession, x: Matrix, state: Matrix, counts: list[int], starts: list[int], slots: list[int]
) -> Matrix:
    """``x [M, C]``; ``state`` is changed in place."""
    numbers = {"offsets": np.cumsum([0, *counts]), "starts": np.array(starts), "slots": np.array(slots)}
    binding = opened.io_binding()
    for name, array in {"x": x[None], "state": state, **numbers}.items():
        fixed = array if name in ("x", "state") else array.astype(np.int32)
        held = fixed if name == "state" else np.ascontiguousarray(fixed)
        numbers[name] = held  # bound by address
        binding.bind_input(name, "cpu", 0, held.dtype.type, held.shape, held.ctypes.data)
    binding.bind_output("y", "cpu")
    opened.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0][0]


def convolved(x: Array, weight: Array, bias: Array | None) -> Array:
    """Of one sequence ``[S, C]`` from its beginning on, in float64."""
    taps = len(weight)
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x.astype(np.float64)])
    y = np.stack([weight[k].astype(np.float64) * padded[k : k + len(x)] for k in range(taps)]).sum(0)
    return y if bias is None else y + bias


def random(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("taps", "channels"), [(2, 16), (3, 300), (4, 7), (16, 64)])
def test_a_sequence_is_convolved_from_zeros_whatever_its_slot_held(taps: int, channels: int, biased: bool) -> None:
    weight, x = random(taps, channels, seed=1), random(9, channels, seed=2)
    bias = random(channels, seed=3) if biased else None
    state = np.full((SLOTS, taps - 1, channels), np.nan, np.float32)
    y = run(session(weight, bias), x, state, [9], [0], [3])
    np.testing.assert_allclose(y, convolved(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert np.isnan(state[[0, 1, 2, 4]]).all()
    kept = np.concatenate([np.zeros((taps - 1, channels), np.float32), x])[-(taps - 1) :]
    assert (state[3] == kept).all()


@pytest.mark.parametrize("channels", [16, 300, 7])
def test_gates_are_parts_of_the_same_tokens(channels: int) -> None:
    """A factor before, a factor after, and what is convolved; the state is of the product."""
    weight, x = random(3, channels, seed=1), random(9, 3 * channels, seed=2)
    before, after, given = np.split(x, 3, 1)
    state = np.full((SLOTS, 2, channels), np.nan, np.float32)
    y = run(session(weight, width=3 * channels, gated=1), x, state, [9], [0], [3])
    np.testing.assert_allclose(y, after * convolved(before * given, weight, None), rtol=1e-5, atol=1e-5)
    assert (state[3] == (before * given)[-2:]).all()


@pytest.mark.parametrize(("channels", "first", "width"), [(16, 0, 16), (40, 7, 47), (5, 3, 30)])
def test_columns_are_read_where_they_lie_and_pass_silu(channels: int, first: int, width: int) -> None:
    weight, bias, x = random(4, channels, seed=1), random(channels, seed=3), np.full((9, width), np.nan, np.float32)
    x[:, first : first + channels] = random(9, channels, seed=2)
    state = np.full((SLOTS, 3, channels), np.nan, np.float32)
    y = run(session(weight, bias, width=width, first=first, silu=1), x, state, [9], [0], [3])
    expected = convolved(x[:, first : first + channels], weight, bias)
    np.testing.assert_allclose(y, expected / (1 + np.exp(-expected)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "gated"), [(1, 0), (0, 1)])
def test_tokens_without_all_channels_are_refused(first: int, gated: int) -> None:
    state = np.zeros((SLOTS, 2, 16), np.float32)
    with pytest.raises(Exception, match="where W has all channels"):
        run(session(random(3, 16), first=first, gated=gated), random(3, 16), state, [3], [0], [0])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), taps=st.integers(2, 5), threads=st.sampled_from((1, 2)))
def test_a_token_is_the_same_to_the_bit_however_sequences_are_cut_and_mixed(seed: int, taps: int, threads: int) -> None:
    """Sequences grow by pieces of any size, none too, in any order, beside each other."""
    draw = np.random.default_rng(seed)
    weight = random(taps, 40, seed=taps)
    opened = session(weight, threads=threads)
    texts = [random(int(draw.integers(1, 13)), 40, seed=10 + n) for n in range(3)]
    slots, state = [4, 0, 2], np.full((SLOTS, taps - 1, 40), np.nan, np.float32)
    alone = [run(opened, text, state.copy(), [len(text)], [0], [1]) for text in texts]
    done, found = [0, 0, 0], [np.empty((0, 40), np.float32)] * 3
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        chosen = draw.permutation(3)[: draw.integers(1, 4)].tolist()
        counts = [int(draw.integers(0, len(texts[n]) - done[n] + 1)) for n in chosen]
        if not any(counts):
            continue
        pieces = [texts[n][done[n] : done[n] + count] for n, count in zip(chosen, counts, strict=True)]
        y = run(opened, np.concatenate(pieces), state, counts, [done[n] for n in chosen], [slots[n] for n in chosen])
        for n, part in zip(chosen, np.split(y, np.cumsum(counts)[:-1]), strict=True):
            found[n] = np.concatenate([found[n], part])
            done[n] += len(part)
    for whole, parts in zip(alone, found, strict=True):
        assert (whole == parts).all()


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
def test_what_lies_outside_the_tokens_or_the_state_is_refused(
    counts: list[int], starts: list[int], slots: list[int]
) -> None:
    opened, state = session(random(3, 16)), np.zeros((SLOTS, 2, 16), np.float32)
    with pytest.raises(Exception, match="CausalConv: offsets, starts or slots do not fit"):
        run(opened, random(3, 16), state, counts, starts, slots)
