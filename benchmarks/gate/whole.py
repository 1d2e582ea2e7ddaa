"""Rows of the whole gate: evidence of a good engine, and of two engines of the same law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.gate import evidence as made
from benchmarks.gate.documents import NO_ERROR, PARITY, SHADOW, TEXT, Documents
from benchmarks.gate.evidence import Floats, Run
from benchmarks.gate.kinds import BASELINE, CANDIDATE, SOURCE_DOCUMENTS, source_record
from benchmarks.gate.rows import EQUAL, GOOD, Outcomes, Row
from evals.gate import judge
from evals.kind import Bounds, Evidence, Report
from evals.kinds.parity import ParityReport
from evals.kinds.proof import ProofSummary
from evals.kinds.serving import ServingReport, ServingSettings
from evals.kinds.shadow import ShadowReport
from evals.kinds.speed import SpeedSettings, SpeedSummary
from evals.kinds.tasks import EvalReport
from tapeout.artifact import ArtifactRef
from tapeout.fingerprint import Fingerprint

REPEATS = SpeedSettings().repeats
WHOLE = "the whole gate"


def whole(
    task_items: tuple[Any, ...],
    text_items: tuple[Any, ...],
    shadow_items: tuple[Any, ...],
    parity_items: tuple[Any, ...],
    source_items: tuple[Any, ...],
    samples: tuple[Any, ...],
) -> Evidence:
    machine = Fingerprint(machine="x86_64", features=("avx2",), libraries={"onnxruntime": "1"})
    built_from = ArtifactRef("QuantizedModel", "9" * 64)
    evaluation = EvalReport.model_construct(
        baseline=BASELINE,
        candidate=CANDIDATE,
        executed_on=machine,
        tasks=dict(Counter(item.task for item in task_items)),
        documents=len(text_items),
        max_tokens=0,  # no long document
        shots={},
        versions={},
    )
    replayed = ShadowReport.model_construct(
        champion=BASELINE, candidate=CANDIDATE, champion_is_baseline=True, prompts=len(shadow_items),
        max_new_tokens=10**6, executed_on=machine,
    )  # fmt: skip
    compared = ParityReport.model_construct(
        candidate=CANDIDATE, built_from=built_from.digest, documents=len(parity_items), vocabulary=1, max_tokens=1,
        embedding=NO_ERROR, head=NO_ERROR, executed_on=machine,
    )  # fmt: skip
    both: dict[str, Any] = {"baseline": BASELINE, "candidate": CANDIDATE, "executed_on": machine}
    served = made.served_items()
    as_served = ServingReport.model_construct(
        asked=ServingSettings(),
        **both, slots=1, max_tokens=made.LAST + 1, max_running=1, step_tokens=256, draft_tokens=0, moved_tokens=0,
        items=len(served), draws=made.draws(), pressure=made.pressure(),
    )  # fmt: skip
    of_source = source_record(made.source_answers(task_items)).model_copy(update={"executed_on": machine})
    batches = tuple(sample.batch for sample in samples if sample.phase == "decode")
    proof = ProofSummary(ok=True, reasons=(), bits_per_weight=7.5)
    return Evidence(
        baseline=BASELINE,
        candidate=CANDIDATE,
        built_from=built_from,
        target="ort-cpu",
        hardware=(machine,),
        reports={
            "proof": Report(built_from, proof),
            "tasks": Report(ArtifactRef("EvalReport", "e"), evaluation, task_items),
            "text": Report(ArtifactRef("EvalReport", "e"), evaluation, text_items),
            "shadow": Report(ArtifactRef("ShadowReport", "s"), replayed, shadow_items),
            "parity": Report(ArtifactRef("ParityReport", "p"), compared, parity_items),
            "serving": Report(ArtifactRef("ServingReport", "v"), as_served, served),
            "source": Report(ArtifactRef("SourceReport", "o"), of_source, source_items),
            "speed": Report(
                ArtifactRef("Benchmark", "t"),
                SpeedSummary(baseline=BASELINE, candidate=CANDIDATE, executed_on=machine, batches=batches),
                samples,
            ),
        },
    )


def good_evidence(rng: Generator, run: Run) -> Evidence:
    """A good engine: items drawn again from those of the real run."""

    def documents(of: Documents) -> list[Floats]:
        found = np.array(getattr(run, of.kind.name))
        drawn = found[rng.integers(0, len(found), of.count)].T
        drawn[1] *= 1 + 1e-9 * np.arange(of.count)  # the same document drawn twice would be refused as a copy
        return list(drawn)

    tables = {
        task: rng.multinomial(n, np.array([right - lost, lost, gained, n - right - gained]) / n).tolist()
        for task, (n, right, lost, gained) in run.tasks.items()
    }
    samples = [
        made.speed_sample(phase, int(batch), rng.choice(ratios, REPEATS).tolist())
        for (phase, batch), ratios in ((name.split(), ratios) for name, ratios in run.speed.items())
    ]
    return whole(
        made.task_items(tables),
        made.text_items(*documents(TEXT)),
        made.shadow_items(*documents(SHADOW)),
        made.parity_items(*documents(PARITY)),
        made.source_items(*np.array(run.source)[rng.integers(0, len(run.source), SOURCE_DOCUMENTS)].T),
        tuple(samples),
    )


def equal_evidence(rng: Generator, run: Run) -> Evidence:
    """Two engines of the same law: what differs is noise."""
    sizes = {task: table[0] for task, table in run.tasks.items()}
    tokens = [rng.choice(run.column(of.kind.name, 0), of.count) for of in (TEXT, SHADOW, PARITY)]
    noise = [(sizes, 1e-8 * rng.exponential(size=len(sizes)), np.zeros(len(sizes))) for sizes in tokens]
    return whole(
        made.task_items(made.task_tables(rng, sizes, {}, 0.005)),
        made.text_items(*noise[0], 1e-6 * rng.normal(size=TEXT.count)),
        made.shadow_items(*noise[1]),
        made.parity_items(*noise[2]),
        made.source_items(run.column("source", 0), 1e-6 * rng.normal(size=len(run.source))),
        tuple(
            made.speed_sample(phase, int(batch), np.exp(rng.normal(0, 0.1, REPEATS)).tolist())
            for phase, batch in (name.split() for name in run.speed)
        ),
    )


def gate_rows(run: Run, bounds: Bounds) -> Iterator[Row]:
    def of(evidence: Callable[[Generator, Run], Evidence]) -> Outcomes:
        return lambda rng, runs: ({WHOLE: judge(evidence(rng, run), bounds).outcome} for _ in range(runs))

    yield Row({WHOLE: "a good engine: the real run, drawn again"}, "default evidence", GOOD, of(good_evidence))
    yield Row({WHOLE: "equal engines, equally fast"}, "default evidence", EQUAL, of(equal_evidence))
