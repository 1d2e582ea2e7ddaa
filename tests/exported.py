"""Portable graphs that many tests read, exported once per machine, and float engines of them.

They are exported again when code that the export can reach, a library, or the model changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from engines.bundle import EngineBundle
from engines.compile import build
from engines.load import find_target
from pipeline.stages.code import module_hashes
from pipeline.stages.environment import libraries
from quantization.compressed_tensors import open_checkpoint
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tests import families
from tests.kept import kept
from tests.tiny import tiny_checkpoint


@cache
def tiny_graph() -> Artifact[PortableGraph]:
    """Of the tiny llama, at 512 positions; do not write to it."""
    from pipeline.export.export import export

    checkpoint = tiny_checkpoint()

    def write(folder: Path) -> None:
        export(checkpoint, "", folder / "graph", max_positions=512, tolerance=1e-3, seed=0, parents={})

    return _graph(kept("tiny-graph", f"{checkpoint} {_code()}", write))


@cache
def family_graph(name: str, *dtypes: str, **settings: int) -> Artifact[PortableGraph]:
    """Of a family in tests/families.py, with its checkpoint beside it; do not write to either.

    ``dtypes``: types of torch that its weights are converted to in turn. ``settings``: of its configuration.
    """
    import torch

    def write(folder: Path) -> None:
        model = families.random_model(name, **settings)
        for dtype in dtypes:
            model = model.to(getattr(torch, dtype))
        positions = settings.get("max_position_embeddings", families.MAX_POSITIONS)
        families.export_model(model, folder, max_positions=positions)

    made_by = Path(families.__file__).read_text()
    return _graph(kept(f"family-{name}", f"{dtypes} {settings} {made_by} {_code()}", write))


def traced_once(patch: pytest.MonkeyPatch) -> None:
    """Within ``patch`` exports of one configuration share one trace: for tests of what comes after it.

    A graph depends on parameters by their names, types and shapes alone.
    """
    from pipeline.export.trace import trace

    def traced(model: Any, progress: Callable[[str], None]) -> ir.Model:
        config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
        parameters = [(name, value.dtype, value.shape) for name, value in model.named_parameters()]
        key = repr((type(model), config, parameters))
        if key not in _traces:
            _traces[key] = trace(model, progress)
        return _traces[key].clone()

    patch.setattr("pipeline.export.export.trace", traced)


_traces: dict[str, ir.Model] = {}


def build_float(
    graph: Artifact[PortableGraph],
    folder: Path,
    slots: int,
    checkpoint: Path | None = None,
    *,
    recurrent_state: str = "float32",
) -> Artifact[EngineBundle]:
    """``checkpoint``: other weights than the graph's own. ``recurrent_state``: how recurrences keep theirs."""
    return build(
        graph,
        open_checkpoint(checkpoint or graph.folder),
        folder,
        target=find_target("ort-cpu"),
        precision="float32",
        slots=slots,
        kv_scales={},
        recurrent_dtype=recurrent_state,
        parents={"graph": graph},
    )


@cache
def _code() -> str:
    return f"{module_hashes('pipeline.export.export', 'ort-cpu')} {libraries('ort-cpu')}"


def _graph(folder: Path) -> Artifact[PortableGraph]:
    return artifact.load(folder / "graph", PortableGraph)
