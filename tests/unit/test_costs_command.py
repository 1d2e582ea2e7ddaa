from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.costs import timing
from pipeline.cli.main import app
from quantization.units import CACHE_CANDIDATES, candidates_for
from tapeout.errors import RecipeError
from tapeout.schemes import EMBEDDING_CANDIDATES
from tests.graphs import llama_graph
from tests.native import own_cache

PARAMS = """
model: {source: "file:m"}
data: {source: "file:d"}
plan: {context: 32}
build: {slots: 4, threads: 1}
benchmark: {batches: [1]}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test has measured, the others read."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tiny_checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_cache(monkeypatch, cache)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    llama_graph(tiny_checkpoint, tmp_path / "graph")
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path


def ask(folder: Path, *words: str) -> str:
    options = ("--artifacts", str(folder), "--params", str(folder / "params.yaml"))
    done = CliRunner().invoke(app, ["costs", *options, *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_every_kernel_is_timed_on_every_shape_at_every_row_count(folder: Path) -> None:
    """Whatever the recipe has written out; a second time nothing is measured again."""
    found = json.loads(ask(folder, "--tokens", "8,1", "--json"))
    assert found["tokens"] == [1, 8] and found["threads"] == 1
    head = next(product for product in found["linears"] if (product["columns"], product["outputs"]) == (128, 1024))
    assert list(head["schemes"]) == [kernel.name for kernel in candidates_for(128, EMBEDDING_CANDIDATES)]
    assert all(kernel["bytes"] > 0 for product in found["linears"] for kernel in product["schemes"].values())
    assert list(found["attention"]["schemes"]) == [cache.dtype for cache in CACHE_CANDIDATES]
    parts = [*found["linears"], found["attention"]]
    seconds = [kernel["seconds"] for part in parts for kernel in part["schemes"].values()]
    assert all(list(by_tokens) == ["1", "8"] and min(by_tokens.values()) > 0 for by_tokens in seconds)
    assert json.loads(ask(folder, "--tokens", "1,8", "--json")) == found


def test_people_see_who_uses_a_shape(folder: Path) -> None:
    shown = ask(folder, "--tokens", "1")
    assert "128 x 1024: 1 head" in shown and "4 qkv" in shown and "1 token, µs" in shown
    assert (
        "attention of a layer over a context of 32; up to 4 tokens are of sequences that decode, more are of a prompt"
        in shown
    )


def test_targets_whose_kernels_are_not_timed_here_are_refused(folder: Path) -> None:
    recipe = (folder / "params.yaml").read_text().replace("{slots: 4,", "{target: tensorrt-rtx, slots: 4,")
    (folder / "params.yaml").write_text(recipe)
    with pytest.raises(RecipeError, match=r"build\.target: tensorrt-rtx"):
        ask(folder, "--tokens", "1")


def test_only_what_was_asked_for_is_told(folder: Path) -> None:
    found = json.loads(ask(folder, "--tokens", "8", "--json"))
    kernels = [kernel for product in found["linears"] for kernel in product["schemes"].values()]
    assert all(list(kernel["seconds"]) == ["8"] for kernel in kernels)


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "1,,2", "²"])
def test_numbers_of_tokens_that_are_none_are_refused(folder: Path, tokens: str) -> None:
    with pytest.raises(RecipeError, match="--tokens") as caught:
        ask(folder, "--tokens", tokens)
    assert caught.value.expected == "numbers of tokens of a step, such as 1,8,128"
