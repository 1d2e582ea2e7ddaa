"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in streamed text, and holds back only text that could still become one.

    >>> matcher = StopMatcher(("</end>",))
    >>> matcher.push("a <b> </"), matcher.push("end> c"), matcher.matched
    ('a <b> ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False
        self.stop = ""  # the stop string that was found

    def push(self, text: str) -> str:
        """The text that certainly precedes any stop string; empty after a match."""
        if self.matched:
            return ""
        text = self._held + text
        found = [(index + len(stop), index) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            # The match that is complete first wins, so the answer does not depend on where the pieces were cut.
            end, start = min(found)
            self.matched, self._held, self.stop = True, "", text[start:end]
            return text[:start]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back and is not a stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest prefix of ``stop`` that ``text`` ends with, less than the whole.

    >>> overlap("a <tool", "<tool_call>"), overlap("a", "<tool_call>")
    (5, 0)
    """
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
