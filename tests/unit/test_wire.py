"""Messages and frames between server and engine: each arrives as it was sent, or is one clear error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli.serve import ServeError
from runtime.wire import codec, session
from runtime.wire.codec import Hello, Proof, WireError, decode, encode, encode_checked
from runtime.wire.failures import Failure
from runtime.wire.limits import DisplacedError, QueueFullError
from runtime.wire.messages import (
    Add,
    Cancel,
    Close,
    Constraint,
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FetchAhead,
    FetchState,
    FilePart,
    FindState,
    GenerateRequest,
    Heartbeat,
    KeyChanges,
    Leaving,
    ReadFile,
    RefusedRequest,
    Reopen,
    RoutingReport,
    SamplingSettings,
    SharedPlace,
    StateKeys,
    StatePart,
    StepReport,
    TokenLogprobs,
    WarmUp,
    WatchBlocks,
)
from runtime.wire.session import PROTOCOL, VERSION, Session
from tapeout import errors
from tapeout.errors import ArtifactError, RequestError, SignatureError, TapeoutError

ROOT = Path(__file__).parents[2]
KEY = b"k" * 32

texts, counts, tokens = st.text(max_size=20), st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e300)
logprobs = st.builds(
    TokenLogprobs,
    tokens,
    st.floats(max_value=0.0, allow_nan=False),
    st.lists(st.tuples(tokens, st.floats(-100, 0)), max_size=3).map(tuple),
)
sampling = st.builds(
    SamplingSettings,
    temperature=st.floats(0, 5),
    top_k=st.integers(0, 100),
    top_p=st.floats(0, 1),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
requests = st.builds(
    GenerateRequest,
    texts,
    st.lists(tokens, max_size=20),
    counts,
    sampling,
    st.frozensets(tokens, max_size=9),
    logprobs=st.none() | counts,
    constraint=st.none() | st.builds(Constraint, st.sampled_from(["json_schema", "regex", "choice"]), texts),
    priority=st.integers(-9, 9),
    tenant=texts,
    cache_salt=st.binary(max_size=40),
    queue_timeout=st.none() | seconds,
    timeout=st.none() | seconds,
    answered=st.lists(tokens, max_size=20),
)
deltas = st.builds(
    Delta,
    texts,
    st.lists(tokens, max_size=4).map(tuple),
    st.none() | st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.lists(st.none() | logprobs, max_size=3).map(tuple),
    counts,
    st.none() | st.sampled_from(["stop", "length", "cancelled", "timeout", "error"]),
    st.none() | texts,
    st.none() | seconds,
)
stats = st.builds(
    lambda *values: EngineStats(running=values[0], step_seconds=values[1], finished=values[2]),
    *(counts, seconds, st.dictionaries(texts, counts, max_size=3)),
)
refusals = st.builds(
    RefusedRequest,
    texts,
    st.builds(RequestError, texts, expected=texts, remedy=texts)
    | st.builds(QueueFullError, texts, expected=texts, retry_after=st.none() | seconds)
    | st.builds(DisplacedError, texts, expected=texts, retry_after=st.none() | seconds),
)
infos = st.builds(
    EngineInfo,
    *(texts, texts, counts, counts, counts, counts, counts, counts),
    st.frozensets(tokens, max_size=5),
    server_cores=st.frozensets(st.integers(0, 500), max_size=5),
    files=st.dictionaries(texts, texts, max_size=3),
    level=texts,
    moves_blocks=st.booleans(),
    pool=st.sampled_from(["mixed", "prefill", "decode"]),
)
keys = st.binary(min_size=32, max_size=32)
places = st.none() | st.builds(SharedPlace, counts, counts, keys)
commands = (
    st.builds(Add, requests, seconds, texts)
    | st.builds(Cancel, texts)
    | st.builds(Close)
    | st.builds(ReadFile, texts, counts)
    | st.builds(Reopen, texts, seconds)
    | st.builds(WatchBlocks, counts)
    | st.builds(FetchAhead, st.lists(counts, max_size=4).map(tuple), st.binary(max_size=9), texts)
    | st.builds(WarmUp, texts, counts)
    | st.builds(FindState, st.integers(0, 4096))
    | st.builds(FetchState, st.sampled_from(["paged", "recurrent"]), keys, places, st.integers(0, 99))
)
changes = st.builds(KeyChanges, st.binary(max_size=64), st.binary(max_size=64))
names = st.lists(texts, max_size=3).map(tuple)
loads = st.builds(
    lambda *values: EngineLoad(*values), *[counts] * 6, *[seconds] * 2, counts, *[seconds] * 2, names, counts
)
routings = st.builds(RoutingReport, counts, counts, st.booleans(), counts, changes, changes, counts, loads)
reports = st.builds(
    StepReport,
    *(st.lists(deltas, max_size=4).map(tuple), stats, st.lists(refusals, max_size=2).map(tuple), st.none() | routings),
)
parts = st.builds(StatePart, keys, st.booleans(), st.booleans(), st.binary(max_size=16), st.binary(max_size=99))
signs = st.builds(Heartbeat) | st.builds(Leaving) | st.builds(StateKeys, keys)
answers = infos | parts | st.builds(FilePart, texts, counts, st.binary(max_size=50)) | reports | signs
messages = (
    commands
    | answers
    | st.builds(Hello, texts, counts, st.binary(max_size=40))
    | st.builds(Proof, st.binary(max_size=40))
    | st.builds(Failure, st.just("ArtifactError"), texts, texts, texts, st.none() | seconds)
)
FULL = StepReport(
    (Delta("a", (1, 2), (TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5))),), (None,), 3, "stop", "why", 0.25),),
    EngineStats(running=1, step_seconds=0.5, finished={"stop": 1}),
    (RefusedRequest("b", QueueFullError("full", expected="room", retry_after=1.5)),),
    RoutingReport(
        1,
        0,
        True,
        2,
        KeyChanges(b"k" * 16, b"l" * 32),
        KeyChanges(),
        3,
        EngineLoad(4, 5, prompt_seconds=0.5, large=("t",)),
    ),
)
REQUEST = GenerateRequest(
    "a",
    [1, 2],
    3,
    SamplingSettings(0.5, logit_bias={7: 1.0}),
    frozenset({1}),
    cache_salt=b"s",
    timeout=2.5,
    answered=[3],
)
INFO = EngineInfo(
    "d",
    "n",
    1,
    2,
    3,
    4,
    5,
    6,
    frozenset({1}),
    server_cores=frozenset({3}),
    files={"a": "b"},
    level="l",
    cold_seconds=2.5,
)
EXAMPLES = (
    FULL,
    Add(REQUEST, 0.5, "unix:/a"),
    Cancel("a"),
    INFO,
    ReadFile("s", 1),
    Reopen("s", 1.5),
    WatchBlocks(1),
    FetchState("paged", b"k" * 32, SharedPlace(1, 2, b"m" * 32), 3),
    FetchAhead((1, 2), b"s", "unix:/a"),
    WarmUp("unix:/a", 3),
    FindState(3),
    StateKeys(b"k" * 32),
    StatePart(b"k" * 32, True, False, b"c" * 16, b"content"),
    FilePart("s", 0, b"x"),
    Proof(b"p"),
)
EXAMPLES = (*EXAMPLES, Failure.of(ArtifactError("found", expected="expected", remedy="remedy")))


def comparable(message: Any) -> Any:
    """Errors are equal where all their parts are."""
    if isinstance(message, StepReport):
        return message._replace(refusals=tuple((id, Failure.of(error)) for id, error in message.refusals))
    return message


@given(messages)
def test_every_message_arrives_as_it_was_sent(message: Any) -> None:
    found = decode(encode(message))
    assert type(found) is type(message) and comparable(found) == comparable(message)


# --- what is no message ----------------------------------------------------------------------------------------------


def refused(payload: bytes) -> bool:
    try:
        decode(payload)
    except WireError as error:
        assert error.found and error.expected
        return True
    return False


def changed(value: Any, change: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """``value`` with one part of it replaced, for each part and each replacement."""
    yield from change(value)
    if isinstance(value, list):
        for place, part in enumerate(value):
            yield from ([*value[:place], new, *value[place + 1 :]] for new in changed(part, change))
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from (value | {name: new} for new in changed(part, change))


def variants(message: Any, change: Callable[[Any], Iterator[Any]]) -> list[bytes]:
    payload = encode(message)
    body = msgspec.msgpack.decode(payload[1:], strict=False)
    return [payload[:1] + msgspec.msgpack.encode(new) for new in changed(body, change)]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_missing_and_additional_fields_are_refused(message: Any) -> None:
    """Planted: sizes that are not compared, so that defaults fill in and the rest is dropped."""

    def fields(value: Any) -> Iterator[Any]:
        if isinstance(value, list) and value not in (
            [1],
            [1, 2],
            [None],
            [3],
            ["t"],
        ):  # of which there may be any number
            if not (value and all(isinstance(part, list) for part in value)):
                yield value[:-1]
            yield [*value, None]
            yield [*value, 1]
        elif isinstance(value, dict) and value not in ({"stop": 1}, {"a": "b"}, {7: 1.0}):
            yield from ({name: part for name, part in value.items() if name != left} for left in value)
            yield value | {"more": 1}

    kept = [payload for payload in variants(message, fields) if not refused(payload)]
    assert [msgspec.msgpack.decode(p[1:]) for p in kept] == []


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_values_of_another_type_are_refused(message: Any) -> None:
    def others(value: Any) -> Iterator[Any]:
        found = type(value)
        for other in (True, 1.5, "x", b"x", [[]], {"x": {}}, 7):
            if type(other) is not found and not (value is None or (found is list and value == [])):
                yield other

    accepted = [payload for payload in variants(message, others) if not refused(payload)]
    # A field that may be absent takes a value of its one type, and these do not clash.
    assert [msgspec.msgpack.decode(p[1:]) for p in accepted] == []


def test_numbers_that_are_none_are_refused() -> None:
    for message in (FULL, Add(REQUEST, 0.5)):

        def nan(value: Any) -> Iterator[Any]:
            if isinstance(value, float):
                yield math.nan
                yield math.inf

        found = variants(message, nan)
        assert found and all(map(refused, found))
    impossible = FULL._replace(deltas=(Delta("a", (1,), (TokenLogprobs(1, -math.inf),)),))
    assert decode(encode(impossible)).deltas == impossible.deltas, "of a token that cannot come"


@given(st.binary(max_size=200) | st.builds(lambda kind, rest: bytes([kind]) + rest, st.integers(0, 12), st.binary()))
def test_random_bytes_are_no_message_or_a_whole_one(payload: bytes) -> None:
    if not refused(payload):
        message = decode(payload)
        assert comparable(decode(encode(message))) == comparable(message)


@settings(max_examples=300)
@given(messages, st.data())
def test_a_changed_payload_is_no_message_or_a_whole_one(message: Any, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if not refused(bytes(payload)):
        found = decode(bytes(payload))
        assert comparable(decode(encode(found))) == comparable(found)


@pytest.mark.parametrize(
    "body", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
@pytest.mark.parametrize("kind", range(10))
def test_lengths_and_depths_that_are_not_there_cost_nothing(kind: int, body: bytes) -> None:
    assert refused(bytes([kind]) + body)


def test_unknown_messages_are_refused() -> None:
    for payload in (b"", b"\x80\x90", b"\xff"):
        with pytest.raises(WireError, match="unknown kind"):
            decode(payload)


def test_what_a_request_holds_is_checked_where_it_is_sent() -> None:
    whole = GenerateRequest("a", (1, 2), 3, SamplingSettings(1, logit_bias={1: 2}), timeout=5, answered=(3,))
    assert decode(encode_checked(Add(whole, 0))) == Add(
        GenerateRequest("a", [1, 2], 3, SamplingSettings(1.0, logit_bias={1: 2.0}), timeout=5.0, answered=[3]), 0.0
    )
    wrong: list[dict[str, Any]] = [
        {"prompt": ["one"]},
        {"prompt": [1.5, None]},
        {"prompt": [1 << 70]},
        {"cache_salt": "text"},
        {"priority": "high"},
        {"timeout": math.nan},
        {"timeout": -1},
        {"tenant": "\ud800"},
        {"stop_tokens": {None}},
        {"constraint": object()},
    ]
    for values in wrong:
        with pytest.raises(RequestError):
            encode_checked(Add(GenerateRequest(**({"id": "a", "prompt": [1], "max_new_tokens": 1} | values)), 0.0))


# --- errors ----------------------------------------------------------------------------------------------------------

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TapeoutError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_arrive_as_the_classes_they_are(kind: type[TapeoutError]) -> None:
    found = decode(encode(Failure.of(kind("found", expected="expected", remedy="remedy")))).error()
    assert type(found) is kind
    assert (found.found, found.expected, found.remedy) == ("found", "expected", "remedy")


def test_classes_that_the_other_side_may_not_know_arrive_as_the_one_above() -> None:
    assert type(Failure.of(ServeError("x")).error()) is TapeoutError
    full = Failure.of(DisplacedError("x", expected="y", retry_after=2.5)).error()
    assert isinstance(full, DisplacedError) and full.retry_after == 2.5 and full.remedy


def test_no_name_makes_a_class_that_is_no_error_of_ours() -> None:
    for name in ("ExitCode", "one_line", "Exception", "RuntimeError", ""):
        report = msgspec.msgpack.decode(encode(FULL)[1:])
        report[2][0][1][0] = name
        assert refused(encode(FULL)[:1] + msgspec.msgpack.encode(report))
    report[2][0][1][0] = "ArtifactError"  # an error, and none of a request
    assert refused(encode(FULL)[:1] + msgspec.msgpack.encode(report))


# --- frames ----------------------------------------------------------------------------------------------------------


def passed(sender: Session, receiver: Session, more: bytes = b"") -> list[Any]:
    data = bytes(sender.outgoing) + more
    sender.outgoing.clear()
    return list(receiver.receive(data))


def pair(server_key: bytes = KEY, engine_key: bytes = KEY) -> tuple[Session, Session]:
    server, engine = Session("server", server_key), Session("engine", engine_key)
    for _ in range(2):
        assert passed(server, engine) == passed(engine, server) == []
    return server, engine


def test_both_sides_know_each_other_after_two_messages_each() -> None:
    server, engine = pair()
    assert server.established and engine.established and not server.outgoing and not engine.outgoing
    assert passed(server, engine, server.frame(Cancel("a"))) == [Cancel("a")]
    assert passed(engine, server, engine.frame(INFO)) == [INFO]
    server, engine = pair(b"", b"")
    assert passed(server, engine, server.frame(Cancel("a"))) == [Cancel("a")]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(EXAMPLES), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from(["flip", "cut", "insert", "repeat", "swap", "none"]),
    st.data(),
)
def test_damaged_frames_end_a_connection_and_nothing_of_them_arrives(
    sent: list[Any], to_engine: bool, damage: str, data: st.DataObject
) -> None:
    """Planted: no check of a frame's head, of its number, or of its content."""
    server, engine = pair()
    sender, receiver = (server, engine) if to_engine else (engine, server)
    frames = [sender.frame(message) for message in sent]
    place = data.draw(st.integers(0, len(frames) - 2))
    match damage:
        case "flip":
            frame = bytearray(frames[place])
            for _ in range(data.draw(st.integers(1, 4))):
                frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            whole = bytes(frame) == frames[place]
            frames[place] = bytes(frame)
        case "cut":
            begin = data.draw(st.integers(0, len(frames[place]) - 1))
            end = data.draw(st.integers(begin + 1, len(frames[place])))
            frames[place], whole = frames[place][:begin] + frames[place][end:], False
        case "insert":
            at = data.draw(st.integers(0, len(frames[place])))
            more = data.draw(st.binary(min_size=24, max_size=40))
            frames[place], whole = frames[place][:at] + more + frames[place][at:], False
        case "repeat":
            frames.insert(place + 1, frames[place])
            whole = False
        case "swap":
            frames[place], frames[place + 1], whole = frames[place + 1], frames[place], False
        case _:
            whole = True
    frames.append(sender.frame(last := FilePart("s", 0, bytes(2000))))  # so that a cut frame has bytes to wait for
    sent = [*sent, last]
    stream, found, error = b"".join(frames), list[Any](), None
    step = data.draw(st.integers(1, 200))
    try:
        for begin in range(0, len(stream), step):
            found += receiver.receive(stream[begin : begin + step])
    except WireError as wire:
        error = wire
    assert list(map(comparable, found)) == list(map(comparable, sent[: len(found)])), "what arrives was sent"
    assert (len(found) == len(sent)) if whole else (error is not None and error.expected)


