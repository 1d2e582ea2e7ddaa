"""Recurrent state: a running sequence has one slot, and a prefix is resumed from a copy of a slot, a snapshot.

Snapshots are kept at ends of blocks: at the last one of a prompt that leaves a token to compute, so that the same
prompt finds it; where a prompt leaves what another kind of state still knows, so that the third such prompt finds it;
at the last one of an answer so far, so that the next turn of a conversation goes on behind it; and each
``snapshot_tokens``, if not 0. A grid alone finds little, as prefixes seldom end on it. A snapshot takes a slot that no
sequence has, the least recently used, and is left out where there is none. That of an answer gives its slot to the next
one of the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.kinds import Demand, Lease, Match
from tapeout.state import NO_SLOT

NEVER = 1 << 62  # a position


@dataclass
class _Plan:
    """Of one sequence. ``done``: positions up to which its snapshots have slots, or have been left out.

    ``answer``: positions behind this one are of its answer. ``latest``: slot and key of the answer's last snapshot.
    """

    done: int
    stops: tuple[int, ...]  # positions at which a snapshot is wanted
    answer: int = NEVER
    latest: tuple[int, bytes] | None = None
    source: int = NO_SLOT  # the snapshot that it resumes at, held until it is copied


class RecurrentState:
    """See :class:`runtime.engine.cache.kinds.StateKind`. ``pool``: of slots."""

    trims = False

    def __init__(self, pool: BlockPool, block_tokens: int, snapshot_tokens: int = 0) -> None:
        self.pool, self._size, self.max_tokens = pool, block_tokens, NEVER
        self._interval = -(-snapshot_tokens // block_tokens) * block_tokens  # 0: no grid
        self._promised: dict[bytes, Lease] = {}  # keys at which a running sequence will leave a snapshot
        self._plans: dict[Lease, _Plan] = {}
        self._copies: dict[int, int] = {}  # by slot of a sequence: the snapshot that it resumes at

    def take_copies(self) -> list[tuple[int, int]]:
        """From which slot to which state must be copied before the next step. The caller copies at once."""
        copies = [(source, target) for target, source in self._copies.items()]
        for source, _ in copies:
            self.pool.release([source])
        self._copies.clear()
        return copies

    def longest(self, keys: Sequence[bytes]) -> tuple[int, int]:
        later = 0
        for count in range(len(keys), 0, -1):
            key = keys[count - 1]
            if self.pool.find([key]):
                return count, later or count
            if key in self._promised:
                later = later or count
        return 0, later

    def hold(self, lease: Lease, match: Match) -> None:
        plan = self._plans[lease] = _Plan(match.tokens, (match.known,))
        if match.tokens:
            source = self.pool.find([self._key(lease, match.tokens)])
            self.pool.hold(source)
            if self.pool.available:
                plan.source = source[0]
            else:  # unless others resume there, too, it is the one slot that can be taken, and needs no copy
                self.pool.release(source)

    def fits(self, lease: Lease, tokens: int, demands: Sequence[Demand]) -> bool:
        return self.pool.available > 0

    def take(self, lease: Lease, tokens: int) -> None:
        plan, taken = self._plans[lease], self.pool.take(1)
        assert taken is not None, "a slot is taken without a look at whether there is one"
        lease.slot = taken[0]
        if plan.source != NO_SLOT:
            self._copies[lease.slot], plan.source = plan.source, NO_SLOT
        plan.answer = (tokens - 1) // self._size * self._size
        plan.stops = *plan.stops, plan.answer
        position = plan.done
        while (position := self._next(plan, position)) <= tokens:
            self._promised.setdefault(self._key(lease, position), lease)

    def grow(self, lease: Lease, end: int) -> int:
        plan = self._plans[lease]
        while (position := self._next(plan, plan.done)) <= end:
            plan.done = position
            if plan.latest and not self._of_grid(position - self._size):
                self.pool.forget(*plan.latest)
                plan.latest = None
            if taken := self.pool.take(1):
                lease.snapshots.append((position, taken[0]))
            else:
                self._withdraw(lease, lease.keys[position // self._size - 1 : position // self._size])
        return position - 1

    def commit(self, lease: Lease, computed: int) -> None:
        for position, slot in lease.snapshots:
            assert position <= computed, "a snapshot is published before it is taken"
            key = self._key(lease, position)
            self.pool.publish(slot, key)
            self.pool.release([slot])
            if position > self._plans[lease].answer:
                self._plans[lease].latest = slot, key
            self._withdraw(lease, [key])
        lease.snapshots = []

    def due(self, lease: Lease) -> int:
        return lease.snapshots[0][0] if lease.snapshots else NEVER

    def close(self, lease: Lease) -> None:
        self._withdraw(lease, lease.keys)
        plan, copied = self._plans.pop(lease), self._copies.pop(lease.slot, NO_SLOT)
        for slot in (lease.slot, plan.source, copied, *(slot for _, slot in lease.snapshots)):
            if slot != NO_SLOT:
                self.pool.release([slot])
        lease.slot, lease.snapshots = NO_SLOT, []

    def can_grow(self, sequences: int) -> bool:
        return True

    def check(self, leases: Iterable[Lease]) -> None:
        leases = set(leases)
        held = [[lease.slot, *(slot for _, slot in lease.snapshots)] for lease in leases]
        self.pool.check([*held, *([source] for source in self._copies.values())])
        assert self._plans.keys() == leases, "a sequence that has ended has a plan, or a running one has none"
        assert self._copies.keys() <= {lease.slot for lease in leases}, "state is copied to a slot that nobody has"
        assert set(self._promised.values()) <= leases, "nobody computes a snapshot that others wait for"

    def _next(self, plan: _Plan, after: int) -> int:
        """The next position at which a snapshot of a sequence is wanted."""
        grid = (after // self._interval + 1) * self._interval if self._interval else NEVER
        answer = NEVER if plan.answer == NEVER else (max(after, plan.answer) // self._size + 1) * self._size
        return min([grid, answer, *(stop for stop in plan.stops if stop > after)])

    def _of_grid(self, position: int) -> bool:
        return bool(self._interval) and position % self._interval == 0

    def _key(self, lease: Lease, position: int) -> bytes:
        return lease.keys[position // self._size - 1]

    def _withdraw(self, lease: Lease, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._promised.get(key) is lease:
                del self._promised[key]
