"""The server's address, taken before anything heavy is imported or opened."""

from __future__ import annotations

import socket

from tapeout.errors import TapeoutError

BACKLOG = 2048


class ServeError(TapeoutError):
    """The server cannot be started."""


def listen(host: str, port: int) -> socket.socket:
    """The server's address, taken before anything is loaded. :class:`ServeError` if it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)  # so that a second server is refused; clients wait until the engine is open
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            expected="a free port, and an address of this machine",
            remedy="stop what uses it, or choose another --port or --host",
        ) from error
    return found
