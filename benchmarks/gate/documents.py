"""Rows of checks whose independent units are documents: text, shadow and parity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.gate import evidence as made
from benchmarks.gate.evidence import (
    Floats,
    Run,
    Shape,
    all_or_little,
    clustered,
    disagreeing,
    lognormal,
    rare,
    resampled,
    scaled_to,
    scaled_to_share,
)
from benchmarks.gate.rows import BOUND, Outcomes, Row, judged
from evals.check import Outcome
from evals.conditions import times_bound
from evals.kind import Bounds, EvidenceKind
from evals.kinds import parity, shadow, text
from evals.kinds.parity import ParityReport, TableError
from evals.kinds.shadow import ShadowReport

NO_ERROR = TableError(rows=1, error=0, worst=0)


@dataclass(frozen=True)
class Documents:
    """Evidence whose independent units are documents. ``minimum``, ``kl``, ``agreement``: parameters of the gate."""

    kind: EvidenceKind[Any, Any, Any]
    units: str
    minimum: str
    count: int  # documents of the default recipe
    kl: str
    agreement: str
    kl_check: str
    agreement_check: str

    def items(self, tokens: Floats, kl: Floats, differ: Floats, log_ratio: Floats) -> tuple[Any, ...]:
        if self.kind.name == "text":
            return made.text_items(tokens, kl, differ, log_ratio)
        return (made.shadow_items if self.kind.name == "shadow" else made.parity_items)(tokens, kl, differ)

    def judge(self, items: tuple[Any, ...], bounds: Bounds) -> dict[str, Outcome]:
        records = {
            "shadow": ShadowReport.model_construct(champion="b", champion_is_baseline=True),
            "parity": ParityReport.model_construct(embedding=NO_ERROR, head=NO_ERROR),
        }
        return judged(self.kind, records.get(self.kind.name), items, bounds)


TEXT = Documents(
    text.KIND, "documents", "min_text_documents", 300, "max_kl", "min_top_token", "kl", "top_token"
)  # fmt: skip
SHADOW = Documents(
    shadow.KIND, "prompts", "min_shadow_prompts", 300, "max_shadow_kl", "min_shadow_agreement", "shadow_kl",
    "shadow_agreement",
)  # fmt: skip
PARITY = Documents(
    parity.KIND, "documents", "min_documents", 32, "max_parity_kl", "min_parity_top_token", "parity_kl",
    "parity_top_token",
)  # fmt: skip


def document_rows(of: Documents, run: Run, bounds: Bounds, *, count: int, promise: str = BOUND) -> Iterator[Row]:
    """The truth of each check lies on its bound; but for ``BOUND``, that of the mean without a limit for a document."""
    bounds = bounds.model_copy(update={of.minimum: min(getattr(bounds, of.minimum), count)})
    limit, allowed = times_bound(getattr(bounds, of.minimum)), 1 - getattr(bounds, of.agreement)
    own = resampled(run.column(of.kind.name, 1))
    free = limit * allowed >= 1  # a document may disagree everywhere
    garbage = ("1 % of documents disagree everywhere", all_or_little(allowed, min(0.01, allowed / 2)))
    shapes: list[tuple[str, Shape]] = [
        ("rare: 1 % of documents, 50 times", rare(0.01, 50, own)),
        ("rare: 2 % of documents, 50 times", rare(0.02, 50, own)),
        ("rare: 0.5 % of documents, 100 times", rare(0.005, 100, own)),
    ]
    shares: list[tuple[str, Shape]] = [garbage]
    if promise == BOUND:
        shapes = [
            ("the run's own", own),
            ("log-normal, σ = 1", lognormal(1.0)),
            ("log-normal, σ = 1.5", lognormal(1.5)),
            *shapes,
        ]
        shares = [
            ("independent tokens", lambda rng, size: np.full(size, allowed)),
            *(
                (f"correlation of tokens {each}", clustered(allowed, each))
                for each in ((0.1, 0.5) if free else (0.01, 0.03))
            ),
            *([garbage] if free else []),
        ]
    for number, (title, shape) in enumerate(shapes):
        other, share = shares[min(number, len(shares) - 1)]
        checks = {of.kl_check: title} | ({"perplexity": title} if of is TEXT else {})
        if number < len(shares):
            checks[of.agreement_check] = other
        outcomes = _documents(of, run, bounds, count, shape, share, limit if promise == BOUND else 0)
        yield Row(checks, f"{count} {of.units}", promise, outcomes)


def _documents(
    of: Documents, run: Run, bounds: Bounds, count: int, shape: Shape, share: Shape, limit: float
) -> Outcomes:
    """``limit``: how many times the bound a document counts for at most, where the truth is of that mean; or 0."""

    def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        tokens, allowed = run.column(of.kind.name, 0), 1 - getattr(bounds, of.agreement)
        ratio = math.log(bounds.max_perplexity_ratio) if isinstance(bounds, text.TextBounds) else 0.0
        many = scaled_to(shape, limit) if limit else 1.0
        disagree = scaled_to_share(share, tokens, min(limit * allowed, 1.0), allowed) if limit else 1.0
        for _ in range(runs):
            sizes, differ = disagreeing(share, disagree, tokens, rng, (1, count))
            multiples = many * shape(rng, (1, count))[0]
            items = of.items(sizes[0], getattr(bounds, of.kl) * multiples, differ[0], ratio * multiples)
            yield of.judge(items, bounds)

    return outcomes
