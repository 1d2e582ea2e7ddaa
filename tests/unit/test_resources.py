"""Too little disk or memory is said before a stage starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapeout.errors import ResourceError
from tapeout.resources import Needs, available_memory, free_disk, require


def test_what_is_there_is_enough_for_little(tmp_path: Path) -> None:
    said: list[str] = []
    require("export", Needs(10_000_000, 20_000_000), tmp_path / "not" / "yet", said.append)
    assert said == ["takes about 0.0 GB of disk and 0.0 GB of memory"]
    assert free_disk(tmp_path / "not" / "yet") > 0 and available_memory() > 0


def test_too_little_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="of disk free at") as caught:
        require("export", Needs(1 << 60, 1), tmp_path)
    assert caught.value.expected == "about 1152921504.6 GB for export"
    with pytest.raises(ResourceError, match="of memory available") as caught:
        require("export", Needs(1, 1 << 60), tmp_path)
    assert caught.value.remedy
