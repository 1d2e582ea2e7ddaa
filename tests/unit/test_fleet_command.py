"""``tapeout fleet`` before Ray has a say: files, refusals, and what is handed to Ray Serve."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.cli.main import main
from runtime.fleet import asked, control
from runtime.fleet.control import read_plan, require_room
from runtime.fleet.local import LocalFleet
from runtime.fleet.ray_cluster import FleetError
from runtime.fleet.replicas import WANTED, carry_out, resolved
from runtime.fleet.roster import Place
from runtime.gateway.fleet.discovery import FleetFile, FleetFileError, FromFile
from tests.command import ROOT

UP = "key: engine.key\nup: {bundle: b, name: nowhere}\nscaling: {least: 2, most: 3}\n"


def written(folder: Path, text: str = UP) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "key: k",
        "engines: [tcp:h:1]\nup: {bundle: b}",
        "up: {}",
        "up: {bundle: b, name: Über}",
        "up: {bundle: b, engines: {count: 2}}",
        "up: {bundle: b}\nscaling: {least: 3, most: 2}",
        "up: {bundle: b}\nscaling: {most: 2, standby: 2}",
    ],
)
def test_a_file_that_says_too_little_or_too_much_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FleetFileError):
        FleetFile.read(written(tmp_path, text))


def test_a_list_that_becomes_a_plan_is_no_list_any_more(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match="no `engines` any more"):
        FromFile(written(tmp_path)).read()


def test_what_replicas_get_is_of_the_cluster_and_has_absolute_paths(tmp_path: Path) -> None:
    found = yaml.safe_load(resolved(read_plan(written(tmp_path))[0], "10.0.0.1:6379"))
    assert found["key"] == str(tmp_path / "engine.key") and found["up"]["ray"] == "10.0.0.1:6379"
    assert found["up"]["bundle"] == str(tmp_path / "b") and found["scaling"]["most"] == 3
    named, _ = read_plan(written(tmp_path, UP.replace("bundle: b", "bundle: 'models:/m@champion'")))
    assert yaml.safe_load(resolved(named, "h:1"))["up"]["bundle"] == "models:/m@champion"
    assert FleetFile.model_validate(yaml.safe_load(resolved(named, "h:1"))).up


def test_gateways_that_are_started_get_the_objectives_of_the_file(tmp_path: Path) -> None:
    """Their own list is in another folder. Planted: a list of engines alone."""
    (tmp_path / "engine.key").write_bytes(b"k" * 32)
    file, _ = read_plan(written(tmp_path, UP + "slo: {availability: 0.99}\n"))
    folder = tmp_path / "gateway"
    folder.mkdir()
    here = LocalFleet(file, folder)
    here._roster.engine("1", "mixed", Place("tcp:127.0.0.1:7", "127.0.0.1", 1, 2), None, now := monotonic())
    here._list(now)
    (folder / "ray.yaml").write_text(resolved(file, "10.0.0.1:6379"))
    assert file.up is not None
    for name in (f"{file.up.name}.yaml", "ray.yaml"):
        found = FleetFile.read(folder / name)
        assert found.slo is not None and found.slo.availability == 0.99 and found.scaling == file.scaling
    assert FromFile(folder / f"{file.up.name}.yaml").read().engines == ("tcp:127.0.0.1:7",)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["fleet", *words]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_done_is_said_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path))
    assert "a number, or auto" in run(capsys, "scale", path, "many")
    assert "1 to 3" in run(capsys, "scale", path, "4")
    assert "1 to 3" in run(capsys, "scale", path, "0")
    written(tmp_path, "engines: [unix:/a]")
    assert "a section `up`" in run(capsys, "status", path)


def test_one_message_says_that_ray_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "ray.py").write_text("raise ImportError('no module named ray')")  # of the process that asks it
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for word in ("up", "status", "down"):
        message = run(capsys, word, str(written(tmp_path, UP.replace("name: nowhere", "ray: 'h:1'"))))
        assert 'pip install "tapeout[fleet]"' in message and "Traceback" not in message


def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    path = str(written(tmp_path, UP.replace("name: nowhere", "ray: '127.0.0.1:1'")))
    assert "no Ray answers at 127.0.0.1:1" in run(capsys, "status", path)
    assert "is not up on this machine" in run(capsys, "status", str(written(tmp_path)))
    assert main(["fleet", "down", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "nowhere", "up": False}


def test_the_policy_of_serve_does_what_the_roster_has_said_last() -> None:
    def told(*values: tuple[float, float]) -> list[Any]:
        return [SimpleNamespace(timestamp=at, value=value) for at, value in values]

    context: Any = SimpleNamespace(target_num_replicas=2, raw_metrics=None)
    assert carry_out(context) == (2, {})
    context.raw_metrics = {WANTED: {"a": told((1.0, 4.0), (3.0, 1.0)), "b": told((2.0, 3.0))}}
    assert carry_out(context) == (1, {})
    context.raw_metrics = {WANTED: {"a": []}}
    assert carry_out(context) == (2, {})


@pytest.mark.parametrize("word", ["up", "run"])
def test_a_key_or_bundle_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    pytest.importorskip("ray")
    path = str(written(tmp_path))
    assert f"the key {tmp_path / 'engine.key'} cannot be read" in run(capsys, word, path)
    (tmp_path / "engine.key").write_text("k" * 64)
    assert f"there is no folder {tmp_path / 'b'}" in run(capsys, word, path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "fleet.yaml cannot be used: No such file or directory"),
        ("engine: [tcp:h:1]", "unknown key `engine`: did you mean `engines`?"),
        ("up: {bundle: b, engines: {cpu: 2}}", "unknown key `up.engines.cpu`: did you mean `cpus`?"),
        ("engines: [tcp:h:1]\npools: {decode: {leest: 2}}", "`pools.decode.leest`: did you mean `least`?"),
        ("external: [{url: 'http://h', model: m, text: t, keys: k}]", "`external.0.keys`: did you mean `key`?"),
        ("engines: [tcp:h:1]\nexternal: [{url: 'http://h', model: m, text: t}]", "write a file for each of them"),
        ("up: {bundle: b}\nxyz: 1", "unknown key `xyz` (known: engines, external, key, kubernetes, "),
        ("up: {bundle: b, engines: {options: [--pool, decode]}}", "`--pool` is no option here: `pools` in the file"),
        ("up: {bundle: b}\nscaling: {}\npools: {}", "`scaling` is of a fleet without `pools`"),
        ("up: {bundle: b, decode: {}}", "`up.prefill` and `up.decode` are of engines in `pools`"),
        ("up: {}", "`up.bundle` is missing"),
        ("", "fleet.yaml cannot be used: it is empty"),
        ("[1, 2]", "fleet.yaml cannot be used: it has no keys"),
        ("up: {bundle: b, engines: {options: ['--listen=tcp:h:1']}}", "`--listen` is no option here: each engine gets"),
        ("up: {bundle: b, gateways: {options: [--port, '1']}}", "`--port` is no option here: `port` beside it"),
        ("engines: [tcp:h:1\nkey: k", "no YAML on line 2"),
        ("engines: [tcp:h:1]\nslo: {availability: 99.9}", "`slo.availability`: input should be less than 1, not 99.9"),
        ("key: k", "one of `engines`, `table`, `kubernetes` and `up` is needed"),
    ],
)
def test_the_problem_of_a_file_is_named_in_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / "fleet.yaml" if text is None else written(tmp_path, text)
    message = run(capsys, "status", str(path))
    assert said in message and "pydantic" not in message and "<unicode string>" not in message


def test_a_fleet_that_this_machine_has_no_room_for_is_refused(tmp_path: Path) -> None:
    """Ray waits for ever for CPUs that no machine has."""
    text = UP.replace("name: nowhere", "engines: {cpus: 1.5}, gateways: {count: 2, cpus: 0.5}")
    file, plan = read_plan(written(tmp_path, text))
    require_room(file, plan, 4.0)
    file, plan = read_plan(written(tmp_path, text.replace("least: 2", "least: 3")))
    with pytest.raises(FleetError, match=r"3 engines and 2 gateways need 5\.5 CPUs"):
        require_room(file, plan, 4.0)


POOLS = """
key: engine.key
up: {bundle: b, name: nowhere, engines: {cpus: 1, options: [--a]}, decode: {cpus: 2, options: [--b]}}
pools: {prefill: {least: 2, most: 3}, decode: {most: 2, token_seconds: 0.1}}
"""


def test_each_pool_has_its_own_number_of_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, POOLS)
    file, plan = read_plan(path)
    assert [(pool, one.least, one.most, one.target) for pool, one in file.started.items()] == [
        ("prefill", 2, 3, 1.0),
        ("decode", 1, 2, 0.1),
    ]
    assert [plan.engine(pool).options for pool in file.started] == [("--a",), ("--b",)]
    assert FleetFile.model_validate(yaml.safe_load(resolved(file, "h:1"))).pools == file.pools
    require_room(file, plan, 4.5)
    with pytest.raises(FleetError, match=r"3 engines and 1 gateways need 4\.5 CPUs"):
        require_room(file, plan, 4.0)
    message = run(capsys, "scale", str(path), "2")
    assert "--pool is not given" in message and "--pool prefill, --pool decode" in message
    assert "1 to 2, as `pools.decode` in the file says" in run(capsys, "scale", str(path), "3", "--pool", "decode")
    written(tmp_path)
    assert "no pools, and --pool is decode" in run(capsys, "scale", str(path), "2", "--pool", "decode")


RAY = """
import sys, time
from types import SimpleNamespace

