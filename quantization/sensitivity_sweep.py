"""Sweep: every candidate scheme on every unit of a model, one at a time, everything else in float.

A unit's schemes are measured from the unit's first layer on; what lies before it is the same for all of them. The
token embedding and lm_head are one unit with candidates of their own, the KV cache is another; where the recipe writes
one of the two out, that alone is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantization.calibration import Calibration, sample_hash
from quantization.needs import simulation_needs
from quantization.sensitivity import Sensitivity, UnitSensitivity
from quantization.statistics import held_out
from quantization.units import ALL_CANDIDATES, Candidates, caches, candidates_of, embedding_schemes, units_of
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
    units = units_of(graph.record, wanted.layers_per_group)
    work = [
        (unit, [scheme for scheme in candidates_of(unit.groups[0], candidates) if scheme != FLOAT]) for unit in units
    ]
    embeddings = embedding_schemes(wanted.embeddings, graph.record.hidden_size)
    kept = caches(wanted.kv_cache, graph.record, candidates)
    count = sum(len(schemes) for _, schemes in work) + len(embeddings) + len(kept)
    tokens, positions = len(chosen) * max(map(len, chosen)), POSITIONS * len(chosen)
    require("measuring sensitivity", simulation_needs(graph.record, units, tokens, positions, plans=False), folder)
    rounding = QuickRounding(graph, calibration, settings)
    measured: list[UnitSensitivity] = []
    with (
        artifact.create(folder, Sensitivity) as draft,
        ProgressBar(title="measuring sensitivity", unit="scheme", total=count) as progress,
    ):
        starts = {unit.first_layer for unit in units}
        simulation = Simulation(graph, chosen, starts, int8_inputs=candidates.int8_inputs)
        for unit, schemes in work:
            kls = {FLOAT.name: 0.0}
            prepared = rounding.prepare(unit.groups)
            for scheme in schemes:
                changed = rounding.rounded(prepared, scheme)
                kls[scheme.name] = simulation.kl(changed, first_layer=unit.first_layer)
                progress.update()
            measured.append(UnitSensitivity(name=unit.name, groups=tuple(group.name for group in unit.groups), kl=kls))
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
