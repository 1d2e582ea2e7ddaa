"""A server's traffic log as a data set: what its users asked, and what they were answered.

The log (``runtime/gateway/accounts/traffic.py``) is JSON lines, redacted before they were written. The data set
``traffic`` has two columns: ``question``, the first message of a user or a prompt, for shadow replay; ``text``, the
whole exchange, for calibration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.sources.copying import Fetched, fetch_source
from pipeline.sources.source import folder_of
from tapeout.errors import SourceError

NAME = "traffic"
SUFFIX = ".jsonl"
EXPECTED = "messages or prompts, and responses, as `tapeout serve --traffic-log` writes them"
REMEDY = "remove the line, or name another file in data.traffic"

log = logging.getLogger(__name__)
Read = TypeVar("Read")


def fetch_traffic(source: str, sha256: str | None, incoming: Path, data: Path) -> Fetched:
    """Fetch one file of the log, or a folder of them, and write it as a table into the ``data`` folder."""
    from datasets import Dataset

    log = fetch_source(source, incoming, sha256=sha256, keep=lambda name: name.endswith(SUFFIX))
    rows = exchanges(log.path)
    table = Dataset.from_dict({name: [row[name] for row in rows] for name in ("question", "text")})
    table.save_to_disk(str(data / folder_of(NAME) / "validation"))
    return log


def exchanges(path: Path) -> list[dict[str, str]]:
    """The ``question`` and the whole ``text`` of every exchange, the oldest first, in a file of the log or a folder.

    Torn lines, which are no JSON, are skipped, and a warning counts them. :class:`SourceError` if no line is left, or
    for JSON that is no line of a log.
    """
    rows = _of_each_call(path, lambda call: [*_exchanges(call)])
    if not rows:
        raise SourceError(f"{path} holds no exchange", expected="a traffic log of `tapeout serve --traffic-log`")
    return rows


class LoggedCall(NamedTuple):
    """``texts``: of the messages, or the prompt. Counts are those of all choices together."""

    texts: tuple[str, ...]
    responses: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


def logged_calls(path: Path) -> list[LoggedCall]:
    """Every call of a log with one prompt, the oldest first. Errors as those of :func:`exchanges`."""
    found = _of_each_call(path, _logged)
    if not found:
        raise SourceError(f"{path} holds no call", expected="a traffic log of `tapeout serve --traffic-log`")
    return found


def _logged(call: dict[str, Any]) -> list[LoggedCall]:
    texts = [_text(message.get("content")) for message in call["messages"]] or call["prompts"]
    if not call["messages"] and len(texts) != 1:
        return []
    responses, counts = call["responses"], (int(call["prompt_tokens"]), int(call["completion_tokens"]))
    return [LoggedCall(tuple(texts), tuple(map(str, responses)), *counts)]


def _of_each_call(path: Path, read: Callable[[dict[str, Any]], list[Read]]) -> list[Read]:
    """What ``read`` makes of the lines of a file of the log, or of all in a folder."""
    # The server's current file has the name that comes last.
    files = [path] if path.is_file() else sorted(path.rglob(f"*{SUFFIX}"))
    rows: list[Read] = []
    for file in files:
        calls, torn = _calls(file)
        if torn:
            log.warning("%s: %d of %d lines are torn, and skipped", file, torn, torn + len(calls))
        if torn and not calls:
            raise SourceError(f"{file} is no traffic log: none of its lines is JSON", expected=EXPECTED, remedy=REMEDY)
        rows += [row for number, call in calls for row in _rows(file, number, call, read)]
    return rows


def _calls(file: Path) -> tuple[list[tuple[int, Any]], int]:
    """The number and the value of each line, and how many lines are torn: by a crash of the server, or a full disk."""
    lines = [(number, line) for number, line in enumerate(file.read_bytes().split(b"\n"), start=1) if line.strip()]
    calls: list[tuple[int, Any]] = []
    for number, line in lines:
        with suppress(ValueError):
            calls.append((number, json.loads(line)))
    return calls, len(lines) - len(calls)


def _rows(file: Path, number: int, call: Any, read: Callable[[dict[str, Any]], list[Read]]) -> list[Read]:
    try:
        return read(call)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"line {number} of {file.name} is no line of a traffic log: {error!r}"
        raise SourceError(found, expected=EXPECTED, remedy=REMEDY) from error


def _exchanges(call: dict[str, Any]) -> Iterator[dict[str, str]]:
    messages, prompts, responses = call["messages"], call["prompts"], call["responses"]
    if messages:
        turns = [(message["role"], _text(message.get("content"))) for message in messages]
        question = next((text for role, text in turns if role == "user"), "")
        yield {"question": question, "text": "\n".join([*(text for _, text in turns if text), *responses[:1]])}
    each = len(responses) // len(prompts) if prompts else 0
    for index, prompt in enumerate(prompts):
        yield {"question": prompt, "text": "".join([prompt, *responses[index * each : index * each + 1]])}


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")
