"""A process that a fleet owns: started again where it ends or hangs, given up in the end, and never left behind."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import psutil
import pytest

from runtime.fleet import runner as module
from runtime.fleet.ray_cluster import MARK, TOKEN_PATH, FleetError, LocalRay
from runtime.fleet.runner import EngineRunner, GatewayRunner
from runtime.gateway.fleet.scaling import EngineReport
from runtime.wire.messages import EngineLoad, EngineStats
from tapeout.errors import TapeoutError
from tests.command import ROOT
from tests.waiting import until, wait_for

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-m", "tests.command_engine"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def runner(folder: Path, bundle: str = "sound") -> EngineRunner:
    (folder / "key").write_bytes(KEY)
    return EngineRunner(lambda: bundle, "mixed", "127.0.0.1", folder / "key", KEY, (), drain_seconds=5)


def test_an_engine_stays_until_the_blocks_of_its_requests_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last request that left would be computed again. Planted: it ends with its requests."""
    looks = count()

    def report(_: EngineRunner) -> EngineReport:
        look = next(looks)
        return EngineReport(EngineLoad(), EngineStats(running=int(look < 2), blocks_sent=min(look, 5)))

    monkeypatch.setattr(EngineRunner, "report", property(report))
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "FETCH_SECONDS", 0.0)
    asyncio.run(runner(tmp_path).idle(0.0))
    assert next(looks) > 5


def test_an_engine_that_is_killed_or_hangs_is_started_again_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 2.0)

    async def run() -> None:
        engine = runner(tmp_path)
        await engine.start()
        address = engine.address
        try:
            for sign in (signal.SIGKILL, signal.SIGSTOP):
                before = engine.pid
                assert before is not None and engine.report is not None
                assert engine.opening_seconds is not None and engine.opening_seconds > 0
                os.kill(before, sign)
                await until(lambda before=before: engine.pid != before and engine.answers)
                assert not psutil.pid_exists(before) and engine.address == address
                engine.require_healthy()
            before = engine.pid
            await engine.again()
            assert engine.pid != before and engine.answers and engine.address == address
        finally:
            last = engine.pid
            await engine.stop()
        assert last is not None and not psutil.pid_exists(last) and engine.report is None

    asyncio.run(run())


def test_one_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        engine = runner(tmp_path)
        await engine.start()
        try:
            seen: set[int | None] = {None}
            for _ in range(module.MOST_FAILURES + 1):
                await until(lambda: engine.answers and engine.pid not in seen)
                assert engine.pid is not None
                engine.require_healthy()
                seen.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.gave_up)
            with pytest.raises(TapeoutError, match="ended 4 times"):
                engine.require_healthy()
        finally:
            await engine.stop()

    asyncio.run(run())


def test_one_that_cannot_be_renewed_is_given_up_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = runner(tmp_path)
        await engine.start()
        try:
            monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", "raise SystemExit('broken')"))
            await engine.again()
            await until(lambda: engine.gave_up)
        finally:
            await engine.stop()

    asyncio.run(run())


def test_one_that_cannot_be_opened_says_what_its_log_says(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="it cannot be opened"):
        asyncio.run(runner(tmp_path, "broken").start())


CHATTY = """
import sys
for _ in range({lines}):
    sys.stderr.write("x" * {length} + "\\n")
sys.exit("it cannot be opened")
"""


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("lines", "length", "log"), [(20, 200_000, io.StringIO()), (500, 2_000, FullDisk())])
def test_a_process_never_waits_for_its_log_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, length: int, log: io.StringIO
) -> None:
    """Planted: a line that is too long, or a log that cannot be written, ends the reading, and the process hangs."""
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", CHATTY.format(lines=lines, length=length)))
    monkeypatch.setattr(module.sys, "stderr", log)

    async def run() -> None:
        engine = runner(tmp_path)
        try:
            with pytest.raises(TapeoutError, match="it cannot be opened"):
                await asyncio.wait_for(engine.start(), 30)
        finally:
            await engine.stop()

    asyncio.run(run())


