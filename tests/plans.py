"""Kernel plans that are written out, for tests that need no costs and no sensitivities."""

from __future__ import annotations

from pathlib import Path

from pipeline.artifact import Artifact
from pipeline.graph import PortableGraph
from pipeline.recipe import Recipe
from quantization.kernel_plan import KernelPlan
from quantization.planning import write_plan


def written_plan(recipe: Recipe, graph: Artifact[PortableGraph], folder: Path) -> Artifact[KernelPlan]:
    return write_plan(recipe.plan, graph, folder)
