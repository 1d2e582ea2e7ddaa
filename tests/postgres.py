"""A PostgreSQL server of its own for tests, on a Unix socket; skipped where there is none."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


def _programs() -> Path | None:
    """The folder of the newest ``initdb`` and ``postgres``; Debian keeps them out of the path."""
    found = [Path(path).resolve().parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


@dataclass
class Postgres:
    """``url``: of SQLAlchemy; ``address``: the same from other machines, where it listens for these."""

    url: str
    address: str
    process: subprocess.Popen[bytes]
    words: list[str]

    def stop(self) -> None:
        """At once: connections are cut, and what was not committed is lost."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()

    def start(self) -> None:
        self.process = subprocess.Popen(self.words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait()

    def wait(self) -> None:
        import sqlalchemy as sa
        from sqlalchemy import exc

        from tests.waiting import wait_for

        engine = sa.create_engine(self.url)

        def answers() -> bool:
            try:
                with engine.connect():
                    return True
            except exc.SQLAlchemyError:
                return False

        wait_for(answers, 60)
        engine.dispose()


@contextmanager
def running_postgres(password: str = "", *, within: Sequence[str] = (), host: str = "") -> Generator[Postgres]:
    """``password``: that everybody must give, each its own; this one is of the owner ``tapeout``.

    ``within``, ``host``: words before the command and the address of a machine that it is on, see
    :class:`tests.network.Network`.
    """
    programs = _programs()
    if programs is None:
        pytest.skip("no postgres; `apt-get install postgresql`")
    pytest.importorskip("psycopg", reason="pip install 'tapeout[postgres]'")
    # A short path: those of Unix sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as name:
        folder = Path(name)
        user: list[str] = []
        if os.getuid() == 0:  # postgres refuses to run as root
            nobody = pwd.getpwnam("postgres" if _has_user("postgres") else "nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            user = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
        data, login, authentication = str(folder / "data"), "tapeout", ["--auth=trust"]
        if password:
            (secret := folder / "password").write_text(password)
            login, authentication = f"tapeout:{password}", ["--auth=scram-sha-256", f"--pwfile={secret}"]
        subprocess.run(
            [*user, str(programs / "initdb"), "-D", data, "-U", "tapeout", *authentication, "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        if host:
            with (folder / "data" / "pg_hba.conf").open("a") as file:
                file.write("host all all samenet trust\n")
        words = [*within, *user, str(programs / "postgres"), "-D", data, "-k", name, "-c", f"listen_addresses={host}"]
        url = f"postgresql+psycopg://{login}@/postgres?host={name}"
        address = f"postgresql+psycopg://{login}@{host}/postgres"
        found = Postgres(
            url, address, subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), words
        )
        try:
            found.wait()
            yield found
        finally:
            found.stop()


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
