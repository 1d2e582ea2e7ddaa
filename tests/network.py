"""Machines of a network on this one: namespaces that a switch joins. A test takes their links down and up again.

Nobody is told when a link is down: no connection is reset or closed, packets are only lost. Tests are skipped where
the system permits no namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000  # linux/sched.h


class Network:
    """``hosts``: names of the machines."""

    def __init__(self, *hosts: str) -> None:
        self._hosts = hosts
        self._prefix = f"tapeout-{os.getpid()}"
        self._switch = self._name("switch")

    def address(self, host: str) -> str:
        return f"10.231.0.{self._hosts.index(host) + 1}"

    def within(self, host: str) -> list[str]:
        """Words before a command that is to run on this machine. The process is that of the command."""
        return ["ip", "netns", "exec", self._name(host)]

    def enter(self, host: str) -> None:
        """Sockets that the calling thread makes from now on are on this machine."""
        library = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self._name(host)}").open() as file:
            if library.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the thread cannot enter the namespace")

    def cut(self, host: str) -> None:
        """The link between this machine and the switch."""
        _ip("-n", self._switch, "link", "set", self._port(host), "down")

    def mend(self, host: str) -> None:
        _ip("-n", self._switch, "link", "set", self._port(host), "up")

    def limit_buffers(self, host: str, send: int, receive: int) -> None:
        """Of TCP, to so many bytes at most, on sockets that are made from now on."""
        for kind, most in (("wmem", send), ("rmem", receive)):
            command = f"echo 4096 {most} {most} > /proc/sys/net/ipv4/tcp_{kind}"
            subprocess.run([*self.within(host), "sh", "-c", command], check=True)

    def make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "up", "type", "bridge")
        for host in self._hosts:
            name, port = self._name(host), self._port(host)
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        for name in (*map(self._name, self._hosts), self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _port(self, host: str) -> str:
        return f"port{self._hosts.index(host)}"


@contextmanager
def network(*hosts: str) -> Generator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("no ip; `apt-get install iproute2`")
    found = Network(*hosts)
    try:
        try:
            found.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield found
    finally:
        found.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
