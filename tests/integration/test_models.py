"""docs/models.md says what is true of some of its families, and has a row for each."""

from __future__ import annotations

import pytest

from tests.families import ALL_FAMILIES
from tests.model_table import PAGE, examine, rows_of

# The others take about 15 minutes: `python -m tests.model_table` runs them all and writes the page.
AGAIN = (
    "bloom",
    "falcon",
    "gemma4",
    "granite",
    "granite-scaled-logits",
    "granite_swa",
    "hyperclovax",
    "mamba",
    "minicpm3",
    "mixtral",
    "mpt",
    "phi3-longrope",
)


def test_the_page_has_a_row_for_every_family() -> None:
    assert list(rows_of(PAGE.read_text())) == sorted(ALL_FAMILIES)


@pytest.mark.parametrize("family", AGAIN)
def test_a_row_is_what_a_run_gives(family: str) -> None:
    assert rows_of(PAGE.read_text())[family] == str(examine(family))
