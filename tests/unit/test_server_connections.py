"""Connections, paths and methods of any kind, over real sockets: none is kept for ever, and none is a traceback."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.client import HTTPResponse
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from runtime.gateway.http import http_connection
from runtime.gateway.http.app import create_app
from runtime.gateway.http.http_connection import MOST_FILES, ConnectionLimits, most_connections
from runtime.gateway.http.service import Service
from runtime.gateway.operations.http_metrics import METHODS
from runtime.gateway.operations.operations import Operations, OperationsSettings
from runtime.gateway.text.model import TextModel
from tapeout.errors import TapeoutError
from tests import web
from tests.http_server import MODEL, VOCAB, byte_tokenizer, listening
from tests.serving_client import LocalClient, SlowEngine
from tests.waiting import wait_for

ORIGIN = "https://chat.example.org"
LIMITS = ConnectionLimits(header_seconds=0.3, idle_seconds=1, header_bytes=2000, read_seconds=0.5, connections=8)


@dataclass
class Site:
    port: int
    operations: Operations
    http: httpx2.Client

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def counted(self) -> dict[tuple[str, str, str], float]:
        samples = [s for family in self.operations.metrics.http_requests.collect() for s in family.samples]
        return {
            (s.labels["handler"], s.labels["method"], s.labels["status"]): s.value
            for s in samples
            if s.name == "http_requests_total"
        }


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    client = LocalClient(SlowEngine(VOCAB, slots=4, max_tokens=64))
    operations = Operations(
        client, MODEL, OperationsSettings(api_keys=("secret",), cors_origins=(ORIGIN, "http://localhost:3000"))
    )
    extensions = operations.extensions
    service = Service(client, {client.info.digest: TextModel(client.info.digest, byte_tokenizer())}, (MODEL,))
    app: ASGIApp = create_app(service, routers=extensions.routers, middleware=extensions.middleware)
    with (
        listening(app, LIMITS, extensions.malformed) as url,
        web.client(base_url=url, timeout=20, headers={"authorization": "Bearer secret"}) as http,
    ):
        yield Site(int(url.rpartition(":")[2]), operations, http)


def answered(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection, which it must."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WHOLE = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"G", b" 408 "),
        (BEGUN, b" 408 "),
        (BEGUN + b"Content-Length: 5\r\nX-Half: ", b" 408 "),
        (WHOLE, b" 200 "),
        (WHOLE + b"\r\n", b" 200 "),
        (WHOLE + b"GET /ver", b" 408 "),
        # Answered before its body has come, and it never comes.
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 9\r\n\r\n{", b" 404 "),
    ],
)
def test_a_connection_that_sends_no_more_is_closed(site: Site, sent: bytes, said: bytes) -> None:
    with site.connect() as connection:
        connection.sendall(sent)
        answer = answered(connection)
        assert said in answer if said else not answer
        if b" 408 " in said:
            assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


@pytest.mark.parametrize("before", [b"", WHOLE])
@pytest.mark.parametrize("drops", [BEGUN + b"X-Slow: " + b"x" * 1000, b"\r\n" * 1000])
def test_a_connection_that_sends_byte_by_byte_is_closed(site: Site, before: bytes, drops: bytes) -> None:
    """Each byte is new data, so a limit between two of them is never reached."""
    with site.connect() as connection:
        connection.sendall(before)
        if before:
            assert b" 200 " in connection.recv(1 << 16)
        with pytest.raises(OSError):
            for byte in drops:
                connection.sendall(bytes([byte]))
                time.sleep(0.01)


def test_a_client_that_reads_nothing_is_cut_off(site: Site) -> None:
    """Its response waits in buffers, of the system and of the server, which would keep it for ever."""
    asked = json.dumps({"prompt": "x", "max_tokens": 60, "n": 64, "logprobs": 20, "stream": True})
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Authorization: Bearer secret",
        f"Content-Length: {len(asked)}",
    ]
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    with connection:
        connection.connect(("127.0.0.1", site.port))
        connection.sendall("\r\n".join([*lines, "", asked]).encode())
        wait_for(lambda: site.operations.metrics.client.stats.running > 0)
        wait_for(lambda: not [peer for peer in held(site) if peer == connection.getsockname()])
        assert b"[DONE]" not in answered(connection)


@pytest.mark.parametrize("asked", [b"", b"Connection: close\r\n"])
def test_a_client_that_takes_a_large_body_slowly_gets_all_of_it(asked: bytes) -> None:
    """Longer than ``read_seconds`` in all, but something all the time. Planted: a limit for the whole body."""
    body = b"x" * (16 << 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    connection, found = socket.socket(), 0
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.settimeout(20)
    with listening(app, replace(LIMITS, read_seconds=1.0)) as url, connection:
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + asked + b"\r\n")
        while found < len(body):
            part = connection.recv(1 << 16)
            assert part, f"cut off after {found} bytes"
            found += len(part)
            time.sleep(0.01)


def held(site: Site) -> list[Any]:
    """Clients that the server has connections of."""
    found = psutil.Process().net_connections("tcp")
    return [c.raddr for c in found if c.laddr.port == site.port and c.status == "ESTABLISHED"]


def test_headers_without_an_end_are_refused(site: Site) -> None:
    with site.connect() as connection:
        connection.sendall(BEGUN + b"X-Long: ")
        time.sleep(0.05)
        connection.sendall(b"x" * (LIMITS.header_bytes + 1))
        assert b" 431 " in answered(connection)


@pytest.mark.parametrize("part", ["path", "name", "value"])
def test_long_headers_that_come_at_once_are_refused(site: Site, part: str) -> None:
    parts = {"path": "/version?", "name": "X-Long", "value": "x"}
    parts[part] += "x" * LIMITS.header_bytes
    with site.connect() as connection:
        connection.sendall("GET {path} HTTP/1.1\r\nHost: x\r\n{name}: {value}\r\n\r\n".format(**parts).encode())
        assert answered(connection).startswith(b"HTTP/1.1 431 ")


UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    b"Upgrade: TLS/1.0\r\nConnection: upgrade\r\n",
]


@pytest.mark.parametrize("asked", UPGRADES)
@pytest.mark.parametrize("cut", [1, 7, 60, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(
    site: Site, asked: bytes, cut: int, chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As the first request of Java's client does, however it is cut, and so does the request behind it."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(body)
    sent = BEGUN + b"Authorization: Bearer secret\r\n" + asked + length + b"\r\n"
    sent += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    before = site.counted()
    with site.connect() as connection:
        for begin in range(0, len(sent), cut):
            connection.sendall(sent[begin : begin + cut])
        answer = HTTPResponse(connection)
        answer.begin()
        assert json.loads(answer.read())["choices"], answer.status
        connection.sendall(WHOLE)
        assert b" 200 " in connection.recv(1 << 16)
    row = ("/v1/completions", "POST", "2xx")
    assert site.counted()[row] == before.get(row, 0) + 1
    assert not caplog.records


def test_a_client_of_http_1_0_gets_no_chunks(site: Site) -> None:
    """It takes a body for what comes until the connection is closed."""
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer secret\r\nContent-Length: %d\r\n\r\n" % len(body)
    with site.connect() as connection:
        connection.sendall(head + body)
        answer = answered(connection)
    begun, _, said = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in begun.lower() and b"connection: close" in begun.lower()
    assert said.startswith(b"data: {") and said.endswith(b"data: [DONE]\n\n") and b"\r\n" not in said
    with site.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n")
        assert b"content-length:" in answered(connection)


@pytest.mark.parametrize("sent", [b"X-Name: value\r\n", b"x" * 50])
def test_headers_behind_a_body_without_an_end_are_cut_off(site: Site, sent: bytes) -> None:
    """Long before the body's time is over."""
    said = b""
    with site.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(BEGUN + b"Authorization: Bearer secret\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        for _ in range(1000):
            connection.sendall(sent * 10)
        said = answered(connection)
    assert not said


def test_a_body_may_come_in_many_chunks(site: Site) -> None:
    body = b'{"prompt": "' + b"x" * 500 + b'", "max_tokens": 1, "truncate_prompt_tokens": 8}'

    def pieces() -> Iterator[bytes]:
        for byte in body:
            yield bytes([byte])

    assert site.http.post("/v1/completions", content=pieces()).status_code == 200


def test_requests_one_after_the_other_keep_their_connection(site: Site) -> None:
    with site.connect() as connection:
        for part in (WHOLE, WHOLE[:9], WHOLE[9:], WHOLE):
            connection.sendall(part)
            if part.endswith(b"\r\n\r\n"):
                answer = HTTPResponse(connection)  # all of it: what is left would be taken for the next one
                answer.begin()
                answer.read()
                assert answer.status == 200


def test_connections_beyond_the_most_are_told_and_closed(site: Site) -> None:
    held: list[socket.socket] = []
    try:
        for _ in range(LIMITS.connections):
            held.append(site.connect())
            held[-1].sendall(WHOLE)
            held[-1].recv(1 << 16)
        with site.connect() as connection:
            answer = answered(connection)
        assert b" 503 " in answer and b"too_many_connections" in answer and b"retry-after" in answer
    finally:
        for connection in held:
            connection.close()
    wait_for(lambda: b" 200 " in _once(site))


def _once(site: Site) -> bytes:
    with site.connect() as connection:
        connection.sendall(WHOLE)
        return connection.recv(1 << 16)


def test_room_for_connections_follows_from_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, asked = [(1024, 4096)], list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: asked.append(both))
    assert most_connections() == 4096 - http_connection.OTHER_FILES and asked == [(4096, 4096)]
    limits[0] = (256, 256)
    assert most_connections() == 128 and len(asked) == 1
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert most_connections() == MOST_FILES - http_connection.OTHER_FILES and len(asked) == 1


