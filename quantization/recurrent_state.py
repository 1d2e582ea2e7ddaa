"""How the state of a model's recurrences is kept, and what of its state that concerns."""

from __future__ import annotations

from tapeout.artifact import Artifact
from tapeout.operators import graph_state
from tapeout.portable_graph import PortableGraph
from tapeout.portable_model import load_graph


def kept_in(graph: Artifact[PortableGraph], dtype: str) -> PortableGraph:
    """Its record, with the state of recurrences in ``dtype``: budgets count what an engine will hold."""
    if dtype == "float32":
        return graph.record
    state = graph_state(load_graph(graph.folder / "model.onnx").graph, "float32", dtype)
    return graph.record.model_copy(update={"state": state})


def rounds_states(graph: Artifact[PortableGraph]) -> bool:
    """Whether the model has recurrences; what convolutions keep is always in float32."""
    return kept_in(graph, "bfloat16").state != graph.record.state
