"""What a server may run: no more than its verdict's evidence measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from evals.kinds.serving import DRAFT_TOKENS, MAX_RUNNING
from runtime.gateway.http.listen import ServeError
from runtime.wire.limits import Limits

# Fact of a verdict -> field of the limits, option, parameter of the recipe, and what else may have kept it low.
LIMITS = {
    MAX_RUNNING: (
        "max_running",
        "--max-running",
        "serving.max_running",
        ", and build.slots where the engine had no room for more",
    ),
    DRAFT_TOKENS: (
        "max_draft_tokens",
        "--draft-tokens",
        "serving.draft_tokens",
        " (a model with recurrent state takes no drafts)",
    ),
}

log = logging.getLogger("tapeout.server")


def limits_within(
    wanted: Mapping[str, int | None], facts: Mapping[str, float], source: str, *, unsafe: bool = False
) -> Limits:
    """``wanted``: by field of the limits; None: the default, or as much of it as was measured.

    ``facts``: of the verdict, by name. Unless ``unsafe``, :class:`ServeError` for more than was measured, and for a
    verdict that does not say what was measured.
    """
    limits = Limits()
    for fact, (field, option, parameter, cause) in LIMITS.items():
        value, default = wanted.get(field), int(getattr(limits, field))
        if fact not in facts:
            if not unsafe:
                raise ServeError(
                    f"the evidence about {source} does not say with how many of {parameter} it was measured",
                    expected=f"a verdict with the fact {fact}",
                    remedy="run `dvc repro gate`, and sign and register again, or accept the risk with --unsafe",
                )
            limits = replace(limits, **{field: default if value is None else value})
            continue
        most = int(facts[fact])
        if value is not None and value > most and not unsafe:
            raise ServeError(
                f"{option} {value} is more than the evidence about {source} covers",
                expected=f"at most {most}, which was measured",
                remedy=f"raise {parameter} in the recipe{cause}, and run `dvc repro gate`, or accept the risk with "
                "--unsafe",
            )
        if value is not None and value > most:
            log.warning("--unsafe: %s %d, and %d was measured", option, value, most)
        chosen = value if value is not None else default if unsafe else min(default, most)
        limits = replace(limits, **{field: chosen})
    return limits


def require_covered(limits: Limits, facts: Mapping[str, float], source: str) -> None:
    """:class:`ServeError` unless the evidence about another engine covers the limits that a server runs with."""
    limits_within({field: int(getattr(limits, field)) for field, *_ in LIMITS.values()}, facts, source)
