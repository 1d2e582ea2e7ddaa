"""What the gateways of a fleet say together, of which ``tapeout fleet release`` decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import orjson
import pytest

from evals.kinds.online.canary import Figures
from pipeline.cli.release import Gateways, ReleaseError

OLD, NEW = "a" * 64, "b" * 64


def engine(address: str, digest: str, state: str = "ready") -> dict[str, str]:
    return {"address": address, "digest": digest, "state": state}


@pytest.fixture
def gateway() -> Iterator[Callable[[Any], str]]:
    """The address of one that answers so; it wants a key."""
    servers: list[ThreadingHTTPServer] = []

    def made(answer: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/fleet" and self.headers["Authorization"] == "Bearer secret"
                self.send_response(200 if known else 401)
                self.end_headers()
                self.wfile.write(orjson.dumps(answer))

            def log_message(self, format: str, *args: Any) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield made
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_engine_is_ready_where_all_gateways_see_it_with_one_bundle(gateway: Callable[[Any], str]) -> None:
    """Planted: the first gateway alone, or engines that are suspected."""
    one = [engine("a", OLD), engine("b", OLD), engine("c", NEW), engine("d", OLD, "draining")]
    other = [engine("a", OLD), engine("b", OLD, "suspect"), engine("c", OLD), engine("d", OLD), engine("e", OLD)]
    found = Gateways([gateway({"replicas": engines, "bundles": {}}) for engines in (one, other)], "secret")
    assert found.ready() == {"a": OLD}


def test_calls_of_all_gateways_count(gateway: Callable[[Any], str]) -> None:
    bundles = [{NEW: {"calls": n, "failed": 1, "first_tokens": [n, 1]}} for n in (3, 4)]
    found = Gateways([gateway({"replicas": [], "bundles": one}) for one in bundles], "secret")
    assert found.figures(NEW) == Figures(calls=7, failed=2, first_tokens=(7, 2)) and found.figures(OLD) == Figures()


@pytest.mark.parametrize("key", ["", "other"])
def test_a_gateway_that_does_not_answer_stops_everything(gateway: Callable[[Any], str], key: str) -> None:
    good = gateway({"replicas": [engine("a", OLD)], "bundles": {}})
    with pytest.raises(ReleaseError, match="does not say how its engines are: 401"):
        Gateways([good], key).ready()
    with pytest.raises(ReleaseError, match="does not say how its engines are"):
        Gateways([good, "http://127.0.0.1:9"], "secret").ready()