up = False
exceptions = SimpleNamespace(RayError=RuntimeError)

def init(**_):
    global up
    up = True
    print("(raylet) a node has died")
    print("[W] no head answers within 5 seconds", file=sys.stderr)

def is_initialized():
    return up

def shutdown():
    global up
    up = False
    print("(raylet) another one, too")

def get_actor(name, namespace):
    return SimpleNamespace(status=SimpleNamespace(remote=lambda: {"engines": []}))

def get(found, timeout):
    return found
"""
SERVE = """
import time
from types import SimpleNamespace

def status():
    {before}
    status = SimpleNamespace(value="RUNNING")
    return SimpleNamespace(applications={{"nowhere": SimpleNamespace(status=status, message="", deployments={{}})}})
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes the file of a fleet whose Ray is made up; ``before``: what it does before it says how it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    folder = tmp_path / "python" / "ray"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{ROOT}")

    def write(before: str) -> str:
        (folder / "__init__.py").write_text(RAY)
        (folder / "serve.py").write_text(SERVE.format(before=before))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        return str(written(tmp_path, UP.replace("name: nowhere", f"name: nowhere, ray: '{address}'")))

    with listener:
        yield write


def test_what_ray_prints_is_not_in_the_answer(cluster: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    """It tells every driver of a head that has died, at any time. Planted: among the JSON, and behind it."""
    assert main(["fleet", "status", cluster("pass"), "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["state"] == "RUNNING" and not said.err


@pytest.mark.parametrize("word", [["status"], ["scale", "2"], ["drain", "tcp:h:1"], ["down"]])
def test_a_ray_that_does_not_answer_is_named(
    cluster: Callable[[str], str], word: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a head that is stopped, or a dead controller that nobody starts again. Planted: a command without end."""
    monkeypatch.setattr(asked, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(control, "END_SECONDS", -28.0)
    path = cluster("time.sleep(3600)")
    if word[0] in ("scale", "drain"):  # whose roster is asked before Serve
        (Path(path).parent / "python" / "ray" / "__init__.py").write_text(
            RAY.replace("global up", "time.sleep(3600)", 1)
        )
    message = run(capsys, word[0], path, *word[1:])
    assert "Ray has not answered for 2 seconds" in message and "Traceback" not in message


def test_what_goes_wrong_in_ray_is_no_fault_of_ours(
    cluster: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = run(capsys, "status", cluster("raise RuntimeError('the actor is dead')"))
    assert "Ray does not answer: RuntimeError: the actor is dead" in message and "fault in tapeout" not in message


DISCOVERY = """
from types import SimpleNamespace
from runtime.fleet import ray_discovery as it

asked = SimpleNamespace(addresses=SimpleNamespace(remote=lambda: ["tcp:127.0.0.1:7000"]))
it.connect = lambda _: print("(raylet) a node has died") or SimpleNamespace(get=lambda found, timeout: found)
it.find_roster = lambda _: asked
it.main()
"""


def test_what_ray_prints_is_not_among_addresses(tmp_path: Path) -> None:
    """Planted: a gateway takes it for one, and reads no others any more."""
    plan = read_plan(written(tmp_path))[1].model_dump_json()
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", DISCOVERY, plan]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=ROOT, text=True) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        try:
            assert json.loads(asking.stdout.readline()) == ["tcp:127.0.0.1:7000"]
        finally:
            asking.stdin.close()
