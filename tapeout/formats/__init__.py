"""The number formats that there are: one module each, found by listing this folder. A module sets ``FORMAT``."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from tapeout.number_format import NumberFormat, Uncoded


@cache
def formats() -> dict[str, NumberFormat | Uncoded]:
    """By name."""
    found = (import_module(f"{__name__}.{module.name}").FORMAT for module in pkgutil.iter_modules(__path__))
    return {one.name: one for one in found}
