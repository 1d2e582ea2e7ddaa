"""``python -m benchmarks.fleet.streaming`` runs with real processes, and leaves none. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.command import ROOT
from tests.exported import build_float, tiny_graph
from tests.native import own_cache


def test_everything_is_measured_and_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    build_float(tiny_graph(), bundle := tmp_path / "tiny", slots=32)
    wanted = tmp_path / "found.json", tmp_path / "page.md"
    options = ["--quick", "--json", str(wanted[0]), "--page", str(wanted[1])]
    command = [sys.executable, "-m", "benchmarks.fleet.streaming", str(bundle), *options]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500, stdout=subprocess.DEVNULL)
    found, page = json.loads(wanted[0].read_text()), wanted[1].read_text()

    for costs in found["tokens"]["streams"].values():
        assert costs.keys() == {"local engine", "fleet of one", "fleet of two"}
        assert all(cost["gateway"] > 0 and cost["engine"] > 0 and cost["transit_p50"] > 0 for cost in costs.values())
    for one in found["gaps"].values():
        assert one["repeats"] == 1 and one["same"] == one["answers"] == 8
        assert 0 < len(one["gaps"]) == len(one["alone"]) and min(one["gaps"]) > 0
    for kind in ("cold", "standby"):
        (step,) = found["new"][kind]
        assert 0 < step["listed"] <= step["first_token"] and step["cold_seconds"] > 0
    assert found["admission"]["ways"].keys() == {"one gateway alone", "shared, SQLite"}
    assert page.count("| holds |") + page.count("| **missed** |") == 11

    assert not [one for one in psutil.process_iter(["cmdline"]) if str(bundle) in (one.info["cmdline"] or [])]