def test_a_frame_that_is_cut_at_its_end_is_waited_for_and_no_message() -> None:
    server, engine = pair()
    frame = server.frame(Add(REQUEST, 0.5))
    for size in range(len(frame)):
        assert passed(server, engine, frame[size : size + 1]) == ([] if size + 1 < len(frame) else [Add(REQUEST, 0.5)])


def test_whoever_reads_frames_can_neither_send_them_again_nor_back() -> None:
    """Planted: MACs without the frame's number, and one key for both directions."""
    server, engine = pair()
    recorded = server.frame(Cancel("a"))
    assert passed(server, engine, recorded) == [Cancel("a")]
    for receiver in (engine, server):
        head = session._HEAD.unpack_from(recorded)
        check = crc32(session._NUMBERED.pack(head[0], receiver._received))
        with pytest.raises(WireError, match="content was changed"):
            list(receiver.receive(session._HEAD.pack(head[0], check, head[2]) + recorded[24:]))


@given(st.binary(min_size=24, max_size=200))
def test_random_bytes_are_no_frame(content: bytes) -> None:
    for known in (True, False):
        server, engine = pair() if known else (Session("server"), Session("engine"))
        for side in (server, engine):
            with pytest.raises(WireError):
                list(side.receive(content))


def test_lengths_are_bounded_and_less_before_the_key_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: no bound, so that whoever connects fills the memory."""
    stranger = Session("server", KEY)
    stranger.outgoing.clear()
    stranger._sent = 0
    large = stranger.seal(b"\x00" * (session.GREETING_BYTES + 1))
    with pytest.raises(WireError, match="a frame of 4097 bytes"):
        list(Session("engine", KEY).receive(large[:24]))
    server, engine = pair()
    frame = server.seal(b"\x00" * 2001)
    monkeypatch.setattr(session, "MOST_BYTES", 2000)
    with pytest.raises(WireError, match="a frame of 2001 bytes"):
        list(engine.receive(frame[:24]))
    with pytest.raises(WireError, match="a message of 2001 bytes"):
        server.seal(b"\x00" * 2001)


# --- who is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("server_key", "engine_key"), [(b"x" * 32, KEY), (b"", KEY), (KEY, b"")])
def test_another_key_is_refused_on_both_sides(server_key: bytes, engine_key: bytes) -> None:
    """Planted: a proof that is not compared."""
    server, engine = Session("server", server_key), Session("engine", engine_key)
    passed(engine, server)
    with pytest.raises(SignatureError, match="the server has another key") as caught:
        passed(server, engine)
    assert caught.value.expected and caught.value.remedy and not engine.established
    with pytest.raises(SignatureError, match="the server has another key"):
        passed(engine, server)
    assert not server.established


def test_an_engine_says_nothing_of_its_key_to_a_stranger() -> None:
    server, engine = Session("server", b"x" * 32), Session("engine", KEY)
    greeting = bytes(engine.outgoing)
    passed(engine, server)
    with pytest.raises(SignatureError):
        passed(server, engine)
    assert engine._derived("proof", "engine") not in greeting + engine.outgoing


def test_a_server_refuses_an_engine_without_the_key() -> None:
    """Planted: a server that believes any engine."""
    server, engine = Session("server", KEY), Session("engine", b"x" * 32)
    passed(engine, server)
    with pytest.raises(SignatureError, match="the engine has another key"):
        list(server.receive(engine.frame(Proof(engine._nonce))))


@pytest.mark.parametrize(("protocol", "version"), [(PROTOCOL, VERSION + 1), (PROTOCOL, 0), ("other", VERSION)])
def test_another_version_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, protocol: str, version: int
) -> None:
    with monkeypatch.context() as other:
        other.setattr(session, "PROTOCOL", protocol)
        other.setattr(session, "VERSION", version)
        server, engine = Session("server", KEY), Session("engine", KEY)
    ours = Session("engine", KEY), Session("server", KEY)
    for theirs, mine, name in ((server, ours[0], "server"), (engine, ours[1], "engine")):
        with pytest.raises(WireError) as caught:
            passed(theirs, mine)
        assert caught.value.found == f"the {name} speaks {protocol} {version}"
        assert caught.value.expected == f"{PROTOCOL} {VERSION}" and "same version" in caught.value.remedy


def test_a_later_version_may_say_more_in_its_greeting() -> None:
    class LaterHello(msgspec.Struct):
        protocol: str
        version: int
        nonce: bytes
        more: list[str]

    later = Session("server", KEY)
    later._sent = 0
    hello = LaterHello(PROTOCOL, VERSION + 1, b"n" * 32, ["compression"])
    with pytest.raises(WireError, match=f"speaks {PROTOCOL} {VERSION + 1}"):
        list(Session("engine", KEY).receive(later.seal(encode(Hello("", 0, b""))[:1] + msgspec.msgpack.encode(hello))))


def test_what_was_recorded_proves_nothing_to_another_connection() -> None:
    """Planted: nonces that are always the same."""
    server, engine = Session("server", KEY), Session("engine", KEY)
    recorded = bytes(server.outgoing)
    passed(engine, server)
    server_after_greeting = bytes(server.outgoing)[len(recorded) :]
    recorded += server_after_greeting
    assert passed(server, engine) == [] and engine.established
    with pytest.raises(SignatureError):
        list(Session("engine", KEY).receive(recorded))


def test_commands_before_the_proof_are_refused() -> None:
    """Planted: an engine that obeys strangers."""
    stranger, engine = Session("server"), Session("engine")
    with pytest.raises(WireError, match="before the keys were compared"):
        passed(stranger, engine, stranger.frame(Cancel("a")))
    with pytest.raises(WireError, match="as the first message"):
        stranger = Session("server")
        stranger._sent = 0
        list(Session("engine").receive(stranger.frame(Cancel("a"))))


@given(st.data())
def test_a_damaged_greeting_lets_nobody_in(data: st.DataObject) -> None:
    server, engine = Session("server", KEY), Session("engine", KEY)
    damaged, exchanged = data.draw(st.integers(0, 3)), 0
    with pytest.raises((WireError, SignatureError)):
        for _ in range(2):
            for sender, receiver in ((server, engine), (engine, server)):
                content = bytearray(sender.outgoing)
                sender.outgoing.clear()
                if exchanged == damaged:
                    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                exchanged += 1
                list(receiver.receive(bytes(content)))
    assert not (server.established and engine.established)


def test_nothing_of_the_runtime_loads_pickles() -> None:
    """Whoever reaches the other end of a connection would run code."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "runtime").rglob("*.py")}
    assert len(sources) > 50 and codec.__file__
    loads = re.compile(r"^\s*(import|from) (pickle|marshal|shelve|multiprocessing)\b", re.MULTILINE)
    assert [str(path) for path, text in sources.items() if loads.search(text)] == []
