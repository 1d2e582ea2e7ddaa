"""What an engine tells servers that choose among engines: by which keys its state can be found, and how busy it is.

Nothing is noted while no server asks. Each that does has changes of its own yet to hear, so one that reads slowly, or
lost a report and asks again, holds up nobody. A change says whether a key is there now, not what happened to it: what
is not yet heard is never more than the keys that the server knows and those that are there. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from runtime.engine.cache.blocks import BlockPool
from runtime.wire.messages import KEY_BYTES, MOST_KEYS, EngineLoad, KeyChanges, RoutingReport


class RoutingWatcher:
    """Of one server: what it has yet to hear. ``asks``: it wants to hear at all. ``received``: its requests since."""

    def __init__(self) -> None:
        self.received, self.asks = 0, False
        self._turn = self._number = 0
        self._whole = True  # the next report begins with what is there
        self._unheard: tuple[dict[bytes, bool], ...] = ()  # by pool

    def begin(self, turn: int) -> None:
        """It asks from now on, or asks again: with the next report it hears everything."""
        self.asks, self._whole, self._turn, self._number = True, True, turn, 0

    @property
    def behind(self) -> int:
        """Changes that the last report had no room for."""
        return sum(map(len, self._unheard))

    def hear(self, pools: Sequence[BlockPool], changes: Sequence[dict[bytes, bool]], load: EngineLoad) -> RoutingReport:
        """The next report. ``changes``: since the last one."""
        if not self._whole:
            for unheard, changed in zip(self._unheard, changes, strict=True):
                unheard.update(changed)
            # Else one that hears less than happens would have to be told of keys that are long gone.
            self._whole = self.behind > MOST_KEYS + 2 * sum(pool.blocks for pool in pools)
        whole, number = self._whole, self._number
        if whole:
            self._unheard = tuple(dict.fromkeys(pool.keys, True) for pool in pools)
        self._whole, self._number = False, number + 1
        blocks, snapshots = map(_take, self._unheard)
        return RoutingReport(self._turn, number, whole, self.behind, blocks, snapshots, self.received, load)


class RoutingReports:
    """``blocks`` and ``snapshots``: pools of paged and of recurrent state. ``load``: of the engine, now."""

    def __init__(self, blocks: BlockPool, snapshots: BlockPool, load: Callable[[], EngineLoad]) -> None:
        self._pools, self._load = (blocks, snapshots), load

    def next(self, watchers: Sequence[RoutingWatcher]) -> list[RoutingReport]:
        """One for each, which are all that there are."""
        if not watchers:
            for pool in self._pools:
                pool.forget_changes()
            return []
        changes, load = [pool.take_changes() for pool in self._pools], self._load()
        return [watcher.hear(self._pools, changes, load) for watcher in watchers]


def _take(unheard: dict[bytes, bool]) -> KeyChanges:
    """The next changes that fit into one report; they are heard now."""
    if not unheard:
        return _NONE
    keys = list(islice(unheard, MOST_KEYS))
    parts: tuple[list[bytes], list[bytes]] = [], []  # those that are gone, and those that are there
    for key in keys:
        parts[unheard.pop(key)].append(key[:KEY_BYTES])
    return KeyChanges(b"".join(parts[True]), b"".join(parts[False]))


_NONE = KeyChanges()
