"""Serving: every way an engine is used in service gives what a prefill in one piece gives.

Accuracy and text are measured with prefills in slot 0. Users get batched decode steps, in every slot, at every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from evals.block import QUALITY, Block, FactRow, Table, fact_metrics
from evals.check import Check, Fact, Findings, JudgedVerdict, Outcome
from evals.items import read_items
from evals.kind import Bounds, Evidence, EvidenceKind, EvidenceRecord, Report
from evals.limits import at_least, at_most
from evals.rules import Rule, counted, differing, mean_above_largest, token_rules
from tapeout.artifact import Frozen, ParentTypes, load
from tapeout.recipe import BaseRecipe, Count, Section

EVERY_SLOT = ("pieces", "decode", "greedy", "mixed", "reuse")  # paths that must be measured in every slot
SEVERAL = ("copy", "share")  # paths that need more than one slot
ONCE = ("generation", "reopened", "resumed")
EVERY_SIZE = ("running", "joining")  # paths of every batch size that a server may form
MOVED = "moved"  # the path of engines whose blocks can be moved
CHOOSING = ("greedy", "running")  # paths on which the engine picks the likeliest token
# Behind fewer tokens than this, KL against the float engine is large for any quantized model: what follows a cut-off
# word is anyone's guess, and attention has nothing else to read. 1.0 nat behind one token on the default model.
CONTEXT = 16
PATHS = (*EVERY_SLOT, *SEVERAL, *ONCE, *EVERY_SIZE)
MAX_RUNNING, DRAFT_TOKENS = "serving_max_running", "serving_draft_tokens"  # facts of a verdict: what was measured
# Settings that tokens are drawn with; the draws themselves are made where the server's sampler can be imported.
DRAWN = ("temperature", "top_k", "top_p", "min_p", "all_filters", "penalties", "greedy", "logit_bias", "logprobs")
CHOICES = "choices"
# Kinds of requests that the serving core answers under pressure.
PRESSED = (
    "greedy",
    "penalties",
    "logit_bias",
    "drafts",
    "draws",
    "least_length",
    "logprobs",
    "leaves",
    CHOICES,
)
GREEDY = ("greedy", "leaves")  # of these: the engine itself chooses all tokens
# A further kind: greedy requests alone, where an engine of two steps at once begins the next before the last is known.
AHEAD = "ahead"
# And another, where requests share state: prompts that go on behind an earlier prompt and its answer, as in a chat.
TURNS = "turns"


class ServedItem(Frozen):
    """The positions that one slot computed on one path, in steps of one batch size.

    ``agree``, ``kl_sum``, ``kl_max`` and ``error`` compare with a prefill of the same tokens in one piece in slot 0 of
    the same engine, ``float_kl_sum`` with logits of the float engine. ``error``: the largest difference of a logit over
    the largest logit. ``gap``: how far the logit of the chosen token lies below the largest one, on paths that choose.
    """

    path: str
    slot: int
    first_slot: int  # of the batch
    batch: int
    first: int  # position
    last: int
    tokens: int
    agree: int
    kl_sum: float
    kl_max: float
    error: float
    gap: float
    float_kl_sum: float | None  # None: the float engine was not asked


class Draws(Frozen):
    """Tokens drawn with fixed seeds from the engine's own logits, by the bundle's library and by numpy.

    ``differ``: how many of the draws are not the same: the token, or a log-probability.
    """

    settings: str  # one of DRAWN
    draws: int
    differ: int


class Pressed(Frozen):
    """Answers of the serving core to requests of one kind, while it has too few blocks (``pressure.py``).

    ``wrong``: tokens that do not follow by the logits of a prefill in one piece. ``gap``: how far the worst token falls
    short. ``preempted``: how often a request lost its blocks. ``cached``: prompt tokens that were found in blocks.
    ``accepted``: tokens that were drafted.
    """

    settings: str  # one of PRESSED, TURNS or AHEAD
    answers: int
    tokens: int
    wrong: int
    gap: float
    preempted: int
    cached: int
    accepted: int


class Pressure(Frozen):
    """All that the serving core answered. ``shares``: prompts can be found. ``scarce``: there were too few blocks.

    ``constrains``: constraints can be read with the model's tokenizer; else the server refuses them.
    ``steps_at_once``: of the engine. ``steps_ahead``: that began before the one before had ended.
    """

    shares: bool
    scarce: bool
    constrains: bool
    steps_at_once: int
    steps_ahead: int
    answers: tuple[Pressed, ...]


def draws_of(counts: Mapping[str, tuple[int, int]]) -> tuple[Draws, ...]:
    """From how many tokens were drawn and how many of them differ, by settings."""
    return tuple(Draws(settings=name, draws=draws, differ=differ) for name, (draws, differ) in counts.items())


class ServingSettings(Section):
    steps: Count = 8  # of decode at each length
    answers: Count = 24
    new_tokens: Count = 24
    max_running: Count = 64  # sequences in a step; `tapeout serve` runs no more
    step_tokens: Count = 256  # in a step with drafts
    draft_tokens: Count = 8  # for a sequence in a step
    pressed: Annotated[int, Field(ge=len(PRESSED))] = 45  # requests to the serving core with too few blocks


class ServingReport(EvidenceRecord):
    """``max_running``: the largest batch, of which and of all below it steps were compared. ``draft_tokens``: the most
    that were fed to a sequence in a step, 0 where the engine takes none; at most ``step_tokens`` were to all together.
    ``asked``: what the recipe asked for.
    """

    artifact_type: ClassVar[str] = "ServingReport"
    remedy: ClassVar[str] = "run `dvc repro serving`"
    schema_version: ClassVar[int] = 9
    parent_types: ClassVar[ParentTypes] = {
        "baseline": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "source": ("Source",),
    }

    baseline: str
    candidate: str
    asked: ServingSettings
    slots: int
    max_tokens: int
    max_running: int
    step_tokens: int
    draft_tokens: int
    moved_tokens: int
    items: int
    draws: tuple[Draws, ...]  # none where the bundle has no native library: then numpy draws
    pressure: Pressure


class ServingBounds(Bounds):
    max_serving_kl: float = Field(default=0.02, gt=0, le=0.5)
    max_serving_position_kl: float = Field(default=0.5, gt=0, le=5)
    min_serving_agreement: float = Field(default=0.9, ge=0.5, le=1)
    max_greedy_gap: float = Field(default=1e-3, gt=0, le=0.1)
    max_serving_float_kl: float = Field(default=0.1, gt=0, le=2)
    max_wrong_answers: float = Field(default=0.01, ge=0, le=0.1)  # share of tokens


class ServingKind(EvidenceKind[ServingReport, ServedItem, ServingBounds]):
    order, name, folder, stage = 55, "serving", "serving", "serving"
    measure_module = "evals.kinds.serving.measure"
    artifact_types, items_file = ("ServingReport",), "served_items.jsonl"
    sections: ClassVar = {"serving": ServingSettings}
    report, item, bounds = ServingReport, ServedItem, ServingBounds
    absent = Block(QUALITY, "As served", missing="Batched decoding was not measured.")

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        settings = recipe.section(ServingSettings)
        return recipe.too_long(
            {
                "serving.steps, with a prompt of one": settings.steps + 1,
                "serving.new_tokens, with a prompt of one": settings.new_tokens + 1,
            }
        )

    def deviations(self, report: Report[ServingReport, ServedItem], recipe: BaseRecipe) -> list[str]:
        made, asked = report.record.asked.model_dump(), recipe.section(ServingSettings).model_dump()
        return differing("ServingReport", {f"serving.{name}": (made[name], asked[name]) for name in asked})

    def problems(self, report: Report[ServingReport, ServedItem], evidence: Evidence) -> list[str]:
        record, items = report.record, report.items
        problems = counted("ServingReport", "items", len(items), record.items)
        problems += served_problems("ServingReport", items, record.slots, record.max_tokens)
        problems += size_problems("ServingReport", items, record.max_running)
        if record.draft_tokens and not any(item.path == "drafts" for item in items):
            problems.append("ServingReport has nothing on the path 'drafts'")
        if record.moved_tokens and not any(item.path == MOVED for item in items):
            problems.append(f"ServingReport has nothing on the path {MOVED!r}")
        problems += draw_problems("ServingReport", record.draws, any(one.level for one in evidence.hardware))
        problems += pressure_problems("ServingReport", record.pressure)
        problems += [
            f"ServingReport has {one.answers} answers under pressure with {one.settings}, not {wanted} as it claims"
            for one in record.pressure.answers
            if one.settings in PRESSED and one.answers != (wanted := pressed_answers(one.settings, record.asked))
        ]
        if not any(item.float_kl_sum is not None and item.last == record.max_tokens - 1 for item in items):
            problems.append("ServingReport does not compare the last position with the float engine")
        return problems

    def judge(self, report: Report[ServingReport, ServedItem], evidence: Evidence, bounds: ServingBounds) -> Findings:
        compared = [item for item in report.items if item.float_kl_sum is not None]
        return Findings(
            checks=(
                *served_checks(report.items, bounds),
                draws_check(report.record.draws),
                pressure_check(report.record.pressure, bounds),
                at_most(
                    "serving_float_kl",
                    "largest mean KL of a way of serving against the float engine, nats",
                    _means(
                        [item for item in compared if item.first >= CONTEXT] or compared,
                        lambda item: item.float_kl_sum or 0.0,
                        fine=False,  # one slot has too few positions: the KL of a single one can be 2 nats
                    ),
                    bounds.max_serving_float_kl,
                    "paths",
                ),
            ),
            facts=(
                Fact(name=MAX_RUNNING, title="sequences in a step, at most", value=report.record.max_running),
                Fact(
                    name=DRAFT_TOKENS, title="drafts of a sequence in a step, at most", value=report.record.draft_tokens
                ),
            ),
        )

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        report, items = load(folder, ServingReport).record, read_items(folder / self.items_file, ServedItem)
        pressed = report.pressure.answers
        facts = (
            FactRow("slots", "Slots", report.slots, note="each on every path"),
            FactRow("max_running", "Sequences in a step", report.max_running, note="and every number below"),
            FactRow("last_position", "Last position reached", max(item.last for item in items)),
            FactRow("moved", "Tokens whose blocks were moved to another engine", report.moved_tokens),
            FactRow("draws", "Tokens drawn", sum(one.draws for one in report.draws), note="by the bundle and by numpy"),
            FactRow(
                "pressed",
                "Answers of the serving core under pressure",
                sum(one.answers for one in pressed),
                note=f"{sum(one.preempted for one in pressed)} times preempted, "
                f"{sum(one.cached for one in pressed)} prompt tokens found in blocks, "
                f"{sum(one.accepted for one in pressed)} drafted tokens accepted, "
                f"{report.pressure.steps_ahead} steps begun ahead",
            ),
        )
        rows: list[tuple[str, float, float, float, float | None]] = []
        for path in dict.fromkeys(item.path for item in items):
            own = [item for item in items if item.path == path]
            tokens = sum(item.tokens for item in own)
            kls = [item.float_kl_sum for item in own if item.float_kl_sum is not None]
            rows.append(
                (
                    path,
                    tokens,
                    sum(item.agree for item in own) / tokens,
                    sum(item.kl_sum for item in own) / tokens,
                    sum(kls) / tokens if len(kls) == len(own) else None,
                )
            )
        table = Table(
            ("Path", "Tokens", "Same top token", "KL", "KL against float"),
            tuple(rows),
            "KL and top tokens against a prefill of the same tokens in one piece in slot 0.",
        )
        return Block(QUALITY, "As served", facts=facts, table=table, metrics=fact_metrics("serving", facts))


def served_problems(name: str, items: Sequence[ServedItem], slots: int, max_tokens: int) -> list[str]:
    """What is missing or impossible in the items ``name`` of an engine with so many slots and positions."""
    problems: list[str] = []
    for path in PATHS:
        own = [item for item in items if item.path == path]
        if path in SEVERAL and slots == 1:
            continue
        if not own:
            problems.append(f"{name} has nothing on the path {path!r}")
        elif path in (*EVERY_SLOT, *SEVERAL) and (absent := set(range(slots)) - {item.slot for item in own}):
            problems.append(f"{name} has nothing of slots {_few(absent)} on the path {path!r}")
    for path in ("decode", "greedy"):
        own = [item for item in items if item.path == path]
        if absent := set(range(1, slots + 1)) - {item.batch for item in own}:
            problems.append(f"{name} has no step of batch size {_few(absent)} on the path {path!r}")
        if slots > 1 and not any(item.first_slot for item in own):
            problems.append(f"{name} has no batch behind the first slot on the path {path!r}")
        reached = max((item.last for item in own), default=-1)
        if reached != max_tokens - 1:
            problems.append(f"{name} reaches position {reached} on the path {path!r}, not {max_tokens - 1}")
    for complaint, breaks in RULES:
        if found := [item for item in items if breaks(item)]:
            problems.append(f"{len(found)} of {len(items)} served items {complaint}: path {found[0].path!r}")
    return problems


def size_problems(name: str, items: Sequence[ServedItem], most: int) -> list[str]:
    """Batch sizes, up to ``most``, that the items ``name`` lack."""
    return [
        f"{name} has no step of batch size {_few(absent)} on the path {path!r}"
        for path in EVERY_SIZE
        if (absent := set(range(1, most + 1)) - {item.batch for item in items if item.path == path})
    ]


def draw_problems(name: str, draws: Sequence[Draws], native: bool) -> list[str]:
    """What is missing or impossible in the draws ``name`` of a bundle with a native library, or without one."""
    if not draws and not native:
        return []
    problems = [
        f"{name} has no draws with {missing}" for missing in DRAWN if missing not in {d.settings for d in draws}
    ]
    wrong = [one.settings for one in draws if not 0 <= one.differ <= one.draws or not one.draws]
    return problems + [f"{name} has an impossible number of draws with {settings}" for settings in wrong]


def pressure_problems(name: str, pressure: Pressure) -> list[str]:
    """What is missing or impossible in the answers ``name`` of the serving core."""
    found = [one.settings for one in pressure.answers]
    wanted = [settings for settings in PRESSED if settings != CHOICES or pressure.constrains]
    wanted += [AHEAD] if pressure.steps_at_once > 1 else []
    wanted += [TURNS] if pressure.shares else []
    problems = [f"{name} has no answers under pressure with {missing}" for missing in wanted if missing not in found]
    problems += [
        f"{name} has impossible numbers of answers under pressure with {one.settings}"
        for one in pressure.answers
        if min(one.answers, one.tokens) < 1 or not 0 <= one.wrong <= max(one.tokens, one.answers) or not one.gap >= 0
    ]
    if pressure.scarce and not any(one.preempted for one in pressure.answers):
        problems.append(f"{name} was not under pressure: no request lost its blocks")
    if pressure.steps_at_once > 1 and not pressure.steps_ahead:
        problems.append(f"{name} has no step that began before the one before had ended")
    if pressure.shares and not any(one.cached for one in pressure.answers):
        problems.append(f"{name} was not under pressure: no prompt was found again")
    return problems


def pressed_answers(settings: str, asked: ServingSettings) -> int:
    """Of one kind of :data:`PRESSED`: these take turns among the requests, and each request is answered twice."""
    return 2 * len(range(PRESSED.index(settings), asked.pressed, len(PRESSED)))


def pressure_check(pressure: Pressure, bounds: ServingBounds) -> Check:
    """The serving core answers as a prefill in one piece says, whatever it shares, preempts and drafts."""
    return at_most(
        "serving_answers",
        "share of tokens of the serving core, under pressure, that do not follow from one prefill",
        {one.settings: one.wrong / max(one.tokens, one.wrong, 1) for one in pressure.answers},
        bounds.max_wrong_answers,
        "settings",
    )


def draws_check(draws: Sequence[Draws]) -> Check:
    """The bundle's library draws the tokens that numpy draws."""
    title = "draws of the bundle's library that numpy does not make"
    if not draws:
        reason = "the bundle has no sampler of its own: numpy draws"
        return Check(name="serving_draws", title=title, outcome=Outcome.PASS, reason=reason)
    return at_most("serving_draws", title, {one.settings: one.differ for one in draws}, 0, "settings")


