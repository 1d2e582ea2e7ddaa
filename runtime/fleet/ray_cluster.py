"""Ray itself: imported late, started on this machine, connected to, and ended without a process left."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from runtime.gateway.fleet.plan import LOCAL, FleetPlan
from tapeout.errors import TapeoutError, one_line

NAMESPACE = "tapeout"
LOOPBACK = "127.0.0.1"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
MARK = "TAPEOUT_RAY_FOLDER"  # in the environment of what a Ray of a fleet's own has started
START_SECONDS = 180.0
CONNECT_SECONDS = 3.0
END_SECONDS = 10.0  # that processes have to end
# Of Ray, before it is imported: no usage reports, and none of its warnings between our lines.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class FleetError(TapeoutError):
    """A fleet cannot be started, found or changed."""


def import_ray() -> Any:
    os.environ |= {name: os.environ.get(name, value) for name, value in QUIET.items()}
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise FleetError(
            f"Ray cannot be imported: {one_line(error)}",
            expected="Ray Serve, which starts engines and gateways on one machine or many",
            remedy='`pip install "tapeout[fleet]"`; without Ray run `tapeout engine` and `tapeout gateway` themselves',
        ) from error


def import_serve() -> Any:
    import_ray()
    return importlib.import_module("ray.serve")


class LocalRay:
    """A Ray of one fleet on this machine. Its folder has its address and a token, without which nobody can use it.

    Its engines listen on this machine alone; Ray itself listens on all addresses, whatever it is told: hence the token.
    All its processes, and those that they start, have the folder in their environment (:data:`MARK`). So they are found
    again, also when Ray itself is dead. The path of the token would not do: a shell for `ray status` has it, too.
    """

    def __init__(self, name: str) -> None:
        # Not in TMPDIR: the paths of Ray's sockets may have 107 bytes. Ray opens its own folder, `r` in this one, to
        # everybody.
        self.folder = Path("/tmp") / f"tapeout-{os.getuid()}-{name}"
        self._token, self._address = self.folder / "token", self.folder / "address.json"

    @property
    def address(self) -> str | None:
        """:class:`FleetError` where its folder is somebody else's, who could name any address."""
        self._require_own_folder()
        try:
            return json.loads(self._address.read_text())["address"]
        except (OSError, ValueError, KeyError):
            return None

    def use(self) -> None:
        """Have this process, and those that it starts, show the token. Before Ray is imported: it looks then."""
        # Of another cluster: its token would go before, and its state would be taken for that of this one.
        for name in ("RAY_AUTH_TOKEN", "RAY_REDIS_ADDRESS"):
            os.environ.pop(name, None)
        os.environ |= {"RAY_AUTH_MODE": "token", TOKEN_PATH: str(self._token)}

    @contextmanager
    def held(self) -> Generator[None]:
        """:class:`FleetError` where another command starts or ends it. Gone with this process, however it ends."""
        path = self.folder.with_name(f"{self.folder.name}.lock")
        descriptor = self._lock(path)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _lock(self, path: Path) -> int:
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise FleetError(
                    f"{path} cannot be used: {error.strerror}",
                    expected="a file of yours, or none",
                    remedy="find out who has put it there, and remove it",
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(descriptor, 20).decode(errors="replace") or "another one"
                os.close(descriptor)
                raise FleetError(
                    f"process {holder} is starting or ending this fleet right now",
                    expected="one command at a time",
                    remedy=f"wait for it, or end it (`kill {holder}`): it takes down what it has started",
                ) from error
            try:
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)  # whoever held it has removed it meanwhile

    def make_folder(self) -> None:
        """:class:`FleetError` where it is somebody else's."""
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        self._require_own_folder()

    def start(self) -> str:
        """Its address. The folder must be there."""
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        address = f"{LOOPBACK}:{_free_port()}"
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--node-ip-address={LOOPBACK}"),
            *(f"--port={address.rpartition(':')[2]}", f"--temp-dir={self.folder / 'r'}"),
            *("--include-dashboard=false", "--disable-usage-stats"),
        ]
        self.use()
        marked = {**os.environ, MARK: str(self.folder)}
        found = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            cwd="/",
            env=marked,
        )
        if found.returncode:
            self.stop()
            raise FleetError(f"Ray has not started: {one_line(FleetError(found.stdout + found.stderr))}")
        self._address.write_text(json.dumps({"address": address}))
        return address

    def _require_own_folder(self) -> None:
        """Everybody may write to /tmp, and knows the name. But nobody can replace another user's folder there."""
        try:
            found = self.folder.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode):
            what = "is a link" if stat.S_ISLNK(found.st_mode) else "is no folder"
        elif found.st_uid != os.getuid():
            what = f"belongs to the user with id {found.st_uid}"
        elif found.st_mode & 0o077:
            what = f"can be used by others (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            return
        raise FleetError(
            f"{self.folder} {what}",
            expected="a folder that only you may use, or none",
            remedy="find out who has put it there, and remove it",
        )

    def processes(self) -> list[psutil.Process]:
        """Workers of Ray overwrite their environment with their names; but what has started them does not."""
        found = {process.pid: process for process in psutil.process_iter() if self._is_ours(process)}
        for process in list(found.values()):
            with suppress(psutil.Error):
                found |= {child.pid: child for child in process.children(recursive=True)}
        return [process for process in found.values() if _runs(process)]

    def stop(self) -> None:
        """End all its processes, and remove its folder."""
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    end(process)
            until = monotonic() + END_SECONDS
            while self.processes() and monotonic() < until:
                sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get(MARK) == str(self.folder)
        except psutil.Error:
            return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def connect(plan: FleetPlan) -> Any:
    """To the Ray of this fleet, which must be up. The module ``ray``."""
    address = plan.ray
    if plan.ray == LOCAL:
        local = LocalRay(plan.name)
        found = local.address
        if found is None:
            raise FleetError(f"the fleet {plan.name} is not up on this machine", remedy="`tapeout fleet up FILE`")
        local.use()
        address = found
    ray = import_ray()
    require_reachable(address)
    join(address)
    return ray


def join(address: str) -> None:
    """:class:`FleetError` if Ray refuses this process."""
    ray = import_ray()
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", configure_logging=False
        )
    except (ConnectionError, RuntimeError) as error:
        raise FleetError(
            f"Ray at {address} refuses this process: {one_line(error)}",
            expected="a cluster of the same version of Ray and Python, whose token this process has",
            remedy=f"set RAY_AUTH_MODE=token and {TOKEN_PATH} as on its machines",
        ) from error


def require_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise FleetError(
            f"no Ray answers at {address}: {one_line(error)}",
            expected="the address of the head of a Ray cluster, HOST:PORT (its GCS, usually port 6379)",
            remedy="start it; if it was this fleet's own, `tapeout fleet down FILE` ends what is left of it",
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
