"""What a release asks all gateways of a fleet, and tells one of its engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import requests

from evals.kinds.online.canary import Figures
from pipeline.cli.serve_http import engine_files
from runtime.gateway.fleet.connection import ReplicaConnection
from runtime.wire.messages import EngineInfo, Reopen
from tapeout.errors import TapeoutError, one_line

ASK_SECONDS = 10.0  # that a gateway may take to answer
CONNECT_SECONDS = 5.0  # that an engine may take to answer, once it is open


class ReleaseError(TapeoutError):
    """The fleet is not as the change needs it."""


class Gateways:
    """What all of them say together. :class:`ReleaseError` where one does not answer: it may see another fleet."""

    def __init__(self, urls: Sequence[str], api_key: str) -> None:
        self._urls, self._headers = urls, {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ready(self) -> dict[str, str]:
        """Digests by address, of the engines that all of them see ready with it."""
        found = [self._engines(state) for state in self._ask()]
        return {address: digest for address, digest in found[0].items() if all(o.get(address) == digest for o in found)}

    def addresses(self) -> tuple[str, ...]:
        """Of the engines that one of them has on its list, ready or not."""
        return tuple(dict.fromkeys(one["address"] for state in self._ask() for one in state["replicas"]))

    def source(self, digest: str) -> str:
        """Of a bundle that a ready engine has, as that engine says."""
        replicas = [one for state in self._ask() for one in state["replicas"]]
        return next((one["source"] or "" for one in replicas if one["digest"] == digest), "")

    def figures(self, digest: str) -> Figures:
        total = Figures()
        for state in self._ask():
            if digest in state["bundles"]:
                total = total.plus(Figures.model_validate(state["bundles"][digest]))
        return total

    def _engines(self, state: Any) -> dict[str, str]:
        return {one["address"]: one["digest"] for one in state["replicas"] if one["state"] == "ready"}

    def _ask(self) -> list[Any]:
        answers: list[Any] = []
        for url in self._urls:
            try:
                answer = requests.get(f"{url.rstrip('/')}/fleet", headers=self._headers, timeout=ASK_SECONDS)
                answer.raise_for_status()
                answers.append(answer.json())
            except (requests.RequestException, ValueError) as error:
                raise ReleaseError(
                    f"the gateway {url} does not say how its engines are: {_unanswered(error)}",
                    expected="`tapeout gateway` at this address, which begins with http:// or https://",
                    remedy="start it, or leave it out if it is gone for good",
                ) from error
        return answers


async def reopen(address: str, key: bytes, source: str, drain_seconds: float, open_seconds: float) -> EngineInfo:
    """Have an engine open another bundle: what it says of itself once it has given a token again."""
    connection = ReplicaConnection(address, key, engine_files())
    try:
        await connection.open(CONNECT_SECONDS)
        connection.send(Reopen(source, float(drain_seconds)))
        async with asyncio.timeout(drain_seconds + CONNECT_SECONDS):
            while not connection.down:
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise ReleaseError(f"the engine at {address} does not leave its bundle", expected="that it ends") from error
    finally:
        await connection.close()
    until = time.monotonic() + open_seconds
    while True:
        connection = ReplicaConnection(address, key, engine_files())
        try:
            await connection.open(CONNECT_SECONDS)
            await connection.first_token(open_seconds)
            return connection.info
        except TapeoutError as error:
            if time.monotonic() > until:
                raise ReleaseError(
                    f"the engine at {address} is not open after {open_seconds:g} seconds: {error.found}",
                    expected="that it opens one of both bundles",
                    remedy="look at its log, start it again, and run this again",
                ) from error
            await asyncio.sleep(0.2)
        finally:
            await connection.close()


def _unanswered(error: Exception) -> str:
    match error:
        case requests.exceptions.InvalidSchema() | requests.exceptions.MissingSchema():
            return "no such address"
        case requests.ConnectionError():
            return "nothing answers there"
        case _:
            return one_line(error)
