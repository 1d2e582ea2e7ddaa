"""The kinds of evidence: one file each. A file here is all that the gate, the recipe and the report need to know."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from evals.kind import Evidence, Kind


def kinds() -> tuple[Kind[Any, Any, Any], ...]:
    """Every kind, in the order of its checks."""
    found = [importlib.import_module(f"{__name__}.{module.name}").KIND for module in pkgutil.iter_modules(__path__)]
    return tuple(sorted(found, key=lambda kind: kind.order))


def missing(evidence: Evidence, needed: str = "executed") -> tuple[str, ...]:
    """Nouns of the reports that are not there."""
    absent = (kind for kind in kinds() if kind.needed == needed and kind.nouns and kind.given(evidence) is None)
    return tuple(dict.fromkeys(kind.nouns[0] for kind in absent))
