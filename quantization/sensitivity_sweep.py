"""Sweep: every candidate scheme on every unit of a model, one at a time, everything else in float.

A unit's schemes are measured from the unit's first layer on; what lies before it is the same for all of them. The
token embedding and lm_head are one unit with candidates of their own, the KV cache is another; where the recipe writes
one of the two out, that alone is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantization.calibration import Calibration, sample_hash
from quantization.compressed_tensors import open_checkpoint
from quantization.expert_bits import ExpertErrors
from quantization.needs import simulation_needs
from quantization.sensitivity import Sensitivity, UnitSensitivity
from quantization.statistics import held_out
from quantization.units import (
    ALL_CANDIDATES,
    Candidates,
    Unit,
    caches,
    candidates_of,
    embedding_schemes,
    planned_units,
)
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.progress import ProgressBar
from tapeout.recipe import Plan, Quantize
from tapeout.resources import require
from tapeout.schemes import FLOAT


def sweep(
    wanted: Plan,
    settings: Quantize,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    samples: Sequence[Sequence[int]],
    folder: Path,
    candidates: Candidates = ALL_CANDIDATES,
) -> Artifact[Sensitivity]:
    """Write the Sensitivity to ``folder``. ``samples``: token ids of all that was calibrated on.

    Where the plan is written out nothing is measured, and the record says so.
    """
    parents = {"graph": graph, "calibration": calibration}
    if wanted.schemes != "auto":
        with artifact.create(folder, Sensitivity) as draft:
            draft.finish(Sensitivity(asked=False), parents=parents)
        return artifact.load(folder, Sensitivity)
    from quantization.quick_rounding import QuickRounding
    from quantization.simulate import POSITIONS, Simulation

    chosen = held_out(calibration, samples)[: wanted.samples]
    units = planned_units(wanted, graph.record)
    work = [
        (unit, [scheme for scheme in candidates_of(unit.groups[0], candidates) if scheme != FLOAT]) for unit in units
    ]
    embeddings = embedding_schemes(wanted.embeddings, graph.record.hidden_size)
    kept = caches(wanted.kv_cache, graph.record, candidates)
    count = sum(len(schemes) for _, schemes in work) + len(embeddings) + len(kept)
    tokens, positions = len(chosen) * max(map(len, chosen)), POSITIONS * len(chosen)
    require("measuring sensitivity", simulation_needs(graph.record, units, tokens, positions, plans=False), folder)
    rounding, source = QuickRounding(graph, calibration, settings), open_checkpoint(graph.folder)

    def errors_of(unit: Unit) -> ExpertErrors | None:
        """Of each expert, where the plan may give it bits of its own."""
        apart = wanted.experts == "per_expert" and unit.groups[0].experts
        return ExpertErrors(unit.groups[0], graph.record, calibration, source) if apart else None

    measured: list[UnitSensitivity] = []
    with (
        artifact.create(folder, Sensitivity) as draft,
        ProgressBar(title="measuring sensitivity", unit="scheme", total=count) as progress,
    ):
        starts = {unit.first_layer for unit in units}
        simulation = Simulation(graph, chosen, starts, int8_inputs=candidates.int8_inputs)
        for unit, schemes in work:
            kls, experts = {FLOAT.name: 0.0}, dict[str, tuple[float, ...]]()
            prepared = rounding.prepare(unit.groups)
            errors = errors_of(unit)
            for scheme in schemes:
                changed = rounding.rounded(prepared, scheme)
                kls[scheme.name] = simulation.kl(changed, first_layer=unit.first_layer)
                if errors is not None:
                    shares = errors.shares(changed[unit.groups[0].name].linears[0])
                    experts[scheme.name] = tuple((kls[scheme.name] * shares).tolist())
                progress.update()
            names = tuple(group.name for group in unit.groups)
            measured.append(UnitSensitivity(name=unit.name, groups=names, kl=kls, experts=experts))
        embedding_kls: dict[str, float] = {}
        for scheme in embeddings:
            changed = rounding.embeddings(scheme)
            embedding_kls[scheme.name] = simulation.kl(changed) if changed else 0.0
            progress.update()
        kv_cache: dict[str, float] = {}
        for cache in kept:
            rounded = rounding.kv_cache(cache)
            kv_cache[cache.name] = simulation.kl({}, kv=rounded) if rounded else 0.0
            progress.update()
        record = Sensitivity(
            asked=True,
            samples=tuple(sample_hash(sample) for sample in chosen),
            positions=simulation.positions,
            units=tuple(measured),
            embeddings=embedding_kls,
            kv_cache=kv_cache,
        )
        draft.finish(record, parents=parents)
    return artifact.load(folder, Sensitivity)
