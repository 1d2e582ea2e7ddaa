"""The public API on a small bundle, and its names for users and type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tapeout
from tapeout.errors import ArtifactError, RequestError
from tests.exported import build_float, family_graph

ROOT = Path(__file__).parents[2]
NAMES = ["SamplingSettings", "TapeoutError", "TextEngine", "__version__", "generate", "load"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_float(family_graph("llama"), tmp_path_factory.mktemp("api") / "bundle", slots=2).folder


def test_a_folder_and_an_open_engine_give_the_same_text(bundle: Path) -> None:
    text = tapeout.generate(str(bundle), "w5 w6 w7", raw=True, max_new_tokens=4)
    with tapeout.load(bundle, threads=1) as engine:
        assert isinstance(engine, tapeout.TextEngine)
        assert tapeout.generate(engine, "w5 w6 w7", raw=True, max_new_tokens=4) == text
        pieces = list(engine.stream(engine.encode("w5 w6 w7", raw=True), max_new_tokens=4))
    assert "".join(piece.text for piece in pieces) == text
    assert text and pieces[-1].finish_reason in ("stop", "length")


def test_sampling_is_repeated_by_its_seed(bundle: Path) -> None:
    sampling = tapeout.SamplingSettings(temperature=2.0, seed=3)
    with tapeout.load(bundle) as engine:
        drawn = {tapeout.generate(engine, "w5", raw=True, max_new_tokens=6, sampling=sampling) for _ in range(3)}
        greedy = tapeout.generate(engine, "w5", raw=True, max_new_tokens=6)
    assert len(drawn) == 1 and drawn != {greedy}


def test_mistakes_are_errors_of_tapeout(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        tapeout.load(tmp_path)
    assert isinstance(caught.value, tapeout.TapeoutError)
    with pytest.raises(RequestError, match="no chat format"):
        tapeout.generate(bundle, "hello")


def test_names_are_those_that_type_checkers_see() -> None:
    stub = ast.parse((ROOT / "tapeout/__init__.pyi").read_text())
    typed = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(typed | {"__version__"}) == NAMES
    assert set(NAMES) <= set(dir(tapeout))
    assert all(getattr(tapeout, name) is not None for name in NAMES)
    with pytest.raises(AttributeError, match=r"no attribute 'lod'; it offers .*load"):
        _ = tapeout.lod  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
