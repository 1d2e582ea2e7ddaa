"""docs/extending.md lists the plug-ins that there are, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import iter_modules

import pytest

from engines.load import known_targets
from evals.kinds.tasks.generative import generative_tasks
from evals.known import kinds
from quantization.methods import method
from tapeout.formats import formats
from tapeout.recipe import Quantize

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()


def listed(title: str) -> list[str]:
    """The names after ``Title:`` at the beginning of a line."""
    line = re.search(rf"^{title}: (.+)\.$", PAGE, re.MULTILINE)
    assert line is not None, f"the page has no list of {title}"
    return re.findall(r"`([^`]+)`", line[1])


def modules(folder: str) -> list[str]:
    """Modules and packages in a folder."""
    return sorted(module.name for module in iter_modules([str(ROOT / folder)]))


def test_methods() -> None:
    assert listed("Methods") == modules("quantization/methods") == sorted(Quantize().candidates)
    assert all(callable(method(name).propose) for name in listed("Methods"))


def test_number_formats() -> None:
    assert listed("Number formats") == sorted(formats())


def test_kinds_of_evidence() -> None:
    assert modules("evals/kinds") == sorted(kind.name for kind in kinds())


def test_generative_tasks() -> None:
    assert listed("Generative tasks") == modules("evals/kinds/tasks/generative") == sorted(generative_tasks())


def test_targets() -> None:
    assert listed("Targets") == sorted(known_targets())


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:tapeout|quantization|engines|evals|tests)/[^`]+)`", PAGE)))
)
def test_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()
