"""Make the KernelPlan: the rules as they are written, or the best kernels for a workload within a budget of quality.

Units are chosen by the sum of their KLs. What all chosen kernels cost together is then measured, on calibration rows
that no sensitivity was measured on; the budget of the sum is corrected by what was found, and the choice made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline import artifact, frontier
from pipeline.artifact import Artifact
from pipeline.errors import QuantizationError
from pipeline.frontier import Frontier, FrontierPoint
from pipeline.graph import LinearGroup, PortableGraph
from pipeline.kernels import FLOAT, Kernel
from pipeline.recipe import Plan, Recipe
from pipeline.svg import standalone
from quantization.calibration import Calibration, row_hash
from quantization.kernel_plan import (
    COLUMNS,
    FRONTIER_CHART,
    FRONTIER_FILE,
    PLAN_FILE,
    KernelPlan,
    Search,
    UnitPlan,
    summary,
    table,
)
from quantization.plan import Unit, fitted, kernel_named, menu_for, resolve, units_of, written_units
from quantization.planner import Choice, Chosen, Goal, Limits, Option, Workload, settle
from quantization.planner import frontier as best_plans
from quantization.products import CostTable, head_of, shape_of, workload_of
from quantization.quick_rounding import QuickRounding
from quantization.sensitivity import Sensitivity
from quantization.simulate import Simulated, Simulation
from quantization.statistics import held_out

CHECK_ROWS = 2  # times plan.rows, as far as there are so many: one KL of a whole plan decides


def make_plan(
    recipe: Recipe,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    sensitivity: Artifact[Sensitivity],
    costs: CostTable,
    rows: Sequence[Sequence[int]],
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[KernelPlan]:
    """Write the KernelPlan to ``folder``. ``rows``: token ids of all that was calibrated on.

    :class:`QuantizationError` for sensitivities of another graph or calibration, and for budgets no plan keeps to.
    """
    parents = {"graph": graph.digest, "calibration": calibration.digest}
    if sensitivity.parents != parents:
        raise QuantizationError(
            f"{sensitivity.folder} was measured on another graph or calibration",
            expected=f"graph {graph.digest[:12]} and calibration {calibration.digest[:12]}",
            remedy="run `dvc repro sensitivity`",
        )
    wanted = recipe.plan
    with artifact.create(folder, KernelPlan) as draft:
        if wanted.kernels == "auto":
            heldout = held_out(calibration, rows)
            record, points = _chosen(recipe, graph, calibration, sensitivity.record, costs, heldout, progress)
            (draft.folder / FRONTIER_FILE).write_text(frontier.table(points))
            chart = frontier.chart(Frontier(points, wanted.max_kl, by_bytes=wanted.goal == "memory"))
            (draft.folder / FRONTIER_CHART).write_text(standalone(chart))
        else:
            record = _written(wanted, graph.record, resolve(graph.record, wanted.kernels), costs)
        (draft.folder / PLAN_FILE).write_text(text(record))
        draft.finish(record, parents=parents | {"sensitivity": sensitivity.digest})
    return artifact.load(folder, KernelPlan)


def write_plan(wanted: Plan, graph: Artifact[PortableGraph], folder: Path) -> Artifact[KernelPlan]:
    """A plan of rules alone, for a build that asks for its own: a unit a group, nothing weighed.

    :class:`QuantizationError` for a linear that no rule matches.
    """
    assert wanted.kernels != "auto"
    units = tuple(
        UnitPlan(name=name, groups=(name,), kernel=kernel, bytes=0, reason="written in the recipe")
        for name, kernel in resolve(graph.record, wanted.kernels).items()
    )
    with artifact.create(folder, KernelPlan) as draft:
        record = KernelPlan(
            units=units,
            embeddings=wanted.embeddings,
            embeddings_bytes=0,
            kv_cache=wanted.kv_cache,
            search=None,
        )
        draft.finish(record, parents={"graph": graph.digest})
    return artifact.load(folder, KernelPlan)


def _written(wanted: Plan, graph: PortableGraph, kernels: Mapping[str, Kernel], costs: CostTable) -> KernelPlan:
    return KernelPlan(
        units=tuple(
            UnitPlan(
                name=unit.name,
                groups=tuple(group.name for group in unit.groups),
                kernel=kernels[unit.groups[0].name],
                bytes=sum(costs.bytes_of(group, kernels[group.name]) for group in unit.groups),
                reason="written in the recipe",
            )
            for unit in written_units(graph, kernels)
        ),
        embeddings=wanted.embeddings,
        embeddings_bytes=costs.bytes_of(head_of(graph), wanted.embeddings),
        kv_cache=wanted.kv_cache,
        search=None,
    )


def _chosen(
    recipe: Recipe,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    sensitivity: Sensitivity,
    costs: CostTable,
    heldout: Sequence[Sequence[int]],
    progress: Callable[[str], None],
) -> tuple[KernelPlan, tuple[FrontierPoint, ...]]:
    wanted, workload = recipe.plan, Workload(shares=workload_of(recipe.plan))
    minimize: Goal = "bytes" if wanted.goal == "memory" else "seconds"
    units = {unit.name: unit for unit in units_of(graph.record, wanted.band)}
    options = _options(units, sensitivity, costs)
    check = heldout[wanted.rows : wanted.rows * (1 + CHECK_ROWS)]
    whole = _Whole(recipe, graph, calibration, units, check)
    embeddings_bytes = costs.bytes_of(head_of(graph.record), wanted.embeddings)
    # The tables and the cache are not chosen here, but they spend of the same budgets.
    fixed_kl = sensitivity.embeddings_kl + sensitivity.kv_cache_kl
    left = None if wanted.max_bytes is None else wanted.max_bytes - embeddings_bytes
    if fixed_kl >= wanted.max_kl:
        raise QuantizationError(
            f"embeddings and KV cache alone have a KL of {fixed_kl:.4g}",
            expected=f"something left of plan.max_kl = {wanted.max_kl:g}",
            remedy="raise plan.max_kl, or give plan.embeddings or plan.kv_cache more bits",
        )

    def joint_kl(chosen: Chosen) -> float:
        progress(f"a plan of predicted KL {chosen.kl + fixed_kl:.4f} is measured as a whole")
        return whole.kl({choice.unit: choice.kernel for choice in chosen.choices})

    limits = Limits(wanted.max_kl, left)
    settled = settle(options, workload, limits, minimize, fixed_kl=fixed_kl, joint_kl=joint_kl)
    chosen = settled.chosen
    head_seconds = costs.head_seconds(graph.record, wanted)
    record = KernelPlan(
        units=tuple(
            UnitPlan(
                name=choice.unit,
                groups=tuple(group.name for group in units[choice.unit].groups),
                kernel=kernel_named(choice.kernel, units[choice.unit].columns),
                bytes=choice.bytes,
                seconds=choice.seconds,
                kl=choice.kl,
                reason=reason(choice, options[choice.unit], workload, minimize),
            )
            for choice in chosen.choices
        ),
        embeddings=wanted.embeddings,
        embeddings_bytes=embeddings_bytes,
        kv_cache=wanted.kv_cache,
        search=Search(
            goal=wanted.goal,
            workload=workload.shares,
            max_kl=wanted.max_kl,
            max_bytes=wanted.max_bytes,
            target=costs.target,
            threads=costs.threads,
            embeddings_seconds=head_seconds,
            embeddings_kl=sensitivity.embeddings_kl,
            kv_cache_kl=sensitivity.kv_cache_kl,
            predicted_kl=settled.round.predicted_kl,
            joint_kl=settled.round.joint_kl,
            rounds=settled.rounds,
            exact=chosen.exact,
            rows=tuple(row_hash(row) for row in check),
        ),
    )
    best = best_plans(options, workload, minimize)
    return record, _points(best, chosen, kl=fixed_kl, seconds=head_seconds, size=embeddings_bytes)


def _options(units: Mapping[str, Unit], sensitivity: Sensitivity, costs: CostTable) -> dict[str, list[Option]]:
    """What may be chosen for each unit. :class:`QuantizationError` for units that were not measured."""
    measured = {unit.name: unit for unit in sensitivity.units}
    found: dict[str, list[Option]] = {}
    for name, unit in units.items():
        kernels = menu_for(unit.columns)
        missing = {kernel.name for kernel in kernels} - (measured[name].kl.keys() if name in measured else set())
        if missing:
            raise QuantizationError(
                f"no sensitivity of {name} to {', '.join(sorted(missing))}",
                expected="every kernel of the menu, measured on every unit",
                remedy="run `dvc repro sensitivity`",
            )
        group, count = unit.groups[0], len(unit.groups)
        found[name] = [_option(group, kernel, measured[name].kl[kernel.name], count, costs) for kernel in kernels]
    return found


def _option(group: LinearGroup, kernel: Kernel, kl: float, count: int, costs: CostTable) -> Option:
    """``count`` products like that of ``group``."""
    shape, name = shape_of(group), fitted(kernel, group.in_features).name
    return Option(
        kernel=name,
        seconds={rows: count * seconds for rows, seconds in costs.seconds[shape][name].items()},
        bytes=count * costs.bytes[shape][name],
        kl=kl,
    )


class _Whole:
    """What all kernels of a plan cost together, embeddings and cache too."""

    def __init__(
        self,
        recipe: Recipe,
        graph: Artifact[PortableGraph],
        calibration: Artifact[Calibration],
        units: Mapping[str, Unit],
        rows: Sequence[Sequence[int]],
    ) -> None:
        self._units = units
        self._rounding = QuickRounding(graph, calibration, recipe.quantize)
        self._simulation = Simulation(graph, rows, ())
        self._tables = self._rounding.tables(recipe.plan.embeddings)
        self._kv = self._rounding.kv_cache(recipe.plan.kv_cache)
        self._rounded: dict[str, tuple[str, dict[str, Simulated]]] = {}  # by unit: a kernel, and groups under it

    def kl(self, kernels: Mapping[str, str]) -> float:
        """Of a kernel's name for each unit's; what was rounded last is kept for a plan that differs in some units."""
        for name, kernel in kernels.items():
            if self._rounded.get(name, ("",))[0] != kernel:
                unit = self._units[name]
                wanted = kernel_named(kernel, unit.columns)
                groups = {} if wanted == FLOAT else self._rounding.rounded(self._rounding.prepare(unit.groups), wanted)
                self._rounded[name] = (kernel, groups)
        changed = {name: group for _, groups in self._rounded.values() for name, group in groups.items()}
        return self._simulation.kl(changed | self._tables, kv=self._kv)


def reason(choice: Choice, options: Sequence[Option], workload: Workload, minimize: Goal) -> str:
    """Why not a cheaper kernel: what the next one would save, and what it would spend."""

    def value(option: Option) -> float:
        return option.bytes if minimize == "bytes" else workload.cost(option)

    mine = next(value(option) for option in options if option.kernel == choice.kernel)
    cheaper = [option for option in options if value(option) < mine]
    if not cheaper:
        return f"the {'smallest' if minimize == 'bytes' else 'fastest'} kernel"
    least = min(cheaper, key=lambda option: (option.kl, value(option)))
    saved = mine - value(least)
    said = f"{saved / 1e6:.2f} MB" if minimize == "bytes" else f"{saved * 1e6:.1f} µs"
    return f"{least.kernel} would save {said} and spend {least.kl - choice.kl:.4f} more KL"


def _points(
    plans: Sequence[Chosen], chosen: Chosen, *, kl: float, seconds: float, size: int
) -> tuple[FrontierPoint, ...]:
    """Of whole plans, with what embeddings and cache add; the chosen one is among them, wherever it lies."""

    def point(plan: Chosen) -> FrontierPoint:
        return FrontierPoint(plan.kl + kl, (plan.seconds + seconds) * 1e6, (plan.bytes + size) / 1e6, plan is chosen)

    others = [plan for plan in plans if plan.choices != chosen.choices]
    return tuple(sorted(map(point, [*others, chosen]), key=lambda p: p.kl))


def text(plan: KernelPlan) -> str:
    """The plan as Markdown."""
    search = plan.search
    lines = ["# Kernel plan", "", summary(plan), "", f"| {' | '.join(COLUMNS)} |", "|---|---|--:|--:|--:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in table(plan)]
    if search is not None:
        lines += ["", "Plans that were measured as a whole:", "", "| budget of the sum | sum | at once | µs | MB |"]
        lines += ["|--:|--:|--:|--:|--:|"]
        lines += [
            f"| {r.budget:.4f} | {r.predicted_kl:.4f} | {r.joint_kl:.4f} | {r.seconds * 1e6:.1f} "
            f"| {r.bytes / 1e6:.2f} |"
            for r in search.rounds
        ]
    return "\n".join(lines) + "\n"
