"""BlockExperts, the operator: experts over codes, the same bits whoever else is in a step.

Graphs are made by the pass, so what is compared with float64 is its packing and the kernel together.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.compile import step_bytes
from engines.kernels import cpu as native
from engines.passes.onnxruntime import native_experts
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tapeout.operators import DOMAIN
from tapeout.operators.experts import ExpertGate
from tapeout.operators.experts.function import experts_function
from tapeout.quantized import QuantizedWeight, round_to_nearest, stacked
from tapeout.schemes import Scheme
from tests.lowering import apply, lowering, model_of, named, op, parameter, value
from tests.native import Array, Matrix, expected
from tests.random_linears import MXFP4
from tests.unit.test_native_experts import GATES, activated, choices, random

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
HIDDEN, INNER, EXPERTS = 64, 96, 6
MIXED = (8, 4, 5, 6, 4, 8)  # bits of the experts of one layer
ROUNDING_OF_INNER = 3e-6  # relative, of channels that the kernel computes itself
SCHEMES = [
    *(Scheme(bits=bits, group_size=32, symmetric=symmetric) for bits in (4, 5, 6, 8) for symmetric in (False, True)),
    MXFP4,
]


def experts_model(
    gate: ExpertGate, up: QuantizedWeight, down: QuantizedWeight, biases: tuple[Matrix, Matrix] | None = None
) -> ir.Model:
    """Lowered. ``up``: rows as the float operator has them, gates before ups or beside them."""
    width, hidden, inner = up.codes.shape[1], up.codes.shape[2], down.codes.shape[2]
    x = value("x", ["tokens", hidden])
    index, weight = value("index", ["tokens", "chosen"], ir.DataType.INT64), value("weight", ["tokens", "chosen"])
    held = [
        parameter(f"experts.{name}", np.zeros(shape, np.float32))
        for name, shape in (("up", (EXPERTS, width, hidden)), ("down", (EXPERTS, hidden, inner)))
    ]
    if biases is None:
        held += [parameter(name, np.zeros((1, 1), np.float32)) for name in ("no_up_bias", "no_down_bias")]
    else:
        held += [parameter(f"experts.{name}_bias", bias) for name, bias in zip(("up", "down"), biases, strict=True)]
    attributes = asdict(gate) | {"interleaved": int(gate.interleaved)}
    y = op("Experts", [x, index, weight, *held], ["tokens", hidden], domain=DOMAIN, **attributes)
    model = model_of([x, index, weight], [named("y", y)])
    model.functions[(DOMAIN, "Experts", "")] = experts_function()
    lowered = lowering(model, {"experts.up": up, "experts.down": down})
    outcome = apply(lowered, native_experts)
    assert (outcome.matched, outcome.declined) == (1, ()) and model.graph[0].op_type == "BlockExperts"
    assert lowered.plan.keys() == {"experts.up", "experts.down"}
    return model


def opened(model: ir.Model, threads: int = 1) -> ort.InferenceSession:
    options = cpu_options(threads, library(), ["BlockExperts"])
    return open_session(ir.to_proto(model).SerializeToString(), options)


def run(session: ort.InferenceSession, x: Matrix, index: Array, weight: Matrix) -> Matrix:
    return np.asarray(session.run(None, {"x": x, "index": index, "weight": weight})[0])


def of_expert(weight: QuantizedWeight, expert: int, rows: Array) -> QuantizedWeight:
    return weight.part(expert).rows(rows)


def reference(
    gate: ExpertGate,
    up: QuantizedWeight,
    down: QuantizedWeight,
    biases: tuple[Matrix, Matrix] | None,
    x: Matrix,
    index: Array,
    share: Matrix,
) -> tuple[Array, Array]:
    """In float64, and by how much the kernel may miss it: roundings, and inner channels that lie between two codes."""
    inner, hidden = down.codes.shape[2], x.shape[1]
    rows = np.arange(up.codes.shape[1])
    parts = [rows[::2], rows[1::2]] if gate.interleaved else list(rows.reshape(-1, inner))
    y, bound = np.zeros(x.shape), np.zeros(x.shape)
    for token in range(len(x)):
        for expert, weight in zip(index[token], share[token], strict=True):
            up_bias, down_bias = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            between = [
                expected(x[token : token + 1], of_expert(up, expert, part), None if up_bias is None else up_bias[part])
                for part in parts
            ]
            found = activated(gate, between[0][0], between[1][0] if len(between) > 1 else None).astype(np.float32)
            answer, error = expected(
                found, of_expert(down, expert, np.arange(hidden)), down_bias, slack=ROUNDING_OF_INNER
            )
            y[token] += weight * answer[0]
            bound[token] += abs(weight) * (error[0] + 4e-7 * abs(answer[0]))
    return y, bound


def weights(
    scheme: Scheme, has_gate: bool, down: Scheme | None = None, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[QuantizedWeight, QuantizedWeight]:
    return (
        round_to_nearest(random(EXPERTS, inner * (1 + has_gate), hidden, seed=1), scheme),
        round_to_nearest(random(EXPERTS, hidden, inner, seed=2), down or scheme),
    )


def mixed(bits: tuple[int, ...] = MIXED, *, group_size: int = 32, symmetric: bool = True) -> Scheme:
    """A scheme of experts that differ in bits."""
    schemes = [Scheme.model_validate({"bits": b, "group_size": group_size, "symmetric": symmetric}) for b in bits]
    found = Scheme.of_experts(schemes)
    assert found is not None
    return found


def random_biases(up: QuantizedWeight, down: QuantizedWeight) -> tuple[Matrix, Matrix]:
    return random(EXPERTS, up.codes.shape[1], seed=4), random(EXPERTS, down.codes.shape[1], seed=5)


def check(
    gate: ExpertGate,
    up: QuantizedWeight,
    down: QuantizedWeight,
    biases: tuple[Matrix, Matrix] | None,
    tokens: int = 11,
    chosen: int = 3,
) -> None:
    x, (index, share) = random(tokens, up.codes.shape[2], seed=9), choices(tokens, chosen, EXPERTS, 5)
    y = run(opened(experts_model(gate, up, down, biases)), x, index, share)
    wanted, bound = reference(gate, up, down, biases, x, index, share)
    over = np.abs(y - wanted) - bound
    assert (over <= 0).all(), f"{over.max():.1e} beyond what rounding explains, of {np.abs(wanted).max():.1e}"
    # The bound is that of a few channels between two codes: far below what any other weight or choice would give.
    assert np.median(bound) < 0.02 * np.abs(wanted).mean()


@pytest.mark.usefixtures("level")
def test_floats_of_4_bits_give_the_bits_of_the_integers_that_hold_them() -> None:
    """In 4.25 bits a weight: codes are read as they are, and scales are bytes."""
    gate, (up, down) = GATES[1], weights(MXFP4, True)
    wide = [weight.widened(5) for weight in (up, down)]
    assert wide[0] is not None and wide[1] is not None
    biases = random_biases(up, down)
    models = experts_model(gate, up, down, biases), experts_model(gate, wide[0], wide[1], biases)
    for tokens in (1, 7, 30):
        x, (index, share) = random(tokens, HIDDEN, seed=tokens), choices(tokens, 3, EXPERTS, 5)
        one, other = (run(opened(model), x, index, share) for model in models)
        np.testing.assert_array_equal(one, other)
    stored = [tensor for tensor in models[0].graph.initializers.values() if "codes" in str(tensor.name)]
    scales = [tensor for tensor in models[0].graph.initializers.values() if "scales" in str(tensor.name)]
    sizes = [sum(v.const_value.nbytes for v in held if v.const_value is not None) for held in (stored, scales)]
    assert sizes[0] * 2 == up.codes.size + down.codes.size and sizes[1] == up.scales.size + down.scales.size


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("has_gate", [True, False])
def test_a_step_is_what_float64_says(scheme: Scheme, has_gate: bool) -> None:
    check(ExpertGate("silu"), *weights(scheme, has_gate), None)


@pytest.mark.parametrize("gate", [*GATES, ExpertGate("silu", 1.702, 1.5, 1.0, interleaved=True)], ids=str)
@pytest.mark.parametrize("scheme", [Scheme(bits=5, group_size=16), Scheme(bits=5, group_size=32)], ids=str)
def test_every_gate_with_biases_is_what_float64_says(gate: ExpertGate, scheme: Scheme) -> None:
    """Groups of 16 channels in 5 bits are stored in 6."""
    up, down = weights(scheme, True)
    check(gate, up, down, random_biases(up, down))


@pytest.mark.parametrize("has_gate", [True, False])
def test_projections_may_have_schemes_of_their_own(has_gate: bool) -> None:
    up, down = weights(Scheme(bits=4, group_size=64, symmetric=True), has_gate, Scheme(bits=8, group_size=32))
    check(ExpertGate("silu"), up, down, None)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_experts_may_have_bits_of_their_own(symmetric: bool, has_gate: bool) -> None:
    """In one projection or in both, which need not agree; each expert takes the bytes of its own bits."""
    one, other = mixed(symmetric=symmetric), mixed(tuple(reversed(MIXED)), symmetric=symmetric)
    for up_scheme, down_scheme in ((one, other), (one, Scheme(bits=5, symmetric=True)), (Scheme(bits=6), other)):
        up, down = weights(up_scheme, has_gate, down_scheme)
        biases = random_biases(up, down)
        for tokens in (1, 30):
            check(ExpertGate("silu"), up, down, biases, tokens)
        codes = experts_model(ExpertGate("silu"), up, down, biases).graph.initializers["experts.up.codes"].const_value
        assert codes is not None and codes.nbytes == up.codes.size * up_scheme.mean_bits / 8


@pytest.mark.usefixtures("level")
def test_an_expert_has_the_bits_that_it_has_among_experts_of_its_own_bits() -> None:
    """The same outputs to the bit, token by token, whatever bits other experts of the step have."""
    gate, scheme = GATES[1], mixed()
    up, down = weights(scheme, True)
    biases, model = random_biases(up, down), experts_model(gate, up, down, random_biases(up, down))
    for bits in sorted(set(MIXED)):
        alike = Scheme(bits=bits, group_size=32, symmetric=True)
        own = [expert for expert in range(EXPERTS) if MIXED[expert] == bits]
        held = [
            stacked([w.part(e) if e in own else round_to_nearest(w.dequantize()[e], alike) for e in range(EXPERTS)])
            for w in (up, down)
        ]
        x, (index, share) = random(20, HIDDEN, seed=bits), choices(20, len(own), len(own), 5)
        index = np.array(own)[index]
        y = run(opened(experts_model(gate, held[0], held[1], biases)), x, index, share)
        np.testing.assert_array_equal(run(opened(model), x, index, share), y)


@pytest.mark.parametrize("size", [16, 32])
def test_5_bits_of_small_groups_lie_in_6_among_others(size: int) -> None:
    scheme = mixed((5, 6, 5, 5, 6, 8), group_size=size)
    check(ExpertGate("silu"), *weights(scheme, True), None)


def test_scales_that_float16_does_not_hold_stay_in_float32() -> None:
    up, down = weights(Scheme(bits=8, group_size=32), True)
    up = QuantizedWeight(up.codes, up.scales * np.float32(1.0001), up.zero_points, up.scheme)
    check(ExpertGate("silu"), up, down, None)


@pytest.mark.parametrize("has_gate", [True, False])
def test_outputs_that_are_no_whole_pairs_of_tiles(has_gate: bool) -> None:
    """48 channels are three tiles: one more is padding."""
    up, down = weights(Scheme(bits=6, group_size=16), has_gate, hidden=48, inner=48)
    check(ExpertGate("silu"), up, down, random_biases(up, down))


@cache
def kept(bits: int, threads: int) -> ort.InferenceSession:
    """``bits`` 0: experts differ."""
    up, down = weights(Scheme(bits=bits, group_size=32, symmetric=bits != 4) if bits else mixed(), True)
    return opened(experts_model(ExpertGate("silu"), up, down, random_biases(up, down)), threads)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from((0, 4, 5, 6, 8)),
    tokens=st.integers(1, 40),
    chosen=st.integers(1, EXPERTS),
    threads=st.sampled_from((1, 2, 3)),
    popular=st.booleans(),
)
def test_a_token_is_the_same_to_the_bit_alone_in_any_batch_and_on_any_threads(
    seed: int, bits: int, tokens: int, chosen: int, threads: int, popular: bool
) -> None:
    """``popular``: all tokens share their experts, so that the kernel takes them together."""
    x, (index, share) = random(tokens, HIDDEN, seed=seed), choices(tokens, chosen, EXPERTS, seed)
    if popular:
        index = np.tile(index[:1], (tokens, 1))
    one = kept(bits, 1)
    alone = np.concatenate([run(one, x[t : t + 1], index[t : t + 1], share[t : t + 1]) for t in range(tokens)])
    assert (run(kept(bits, threads), x, index, share) == alone).all()
    draw = np.random.default_rng(seed)
    for part in np.array_split(draw.permutation(tokens), draw.integers(1, 5)):
        if len(part):
            assert (run(kept(bits, threads), x[part], index[part], share[part]) == alone[part]).all()


@pytest.mark.parametrize("scheme", [Scheme(bits=8, group_size=32), mixed()], ids=lambda scheme: scheme.name)
def test_a_step_reads_the_experts_that_its_tokens_choose(scheme: Scheme) -> None:
    """Two of six at one token; nearly all at many."""
    model = experts_model(ExpertGate("silu"), *weights(scheme, True))
    held = [v for v in model.graph.initializers.values() if v.uses()]
    every = sum(v.const_value.nbytes for v in held if v.const_value is not None)
    assert step_bytes(model) == every  # how many are chosen is not known
    model.graph.inputs[1].shape = ir.Shape(["tokens", 2])
    assert step_bytes(model) == round(every / 3)
    assert step_bytes(model, 4) == round(every * (1 - (2 / 3) ** 4)) and step_bytes(model, 64) == every


def test_more_tokens_than_are_computed_at_once_are_the_same_to_the_bit() -> None:
    x, (index, share) = random(700, HIDDEN), choices(700, 2, EXPERTS, 1)
    y = run(kept(8, 2), x, index, share)
    for begin, end in ((0, 300), (300, 520), (520, 700)):
        assert (run(kept(8, 2), x[begin:end], index[begin:end], share[begin:end]) == y[begin:end]).all()


def test_a_nan_of_a_token_stays_its_own() -> None:
    x, (index, share) = random(5, HIDDEN), choices(5, 2, EXPERTS, 1)
    x[3, 7] = np.nan
    y = run(kept(4, 1), x, index, share)
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()


@pytest.mark.parametrize("expert", [-1, EXPERTS, 2**40])
def test_an_index_of_no_expert_is_refused(expert: int) -> None:
    x, (index, share) = random(3, HIDDEN), choices(3, 2, EXPERTS, 1)
    index[1, 1] = expert
    with pytest.raises(Exception, match="BlockExperts: an index is of no expert"):
        run(kept(4, 1), x, index, share)
