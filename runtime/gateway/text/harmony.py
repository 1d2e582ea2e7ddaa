"""The messages of gpt-oss's harmony format in one response: reasoning, calls of tools, and the answer.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

A response begins behind ``<|start|>assistant``, which ends the prompt. ``analysis`` is reasoning. What is written to
``functions.NAME`` is a call, and to another recipient reasoning, since no client has the tools that the model knows by
itself. All else is content: ``final``, ``commentary`` to the user, and text without a channel, so that nothing that the
model said is lost but the marks and headers. However the text is cut into pieces, what is read is the same.
"""

from __future__ import annotations

import re
from typing import Literal

from runtime.gateway.text.calls import CallDelta, Calls, Read
from runtime.gateway.text.stops import overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)  # of a message; a new one may begin without an end
FINAL = f"{CHANNEL}final{MESSAGE}"  # behind the prompt where a constraint decides what the answer is
EFFORTS = ("low", "medium", "high")  # of reasoning
FUNCTION = "functions."
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_HEADERS = (START, CHANNEL, MESSAGE, "to=")  # what the header of a message begins with

Kind = Literal["content", "reasoning", "call"]


class HarmonyReader:
    """``calls``: the request has tools; else a call is content."""

    def __init__(self, *, calls: bool) -> None:
        self._functions, self._calls = calls, Calls()
        self._held = ""
        self._body: Kind | None = None  # of the message that is open; None: between messages

    def push(self, text: str) -> Read:
        return self._read(text, ended=False)

    def finish(self) -> Read:
        return self._read("", ended=True)

    def _read(self, text: str, *, ended: bool) -> Read:
        self._held += text
        found: dict[Kind, str] = {"content": "", "reasoning": ""}
        calls: list[CallDelta] = []
        while self._held:
            if self._body is None and not self._open(calls, ended):
                break
            if self._body is None:
                continue
            kind, part, closed = self._body, *self._part(ended)
            if kind == "call":
                calls += [CallDelta(self._calls.count - 1, None, None, part)] if part else []
            else:
                found[kind] += part
            if closed:
                self._body = None
            else:
                break
        return Read(found["content"], calls, found["reasoning"])

    def _open(self, calls: list[CallDelta], ended: bool) -> bool:
        """Take the header of the next message, or drop one without a message. False where more text decides."""
        begin = self._held.lstrip()
        if not begin.startswith(_HEADERS):
            if not ended and any(mark.startswith(begin) for mark in _HEADERS):
                return False
            self._body = "content"
            return True
        role = len(START) if begin.startswith(START) else 0
        found = [(place, mark) for mark in (MESSAGE, *ENDS) if (place := begin.find(mark, role)) >= 0]
        if not found:
            if ended and not begin.startswith((START, CHANNEL)):
                self._body = "content"
            elif ended:
                self._held = ""
            return ended
        place, mark = min(found)
        self._held = begin[place:] if mark == START else begin[place + len(mark) :]
        if mark == MESSAGE:
            self._body = self._kind(begin[:place], calls)
        return True

    def _kind(self, header: str, calls: list[CallDelta]) -> Kind:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1] if recipient else ""
        if self._functions and name.startswith(FUNCTION):
            calls.append(self._calls.new(name.removeprefix(FUNCTION), ""))
            return "call"
        inner = bool(name) and not name.startswith(FUNCTION)
        return "reasoning" if inner or (channel is not None and channel[1] == "analysis") else "content"

    def _part(self, ended: bool) -> tuple[str, bool]:
        """The text of the open message as far as it is certain, and whether it ends there."""
        found = [(place, mark) for mark in ENDS if (place := self._held.find(mark)) >= 0]
        if not found:
            keep = 0 if ended else max(overlap(self._held, mark) for mark in ENDS)
            part, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return part, False
        place, mark = min(found)
        part = self._held[:place]
        self._held = self._held[place:] if mark == START else self._held[place + len(mark) :]
        return part, True
