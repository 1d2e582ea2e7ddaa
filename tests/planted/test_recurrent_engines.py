"""Defects of recurrent state in engines of real graphs: with gated delta rules, and with Mamba2's scan.

Each is planted where it would be made: in the lowered graph, in what an engine keeps after a step, or in the model that
is lowered. The gate's own checks must fail.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

from engines.bundle import SLOTS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, new_value
from engines.passes.onnxruntime import recurrences
from engines.probe import OrtProbe
from engines.protocol import Entry, FloatArray, Result
from engines.sequences import Sequences
from engines.step_inputs import StepPiece
from engines.targets.ort_cpu.paged_engine import PagedEngine
from evals.check import Check, Outcome
from evals.kind import Report
from evals.kinds.parity import KIND, ParityBounds, ParityItem, ParityReport, TableError
from evals.kinds.parity.measure import compare, half_states
from evals.kinds.serving import ServingBounds, ServingSettings, served_checks
from evals.kinds.serving.measure import served_items
from quantization.reference import QuantizedReference
from tapeout.artifact import ArtifactRef
from tapeout.errors import BuildError
from tapeout.operators.gated_delta import is_gated_delta
from tapeout.operators.selective_scan import is_selective_scan
from tests.exported import build_float, family_graph
from tests.fake_engine import MACHINE
from tests.family_engines import Made, make, reference_of, words

FAMILIES = ("qwen3_5", "bamba")
BY_CHANNEL = "kimi_linear"  # each key channel has its own decay
SEQUENCES = 4
SETTINGS = ServingSettings(steps=2, answers=4, new_tokens=4, max_running=4)
EditGraph = Callable[[ir.Model], None]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def failed(family: str, folder: Path, engine: type[PagedEngine] = PagedEngine) -> set[str]:
    """The checks of serving that fail."""
    graph = family_graph(family)
    bundle = build_float(graph, folder / "bundle", SEQUENCES, sharpened(graph.folder, folder / "checkpoint"))
    text = words(family, 1, 3000, 5)[0]
    opened = [Sequences(engine(bundle, threads=1, sequences=count)) for count in (SEQUENCES, SEQUENCES + 1)]
    items = served_items(SETTINGS, None, opened[0], lambda: opened[1], text)
    return {check.name for check in served_checks(items, ServingBounds()) if check.outcome is not Outcome.PASS}


def sharpened(checkpoint: Path, folder: Path) -> Path:
    """The same weights, but that states last and matter and logits differ, as those of a trained model do."""
    shutil.copytree(checkpoint, folder)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    weights["lm_head.weight"] *= 12
    for name in weights:
        if name.endswith("A_log"):
            weights[name] -= 4
        elif name.endswith("dt_bias"):
            weights[name][:] = 1
    save_file(weights, path)
    return folder


def recurrences_of(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if n.domain == DOMAIN and n.op_type.startswith(("GatedDelta", "SelectiveScan"))]


def exchange(model: ir.Model, name: str, made: Callable[[ir.Value], list[ir.Node]]) -> None:
    """Give recurrences the last of the nodes that are ``made`` of an input of the graph, in its place."""
    value = next(value for value in model.graph.inputs if value.name == name)
    found = recurrences_of(model)
    assert found
    nodes = made(value)
    for node in nodes:
        model.graph.insert_before(next(iter(model.graph)), node)
    model.graph.sort()
    for node in found:
        for number, given in enumerate(node.inputs):
            if given is value:
                node.replace_input_with(number, nodes[-1].outputs[0])


def constant(model: ir.Model, name: str, values: Sequence[int], dtype: type[np.generic] = np.int64) -> ir.Value:
    tensor = ir.tensor(np.array(values, dtype), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def never_a_beginning(model: ir.Model) -> None:
    """Recurrences zero the state of a sequence that begins; to these none does."""

    def made(starts: ir.Value) -> list[ir.Node]:
        one = constant(model, "planted.one", [1], np.int32)
        return [ir.node("Max", [starts, one], outputs=[new_value("planted.starts", starts)])]

    exchange(model, STARTS, made)


def slots_of_neighbours(model: ir.Model) -> None:
    """Sequences of a step are given the slots of each other."""

    def made(slots: ir.Value) -> list[ir.Node]:
        zero, one, last = (constant(model, f"planted.{n}", [n]) for n in (0, 1, 1 << 40))
        first = ir.node("Slice", [slots, zero, one, zero], outputs=[new_value("planted.first", slots)])
        rest = ir.node("Slice", [slots, one, last, zero], outputs=[new_value("planted.rest", slots)])
        both = [rest.outputs[0], first.outputs[0]]
        return [first, rest, ir.node("Concat", both, {"axis": 0}, outputs=[new_value("planted.slots", slots)])]

    exchange(model, SLOTS, made)


@pytest.mark.parametrize("edit", [never_a_beginning, slots_of_neighbours])
def test_state_that_is_not_reset_or_is_a_neighbours(
    family: str, edit: EditGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engines.passes.onnxruntime import norms

    sound = norms.run

    def planted(lowering: Lowering) -> PassResult:
        edit(lowering.model)  # once recurrences are lowered
        return sound(lowering)

    monkeypatch.setattr(norms, "run", planted)
    assert "serving_kl" in failed(family, tmp_path)


class ShiftedConvolutions(PagedEngine):
    """What convolutions keep is one token off."""

    def _keep(self, run: Sequence[StepPiece]) -> None:
        for name, state in self._state.items():
            if name.endswith("conv"):
                slots = [piece.slot for piece in run]
                state[slots] = np.roll(state[slots], 1, axis=1)
        super()._keep(run)


class EarlySnapshots(PagedEngine):
    """A snapshot is taken before the last of its tokens."""

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        early = [
            entry._replace(snapshots=[(max(place - 1, entry.start + 1), slot) for place, slot in entry.snapshots])
            for entry in batch
        ]
        results = super().step(early)
        for place, slot in (snapshot for entry in batch for snapshot in entry.snapshots):
            self._slots.hold(slot, place)
        return results


class KeptDrafts(PagedEngine):
    """A guess is fed beside each decoded token and rejected, but stays in the state."""

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        drafted = [
            entry._replace(tokens=[*entry.tokens, 7], positions=(0,))
            if entry.start and len(entry.tokens) == 1 and entry.start + 2 <= self.capabilities.max_tokens
            else entry
            for entry in batch
        ]
        blocks = self.capabilities.block_tokens
        whole = all(-(-(one.start + 2) // blocks) <= len(one.blocks) for one in drafted)
        results = super().step(drafted if whole else batch)
        for entry in batch:
            self._slots.hold(entry.slot, entry.start + len(entry.tokens))
        return results


@pytest.mark.parametrize("engine", [ShiftedConvolutions, EarlySnapshots, KeptDrafts])
def test_state_that_is_of_other_tokens(family: str, engine: type[PagedEngine], tmp_path: Path) -> None:
    assert "serving_kl" in failed(family, tmp_path, engine)


def test_sound_engines(family: str, tmp_path: Path) -> None:
    assert failed(family, tmp_path) == set()


class HalfStates(OrtProbe):
    """States are kept in bfloat16."""

    def states(self) -> dict[str, FloatArray]:
        def rounded(state: FloatArray) -> FloatArray:
            bits = np.ascontiguousarray(state).view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)

        return {name: rounded(state) for name, state in super().states().items()}


def parity_failed(made: Made, folder: Path, probe: type[OrtProbe] = OrtProbe, tokens: int = 60) -> set[str]:
    """The checks of parity that fail, on documents of so many tokens."""
    head = next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head")
    items = compare(
        probe(made.bundle, folder, threads=1), reference_of(made), words(made.name, 4, tokens, 2), head=head
    )
    return {check.name for check in judged(made, items, tokens) if check.outcome is Outcome.FAIL}


def judged(made: Made, items: Sequence[ParityItem], tokens: int) -> Sequence[Check]:
    report = report_of(made, items, tokens)
    return KIND.judge(report, None, ParityBounds(min_documents=4)).checks  # type: ignore[arg-type]


def report_of(made: Made, items: Sequence[ParityItem], tokens: int) -> Report[ParityReport, ParityItem]:
    table = TableError(rows=1, error=0.0, worst=0)
    record = ParityReport(
        candidate="a",
        built_from="b",
        documents=len(items),
        vocabulary=1,
        max_tokens=tokens,
        states=tuple(items[0].state_errors),
        half_states=half_states(made.bundle.record.io.state),
        embedding=table,
        head=table,
        executed_on=MACHINE,
    )
    return Report(ArtifactRef("ParityReport", "0" * 64), record, tuple(items))


EditDecay = Callable[[ir.Model, ir.Value], list[ir.Node]]


def negated(_: ir.Model, decay: ir.Value) -> list[ir.Node]:
    return [ir.node("Neg", [decay], outputs=[new_value(f"{decay.name}.negated", decay)])]


def of_neighbouring_channels(model: ir.Model, decay: ir.Value) -> list[ir.Node]:
    """Of ``[B, S, H, K]``."""
    zero, one, last, axis = (constant(model, f"planted.{n}", [n]) for n in (0, 1, 1 << 40, 3))
    first = ir.node("Slice", [decay, zero, one, axis])
    rest = ir.node("Slice", [decay, one, last, axis])
    joined = [rest.outputs[0], first.outputs[0]]
    return [first, rest, ir.node("Concat", joined, {"axis": 3}, outputs=[new_value("planted.decay", decay)])]


def of_a_head(model: ir.Model, decay: ir.Value) -> list[ir.Node]:
    """The mean of all channels of a head, for each of them."""
    mean = ir.node("ReduceMean", [decay, constant(model, "planted.axis", [3])], {"keepdims": 1})
    shape = ir.node("Shape", [decay])
    inputs = [mean.outputs[0], shape.outputs[0]]
    return [mean, shape, ir.node("Expand", inputs, outputs=[new_value("planted.decay", decay)])]


def with_other_decays(made: EditDecay, patch: pytest.MonkeyPatch) -> None:
    sound = recurrences.run

    def planted(lowering: Lowering) -> PassResult:
        graph = lowering.model.graph
        for node in [n for n in graph if is_gated_delta(n) or is_selective_scan(n)]:
            decay = node.inputs[3]
            assert decay is not None
            nodes = made(lowering.model, decay)
            graph.insert_before(node, nodes)
            node.replace_input_with(3, nodes[-1].outputs[0])
        return sound(lowering)

    patch.setattr(recurrences, "run", planted)


def test_a_decay_of_the_wrong_sign(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_other_decays(negated, monkeypatch)
    assert "parity_state_error" in parity_failed(
        make(family, tmp_path), tmp_path, tokens=4
    )  # a state that grows so overflows soon


@pytest.mark.parametrize("made", [of_neighbouring_channels, of_a_head])
def test_a_decay_of_another_channel(made: EditDecay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_other_decays(made, monkeypatch)
    assert "parity_state_error" in parity_failed(make(BY_CHANNEL, tmp_path), tmp_path)


def test_a_sound_engine_with_decays_by_channel(tmp_path: Path) -> None:
    made = make(BY_CHANNEL, tmp_path / "made")
    assert parity_failed(made, tmp_path) == set() and failed(BY_CHANNEL, tmp_path) == set()
    assert parity_failed(made, tmp_path, HalfStates) == {"parity_state_error"}


def test_states_of_fewer_bits_than_promised(family: str, tmp_path: Path) -> None:
    made = make(family, tmp_path)
    assert parity_failed(made, tmp_path, HalfStates) == {"parity_state_error"}
    assert parity_failed(made, tmp_path) == set()


@pytest.mark.parametrize(
    ("asked", "made", "found"), [("float32", "bfloat16", "BFLOAT16"), ("bfloat16", "float32", "FLOAT")]
)
def test_an_engine_with_states_of_another_type_than_asked_for_is_not_built(
    family: str, asked: str, made: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sound = recurrences.run

    def planted(lowering: Lowering) -> PassResult:
        lowering.recurrent_dtype = made
        return sound(lowering)

    monkeypatch.setattr(recurrences, "run", planted)
    with pytest.raises(BuildError, match=rf"is {found} after the passes[\s\S]*for state in {asked}"):
        build_float(family_graph(family), tmp_path / "bundle", SEQUENCES, recurrent_state=asked)


class OtherColumns(OrtProbe):
    """States are those of neighbouring channels."""

    def states(self) -> dict[str, FloatArray]:
        return {
            name: state if name.endswith("conv") else np.roll(state, 1, -1) for name, state in super().states().items()
        }


@pytest.fixture(scope="module")
def half(family: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """States in bfloat16, as the plan says."""
    return make(family, tmp_path_factory.mktemp(family), recurrent_state="bfloat16")


def test_states_in_bfloat16_have_bounds_of_their_own(half: Made, tmp_path: Path) -> None:
    assert parity_failed(half, tmp_path) == set()
    assert parity_failed(half, tmp_path, OtherColumns) == {"parity_half_state_error"}


def test_states_in_bfloat16_that_cost_too_much(half: Made, tmp_path: Path) -> None:
    """A sound engine: what its states cost is in every item, and a report without it is refused."""
    head = next(group.members[0] for group in half.graph.record.groups if group.name == "lm_head")
    probe = OrtProbe(half.bundle, tmp_path, threads=1)
    items = compare(probe, reference_of(half), words(half.name, 4, 60, 2), head=head)
    assert all(item.state_kl_sum is not None and 0 < item.state_kl_sum < 1e-3 * item.tokens for item in items)
    costly = [item.model_copy(update={"state_kl_sum": 0.003 * item.tokens}) for item in items[:1]] + items[1:]
    assert {c.name for c in judged(half, costly, 60) if c.outcome is Outcome.FAIL} == {"parity_state_kl"}


def test_convolutions_alone_are_judged_as_in_float32_where_bfloat16_is_asked_for(tmp_path: Path) -> None:
    """What they keep is never rounded: the gate asks for no evidence of it, and holds states to the bound of floats."""
    made = make("lfm2", tmp_path, recurrent_state="bfloat16")
    assert made.quantized.record.recurrent_state == "float32" and half_states(made.bundle.record.io.state) == ()
    head = next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head")
    probe, reference = OrtProbe(made.bundle, tmp_path, threads=1), reference_of(made)
    report = report_of(made, compare(probe, reference, words("lfm2", 4, 60, 2), head=head), 60)
    assert report.record.states and not any("bfloat16" in problem for problem in KIND.problems(report, None))  # type: ignore[arg-type]
    checks = KIND.judge(report, None, ParityBounds(min_documents=4)).checks  # type: ignore[arg-type]
    assert "parity_state_error" in {check.name for check in checks}
    assert {check.name for check in checks if check.outcome is Outcome.FAIL} == set()


def test_evidence_of_states_in_float32_says_nothing_of_an_engine_with_bfloat16(half: Made, tmp_path: Path) -> None:
    """Planted: the reference keeps states in float32, as if the quantized model said so."""
    head = next(group.members[0] for group in half.graph.record.groups if group.name == "lm_head")
    reference = QuantizedReference(half.quantized.folder, int8_activations=True)
    items = compare(OrtProbe(half.bundle, tmp_path, threads=1), reference, words(half.name, 4, 60, 2), head=head)
    report = report_of(half, items, 60)
    assert "does not measure on every document what states in bfloat16 cost" in " ".join(KIND.problems(report, None))  # type: ignore[arg-type]


def test_evidence_of_states_in_bfloat16_says_nothing_of_an_engine_with_float32(family: str, tmp_path: Path) -> None:
    """Planted: the quantized model says bfloat16, and the engine that was built of it keeps twice as much."""
    made = make(family, tmp_path)
    head = next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head")
    reference = QuantizedReference(made.quantized.folder, int8_activations=True, recurrent_state="bfloat16")
    items = compare(OrtProbe(made.bundle, tmp_path, threads=1), reference, words(made.name, 4, 60, 2), head=head)
    problems = KIND.problems(report_of(made, items, 60), None)  # type: ignore[arg-type]
    assert "ParityReport measures what states in bfloat16 cost, of an engine that has none" in problems
