"""The traffic log: a sample of prompts and responses, redacted before it is written. It is off unless asked for.

``traffic.jsonl`` has one call a line. When it is full it becomes ``traffic-20261122T120000-000001.jsonl``, and the
oldest files are removed. `calibrate` and `shadow` read such files: ``data.traffic`` in the recipe.

Token ids are not written: they cannot be redacted. A prompt that came as token ids is written as its text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from pydantic_core import to_json

from runtime.gateway.accounts.redaction import find_redactors, redact_all
from runtime.gateway.accounts.salt import kept_salt
from runtime.gateway.protocol.calls import Call, Hook
from tapeout.errors import TapeoutError, one_line
from tapeout.whole_lines import append_line

CURRENT = "traffic.jsonl"
WAITING = 1000  # calls that wait for the writer; more are dropped, and counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrafficSettings:
    """``share`` of the calls, 0 to 1. ``redactors``: names of functions, after those that are always used.

    ``max_bytes`` of a file, ``max_files`` that are kept besides the current one.
    """

    folder: Path
    share: float
    redactors: tuple[str, ...] = ()
    max_bytes: int = 64 << 20
    max_files: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise TapeoutError(f"the share of the traffic log is {self.share}", expected="more than 0 and at most 1")


class TrafficLog(Hook, Collector):
    """A hook of all calls. ``decode``: text of token ids. ``dropped``: calls that were sampled and not written."""

    def __init__(self, settings: TrafficSettings, decode: Callable[[Sequence[int]], str]) -> None:
        self._settings, self._decode = settings, decode
        self._redactors = find_redactors(settings.redactors)
        self.written = self.dropped = 0
        self._failed = False  # the last line could not be written, which is said once
        try:
            settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._salt = kept_salt(settings.folder)
        except OSError as error:
            raise TapeoutError(
                f"{settings.folder} cannot be written: {one_line(error)}", expected="a folder for the traffic log"
            ) from error
        self._calls: queue.Queue[Call | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def ended(self, call: Call) -> None:
        if call.error is None and call.responses and self._sampled(call.id):
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self.dropped += 1

    def close(self) -> None:
        """Write what waits."""
        self._calls.put(None)
        self._thread.join()

    def _hash(self, text: str) -> bytes:
        return hashlib.sha256(self._salt + text.encode()).digest()

    def _sampled(self, id: str) -> bool:
        """By the call's id, which clients do not choose."""
        return int.from_bytes(self._hash(f"sample {id}")[:8]) < self._settings.share * 2**64

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._write(to_json(self._redacted(call), inf_nan_mode="null"))
            except OSError as error:
                self.dropped += 1
                if not self._failed:
                    log.error("calls are lost to the traffic log until it can be written again: %s", error.strerror)
                self._failed = True
            except Exception as error:  # what cannot be redacted is not written
                self.dropped += 1
                log.error("a call is not in the traffic log: %s", type(error).__name__)
            else:
                self.written, self._failed = self.written + 1, False

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("tapeout:traffic_calls", "Calls sampled for the traffic log.", labels=["outcome"])
        family.add_metric(["written"], self.written)
        family.add_metric(["lost"], self.dropped)
        yield family

    def _redacted(self, call: Call) -> dict[str, Any]:
        messages = [entry.model_dump(exclude_none=True) for entry in call.conversation if isinstance(entry, BaseModel)]
        texts: list[str] = []
        if not messages:
            given = call.conversation or [None] * len(call.prompts)
            texts = [
                self._decode(tokens) if text is None else text for text, tokens in zip(given, call.prompts, strict=True)
            ]
        responses = ["".join(pieces) for _, pieces in sorted(call.responses.items())]
        content = {"messages": messages, "prompts": texts, "responses": responses}
        return {
            "id": self._hash(f"call {call.id}").hex()[:16],
            "tenant": self._hash(f"tenant {call.caller.tenant}").hex()[:16],
            "day": datetime.fromtimestamp(call.created, UTC).date().isoformat(),
            "model": call.model,
            "bundle": call.digest,
            "prompt_tokens": call.prompt_tokens,
            "completion_tokens": call.completion_tokens,
            **redact_all(content, self._redactors),
        }

    def _write(self, line: bytes) -> None:
        folder, settings = self._settings.folder, self._settings
        current = folder / CURRENT
        if current.exists() and current.stat().st_size + len(line) + 2 > settings.max_bytes:
            kept = sorted(folder.glob("traffic-*.jsonl"))
            number = int(kept[-1].stem.rpartition("-")[2]) + 1 if kept else 1
            current.rename(folder / f"traffic-{datetime.now(UTC):%Y%m%dT%H%M%S}-{number:06}.jsonl")
            for oldest in kept[: len(kept) + 1 - settings.max_files]:
                oldest.unlink()
        file = os.open(current, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            append_line(file, line)
        finally:
            os.close(file)
