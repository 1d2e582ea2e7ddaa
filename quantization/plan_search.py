"""Make the PrecisionPlan: the rules as they are written, or the best schemes for a workload within a budget of quality.

Units are chosen by the sum of their KLs. What all choices cost together is then measured, on calibration samples
that no sensitivity was measured on; the budget of the sum is corrected by what was found, and the choice made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantization import frontier
from quantization.calibration import Calibration, sample_hash
from quantization.cost_table import Cost, CostTable, shape_of, workload_of
from quantization.expert_bits import mixtures
from quantization.frontier import FrontierPoint
from quantization.plan import (
    AS_WRITTEN,
    EMBEDDINGS,
    FRONTIER_FILE,
    KV_CACHE,
    PLAN_FILE,
    CachePlan,
    PrecisionPlan,
    Search,
    StatePlan,
    UnitPlan,
    decisive,
    text,
)
from quantization.plan_solver import Chosen, Goal, Option, PlanBudget, PlanChoice, Workload, settle
from quantization.plan_solver import frontier as best_plans
from quantization.recurrent_state import choose_state, kept_in, written_state
from quantization.sensitivity import Sensitivity, UnitSensitivity
from quantization.statistics import held_out
from quantization.units import (
    ALL_CANDIDATES,
    EMBEDDING,
    HEAD,
    Candidates,
    UnitCandidates,
    resolve,
    written_units,
)
from quantization.whole_plan import WholePlan
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.recipe import Plan, Quantize
from tapeout.schemes import Scheme
from tapeout.state import Recurrent

EMBEDDING_GROUPS = (EMBEDDING, HEAD)
CHECK_SAMPLES = 2  # times plan.samples, as far as there are so many: one KL of a whole plan decides


def make_plan(
    wanted: Plan,
    settings: Quantize,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    sensitivity: Artifact[Sensitivity],
    costs: CostTable,
    samples: Sequence[Sequence[int]],
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
    candidates: Candidates = ALL_CANDIDATES,
) -> Artifact[PrecisionPlan]:
    """Write the PrecisionPlan to ``folder``. ``samples``: token ids of all that was calibrated on.

    ``candidates``: what sensitivities and costs were taken of.

    :class:`QuantizationError` for sensitivities of another graph or calibration, for budgets no plan keeps to, and for
    a type of recurrent state where the model has none: the gate would wait for evidence of it.
    """
    if wanted.recurrent_state == "bfloat16" and not any(isinstance(one, Recurrent) for one in graph.record.state):
        raise QuantizationError(
            f"plan.recurrent_state is {wanted.recurrent_state}, but the model has no recurrent state",
            expected="a model with recurrences (docs/models.md), or float32",
            remedy="leave plan.recurrent_state out",
        )
    parents = {"graph": graph.ref, "calibration": calibration.ref}
    if sensitivity.parents != parents:
        raise QuantizationError(
            f"{sensitivity.folder} was measured on another graph or calibration",
            expected=f"graph {graph.digest[:12]} and calibration {calibration.digest[:12]}",
            remedy="run `dvc repro sensitivity`",
        )
    with artifact.create(folder, PrecisionPlan) as draft:
        if wanted.schemes == "auto":
            heldout = held_out(calibration, samples)
            offered = UnitCandidates.of(wanted, graph.record, candidates)
            state = choose_state(wanted, graph, candidates, heldout, progress)
            record, points = _chosen(
                wanted, settings, graph, calibration, sensitivity.record, costs, offered, state, heldout, progress
            )
            (draft.folder / FRONTIER_FILE).write_text(frontier.table(points))
        else:
            record = _written(wanted, graph, costs)
        (draft.folder / PLAN_FILE).write_text(text(record))
        draft.finish(record, parents=parents | {"sensitivity": sensitivity.ref})
    return artifact.load(folder, PrecisionPlan)


def write_plan(wanted: Plan, graph: Artifact[PortableGraph], folder: Path) -> Artifact[PrecisionPlan]:
    """A plan of rules alone, for a build that asks for its own: a unit per group, nothing measured.

    :class:`QuantizationError` for a linear that no rule matches.
    """
    assert wanted.schemes != "auto"
    units = (_unit(name, (name,), scheme) for name, scheme in resolve(graph.record, wanted.schemes).items())
    with artifact.create(folder, PrecisionPlan) as draft:
        draft.finish(_as_written(wanted, graph, units), parents={"graph": graph})
    return artifact.load(folder, PrecisionPlan)


def _written(wanted: Plan, graph: Artifact[PortableGraph], costs: CostTable) -> PrecisionPlan:
    assert wanted.schemes != "auto" and wanted.embeddings != "auto"
    schemes, units = resolve(graph.record, wanted.schemes), list[UnitPlan]()
    for unit in written_units(graph.record, schemes):
        groups, scheme = tuple(group.name for group in unit.groups), schemes[unit.groups[0].name]
        units.append(_unit(unit.name, groups, scheme, costs.linears(unit.groups, scheme).bytes))
    return _as_written(wanted, graph, units, costs.embeddings(graph.record, wanted.embeddings).bytes)


def _as_written(
    wanted: Plan, graph: Artifact[PortableGraph], units: Iterable[UnitPlan], embedding_bytes: int | None = None
) -> PrecisionPlan:
    """``embedding_bytes``: of embedding and lm_head."""
    assert wanted.embeddings != "auto" and wanted.kv_cache != "auto"
    return PrecisionPlan(
        asked=decisive(wanted),
        units=tuple(units),
        embeddings=_unit(EMBEDDINGS, EMBEDDING_GROUPS, wanted.embeddings, embedding_bytes),
        kv_cache=CachePlan(name=KV_CACHE, settings=wanted.kv_cache, reason=AS_WRITTEN),
        recurrent_state=written_state(wanted, graph),
        search=None,
    )


def _unit(name: str, groups: tuple[str, ...], scheme: Scheme, size: int | None = None) -> UnitPlan:
    return UnitPlan(name=name, groups=groups, scheme=scheme, bytes=size, reason=AS_WRITTEN)


def _chosen(
    wanted: Plan,
    settings: Quantize,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    sensitivity: Sensitivity,
    costs: CostTable,
    offered: UnitCandidates,
    state: StatePlan,
    heldout: Sequence[Sequence[int]],
    progress: Callable[[str], None],
) -> tuple[PrecisionPlan, tuple[FrontierPoint, ...]]:
    workload = Workload(shares=workload_of(wanted))
    minimize: Goal = "bytes" if wanted.goal == "memory" else "seconds"
    offered, sensitivity = _with_mixtures(offered, sensitivity, costs, workload, minimize, wanted.max_bytes)
    options = _options(offered, kept_in(graph, state.dtype), sensitivity, costs)
    check = heldout[wanted.samples : wanted.samples * (1 + CHECK_SAMPLES)]
    whole = WholePlan(settings, graph, calibration, offered, check)

    def joint_kl(chosen: Chosen) -> float:
        progress(f"a plan of predicted KL {chosen.kl:.4f} is measured as a whole")
        return whole.kl({choice.unit: choice.option for choice in chosen.choices})

    budget = PlanBudget(wanted.max_kl - (state.kl or 0.0), wanted.max_bytes)
    settled = settle(options, workload, budget, minimize, joint_kl=joint_kl)
    chosen = settled.chosen

    written = {
        unit for unit, asked in ((EMBEDDINGS, wanted.embeddings), (KV_CACHE, wanted.kv_cache)) if asked != "auto"
    }

    def part(choice: PlanChoice) -> dict[str, Any]:
        found = options[choice.unit]
        why = AS_WRITTEN if choice.unit in written else reason(choice, found, workload, minimize)
        return choice.model_dump(include={"bytes", "seconds", "kl"}) | {"name": choice.unit, "reason": why}

    choices = {choice.unit: choice for choice in chosen.choices}
    embeddings, cache = choices[EMBEDDINGS], choices[KV_CACHE]
    record = PrecisionPlan(
        asked=decisive(wanted),
        units=tuple(
            UnitPlan(
                groups=tuple(group.name for group in unit.groups),
                scheme=offered.scheme(name, choices[name].option),
                **part(choices[name]),
            )
            for name, unit in offered.units.items()
        ),
        embeddings=UnitPlan(
            groups=EMBEDDING_GROUPS, scheme=offered.scheme(EMBEDDINGS, embeddings.option), **part(embeddings)
        ),
        kv_cache=CachePlan(settings=offered.cache(cache.option), **part(cache)),
        recurrent_state=state,
        search=Search(
            goal=wanted.goal,
            workload=workload.shares,
            max_kl=wanted.max_kl,
            max_bytes=wanted.max_bytes,
            target=costs.target,
            timed=costs.timed,
            threads=costs.threads,
            slots=costs.slots,
            context=costs.context,
            predicted_kl=settled.round.predicted_kl,
            joint_kl=settled.round.joint_kl,
            rounds=settled.rounds,
            exact=chosen.exact,
            samples=tuple(sample_hash(sample) for sample in check),
        ),
    )
    return record, _points(best_plans(options, workload, minimize), chosen)


def _with_mixtures(
    offered: UnitCandidates,
    sensitivity: Sensitivity,
    costs: CostTable,
    workload: Workload,
    minimize: Goal,
    max_bytes: int | None,
) -> tuple[UnitCandidates, Sensitivity]:
    """With schemes of experts in bits of their own, where sensitivities are those of each expert."""
    schemes, measured = dict(offered.schemes), list[UnitSensitivity]()
    for unit in sensitivity.units:
        if unit.experts and unit.name in offered.units:
            (group,) = offered.units[unit.name].groups
            coded = [scheme for scheme in schemes[unit.name] if scheme.name in unit.experts]
            prices: list[dict[str, list[float]]] = []
            if minimize == "seconds":
                prices.append({scheme.name: _per_token(costs, group, scheme, workload) for scheme in coded})
            if minimize == "bytes" or max_bytes is not None:
                sizes = costs.bytes[shape_of(group)]
                prices.append({scheme.name: [float(sizes[scheme.name])] * group.experts for scheme in coded})
            found = mixtures(coded, unit.experts, prices)
            schemes[unit.name] = (*schemes[unit.name], *found)
            kl = unit.kl | {scheme.name: loss for scheme, loss in found.items()}
            unit = unit.model_copy(update={"kl": kl})
        measured.append(unit)
    return replace(offered, schemes=schemes), sensitivity.model_copy(update={"units": tuple(measured)})


def _per_token(costs: CostTable, group: LinearGroup, scheme: Scheme, workload: Workload) -> list[float]:
    """Seconds of each expert per token of the workload."""
    seconds = costs.experts_seconds(group, scheme)
    return sum((share / n * seconds[n] for n, share in workload.shares.items()), np.zeros(group.experts)).tolist()


def _options(
    offered: UnitCandidates, graph: PortableGraph, sensitivity: Sensitivity, costs: CostTable
) -> dict[str, list[Option]]:
    """What may be chosen for each unit. :class:`QuantizationError` for what was not measured."""
    measured = {unit.name: unit.kl for unit in sensitivity.units}
    found: dict[str, list[Option]] = {}
    for name, schemes in offered.schemes.items():
        if name == EMBEDDINGS:
            priced = {scheme.name: costs.embeddings(graph, scheme) for scheme in schemes}
            found[name] = _measured(name, priced, sensitivity.embeddings)
        else:
            priced = {scheme.name: costs.linears(offered.units[name].groups, scheme) for scheme in schemes}
            found[name] = _measured(name, priced, measured.get(name, {}))
    kept = {cache.name: costs.cache(graph, cache) for cache in offered.caches}
    return found | {KV_CACHE: _measured(KV_CACHE, kept, sensitivity.kv_cache)}


def _measured(unit: str, priced: Mapping[str, Cost], kl: Mapping[str, float]) -> list[Option]:
    missing = sorted(priced.keys() - kl.keys())
    if missing:
        raise QuantizationError(
            f"no sensitivity of {unit} to {', '.join(missing)}",
            expected="everything a unit may get, measured on every unit",
            remedy="run `dvc repro sensitivity`",
        )
    return [
        Option(name=name, seconds=dict(cost.seconds), bytes=cost.bytes, kl=kl[name]) for name, cost in priced.items()
    ]


def reason(choice: PlanChoice, options: Sequence[Option], workload: Workload, minimize: Goal) -> str:
    """Why not a cheaper option: what the next one would save, and what it would spend."""

    def value(option: Option) -> float:
        return option.bytes if minimize == "bytes" else workload.cost(option)

    mine = next(value(option) for option in options if option.name == choice.option)
    cheaper = [option for option in options if value(option) < mine]
    if len(options) == 1:
        return "the only one there is for its size"
    if not cheaper:
        return "the smallest there is" if minimize == "bytes" else "the fastest there is"
    least = min(cheaper, key=lambda option: (option.kl, value(option)))
    saved = mine - value(least)
    amount = f"{saved / 1e6:.2f} MB" if minimize == "bytes" else f"{saved * 1e6:.1f} µs"
    return f"{least.name} would save {amount} and spend {least.kl - choice.kl:.4f} more KL"


def _points(plans: Sequence[Chosen], chosen: Chosen) -> tuple[FrontierPoint, ...]:
    """The chosen plan is among them, wherever it lies."""
    others = [plan for plan in plans if plan.choices != chosen.choices]
    points = (
        FrontierPoint(plan.kl, plan.seconds * 1e6, plan.bytes / 1e6, plan is chosen) for plan in (*others, chosen)
    )
    return tuple(sorted(points, key=lambda point: point.kl))
