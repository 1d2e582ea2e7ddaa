"""What is read out of the text of a response as it grows: content, calls of tools, and reasoning."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A new call (with ``id`` and ``name``), or more of the arguments of one. ``place``: among the calls."""

    place: int
    id: str | None
    name: str | None
    arguments: str

    def body(self) -> dict[str, Any]:
        if self.name is None:
            return {"index": self.place, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.place, "id": self.id, "type": "function", "function": function}


class Read(NamedTuple):
    content: str
    calls: list[CallDelta]
    reasoning: str = ""


class ToolReader(Protocol):
    def push(self, text: str) -> Read:
        """What new text certainly is."""
        ...

    def finish(self) -> Read:
        """The text that was held back, at the end of the response."""
        ...


class Calls:
    """Numbers the calls of a response."""

    def __init__(self) -> None:
        self.count = 0

    def new(self, name: str, arguments: str) -> CallDelta:
        self.count += 1
        return CallDelta(self.count - 1, f"call_{uuid.uuid4().hex[:24]}", name, arguments)
