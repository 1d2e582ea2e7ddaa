"""Which engines can resume a prompt, and where: the union of their pools, by the keys of blocks.

An engine says which keys came and went in numbered reports, and after a gap everything anew. So the index holds what
the pools hold, and is bounded by them; nothing is guessed from earlier requests. Before a full list has begun nothing
is known of an engine, and until it has ended a part: a prompt then seems to be cached less than it is, never more.

All engines share two dictionaries, in which each key has a bit for each engine that has it: a prompt is looked up once
for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from runtime.wire.codec import WireError
from runtime.wire.messages import KEY_BYTES, EngineStats, KeyChanges, RoutingReport


@dataclass
class _Reported:
    """Of one engine. ``bit``: in the values of both dictionaries. ``turn``: in which it was asked for reports.
    ``next``: the number of the one that must follow.
    """

    bit: int
    turn: int
    next: int = 0


class PrefixIndex:
    """Engines go by names that the caller gives them."""

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}
        self._names: dict[int, str] = {}  # by bit
        self._paged = self._recurrent = 0  # the bits of the engines that have such state
        self._blocks: dict[bytes, int] = {}  # the bits of the engines that have it, by key
        self._snapshots: dict[bytes, int] = {}
        self._turns = count()

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._blocks) + len(self._snapshots)

    def join(self, engine: str) -> int:
        """An engine was connected to, or connected to again: nothing is known of it. The turn to ask it in."""
        self.leave(engine)
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._reported[engine], self._names[bit] = _Reported(bit, turn := next(self._turns)), engine
        return turn

    def leave(self, engine: str) -> None:
        if (reported := self._reported.pop(engine, None)) is not None:
            del self._names[reported.bit]
            self._forget(reported.bit)
            self._paged &= ~reported.bit
            self._recurrent &= ~reported.bit

    def apply(self, engine: str, report: RoutingReport, stats: EngineStats) -> int | None:
        """Where reports are missing before this one, what was known of the engine is void: the turn to ask it in again.

        :class:`WireError` for keys of a wrong length.
        """
        reported = self._reported[engine]
        if report.turn != reported.turn:  # it was asked again since
            return None
        bit = reported.bit
        if report.number != reported.next:
            self._forget(bit)
            reported.turn, reported.next = next(self._turns), 0
            return reported.turn
        if report.whole:
            self._forget(bit)
            self._paged = self._paged | bit if stats.blocks else self._paged & ~bit
            self._recurrent = self._recurrent | bit if stats.slots else self._recurrent & ~bit
        reported.next = report.number + 1
        _change(self._blocks, bit, report.blocks)
        _change(self._snapshots, bit, report.snapshots)
        return None

    def resumable(self, keys: Sequence[bytes]) -> dict[str, int]:
        """After how many blocks of a prompt with these keys each engine can resume it; those that cannot are left out.

        A prompt always leaves a token to compute, so give the keys of all tokens but the last.
        """
        short, names, found = [key[:KEY_BYTES] for key in keys], self._names, dict[int, int]()
        chained, engines_of = self._paged, self._blocks.get  # engines that have all blocks so far
        for blocks, key in enumerate(short):
            having = chained & engines_of(key, 0)
            if having != chained:
                left, chained = chained ^ having if blocks else 0, having
                while left:
                    found[bit := left & -left] = blocks
                    left ^= bit
                if not chained:
                    break
        found.update(dict.fromkeys(_bits(chained), len(short)))
        if self._recurrent:
            self._to_snapshots(short, found)
        return {names[bit]: blocks for bit, blocks in found.items()}

    def check(self) -> None:
        """The bookkeeping adds up; for tests."""
        bits = sum(self._names)
        assert {reported.bit: name for name, reported in self._reported.items()} == self._names
        for engines in (*self._blocks.values(), *self._snapshots.values()):
            assert engines and not engines & ~bits, "a key is of no engine, or of one that has left"

    def _to_snapshots(self, keys: Sequence[bytes], found: dict[int, int]) -> None:
        """Where an engine has recurrent state, it resumes at the last snapshot within its chain of blocks."""
        left = self._recurrent
        ends = {bit: found.pop(bit, 0) if bit & self._paged else len(keys) for bit in _bits(left)}
        for blocks in range(len(keys), 0, -1):
            having = left & self._snapshots.get(keys[blocks - 1], 0)
            for bit in _bits(having):
                if ends[bit] >= blocks:
                    found[bit] = blocks
                    left ^= bit
            if not left:
                break

    def _forget(self, bit: int) -> None:
        for keys in (self._blocks, self._snapshots):
            for key in [key for key, engines in keys.items() if engines & bit]:
                _remove(keys, key, bit)


def _change(keys: dict[bytes, int], bit: int, changes: KeyChanges) -> None:
    for key in _split(changes.published):
        keys[key] = keys.get(key, 0) | bit
    for key in _split(changes.evicted):
        _remove(keys, key, bit)


def _remove(keys: dict[bytes, int], key: bytes, bit: int) -> None:
    """An engine may say of a key that it is gone without having said that it was there."""
    if left := keys.get(key, 0) & ~bit:
        keys[key] = left
    else:
        keys.pop(key, None)


def _split(joined: bytes) -> Iterator[bytes]:
    if len(joined) % KEY_BYTES:
        raise WireError(f"{len(joined)} bytes of keys", expected=f"a multiple of {KEY_BYTES}")
    return (joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES))


def _bits(number: int) -> Iterator[int]:
    while number:
        yield (bit := number & -number)
        number ^= bit
