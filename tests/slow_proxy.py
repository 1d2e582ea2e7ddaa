"""A TCP proxy that counts what it passes on, and can hold everything back from some byte on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Proxy:
    """``limit``: of bytes to clients (or from them, with ``uploads``), counted in ``passed`` over all connections.

    ``reached``: it holds back what comes then.
    """

    port: int
    limit: int | None = None
    uploads: bool = False
    passed: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        self.limit = None
        self.released.set()


@contextmanager
def proxy(target: int, limit: int | None = None, *, uploads: bool = False) -> Generator[Proxy]:
    """In front of a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Proxy(listener.getsockname()[1], limit, uploads)
        threading.Thread(target=_accept, args=(listener, target, found), daemon=True).start()
        try:
            yield found
        finally:
            found.release()
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, target: int, found: Proxy) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", target))
            counted, other = (client, server) if found.uploads else (server, client)
            threading.Thread(target=_pass, args=(counted, other, found), daemon=True).start()
            threading.Thread(target=_pass, args=(other, counted, None), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, found: Proxy | None) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 14):
            if found is not None:
                if found.limit is not None and found.passed + len(data) > found.limit:
                    found.reached.set()
                    found.released.wait()
                found.passed += len(data)
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
