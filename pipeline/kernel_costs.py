"""What the products of a model cost on this machine, as the planner wants to know it."""

from __future__ import annotations

from collections.abc import Callable

from engines import costs
from engines.costs import Shape
from engines.threads import physical_cores
from pipeline.errors import RecipeError
from pipeline.graph import PortableGraph
from pipeline.recipe import Recipe
from quantization.plan import menu_for, stored_plainly
from quantization.planning import CostTable, products_of, workload_of

TIMED_TARGET = "ort-cpu"


def cost_table(
    recipe: Recipe, graph: PortableGraph, *, measure: bool, progress: Callable[[str], None] = lambda _: None
) -> CostTable:
    """Bytes of every product, and its seconds under every kernel of the menu.

    ``measure`` False: seconds as far as they were measured here before. :class:`RecipeError` for a target whose
    products are not timed on this machine.
    """
    if measure and recipe.build.target != TIMED_TARGET:
        raise RecipeError(
            f"plan.kernels: auto for {recipe.build.target}",
            expected=f"{TIMED_TARGET}, whose products are timed on this machine",
            remedy="write the rules of plan.kernels out",
        )
    threads = recipe.build.threads or physical_cores()
    rows = sorted({1, *workload_of(recipe.plan)})  # prefill computes one row of the head
    table = CostTable(recipe.build.target, threads, recipe.build.slots, {}, {})
    wanted = products_of(graph, recipe.plan)
    for number, ((columns, outputs), kernels) in enumerate(wanted.items(), 1):
        shape = Shape(columns, outputs)
        if measure:
            progress(f"costs of {columns} x {outputs} at {', '.join(map(str, rows))} rows ({number} of {len(wanted)})")
        table.bytes[columns, outputs] = {k.name: costs.product_bytes(shape, k, stored_plainly) for k in kernels}
        compared = kernels if measure else menu_for(columns)
        table.seconds[columns, outputs] = costs.costs(
            shape, compared, rows, stored_plainly, threads=threads, only_kept=not measure
        )
    return table
