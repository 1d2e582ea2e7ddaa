"""Speed: latency, throughput and memory of both engines on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from evals.block import SPEED, Bars, Block, Roofline, Rows, Table
from evals.check import Check, Findings, JudgedVerdict, Outcome
from evals.kind import Bounds, Evidence, EvidenceKind, EvidenceRecord, Executed, Report
from evals.rules import Rule, broken, differing
from tapeout.artifact import Frozen, ParentTypes, load
from tapeout.errors import EvidenceError
from tapeout.recipe import BaseRecipe, Count, Section

ENGINES = ("baseline", "candidate")
BATCH_AXIS = "sequences decoded together"
MOST_FAULTS = 0.05  # pages from the disk for each timed step, beyond which its time is that of the disk


class SpeedSample(Frozen):
    """Throughput of both engines at one batch, measured in turn: entry i of both tuples is one paired repeat."""

    batch: int
    phase: Literal["decode", "prefill"]
    baseline_tokens_per_s: tuple[float, ...]
    candidate_tokens_per_s: tuple[float, ...]


class EngineNumbers(Frozen):
    """Medians over the repeats of one engine. Dictionaries are keyed by batch.

    ``roofline_share``: bytes of weights and recurrent state over measured read bandwidth, as a share of the time of a
    step at the smallest batch.
    ``resident_share``: the least share in memory of the weights that the engine leaves in their file; 1 where it leaves
    none, None where the system does not tell. ``page_faults``: pages that were read from a disk while it was timed.
    ``cost_per_million_tokens``: US dollars per million generated tokens at the fastest batch.
    """

    digest: str
    ttft_ms: float
    prefill_tokens_per_s: float
    itl_ms: dict[int, float]
    decode_tokens_per_s: dict[int, float]
    resident_share: float | None
    page_faults: int
    peak_memory_mb: float
    kv_token_bytes: int
    bundle_mb: float
    roofline_share: float
    cost_per_million_tokens: float


class Benchmark(EvidenceRecord):
    artifact_type: ClassVar[str] = "Benchmark"
    remedy: ClassVar[str] = "run `dvc repro benchmark`"
    schema_version: ClassVar[int] = 4  # 4: sequences of a batch are fed different tokens; weights in memory
    parent_types: ClassVar[ParentTypes] = {"baseline": ("EngineBundle",), "candidate": ("EngineBundle",)}

    baseline: EngineNumbers
    candidate: EngineNumbers
    samples: tuple[SpeedSample, ...]
    threads: int
    prompt_tokens: int
    new_tokens: int
    read_bandwidth_gb_s: float
    price_per_hour: float


class SpeedSummary(Executed):
    """A Benchmark as the gate reads it: the bundles (digests) that were timed; its items are the samples.

    ``batches``: at which the recipe wants decoding timed. Prefill is timed once, one prompt at a time.
    ``paged``: which engines have read weights from the disk, as clauses. Their times say how fast the disk is.
    """

    baseline: str
    candidate: str
    batches: tuple[int, ...]
    paged: tuple[str, ...] = ()


class SpeedSettings(Section):
    warmup_tokens: ClassVar[int] = 3  # decoded before ``new_tokens``, untimed

    prompt_tokens: Count = 128
    new_tokens: Count = 32
    batches: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 4, 16)
    repeats: Count = 7
    price_per_hour: float = Field(default=0.10, gt=0)  # US dollars for this machine

    @field_validator("batches")
    @classmethod
    def _different(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(batches)) < len(batches):
            raise ValueError(f"contains duplicates: {', '.join(map(str, batches))}")
        return batches


class SpeedBounds(Bounds):
    min_speed_ratio: float = Field(default=1.0, gt=0)
    min_repeats: Count = 5  # paired repeats per batch and phase; fewer bound no median at 95 %


class SpeedKind(EvidenceKind[SpeedSummary, SpeedSample, SpeedBounds]):
    order, name, folder, stage = 70, "speed", "benchmark", "benchmark"
    measure_module = "evals.kinds.speed.measure"
    artifact_types = ("Benchmark",)
    sections: ClassVar = {"benchmark": SpeedSettings}
    report, item, bounds = SpeedSummary, SpeedSample, SpeedBounds
    absent = Block(SPEED, missing="No benchmark was recorded.")

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        from evals.statistics import required_repeats

        timed, bounds = recipe.section(SpeedSettings), recipe.section(SpeedBounds)
        positions = timed.prompt_tokens + timed.warmup_tokens + timed.new_tokens
        name = f"benchmark.prompt_tokens and new_tokens, with {timed.warmup_tokens} to warm up"
        problems = recipe.too_long({name: positions})
        # An engine can be opened with more slots than it was built with. But then its speed is that of another engine.
        if max(timed.batches) > recipe.build.slots:
            problems.append(f"benchmark.batches reach {max(timed.batches)}, but build.slots is {recipe.build.slots}")
        if (needed := required_repeats(bounds.confidence)) > bounds.min_repeats:
            problems.append(
                f"gate.min_repeats is {bounds.min_repeats}, but a median is bounded at gate.confidence "
                f"{bounds.confidence:g} by {needed} repeats or more"
            )
        return problems

    def load(self, folder: Path, recipe: BaseRecipe) -> Report[SpeedSummary, SpeedSample]:
        found = load(folder, Benchmark)
        found.verify()
        timed, asked = found.record, recipe.section(SpeedSettings)
        lengths = {name: (getattr(timed, name), getattr(asked, name)) for name in ("prompt_tokens", "new_tokens")}
        if deviations := differing("Benchmark", lengths):
            raise EvidenceError(
                "; ".join(deviations), expected="a benchmark as the recipe asks", remedy="run `dvc repro benchmark`"
            )
        summary = SpeedSummary(
            baseline=timed.baseline.digest,
            candidate=timed.candidate.digest,
            batches=asked.batches,
            paged=paged(timed),
            executed_on=timed.executed_on,
        )
        return Report(found.ref, summary, timed.samples)

    def problems(self, report: Report[SpeedSummary, SpeedSample], evidence: Evidence) -> list[str]:
        batches = report.record.batches
        problems = [] if batches else ["Benchmark was asked for no batch"]
        decoded = {sample.batch for sample in report.items if sample.phase == "decode"}
        if all(sample.phase != "prefill" for sample in report.items):
            problems.append("Benchmark has no prefill samples")
        problems += [f"Benchmark has no decode samples at batch {batch}" for batch in batches if batch not in decoded]
        return problems + broken("speed sample", report.items, lambda s: f"{s.phase} at batch {s.batch}", RULES)

    def judge(self, report: Report[SpeedSummary, SpeedSample], evidence: Evidence, bounds: SpeedBounds) -> Findings:
        """One check for each phase and batch that was timed; :meth:`problems` refuses a report that lacks one.

        None decides where an engine read weights from the disk.
        """
        samples = sorted(report.items, key=lambda sample: (sample.phase, sample.batch))
        checks = tuple(_check(sample, bounds) for sample in samples)
        if clauses := report.record.paged:
            reason = f"{'; '.join(clauses)}: time both where all their weights fit the memory"
            undecided = {"outcome": Outcome.INCONCLUSIVE, "reason": reason}
            checks = tuple(check.model_copy(update=undecided) for check in checks)
        return Findings(checks)

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        return speed_block(load(folder, Benchmark).record)


RULES: tuple[Rule[SpeedSample], ...] = (
    ("have no batch", lambda s: s.batch < 1),
    ("have no repeats", lambda s: not s.baseline_tokens_per_s or not s.candidate_tokens_per_s),
    ("have unpaired repeats", lambda s: len(s.baseline_tokens_per_s) != len(s.candidate_tokens_per_s)),
    (
        "have a non-finite or non-positive speed",
        lambda s: not all(math.isfinite(v) and v > 0 for v in (*s.baseline_tokens_per_s, *s.candidate_tokens_per_s)),
    ),
)


def _check(sample: SpeedSample, bounds: SpeedBounds) -> Check:
    """Repeats are paired: what slows the machine for a while slows both engines and does not change the ratio."""
    from evals.conditions import Condition
    from evals.statistics import median_bounds

    ratios = [c / b for c, b in zip(sample.candidate_tokens_per_s, sample.baseline_tokens_per_s, strict=True)]
    condition = Condition(
        name=f"{sample.phase}_speed_b{sample.batch}",
        title=f"{sample.phase} tokens/s at batch {sample.batch}, candidate / baseline",
        direction="at_least",
        bound=bounds.min_speed_ratio,
        units="repeats",
        minimum=bounds.min_repeats,
        confidence=bounds.confidence,
    )
    return condition.check(median_bounds(ratios, bounds.confidence))


def paged(timed: Benchmark) -> tuple[str, ...]:
    """See :class:`SpeedSummary`. Speeds are medians, which a few steps that wait for a page do not change."""
    found: list[str] = []
    repeats = sum(len(sample.candidate_tokens_per_s) for sample in timed.samples if sample.phase == "decode")
    steps = repeats * timed.new_tokens
    for name in ENGINES:
        numbers: EngineNumbers = getattr(timed, name)
        share, faults = numbers.resident_share, numbers.page_faults
        if share is None:
            found.append(
                f"the {name} leaves weights in their file, and the system does not tell how many are in memory"
            )
        elif share < 1:
            found.append(f"{1 - share:.3%} of the weights that the {name} leaves in their file were not in memory")
        if faults > MOST_FAULTS * steps:
            found.append(
                f"the {name} waited for {faults:,} pages from the disk, in {steps:,} steps and the prompts before them"
            )
    return tuple(found)


def speed_block(timed: Benchmark) -> Block:
    old, new, bandwidth = timed.baseline, timed.candidate, timed.read_bandwidth_gb_s
    both, batches = {"baseline": old, "candidate": new}, sorted(new.itl_ms)
    titles = {  # of single numbers: title, unit, and whether higher is better
        "ttft_ms": (f"Time to first token, {timed.prompt_tokens} tokens", "ms", False),
        "prefill_tokens_per_s": ("Prefill", "tokens/s", True),
        "peak_memory_mb": ("Peak memory", "MB", False),
        "kv_token_bytes": ("KV cache a token", "bytes", False),
        "bundle_mb": ("Bundle on disk", "MB", False),
        "cost_per_million_tokens": ("Cost of a million tokens", f"US$ at {timed.price_per_hour:.2f} an hour", False),
    }
    values = {name: (float(getattr(old, name)), float(getattr(new, name))) for name in titles}
    memory = tuple((title, *values[name]) for name, (title, unit, _) in titles.items() if unit == "MB")
    roofline = Roofline(bandwidth, old.roofline_share * bandwidth, new.roofline_share * bandwidth)
    metrics: dict[str, float | None] = {
        "roofline.bandwidth_gb_s": bandwidth,
        "roofline.baseline_share": roofline.baseline_share,
        "roofline.candidate_share": roofline.candidate_share,
    }
    for role, numbers in both.items():
        for batch in batches:
            metrics[f"decode.batch_{batch}.{role}_tokens_s"] = numbers.decode_tokens_per_s[batch]
            metrics[f"decode.batch_{batch}.{role}_itl_ms"] = numbers.itl_ms[batch]
        for name in titles:
            metrics[f"speed.{name.removesuffix('_tokens_per_s')}.{role}"] = getattr(numbers, name)
    return Block(
        SPEED,
        charts={
            "throughput": Bars(
                "Decode throughput by batch",
                "tokens/s",
                tuple((str(b), old.decode_tokens_per_s[b], new.decode_tokens_per_s[b]) for b in batches),
                higher_is_better=True,
                axis=BATCH_AXIS,
            ),
            "latency": Bars(
                "Inter-token latency by batch",
                "ms",
                tuple((str(b), old.itl_ms[b], new.itl_ms[b]) for b in batches),
                higher_is_better=False,
                axis=BATCH_AXIS,
            ),
            "memory": Bars("Memory and size", "MB", memory, higher_is_better=False),
            "roofline": roofline,
        },
        table=speed_table([(*titles[name], *values[name]) for name in titles]),
        machine={"Threads": str(timed.threads)} | ({"Paging": "; ".join(clauses)} if (clauses := paged(timed)) else {}),
        metrics=metrics,
        plots={
            "throughput.csv": Rows(
                ("batch", "engine", "tokens_s", "itl_ms"),
                tuple((b, role, n.decode_tokens_per_s[b], n.itl_ms[b]) for b in batches for role, n in both.items()),
            )
        },
    )


def speed_table(rows: list[tuple[str, str, bool, float, float]]) -> Table:
    """``rows``: title, unit, whether higher is better, baseline, candidate."""

    def factor(higher: bool, baseline: float, candidate: float) -> str:
        """How many times better the candidate is; a dash where the measure is zero."""
        top, bottom = (candidate, baseline) if higher else (baseline, candidate)
        return f"{top / bottom:.2f}×" if bottom else "–"

    return Table(
        ("Measure", "Baseline", "Candidate", "Better by"),
        tuple(
            (f"{title} ({unit}, {'higher' if higher else 'lower'} is better)", base, cand, factor(higher, base, cand))
            for title, unit, higher, base, cand in rows
        ),
        "Medians of all repeats. The checks above compare repeat by repeat, so their ratios differ a little.",
    )


KIND = SpeedKind()
