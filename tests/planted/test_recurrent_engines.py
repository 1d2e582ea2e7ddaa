"""Defects of recurrent state in engines of real graphs: with the gated delta rule, and with Mamba2's scan.

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
from evals.check import Outcome
from evals.kind import Report
from evals.kinds.parity import KIND, ParityBounds, ParityReport, TableError
from evals.kinds.parity.measure import compare
from evals.kinds.serving import ServingBounds, ServingSettings, served_checks
from evals.kinds.serving.measure import served_items
from quantization.reference import QuantizedReference
from tapeout.artifact import ArtifactRef
from tapeout.operators.gated_delta import is_gated_delta
from tapeout.operators.selective_scan import is_selective_scan
from tests.exported import build_float, family_graph
from tests.fake_engine import MACHINE
from tests.family_engines import Made, make, words

FAMILIES = ("qwen3_5", "bamba")
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
    reference = QuantizedReference(made.quantized.folder, int8_activations=True)
    items = compare(probe(made.bundle, folder, threads=1), reference, words(made.name, 4, tokens, 2), head=head)
    table = TableError(rows=1, error=0.0, worst=0)
    record = ParityReport(
        candidate="a",
        built_from="b",
        documents=len(items),
        vocabulary=1,
        max_tokens=tokens,
        states=tuple(items[0].state_errors),
        embedding=table,
        head=table,
        executed_on=MACHINE,
    )
    report = Report(ArtifactRef("ParityReport", "0" * 64), record, tuple(items))
    found = KIND.judge(report, None, ParityBounds(min_documents=4))  # type: ignore[arg-type]
    return {check.name for check in found.checks if check.outcome is Outcome.FAIL}


def test_a_decay_of_the_wrong_sign(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = recurrences.run

    def planted(lowering: Lowering) -> PassResult:
        graph = lowering.model.graph
        for node in [n for n in graph if is_gated_delta(n) or is_selective_scan(n)]:
            decay = node.inputs[3]
            assert decay is not None
            negated = ir.node("Neg", [decay], outputs=[new_value(f"{decay.name}.negated", decay)])
            graph.insert_before(node, negated)
            node.replace_input_with(3, negated.outputs[0])
        return sound(lowering)

    monkeypatch.setattr(recurrences, "run", planted)
    assert "parity_state_error" in parity_failed(
        make(family, tmp_path), tmp_path, tokens=4
    )  # a state that grows so overflows soon


def test_states_of_fewer_bits_than_promised(family: str, tmp_path: Path) -> None:
    made = make(family, tmp_path)
    assert parity_failed(made, tmp_path, HalfStates) == {"parity_state_error"}
    assert parity_failed(made, tmp_path) == set()
