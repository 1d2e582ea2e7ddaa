"""Checks of a plain largest or smallest value, where one bad part must not hide in a mean.

A confidence bound says how far a mean may be off. These values are no means: further evidence can only make them worse,
so the value itself is compared with its bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from evals.check import Check, Outcome


def at_most(name: str, title: str, values: Mapping[str, float], bound: float, unit: str, too_few: str = "") -> Check:
    """The largest of ``values``, which are named. ``too_few``: why so few cannot pass, if so; they can still fail."""
    worst = max(values, key=lambda key: (values[key], key))
    failed = not values[worst] <= bound
    return Check(
        name=name,
        title=title,
        outcome=_outcome(failed, too_few),
        reason=too_few
        if too_few and not failed
        else f"{worst}: {values[worst]:.3g} is {'above' if failed else 'at most'} {bound:g}"
        + ("" if failed else ", and no other is larger"),
        direction="at_most",
        value=values[worst],
        bound=bound,
        unit=unit,
        n=len(values),
    )


def at_least(name: str, title: str, values: Mapping[str, float], bound: float, unit: str) -> Check:
    """The smallest of ``values``, which are named."""
    worst = min(values, key=lambda key: (values[key], key))
    failed = not values[worst] >= bound
    return Check(
        name=name,
        title=title,
        outcome=_outcome(failed, ""),
        reason=f"{worst}: {values[worst]:.4g} is {'below' if failed else 'at least'} {bound:g}"
        + ("" if failed else ", and no other is smaller"),
        direction="at_least",
        value=values[worst],
        bound=bound,
        unit=unit,
        n=len(values),
    )


def _outcome(failed: bool, too_few: str) -> Outcome:
    return Outcome.FAIL if failed else Outcome.INCONCLUSIVE if too_few else Outcome.PASS
