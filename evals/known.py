"""Finds the kinds of evidence: a folder of ``evals/kinds`` is all that the gate, the recipe and the report need."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from evals import kinds as package
from evals.kind import Evidence, EvidenceKind


def kinds() -> tuple[EvidenceKind[Any, Any, Any], ...]:
    """Every kind, in the order of its checks."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    found = [importlib.import_module(f"{package.__name__}.{name}").KIND for name in names]
    return tuple(sorted(found, key=lambda kind: kind.order))


def missing(evidence: Evidence, needed: str = "executed") -> tuple[str, ...]:
    """Types of the reports that are not there."""
    absent = (
        kind for kind in kinds() if kind.needed == needed and kind.artifact_types and kind.given(evidence) is None
    )
    return tuple(dict.fromkeys(kind.artifact_types[0] for kind in absent))
