"""Precision plans that are written out, for tests that need no costs and no sensitivities."""

from __future__ import annotations

from pathlib import Path

from quantization.plan import PrecisionPlan
from quantization.plan_search import write_plan
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe


def written_plan(recipe: BaseRecipe, graph: Artifact[PortableGraph], folder: Path) -> Artifact[PrecisionPlan]:
    return write_plan(recipe.plan, graph, folder)
