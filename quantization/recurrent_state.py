"""How a plan keeps the state of a model's recurrences: as written, or as measured; and what of its state that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from quantization.needs import simulation_needs
from quantization.plan import AS_WRITTEN, RECURRENT_STATE, StatePlan
from quantization.units import Candidates, planned_units
from tapeout.artifact import Artifact
from tapeout.operators import graph_state
from tapeout.portable_graph import PortableGraph
from tapeout.portable_model import load_graph
from tapeout.recipe import Plan
from tapeout.resources import require

STATE_TOKENS = 1024  # of the text that states in bfloat16 are measured on, as far as there are so many
STATE_SHARE = 0.1  # of the plan's budget of KL; what it costs is then taken from the budget
STATE_KL = 0.001  # half of what the gate allows any one document (gate.max_parity_state_kl)
NO_RECURRENCE = "convolutions alone, or nothing: what they keep stays in float32"


def kept_in(graph: Artifact[PortableGraph], dtype: str) -> PortableGraph:
    """Its record, with the state of recurrences in ``dtype``: budgets count what an engine will hold."""
    if dtype == "float32":
        return graph.record
    state = graph_state(load_graph(graph.folder / "model.onnx").graph, "float32", dtype)
    return graph.record.model_copy(update={"state": state})


def rounds_states(graph: Artifact[PortableGraph]) -> bool:
    """Whether the model has recurrences; what convolutions keep is always in float32."""
    return kept_in(graph, "bfloat16").state != graph.record.state


def written_state(wanted: Plan, graph: Artifact[PortableGraph]) -> StatePlan:
    """As the recipe says; float32 where nothing can be kept otherwise."""
    if wanted.recurrent_state != "bfloat16" or rounds_states(graph):
        assert wanted.recurrent_state != "auto"
        return StatePlan(name=RECURRENT_STATE, dtype=wanted.recurrent_state, reason=AS_WRITTEN)
    return StatePlan(name=RECURRENT_STATE, dtype="float32", reason=NO_RECURRENCE)


def choose_state(
    wanted: Plan,
    graph: Artifact[PortableGraph],
    candidates: Candidates,
    heldout: Sequence[Sequence[int]],
    progress: Callable[[str], None],
) -> StatePlan:
    """As written, or bfloat16 where the target has it and it costs little over one long text of held-out samples."""
    if wanted.recurrent_state != "auto":
        return written_state(wanted, graph)
    if not rounds_states(graph):
        return StatePlan(name=RECURRENT_STATE, dtype="float32", reason=NO_RECURRENCE)
    if "bfloat16" not in candidates.states:
        return StatePlan(name=RECURRENT_STATE, dtype="float32", reason="the target has no other")
    from quantization.simulate import POSITIONS, Simulation

    text = [token for sample in heldout for token in sample][: min(graph.record.max_positions, STATE_TOKENS)]
    progress(f"states of recurrences in bfloat16 are measured over {len(text)} tokens")
    units = [*planned_units(wanted, graph.record)]
    needs = simulation_needs(graph.record, units, len(text), POSITIONS, plans=False)
    require("measuring states in bfloat16", needs, graph.folder)
    kl = Simulation(graph, [text], ()).state_kl()
    most = min(STATE_KL, STATE_SHARE * wanted.max_kl)
    reason = f"bfloat16 costs a KL of {kl:.5f} over {len(text)} tokens; up to {most:g} it is taken"
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if kl <= most else "float32"
    return StatePlan(name=RECURRENT_STATE, dtype=dtype, kl=kl if dtype == "bfloat16" else 0.0, reason=reason)
