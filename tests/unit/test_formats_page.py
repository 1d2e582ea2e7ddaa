"""``docs/formats.md`` lists what is read as the tables in the code do."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.export.gguf_mixtures import MIXTURES
from quantization.stored import GGUF_TYPES, LAYOUTS

SECTION = (Path(__file__).parents[2] / "docs/formats.md").read_text().partition("## What is read\n")[2]


def test_every_layout_has_a_row_with_its_tensors_and_types() -> None:
    rows = dict(re.findall(r"^\| `([a-z0-9 -]+)` \| (.+) \|$", SECTION, re.MULTILINE))
    said = {
        name: [
            (part, tuple(re.findall(r"[A-Z][A-Z0-9_]+", types))) for part, types in re.findall("`(.+?)` ([^;]+)", row)
        ]
        for name, row in rows.items()
    }
    assert said == {name: [(part.name, part.types) for part in layout.parts] for name, layout in LAYOUTS.items()}


def test_every_type_of_gguf_is_listed() -> None:
    blocks, floats = (
        re.search(rf"^\| GGUF, {kind} \| (.+) \|$", SECTION, re.MULTILINE) for kind in ("blocks", "floats")
    )
    assert blocks and floats
    assert blocks[1].split(", ") == [name for name, (values, _) in GGUF_TYPES.items() if values > 1]
    assert floats[1].split(", ") == [name for name, (values, _) in GGUF_TYPES.items() if values == 1]


def test_every_architecture_of_experts_in_gguf_is_listed() -> None:
    rows = re.findall(r"^\| GGUF `([a-z0-9-]+)`[a-z ]* \| `([a-z0-9_`, ]+)` \|", SECTION, re.MULTILINE)
    said = {architecture: models.split("`, `") for architecture, models in rows}
    kinds = {name: [each.model_type for each in (m, m.shared) if each] for name, m in MIXTURES.items()}
    assert said == kinds
