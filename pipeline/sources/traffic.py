"""A server's traffic log as a data set: what its users asked, and what they were answered.

The log (``runtime/gateway/accounts/traffic.py``) is JSON lines, redacted before they were written. The data set
``traffic`` has two columns: ``question``, the first message of a user or a prompt, for shadow replay; ``text``, the
whole exchange, for calibration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.sources.locations import Fetched, fetch_source
from pipeline.sources.source import folder_of
from tapeout.errors import SourceError

NAME = "traffic"
SUFFIX = ".jsonl"
EXPECTED = "messages or prompts, and responses, as `tapeout serve --traffic-log` writes them"
REMEDY = "remove the line, or name another file in data.traffic"

log = logging.getLogger(__name__)


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
    # The server's current file has the name that comes last.
    files = [path] if path.is_file() else sorted(path.rglob(f"*{SUFFIX}"))
    rows: list[dict[str, str]] = []
    for file in files:
        calls, torn = _calls(file)
        if torn:
            log.warning("%s: %d of %d lines are torn, and skipped", file, torn, torn + len(calls))
        if torn and not calls:
            raise SourceError(f"{file} is no traffic log: none of its lines is JSON", expected=EXPECTED, remedy=REMEDY)
        rows += [row for number, call in calls for row in _rows(file, number, call)]
    if not rows:
        raise SourceError(f"{path} holds no exchange", expected="a traffic log of `tapeout serve --traffic-log`")
    return rows


def _calls(file: Path) -> tuple[list[tuple[int, Any]], int]:
    """The number and the value of each line, and how many lines are torn: by a crash of the server, or a full disk."""
    lines = [(number, line) for number, line in enumerate(file.read_bytes().split(b"\n"), start=1) if line.strip()]
    calls: list[tuple[int, Any]] = []
    for number, line in lines:
        with suppress(ValueError):
            calls.append((number, json.loads(line)))
    return calls, len(lines) - len(calls)


def _rows(file: Path, number: int, call: Any) -> list[dict[str, str]]:
    try:
        return [*_exchanges(call)]
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
