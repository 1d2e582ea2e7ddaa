"""How many positions each slot of recurrent state holds, so that state is never read for another position.

State cannot be cut as a block table can: from a wrong position tokens would be wrong, and nothing else would show it.
"""

from __future__ import annotations

from engines.protocol import Entry
from tapeout.errors import RequestError
from tapeout.state import NO_SLOT

UNKNOWN = -1  # positions of a slot that a step is writing, or that a step failed to write


class StateSlots:
    """``slots``: 0 for an engine without recurrent state; it refuses whatever names a slot."""

    def __init__(self, slots: int) -> None:
        self._positions = [UNKNOWN] * slots

    def hold(self, slot: int, positions: int) -> None:
        self._positions[slot] = positions

    def copy(self, source: int, target: int) -> None:
        """:class:`RequestError` where one of them is no slot."""
        if error := self._absent([source, target]):
            raise error
        self._positions[target] = self._positions[source]

    def unfit(self, entry: Entry, written: set[int]) -> RequestError | None:
        """Why an entry cannot be run. ``written``: slots that entries before it write; its own are added."""
        own, places = [entry.slot, *(slot for _, slot in entry.snapshots)], [place for place, _ in entry.snapshots]
        end = entry.start + len(entry.tokens)
        if not self._positions and own == [NO_SLOT]:
            return None
        if error := self._absent(own):
            return error
        if places != sorted(set(places)) or not all(entry.start < place <= end for place in places):
            return RequestError(
                f"snapshots at positions {places}",
                expected=f"ascending positions after {entry.start}, up to {end}, of the tokens fed",
            )
        if len(set(own)) < len(own) or not written.isdisjoint(own):
            return RequestError(f"state slots {own}", expected="slots that nothing else in this step writes")
        if entry.start and (held := self._positions[entry.slot]) != entry.start:
            found = "an unknown state" if held == UNKNOWN else f"the state of {held} positions"
            return RequestError(
                f"slot {entry.slot} holds {found}, and the tokens begin at position {entry.start}",
                expected="the state of exactly the positions before them: it can be neither cut nor skipped",
            )
        written.update(own)
        return None

    def _absent(self, slots: list[int]) -> RequestError | None:
        count = len(self._positions)
        if all(0 <= slot < count for slot in slots):
            return None
        expected = f"slots 0 to {count - 1}" if count else "none: this engine has no recurrent state"
        return RequestError(f"state slots {slots}", expected=expected)
