"""The traffic log: what is planted in prompts and responses never reaches a file, whatever stands around it."""

from __future__ import annotations

import errno
import json
import os
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from runtime.gateway.accounts import traffic as module
from runtime.gateway.accounts.redaction import redact, redact_all
from runtime.gateway.accounts.traffic import TrafficLog, TrafficSettings
from runtime.gateway.protocol.bodies import Message
from runtime.gateway.protocol.calls import Call, Caller
from tapeout.errors import TapeoutError
from tests.waiting import wait_for

LETTERS = string.ascii_letters + string.digits


def luhn_completed(digits: str) -> str:
    doubled = [int(d) * 2 - 9 * (int(d) > 4) for d in digits[::-2]]
    return digits + str(-(sum(map(int, digits[-2::-2])) + sum(doubled)) % 10)


def grouped(digits: str, separator: str) -> str:
    return separator.join(digits[at : at + 4] for at in range(0, len(digits), 4))


def random_text(size: int, letters: str = LETTERS) -> st.SearchStrategy[str]:
    """With a digit and a letter, as random text of this length has."""
    return st.text(letters, min_size=size, max_size=size).filter(
        lambda text: any(c.isdigit() for c in text) and any(c.isalpha() for c in text)
    )


emails = st.builds(
    "{}@{}.{}".format,
    st.text(LETTERS + "._+-", min_size=1, max_size=30),
    st.text(LETTERS + "-", min_size=1, max_size=20),
    st.sampled_from(["com", "org", "co.uk", "museum", "de"]),
)
cards = st.builds(
    grouped,
    st.builds(luhn_completed, st.text(string.digits, min_size=12, max_size=18)),
    st.sampled_from(["", " ", "-", "\u2011"]),
)
phones = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["+1 ", "+44", "0049 ", "+49-"]),
    st.sampled_from(["(30) ", "20 ", "555-"]),
    st.text(string.digits, min_size=3, max_size=4),
    st.from_regex(r"[ -]?[0-9]{4}", fullmatch=True),
)
keys = st.one_of(
    st.builds("sk-{}".format, random_text(40)),
    st.builds("sk-proj-{}".format, random_text(60, LETTERS + "_-")),
    st.builds("tk-{}".format, random_text(43, LETTERS + "_-")),
    st.builds("ghp_{}".format, random_text(36)),
    st.builds("AKIA{}".format, st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16)),
    st.builds("AIza{}".format, st.text(LETTERS + "_-", min_size=35, max_size=35)),
    st.builds("eyJ{}.{}.{}".format, random_text(20), random_text(40), random_text(43)),
    random_text(64, "0123456789abcdef"),
)
words = st.text(st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="@"), max_size=20)


@given(words, st.one_of(emails, cards, phones), words)
def test_personal_data_is_removed_whatever_stands_around_it(before: str, secret: str, after: str) -> None:
    assert secret not in redact(f"{before} {secret} {after}")


@given(words, keys, words)
def test_keys_are_removed_whatever_stands_around_them(before: str, secret: str, after: str) -> None:
    for text in (f"{before} {secret} {after}", f'{{"key":"{secret}"}}', f"url?key={secret}&x", f"{secret}\n{after}"):
        assert secret not in redact(text)


@given(st.integers(0, 9), cards, st.integers(0, 9))
def test_a_card_inside_a_longer_number_is_removed(before: int, card: str, after: int) -> None:
    assert card not in redact(f"{before}{card}{after}")


def test_ordinary_text_stays() -> None:
    for text in (
        "In 1969, 3.5 billion years ago, 12:30, 2026-11-22, 22.11.2026, v1.2.3, 127.0.0.1, page 1234567.",
        "task-management-system-for-beginners and state-of-the-art-large-language-models",
        "x = a[i] @ b[j]; print(1_000_000)",
    ):
        assert redact(text) == text


def test_passwords_tokens_and_private_keys_are_removed() -> None:
    for text in ("password: hunter2", "API_KEY=abc", '"secret": "abc"', "Authorization: Bearer abcdef12345"):
        assert "[key]" in redact(text), text
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"
    assert redact(f"a {key} b") == "a [key] b"
    assert redact("-----BEGIN PRIVATE KEY-----\nMIIE cut off") == "[key]"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["a", "1", "1 ", "a@", "(", "-", "eyJ", "a.", "sk-", "secret ", "+1", "a1-"])
def test_no_pattern_is_quadratic(part: str) -> None:
    """A hostile prompt of this length would take many minutes."""
    redact(part * (50_000 // len(part)))


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_every_text_of_a_value_is_redacted(value: Any) -> None:
    assert "@" not in json.dumps(redact_all(value, [lambda text: text.replace("@", "")]), ensure_ascii=False)


def call(number: int, messages: Sequence[dict[str, Any]] = (), response: str = "ok", **more: Any) -> Call:
    found = Call(f"chatcmpl-{number}", "r", "chat", "m", "b", Caller("k", "acme"), False, [[65, 66]], 1, 9, **more)
    found.conversation = more.get("conversation") or [Message.model_validate(message) for message in messages]
    found.responses = {0: [response[:3], response[3:]]}
    return found


def decode(tokens: Sequence[int]) -> str:
    return "decoded ann@example.org"


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@given(secrets=st.lists(st.one_of(emails, cards, phones, keys), min_size=4, max_size=4))
@settings(max_examples=25)
def test_nothing_planted_reaches_the_file(tmp_path_factory: pytest.TempPathFactory, secrets: list[str]) -> None:
    folder = tmp_path_factory.mktemp("traffic")
    one, two, three, four = secrets
    traffic = TrafficLog(TrafficSettings(folder, 1.0), decode)
    parts = [{"type": "text", "text": f"mine: {two} !"}]
    tool = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"to": f" {three} "})}}
    messages = [
        {"role": "user", "content": f"I am {one} ."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [tool]},
    ]
    traffic.ended(call(1, messages, f"You said {four} ."))
    traffic.close()
    written = b"".join(path.read_bytes() for path in folder.glob("*.jsonl")).decode()
    assert written and not [secret for secret in secrets if secret in written]
    assert "acme" not in written and "chatcmpl" not in written
    assert (record := records(folder)[0])["messages"][0]["role"] == "user" and record["completion_tokens"] == 0


