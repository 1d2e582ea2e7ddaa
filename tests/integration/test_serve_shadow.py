"""``tapeout serve --shadow`` as a process on tiny bundles, from the first call to the verdict and over a restart."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.bundle import EngineBundle
from pipeline.cli.main import main
from tapeout import artifact
from tapeout.observations import read_observations
from tests import web
from tests.exported import build_float, tiny_graph
from tests.integration.test_serve import MODEL, Served, served
from tests.native import own_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A champion, the same engine with another size of KV cache, and one with noise in its weights."""
    folder = tmp_path_factory.mktemp("shadow")
    noisy = folder / "noisy-checkpoint"
    shutil.copytree(tiny_checkpoint, noisy)
    torch.manual_seed(0)
    for path in noisy.glob("*.safetensors"):
        tensors = {name: t + 0.5 * t.std() * torch.randn_like(t) for name, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        made = {"champion": (8, None), "equal": (6, None), "noisy": (8, noisy)}
        yield {name: build_float(tiny_graph(), folder / name, *how).folder for name, how in made.items()}


def ask(server: Served, question: str, **options: Any) -> str:
    messages: Any = [{"role": "user", "content": question}]
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=16, **({"temperature": 0} | options)
    )
    return answer.choices[0].message.content or ""


def metrics(server: Served) -> dict[str, float]:
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("tapeout:shadow"))}


def until(server: Served, name: str, least: float, seconds: float = 240) -> None:
    for _ in range(int(seconds / 0.1)):
        if metrics(server)[f"tapeout:shadow_{name}"] >= least:
            return
        time.sleep(0.1)
    raise AssertionError(metrics(server), "".join(server.log[-20:]))


def options(engines: dict[str, Path], challenger: str, log: Path, share: str = "1") -> tuple[str, ...]:
    shadow = ("--shadow", str(engines[challenger]), "--share", share, "--shadow-log", str(log))
    return (str(engines["champion"]), "--unsafe", *shadow, "--params", str(ROOT / "params.yaml"))


def test_an_equal_engine_passes_over_a_restart_and_a_crash(
    engines: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log", tmp_path / "online"
    with served(str(engines["champion"]), "--unsafe") as server:
        plain = [ask(server, f"Question {n}", temperature=0.9, seed=n) for n in range(5)]
    with served(*options(engines, "equal", log)) as server:
        until(server, "ready", 1)
        assert [ask(server, f"Question {n}", temperature=0.9, seed=n) for n in range(5)] == plain
        for number in range(5, 40):
            ask(server, f"Question {number}")
        until(server, "conversations", 40)
        max(psutil.Process(server.process.pid).children(), key=lambda child: child.create_time()).kill()
        for number in range(40, 60):
            ask(server, f"Question {number}")
        until(server, "conversations", 60)
        server.process.send_signal(signal.SIGKILL)  # not drained
        server.process.wait()
    assert main(["shadow-verdict", str(log), "--out", str(out), "--json"]) == 3
    assert "60 of at least 100" in json.loads(capsys.readouterr().out)["reason"]
    with served(*options(engines, "equal", log)) as server:
        until(server, "ready", 1)
        assert metrics(server)["tapeout:shadow_conversations"] == 60
        for number in range(110):
            ask(server, f"Question {number}")
        until(server, "conversations", 110)
        assert metrics(server)["tapeout:shadow_below"] >= 1
        assert server.stop() == 0
    assert main(["shadow-verdict", str(log), "--out", str(out), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["outcome"], verdict["conversations"], verdict["failed"]) == ("PASS", 110, 0)
    assert verdict["disagreement"] == 0 and verdict["missed"] == 0
    assert artifact.load_record(engines["equal"], EngineBundle).digest == verdict["plan"]["challenger"]
    text = (log / "observations.jsonl").read_text()
    assert "Question" not in text and len(text.splitlines()) == 220


def test_a_noisy_engine_fails(engines: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with served(*options(engines, "noisy", log)) as server:
        until(server, "ready", 1)
        for number in range(60):
            ask(server, f"Question {number}", **({"temperature": 1.0, "seed": number} if number % 2 else {}))
        until(server, "conversations", 60)
        until(server, "above", 1)
        assert server.stop() == 0
    assert main(["shadow-verdict", str(log), "--out", str(tmp_path / "online")]) == 1
    assert capsys.readouterr().out.startswith("FAIL: ")


def test_only_a_share_is_mirrored(engines: dict[str, Path], tmp_path: Path) -> None:
    with served(*options(engines, "equal", tmp_path / "log", "0.2")) as server:
        until(server, "ready", 1)
        for number in range(100):
            ask(server, f"Question {number}")
        assert server.stop() == 0
    assert 5 <= len(read_observations(tmp_path / "log").picked) <= 40


@pytest.mark.parametrize(
    ("source", "share", "words"),
    [
        ("champion", "0.5", "holds the champion itself"),
        ("models:/m@champion", "0.5", "no model 'm' in the registry"),
        ("none", "0.5", "there is no folder"),
        ("equal", "0", "share of mirrored calls is 0"),
    ],
)
def test_mistakes_are_named_before_anything_is_served(
    engines: dict[str, Path], tmp_path: Path, source: str, share: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = str(engines.get(source, source if ":" in source else tmp_path / source))
    arguments = ["serve", str(engines["champion"]), "--unsafe", "--port", "0", "--shadow", named, "--share", share]
    assert main([*arguments, "--shadow-log", str(tmp_path / "log"), "--params", str(ROOT / "params.yaml")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
