"""Where an engine listens for servers: ``unix:PATH`` or ``tcp:HOST:PORT``, and the key that both sides share."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from runtime.wire.session import KEY_BYTES
from tapeout.errors import SignatureError, TapeoutError

BACKLOG = 64


class Address(NamedTuple):
    """``host``: of a TCP address; or ``path``: of a Unix socket. TCP port 0 takes a free one."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """
        >>> Address.parse("tcp:[::1]:7000"), str(Address.parse("unix:/run/engine"))
        (Address(host='::1', port=7000, path=''), 'unix:/run/engine')
        """
        kind, _, rest = text.partition(":")
        host, _, port = rest.rpartition(":")
        if kind == "unix" and rest:
            return cls(path=rest)
        if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
            return cls(host.removeprefix("[").removesuffix("]"), int(port))
        raise TapeoutError(f"{text!r} is no address of an engine", expected="tcp:HOST:PORT or unix:PATH")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"tcp:{host}:{self.port}"

    def require_key(self, key: bytes) -> None:
        """:class:`SignatureError` for a TCP address without one: who reaches the port could use the engine."""
        if not (key or self.path):
            raise SignatureError(
                f"{self} without a key",
                expected="a file with the key that server and engine share",
                remedy="make one: `openssl rand -hex 32 > engine.key`, and copy it to both machines",
            )

    def listen(self, key: bytes) -> socket.socket:
        """Only this user may connect to a Unix socket. :class:`TapeoutError` if the address cannot be had."""
        self.require_key(key)
        try:
            if self.path:
                self._remove_unused()
                found = socket.socket(socket.AF_UNIX)
                found.bind(self.path)
                Path(self.path).chmod(0o600)  # before anybody can connect
            else:
                family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
                found = socket.socket(family)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind((self.host, self.port))
            found.listen(BACKLOG)
        except OSError as error:
            raise TapeoutError(
                f"cannot listen at {self}: {error.strerror}",
                expected="a free address of this machine",
                remedy="stop what uses it, or choose another one",
            ) from error
        return found

    def _remove_unused(self) -> None:
        """What an engine that was killed has left."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.path)
            except ConnectionRefusedError:
                Path(self.path).unlink()
            except FileNotFoundError:
                pass


def read_key(path: Path | None) -> bytes:
    """The content of a file without white space at its ends; no key without a file."""
    if path is None:
        return b""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SignatureError(f"the key {path} cannot be read: {error.strerror}", expected="a file") from error
    if len(key) < KEY_BYTES:
        raise SignatureError(
            f"the key in {path} has {len(key)} bytes",
            expected=f"at least {KEY_BYTES} random ones",
            remedy=f"make one: `openssl rand -hex 32 > {path}`",
        )
    return key
