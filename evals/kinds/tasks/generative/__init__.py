"""The generative tasks that there are: one module each, found by listing this folder. A module sets ``TASK``.

A task has the name of its module; ``evaluate.tasks`` names it.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from evals.kinds.tasks.generative_task import GenerativeTask


@cache
def generative_tasks() -> dict[str, GenerativeTask]:
    """By name."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").TASK for name in names}
