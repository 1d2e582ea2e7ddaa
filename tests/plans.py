"""Kernel plans that are written out, for tests that need no costs and no sensitivities."""

from __future__ import annotations

from pathlib import Path

from pipeline import artifact
from pipeline.artifact import Artifact
from pipeline.graph import PortableGraph
from pipeline.recipe import Recipe
from quantization.kernel_plan import KernelPlan, UnitPlan
from quantization.plan import resolve


def written_plan(recipe: Recipe, graph: Artifact[PortableGraph], folder: Path) -> Artifact[KernelPlan]:
    """What the plan stage makes of rules, but with a unit a group and no bytes."""
    assert recipe.plan.kernels != "auto"
    units = [
        UnitPlan(name=name, groups=(name,), kernel=kernel, bytes=0, reason="written in the recipe")
        for name, kernel in resolve(graph.record, recipe.plan.kernels).items()
    ]
    with artifact.create(folder, KernelPlan) as draft:
        record = KernelPlan(
            units=tuple(units),
            embeddings=recipe.plan.embeddings,
            embeddings_bytes=0,
            kv_cache=recipe.plan.kv_cache,
            search=None,
        )
        draft.finish(record, parents={"graph": graph.digest})
    return artifact.load(folder, KernelPlan)