# Paths and methods


RAW_PATHS = st.one_of(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["/", "//", "/v1", "/models", "/chat/completions", "/health", "/metrics", "/tiny", "%2F", "%00", "%ff"]
            ),
            st.sampled_from(
                ["%", "%zz", "?", "#", "..", "%3F", "%0d%0a", "é", "\u2028", "{name}", "/" * 3000, "x" * 9000]
            ),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" \r\n"), max_size=8),
        ),
        max_size=6,
    ).map(lambda parts: "/" + "".join(parts)),
    st.sampled_from(["*", "http://x/v1/models/", "http://x", "x", "", "\0", "/a\0b", "//[", "host:1"]),
)
ANY_METHOD = st.one_of(
    st.sampled_from([*sorted(METHODS), "TRACE", "CONNECT", "PROPFIND", "QUERY", "ODD", "get", "", "\0"]),
    st.text(st.characters(codec="latin-1"), max_size=5),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=ANY_METHOD,
    path=RAW_PATHS,
    host=st.sampled_from(["x", "[", "é", ""]),
    body=st.sampled_from(["", "{}", "x"]),
    key=st.booleans(),
)
def test_any_path_and_method_is_answered_and_counted(
    site: Site, caplog: pytest.LogCaptureFixture, method: str, path: str, host: str, body: str, key: bool
) -> None:
    """In OpenAI's form, under labels that clients cannot choose, and without a traceback."""
    before = sum(site.counted().values())
    caplog.clear()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += ["Authorization: Bearer secret"] if key else []
    with site.connect() as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode())
        head, _, content = answered(connection).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 500 and not [record for record in caplog.records if record.exc_info], (head, caplog.text)
    if status >= 400 and method != "HEAD":
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 1000
    wait_for(lambda: sum(site.counted().values()) == before + 1)
    labels = {label for key in site.counted() for label in key[:1]}
    assert labels <= {"none", "/", "/live", "/health", "/ready", "/metrics", "/version", "/tokenize", "/detokenize",
        "/tokenizer_info", *(f"/v1/{name}" for name in ("models", "models/{name}", "completions", "chat/completions",
        "responses"))}, labels  # fmt: skip
    assert {key[1] for key in site.counted()} <= {*METHODS, "other"}