def test_prompts_that_came_as_token_ids_are_written_as_redacted_text(tmp_path: Path) -> None:
    traffic = TrafficLog(TrafficSettings(tmp_path, 1.0), decode)
    traffic.ended(call(1, conversation=[None]))
    traffic.ended(call(2, conversation=["plain"]))
    traffic.close()
    assert [record["prompts"] for record in records(tmp_path)] == [["decoded [email]"], ["plain"]]


def test_a_share_of_the_calls_is_sampled_by_their_ids(tmp_path: Path) -> None:
    traffic = TrafficLog(TrafficSettings(tmp_path, 0.25), decode)
    for number in range(400):
        traffic.ended(call(number, [{"role": "user", "content": "hi"}]))
        time.sleep(0)
    traffic.close()
    assert 60 < len(records(tmp_path)) + traffic.dropped < 140


def test_files_are_rotated_and_the_oldest_removed(tmp_path: Path) -> None:
    traffic = TrafficLog(TrafficSettings(tmp_path, 1.0, max_bytes=2000, max_files=3), decode)
    for number in range(60):
        traffic.ended(call(number, [{"role": "user", "content": f"number {number:04}"}]))
    traffic.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.jsonl")}
    assert len(sizes) == 4 and max(sizes.values()) <= 2000 and (tmp_path / "traffic.jsonl").stat().st_mode & 0o077 == 0
    said = [record["messages"][0]["content"] for record in records(tmp_path)]
    assert said[-1] == "number 0059" and "number 0000" not in said


def shout(text: str) -> str:
    return text.replace("blue", "[color]")


def fail(text: str) -> str:
    raise RuntimeError(f"planted failure about {text}")


def test_redactors_can_be_added_and_what_one_fails_on_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{__name__}:shout"
    traffic = TrafficLog(TrafficSettings(tmp_path / "a", 1.0, (name,)), decode)
    traffic.ended(call(1, [{"role": "user", "content": "blue"}]))
    traffic.close()
    assert records(tmp_path / "a")[0]["messages"][0]["content"] == "[color]"
    traffic = TrafficLog(TrafficSettings(tmp_path / "b", 1.0, (f"{__name__}:fail",)), decode)
    traffic.ended(call(1, [{"role": "user", "content": "my secret"}]))
    traffic.close()
    assert records(tmp_path / "b") == [] and traffic.dropped == 1 and "my secret" not in caplog.text
    for wrong in ("no.such.module:f", f"{__name__}:missing", "nothing", f"{__name__}:LETTERS"):
        with pytest.raises(TapeoutError, match="redactor"):
            TrafficLog(TrafficSettings(tmp_path, 1.0, (wrong,)), decode)


def test_a_slow_disk_drops_calls_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 2)
    traffic = TrafficLog(TrafficSettings(tmp_path, 1.0), decode)
    monkeypatch.setattr(traffic, "_write", lambda line: time.sleep(0.05))
    for number in range(20):
        traffic.ended(call(number, [{"role": "user", "content": "hi"}]))
    traffic.close()
    assert traffic.dropped > 10


def test_a_full_disk_leaves_whole_lines_and_counts_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk takes a part of a line without an error, and nothing of the rest."""
    room, write = [2000], os.write

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    traffic = TrafficLog(TrafficSettings(tmp_path, 1.0), decode)
    for number in range(20):
        traffic.ended(call(number, [{"role": "user", "content": f"number {number}"}]))
    wait_for(lambda: traffic.written + traffic.dropped == 20)
    room[0] = 1 << 20
    (tmp_path / "traffic.jsonl").open("ab").write(b'{"id": "torn by a cra')
    traffic.ended(call(20, [{"role": "user", "content": "number 20"}]))
    traffic.close()
    lines = (tmp_path / "traffic.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b"" and lines.pop(-2) == b'{"id": "torn by a cra'
    said = [json.loads(line)["messages"][0]["content"] for line in lines]
    assert said[-1] == "number 20" and said[:-1] == [f"number {number}" for number in range(len(said) - 1)]
    assert traffic.written == len(said) > 2 and traffic.dropped == 21 - len(said)
    registry = CollectorRegistry()
    registry.register(traffic)
    assert registry.get_sample_value("tapeout:traffic_calls_total", {"outcome": "lost"}) == traffic.dropped
    assert caplog.text.count("No space left") == 1


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_is_more_than_0_and_at_most_1(tmp_path: Path, share: float) -> None:
    with pytest.raises(TapeoutError, match="share"):
        TrafficSettings(tmp_path, share)