def test_an_engine_that_cannot_be_forked_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody watches it any more, and it counts as one that may come."""

    async def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    async def run() -> None:
        engine = runner(tmp_path)
        await engine.start()
        try:
            assert engine.pid is not None
            monkeypatch.setattr(asyncio, "create_subprocess_exec", none_left)
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.gave_up, 30)
        finally:
            await engine.stop()

    asyncio.run(run())


OWNER = """
import os, subprocess, sys, time
guard = [sys.executable, "-m", "runtime.fleet.guard", str(os.getpid())] if sys.argv[1] == "guarded" else []
child = subprocess.Popen([*guard, "sleep", "300"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_process_is_killed_with_the_one_that_owns_it(guarded: bool) -> None:
    """Without the guard it would live on."""
    words = [sys.executable, "-c", OWNER, "guarded" if guarded else "alone"]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    wait_for(lambda: child.name() == "sleep")
    owner.kill()
    owner.communicate()
    if guarded:
        wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    else:
        assert child.is_running()
        child.kill()


@pytest.mark.parametrize("whose", ["a link", "a file", "another user's", "everybody's"])
def test_a_folder_in_tmp_that_is_not_ours_alone_is_refused(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody can put one there first. Planted: a link to a folder of ours counts as one; an address is read from
    whatever is there, and whoever wrote it runs code here.
    """
    ray, words = LocalRay(f"unit-{os.getpid()}"), {"a link": "is a link", "a file": "is no folder"}
    (tmp_path / "address.json").write_text('{"address": "127.0.0.1:9"}')
    try:
        if whose == "a link":
            ray.folder.symlink_to(tmp_path)
        elif whose == "a file":
            ray.folder.touch()
        else:
            ray.folder.mkdir(mode=0o700)
            (ray.folder / "address.json").write_text('{"address": "127.0.0.1:9"}')
            assert ray.address == "127.0.0.1:9"
        if whose == "everybody's":
            ray.folder.chmod(0o777)
        elif whose == "another user's":
            uid = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        for use in (ray.make_folder, lambda: ray.address):
            with pytest.raises(FleetError, match=words.get(whose, "belongs to the user|can be used by others")):
                use()
    finally:
        if ray.folder.is_dir() and not ray.folder.is_symlink():
            shutil.rmtree(ray.folder)
        else:
            ray.folder.unlink()


def test_a_fleet_of_this_machine_ends_its_processes_and_no_other() -> None:
    ray = LocalRay(f"unit-{os.getpid()}")
    sleeping = [sys.executable, "-c", "import time; time.sleep(300)"]
    ours = subprocess.Popen(sleeping, env={**os.environ, MARK: str(ray.folder)})
    other = subprocess.Popen(sleeping, env={**os.environ, TOKEN_PATH: str(ray.folder / "token")})
    try:
        wait_for(lambda: [one.pid for one in ray.processes()] == [ours.pid])
        ray.stop()
        assert ours.wait(10) == -signal.SIGTERM and other.poll() is None and ray.processes() == []
    finally:
        other.kill()
        other.communicate()


def test_each_gateway_of_a_machine_has_a_journal_of_its_own(tmp_path: Path) -> None:
    """A journal is of one server. Planted: the second gateway ends, as the first one has it."""
    options = ("--usage-journal", "/srv/journal-{port}", "--usage-database=sqlite:////srv/{port}.db")
    gateways = [GatewayRunner(tmp_path / "f", "127.0.0.1", 1, 2, options, drain_seconds=1) for _ in range(2)]
    for number, gateway in enumerate(gateways):
        gateway.port = 8000 + number
    assert [gateway.own_options for gateway in gateways] == [
        ["--usage-journal", f"/srv/journal-{port}", f"--usage-database=sqlite:////srv/{port}.db"]
        for port in (8000, 8001)
    ]


def test_ports_that_are_taken_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = GatewayRunner(tmp_path / "f", "127.0.0.1", port, 1, (), drain_seconds=1)
        with pytest.raises(TapeoutError, match=rf"no free port for a gateway at 127\.0\.0\.1: {port} are taken"):
            asyncio.run(gateway.start())
    last = GatewayRunner(tmp_path / "f", "192.0.2.99", 65535, 2, (), drain_seconds=1)
    with pytest.raises(TapeoutError, match=r": 65535 are taken, or 192\.0\.2\.99 is no address of this machine"):
        asyncio.run(last.start())


HOLDING = """
import sys, time
from runtime.fleet.ray_cluster import LocalRay
with LocalRay(sys.argv[1]).held():
    print("held", flush=True)
    time.sleep(300)
"""


def test_two_commands_do_not_start_one_fleet_at_the_same_time() -> None:
    """Planted: the second start takes the token of the first one, and ends its processes when it fails."""
    ray = LocalRay(f"unit-{os.getpid()}")
    command = [sys.executable, "-c", HOLDING, f"unit-{os.getpid()}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(FleetError, match=f"process {other.pid} is starting or ending this fleet"), ray.held():
                pass
        finally:
            other.kill()
    with ray.held(), pytest.raises(FleetError, match="starting or ending"), ray.held():
        pass
    with ray.held():  # whoever was killed holds nothing
        pass
    assert not ray.folder.with_name(f"{ray.folder.name}.lock").exists()


def test_a_ray_of_this_machine_takes_no_state_of_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head that runs here, say. Planted: it starts what that cluster has in its Redis."""
    for name in ("RAY_AUTH_MODE", TOKEN_PATH, "RAY_AUTH_TOKEN", "RAY_REDIS_ADDRESS"):
        monkeypatch.setenv(name, "of another cluster")
    ray = LocalRay(f"unit-{os.getpid()}")
    ray.use()
    assert os.environ[TOKEN_PATH] == str(ray.folder / "token")
    assert "of another cluster" not in os.environ.values()
