"""Write the table of docs/models.md: what becomes of each family in tests/families.py, at two layers.

    python -m tests.model_table              # every family, about 15 minutes on two quiet cores
    python -m tests.model_table llama gpt2   # these rows again

A row says what was run, not what is believed. Where a family is refused, the row holds the message.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.export.checkpoint import load_checkpoint
from tapeout.errors import TapeoutError
from tests.exported import build_float, family_graph
from tests.families import ALL_FAMILIES
from tests.family_engines import PROMPTS, difference_from_checkpoint, largest_errors, make

PAGE = Path(__file__).parents[1] / "docs/models.md"
HEADER = "| family | transformers' type | exported | quantized | decoded in batches |"
DOCUMENTS, DOCUMENT_TOKENS = 4, 60
TOLERANCE = 1e-4  # of float engines, relative to a token's largest logit; what is measured is near 1e-6


@dataclass(frozen=True)
class Row:
    """Each of the three is ``yes``, or why not; empty where it was not reached."""

    family: str
    exported: str
    quantized: str = ""
    decoded: str = ""

    def __str__(self) -> str:
        cells = self.family, f"`{ALL_FAMILIES[self.family].model_type}`", self.exported, self.quantized, self.decoded
        return f"| {' | '.join(cells)} |"


def examine(family: str) -> Row:
    """Export, quantize and build a family; compare its engines with transformers and with its own checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            graph = family_graph(family)
        except TapeoutError as error:
            return Row(family, f"refused: {error.found}")
        errors = largest_errors(
            build_float(graph, folder / "float", slots=len(PROMPTS)), load_checkpoint(graph.folder).model, family
        )
        wrong = [f"{use} differs by {error:.0e}" for use, error in errors.items() if not error < TOLERANCE]
        decoded = "; ".join(wrong) or "yes"
        try:
            difference = difference_from_checkpoint(make(family, folder), DOCUMENTS, DOCUMENT_TOKENS)
        except TapeoutError as error:
            return Row(family, "yes", f"refused: {error.found}", decoded)
        return Row(family, "yes", difference or "yes", decoded)


def rows_of(page: str) -> dict[str, str]:
    """The rows of the page by family."""
    lines = page.partition(HEADER)[2].splitlines()[2:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def write(families: Iterable[str]) -> None:
    """Replace these families' rows, one by one, and drop rows of families that are no more."""
    for family in families:
        row = str(examine(family))
        print(row, flush=True)
        page = PAGE.read_text()
        rows = {**rows_of(page), family: row}
        table = [rows[name] for name in sorted(ALL_FAMILIES) if name in rows]
        PAGE.write_text("\n".join([page.partition(HEADER)[0] + HEADER, "|---|---|---|---|---|", *table, ""]))


if __name__ == "__main__":
    write(sys.argv[1:] or sorted(ALL_FAMILIES))