@pytest.mark.parametrize("slashes", ["", "/", "//"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", f"/v1/models/{MODEL}", 200),
        ("GET", "/v1/models/none", 404),
        ("POST", "/v1/completions", 200),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/health", 200),
        ("GET", "/v1", 404),
    ],
)
def test_a_slash_at_the_end_changes_nothing(site: Site, method: str, path: str, status: int, slashes: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}' if method == "POST" else b""
    answer = site.http.request(method, path + slashes, content=body)
    assert answer.status_code == status, answer.text
    assert answer.status_code != 405 or answer.headers["allow"]
    if status == 404:
        assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/", "/live", "/health", "/ready", "/metrics", "/version", "/v1/models"])
@pytest.mark.parametrize(("method", "status"), [("GET", "2xx"), ("HEAD", "2xx"), ("PUT", "4xx")])
def test_every_route_is_counted_by_its_path(site: Site, method: str, path: str, status: str) -> None:
    before = site.counted().get((path, method, status), 0)
    site.http.request(method, path)
    wait_for(lambda: site.counted().get((path, method, status), 0) == before + 1, seconds=10)


def test_a_path_of_a_key_needs_it_with_a_slash_too(site: Site) -> None:
    for path in ("/live", "/live/", "/v1/models/", "//v1/models"):
        assert site.http.get(path, headers={"authorization": ""}).status_code == 401


