"""The cost table of a model: what its linears and its attention cost on this machine, as the plan solver needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.costs.attention import TimedAttention
from engines.costs.linears import LinearShape, TimedLinear, linear_bytes
from engines.costs.timing import OperatorTimer, Seconds, streamed_bytes
from engines.load import find_target, known_targets
from engines.target import Target
from pipeline.stages.target_candidates import target_candidates
from quantization.cost_table import (
    CostTable,
    Visits,
    counts_of,
    declared_costs,
    mean_of_layers,
    schemes_by_shape,
    workload_of,
)
from quantization.plan import PlanPart, PrecisionPlan, UnitPlan
from quantization.units import Candidates, caches
from tapeout.cores import physical_cores
from tapeout.errors import RecipeError
from tapeout.portable_graph import PortableGraph
from tapeout.progress import ProgressBar
from tapeout.quantized import stored_by_rtn
from tapeout.recipe import BaseRecipe, Plan

CHOSEN = {"schemes": "auto", "embeddings": "auto", "kv_cache": "auto"}  # all of a plan that can be chosen


def timed_target(recipe: BaseRecipe) -> Target[Any]:
    """The recipe's target. :class:`RecipeError` if it times no schemes, :class:`FingerprintError` if none here."""
    target = find_target(recipe.build.target)
    if not target.capabilities.timed:
        timed = [name for name in known_targets() if find_target(name).capabilities.timed]
        raise RecipeError(
            f"build.target: {target.name}, which times no schemes on this machine",
            expected=f"one of {', '.join(timed)}",
            remedy="write the rules of plan.schemes out, or choose such a target",
        )
    target.require_machine()
    return target


def cost_table(recipe: BaseRecipe, graph: PortableGraph, *, measure: bool, visits: Visits | None = None) -> CostTable:
    """Bytes and seconds of every linear under every scheme it may get; seconds of attention likewise.

    ``visits``: of experts, in calibration. Of a target that times nothing here, by what it declares. ``measure`` False:
    seconds as far as they were measured here before. :class:`RecipeError` if it is True and the target neither times
    nor declares anything.
    """
    capabilities = find_target(recipe.build.target).capabilities
    if capabilities.throughput is not None and not capabilities.timed:
        candidates = target_candidates(capabilities)
        return declared(find_target(recipe.build.target), recipe, graph, recipe.plan, candidates, visits)
    target = timed_target(recipe) if measure else find_target(recipe.build.target)
    threads = recipe.build.threads or physical_cores()
    tokens = sorted({1, *workload_of(recipe.plan)})  # prefill computes one position of lm_head
    sizes: dict[tuple[int, int], dict[str, int]] = {}
    seconds: dict[tuple[int, int], Seconds] = {}
    wanted = schemes_by_shape(graph, recipe.plan)
    # Times are kept for schemes that were timed together; a plan that is written out finds those of a chosen one.
    compared = recipe.plan if measure else recipe.plan.model_copy(update=CHOSEN)
    together, context = schemes_by_shape(graph, compared), min(recipe.plan.context, graph.max_positions)
    streamed = streamed_bytes(sum(group.weights for group in graph.groups))
    timer = OperatorTimer(target, streamed, threads, only_kept=not measure)
    dtypes = [cache.dtype for cache in caches(compared.kv_cache, graph)]
    # First, so that heads which the target has no attention for are refused before linears are timed.
    steps = sorted(workload_of(recipe.plan))
    by_heads = {
        heads: timer.costs(
            TimedAttention(graph.model_copy(update=heads._asdict()), dtypes, recipe.build.slots, context), steps
        )
        for heads in graph.cached_heads
    }
    attention = {
        dtype: mean_of_layers(graph, steps, lambda heads, dtype=dtype: by_heads[heads][dtype]) for dtype in dtypes
    }
    shapes = ProgressBar(wanted.items(), title="timing linears", unit="shape", hidden=not measure)
    for (columns, outputs), schemes in shapes:
        shape = LinearShape(columns, outputs)
        sizes[columns, outputs] = {s.name: linear_bytes(target, shape, s, stored_by_rtn) for s in schemes}
        linear = TimedLinear(shape, together[columns, outputs], stored_by_rtn)
        seconds[columns, outputs] = timer.costs(linear, counts_of(graph, (columns, outputs), tokens, visits or {}))
    return CostTable(
        *(target.name, threads, recipe.build.slots, context, sizes, seconds, attention), visits=visits or {}
    )


def declared(
    target: Target[Any],
    recipe: BaseRecipe,
    graph: PortableGraph,
    plan: Plan,
    candidates: Candidates,
    visits: Visits | None = None,
) -> CostTable:
    """See :func:`quantization.cost_table.declared_costs`; what is not quantized has 16 bits on such targets."""
    throughput, slots = target.capabilities.throughput, recipe.build.slots
    assert throughput is not None
    return declared_costs(
        graph,
        plan,
        candidates,
        throughput,
        target=target.name,
        slots=slots,
        float_bits=16,
        fp8_inputs=target.capabilities.fp8_activations,
        visits=visits,
    )


def timed(plan: PrecisionPlan, recipe: BaseRecipe, graph: PortableGraph, visits: Visits | None = None) -> PrecisionPlan:
    """A plan that was written out, with the times of its schemes as far as they were measured here before, and the
    bytes of its KV cache in the recipe's engine. Times that only follow from what the target declares say so.
    """
    if plan.search is not None:
        return plan
    table, workload = cost_table(recipe, graph, measure=False, visits=visits), workload_of(recipe.plan)
    groups = {group.name: group for group in graph.groups}

    def per_token(seconds: Mapping[int, float]) -> float | None:
        if not workload.keys() <= seconds.keys():
            return None
        return sum(share * seconds[tokens] / tokens for tokens, share in workload.items())

    def of(unit: UnitPlan) -> Mapping[int, float]:
        return table.linears_seconds([groups[name] for name in unit.groups], unit.scheme)

    def costing(part: PlanPart, seconds: Mapping[int, float]) -> dict[str, Any]:
        reason = part.reason if table.timed else f"{part.reason}; time by what {table.target} declares"
        return {"seconds": per_token(seconds), "reason": reason}

    tables, cache = plan.embeddings, plan.kv_cache
    kept = table.cache(graph, cache.settings)
    return plan.model_copy(
        update={
            "units": tuple(unit.model_copy(update=costing(unit, of(unit))) for unit in plan.units),
            "embeddings": tables.model_copy(update=costing(tables, table.embeddings_seconds(graph, tables.scheme))),
            "kv_cache": cache.model_copy(update=costing(cache, kept.seconds) | {"bytes": kept.bytes}),
        }
    )