def served_checks(items: Sequence[ServedItem], bounds: ServingBounds) -> tuple[Check, ...]:
    """Every way of serving against one prefill of the same engine."""
    gaps = {_place(item): item.gap for item in items if item.path in CHOOSING}
    return (
        at_most(
            "serving_kl",
            "largest mean KL of a way of serving against one prefill in slot 0, nats",
            _means([item for item in items if item.path != "generation"], lambda item: item.kl_sum),
            bounds.max_serving_kl,
            "groups",
        ),
        at_most(
            "serving_position_kl",
            "largest KL at one position as served against one prefill in slot 0, nats",
            {_place(item): item.kl_max for item in items if item.path != "generation"},
            bounds.max_serving_position_kl,
            "groups",
        ),
        at_least(
            "serving_agreement",
            "smallest share of same top tokens, as served and in one prefill in slot 0",
            _means(items, lambda item: item.agree, fine=False),
            bounds.min_serving_agreement,
            "paths",
        ),
        at_most(
            "serving_greedy",
            "largest logit that greedy decoding passes over, above the chosen one's",
            gaps,
            bounds.max_greedy_gap,
            "groups",
        ),
    )


RULES: tuple[Rule[ServedItem], ...] = (
    *token_rules(lambda item: item.tokens),
    ("have a mean KL above their largest", mean_above_largest),
    ("have no finite error, gap or KL", lambda i: not all(map(math.isfinite, (i.error, i.gap, i.float_kl_sum or 0.0)))),
    ("lie in slots that their batch does not have", lambda i: not 0 <= i.slot - i.first_slot < i.batch),
    ("end before they begin", lambda i: not 0 <= i.first <= i.last),
)


def _place(item: ServedItem) -> str:
    return f"{item.path}, slot {item.slot}, batch {item.batch} from slot {item.first_slot}"


def _means(items: Sequence[ServedItem], value: Callable[[ServedItem], float], *, fine: bool = True) -> dict[str, float]:
    """Means per token over each path; if ``fine``, also over each slot and each batch size of a path."""
    groups: dict[str, list[ServedItem]] = {}
    for item in items:
        groups.setdefault(item.path, []).append(item)
        if fine:
            groups.setdefault(f"{item.path}, slot {item.slot}", []).append(item)
            groups.setdefault(f"{item.path}, batch {item.batch}", []).append(item)
    return {name: math.fsum(map(value, own)) / sum(item.tokens for item in own) for name, own in groups.items()}


def _few(numbers: set[int]) -> str:
    shown = sorted(numbers)
    return ", ".join(map(str, shown[:3])) + (", …" if len(shown) > 3 else "")


KIND = ServingKind()