def test_a_body_that_is_compressed_is_named(site: Site) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = site.http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]
        assert answer.headers["accept-encoding"] == "identity"
    twice = [("content-encoding", "identity"), ("content-encoding", "br"), ("content-encoding", "GZIP, x")]
    for headers, named in (([("content-encoding", "gzip, br")], "gzip, br"), (twice, "identity, br, GZIP, x")):
        answer = site.http.post("/tokenize", content=body, headers=headers)
        assert answer.status_code == 415 and named in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "unsupported_encoding"
    plain = [("content-encoding", "identity"), ("content-encoding", "Identity,")]
    assert site.http.post("/tokenize", content=b'{"prompt": "x"}', headers=plain).status_code == 200


# Pages of other origins


def test_pages_of_an_allowed_origin_may_call_the_server(site: Site) -> None:
    """The preflight has no key: browsers send none."""
    ask = {"origin": ORIGIN, "access-control-request-method": "POST"}
    ask |= {"access-control-request-headers": "authorization,content-type,x-stainless-lang"}
    preflight = site.http.options("/v1/chat/completions", headers=ask | {"authorization": ""})
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for headers in ({}, {"authorization": "wrong"}):  # an error can be read, too
        answer = site.http.get("/v1/models", headers={"origin": ORIGIN} | headers)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_may_not(site: Site) -> None:
    ask = {"origin": "https://evil.example.org", "access-control-request-method": "POST"}
    assert site.http.options("/v1/chat/completions", headers=ask).status_code == 400
    assert "access-control-allow-origin" not in site.http.get("/v1/models", headers=ask).headers


@pytest.mark.parametrize("origin", ["https://a.org/", "a.org", "https://*.a.org", "ftp://a.org", "", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(TapeoutError, match="no origin"):
        OperationsSettings(cors_origins=(origin,))


def test_without_the_option_no_other_page_may_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    client = LocalClient()
    operations = Operations(client, MODEL, OperationsSettings())
    service = Service(client, {client.info.digest: TextModel(client.info.digest, byte_tokenizer())}, (MODEL,))
    app: ASGIApp = create_app(service, middleware=operations.extensions.middleware)
    with listening(app) as url, web.client(base_url=url) as http:
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        assert http.options("/v1/models", headers=headers).status_code == 405
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=headers).headers
