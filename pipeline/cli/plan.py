"""``tapeout plan``: the kernel of every unit, with what it costs and why it was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipeline.stages.cost_table import timed
from quantization.calibration import Calibration
from quantization.cost_table import visits_of
from quantization.plan import COLUMNS, PrecisionPlan, summary, table
from quantization.recurrent_state import kept_in
from tapeout import artifact
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe


def run(artifacts: Path, recipe: BaseRecipe) -> tuple[dict[str, Any], RenderableType]:
    """The plan that was made, for a script and for people. One that the recipe wrote gets the times of its kernels, as
    far as they were measured on this machine before.
    """
    made = artifact.load(artifacts / "plan", PrecisionPlan)
    graph = artifact.load(artifacts / "graph", PortableGraph)
    calibration = artifacts / "calibration"
    visits = visits_of(artifact.load(calibration, Calibration).record) if calibration.is_dir() else None
    plan = timed(made.record, recipe, kept_in(graph, made.record.recurrent_state.dtype), visits)
    return {"digest": made.digest} | plan.model_dump(mode="json"), shown(plan)


def shown(plan: PrecisionPlan) -> RenderableType:
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(COLUMNS):
        found.add_column(column, justify="right" if 2 <= number <= 4 else "left", overflow="fold")
    for row in table(plan):
        found.add_row(*map(escape, row))
    return Group(Text(summary(plan)), found)
