"""The recurrent state of one sequence: where it can go on, and which tokens it must be fed again to get elsewhere.

Paged state goes on at any position. Recurrent state is that of one position; a copy is kept at one more. Anywhere else
is reached by feeding the tokens again that lie between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.state_slots import UNKNOWN


@dataclass
class SequenceState:
    """``tokens``: those that the sequence holds.

    ``slot``, ``copy``: of its state, and of the copy, or ``NO_SLOT``. ``position``, ``copied``: the position of each.
    """

    slot: int
    copy: int
    tokens: list[int] = field(default_factory=list[int])
    position: int = UNKNOWN
    copied: int = UNKNOWN

    def nearest(self, start: int) -> tuple[int, bool]:
        """The last position up to ``start`` at which the sequence can go on, and whether that is the copy's."""
        if start == self.position:
            return start, False
        return (self.copied, True) if 0 < self.copied <= start else (0, False)

    def forget(self) -> None:
        """Until :meth:`fed`, nothing is known of the state: a step may fail in it."""
        self.position = self.copied = UNKNOWN

    def lose(self) -> None:
        """The sequence is no longer there."""
        self.forget()
        self.tokens.clear()

    def fed(self, start: int, tokens: Sequence[int], copied: int) -> None:
        """A step has computed ``tokens`` from ``start`` on; the copy is of the position ``copied``."""
        end = start + len(tokens)
        if self.tokens[start:end] != [*tokens]:  # else what lies behind them holds
            self.tokens[start:] = tokens
        self.position, self.copied = end, copied
