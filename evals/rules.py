"""Soundness rules that kinds of evidence share. A rule is a complaint, and whether an item deserves it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

# KL and log-likelihoods are differences of floating-point sums over the vocabulary: one may fall this far below zero.
ROUNDING_NATS = 1e-5
EXAMPLES_SHOWN = 3
DIGEST_CHARS = 64


class Scored(Protocol):
    """An item with the divergence of two engines, summed over tokens."""

    @property
    def agree(self) -> int: ...
    @property
    def kl_sum(self) -> float: ...


class Summed(Scored, Protocol):
    @property
    def tokens(self) -> int: ...
    @property
    def kl_max(self) -> float: ...


T = TypeVar("T")
Item = TypeVar("Item", bound=Scored)
Rule = tuple[str, Callable[[T], bool]]


def token_rules(tokens: Callable[[Item], int]) -> tuple[Rule[Item], ...]:
    """Every item with token counts, agreement and a KL sum must keep these."""
    return (
        ("have no tokens", lambda i: tokens(i) < 1),
        ("agree on more tokens than they have, or on fewer than none", lambda i: not 0 <= i.agree <= tokens(i)),
        ("have a non-finite or negative KL", lambda i: not sum_of_nats(i.kl_sum, tokens(i))),
    )


def sum_of_nats(total: float, tokens: int) -> bool:
    """Whether a sum of KL or negative log-likelihood over ``tokens`` positions is possible."""
    return math.isfinite(total) and total >= -ROUNDING_NATS * max(tokens, 1)


def mean_above_largest(item: Summed) -> bool:
    if not math.isfinite(item.kl_max):
        return True
    return item.tokens > 0 and item.kl_sum / item.tokens > item.kl_max + ROUNDING_NATS


def counted(artifact_type: str, what: str, found: int, claimed: int) -> list[str]:
    if not found:
        return [f"{artifact_type} has no {what}"]
    return [f"{artifact_type} has {found} {what}, but claims {claimed}"] if found != claimed else []


def differing(artifact_type: str, found: Mapping[str, tuple[int, int]]) -> list[str]:
    """One line per count that is not as the recipe asks; ``found``: measured, and asked for."""
    return [
        f"{artifact_type} was measured with {measured} {what}, not with {asked} as the recipe asks"
        for what, (measured, asked) in found.items()
        if measured != asked
    ]


def broken(
    what: str, items: Sequence[T], name: Callable[[T], str], rules: Iterable[Rule[T]], *, key: str = ""
) -> list[str]:
    """One line if a name occurs twice, and one per rule that any item breaks, with how many and the first few by name.

    ``what``: one of the items; ``key``: what its name stands for, if not for the item.
    """
    names = [name(item) for item in items]
    repeated = [each for each, count in Counter(names).items() if count > 1]
    problems = [f"{key or what} {_listed(repeated)} more than once"] if repeated else []
    for complaint, breaks in rules:
        found = [each for item, each in zip(items, names, strict=True) if breaks(item)]
        if found:
            problems.append(f"{len(found)} of {len(items)} {what}s {complaint}: {_listed(found)}")
    return problems


def copies(
    what: str,
    items: Sequence[T],
    name: Callable[[T], str],
    content: Callable[[T], Iterable[tuple[object, ...]]],
) -> list[str]:
    """One line if items with different names are copies: what is measured twice is no second observation.

    ``content``: what two different items cannot share, each as a title and values; compared one by one, so that an
    item that was copied under another hash is found by its numbers.
    """
    first: dict[tuple[object, ...], str] = {}
    pairs: dict[str, list[str]] = {}
    for item in items:
        for entry in content(item):
            other = first.setdefault(entry, name(item))
            if other != name(item):
                pairs.setdefault(str(entry[0]), []).append(f"{short(name(item))} is {short(other)}")
    return [
        f"{len(found)} of {len(items)} {what}s are copies, with the same {title}: {_listed(found)}"
        for title, found in pairs.items()
    ]


def same_numbers(kl_sum: float, *others: float) -> list[tuple[object, ...]]:
    """For :func:`copies`. Sums of KL to the last bit are the mark of a document, unless the engines are equal there."""
    return [("numbers", kl_sum, *others)] if kl_sum > 0 else []


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(short, names[:EXAMPLES_SHOWN])) + (", …" if len(names) > EXAMPLES_SHOWN else "")


def short(name: str) -> str:
    return f"{name[:12]}…" if len(name) == DIGEST_CHARS else name
