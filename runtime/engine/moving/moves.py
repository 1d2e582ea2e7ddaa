"""What the engine's own thread does about blocks that move: requests that wait for some, and memory for them."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from runtime.engine.core import EngineCore
from runtime.engine.moving.costs import LinkCosts
from runtime.engine.moving.fetching import Fetch, KeysFetch, PeerLink
from runtime.engine.moving.sending import BlockSender
from runtime.wire.messages import MOST_KEYS, Add, Cancel, EngineInfo, FetchAhead, GenerateRequest, WarmUp

LEAST_SECONDS, MOST_SECONDS = 0.5, 2.0  # that a request waits for a fetch, at least and at most
AHEAD_SECONDS = 10.0  # that a fetch may take for which no request waits
MOST_LINKS = 8
WARM_SECONDS = 10.0  # that a new engine goes on fetching what others have used
WARM_BYTES = 8 << 20  # fetched at once for that: requests that wait for blocks of the same engine come in between

EngineCommand = Add | Cancel | FetchAhead | WarmUp  # what is for the core, or for its blocks

log = logging.getLogger(__name__)


@dataclass
class _Waiting:
    """A fetch, and the requests that wait for it: when each arrived."""

    address: str
    fetch: Fetch
    until: float
    requests: list[tuple[GenerateRequest, float]] = field(default_factory=list[tuple[GenerateRequest, float]])


@dataclass
class _Warming:
    """``keys``: still to be fetched, the last one first. ``current``: the first key of those that are being fetched."""

    address: str
    asked: KeysFetch
    until: float
    keys: list[bytes] | None = None
    current: bytes = b""


class BlockMoves:
    """``key``: shared by all engines and gateways. ``wake``: a descriptor that can be read once there is more to do."""

    def __init__(self, core: EngineCore, info: EngineInfo, key: bytes) -> None:
        self._core, self._info, self._key, self._store = core, info, key, core.blocks
        self._costs = LinkCosts(core.blocks.block_bytes, core.blocks.block_tokens)
        self._links: dict[str, PeerLink] = {}
        self._waiting: dict[bytes, _Waiting] = {}  # by the first key that is missing
        # Fetches that nobody waits for any more, whose threads may still fill a block of these.
        self._late: list[tuple[Fetch, Sequence[int]]] = []
        self._warming: _Warming | None = None
        self.arrived = False  # the last work() has ended a fetch, and gateways wait to hear of its blocks
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.wake)  # not in close(): a thread may still announce something
        if self._store.moves:
            self._store.fetch_seconds = self._costs.block_seconds

    @property
    def waiting(self) -> bool:
        """Requests wait for blocks."""
        return bool(self._waiting)

    def awake(self) -> None:
        """What was announced is seen from now on."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def notify(self) -> None:
        """There is more to do; called by any thread."""
        os.eventfd_write(self.wake, 1)

    def take(self, command: EngineCommand) -> None:
        """A request may wait for its blocks first."""
        now = monotonic()
        if isinstance(command, FetchAhead):
            self._begin(command.tokens, command.cache_salt, command.source, now, ahead=True)
        elif isinstance(command, WarmUp):
            self._warm_up(command, now)
        elif isinstance(command, Cancel):
            for waiting in self._waiting.values():
                for request, arrival in waiting.requests:
                    if request.id == command.id:
                        waiting.requests.remove((request, arrival))
                        self._core.add(request, arrival)
                        break
            self._core.cancel(command.id)
        elif not (command.source and self._waits(command, now)):
            self._core.add(command.request, now - command.age)

    def work(self, senders: Sequence[BlockSender]) -> bool:
        """Lend blocks that others want, and end what has been fetched; whether there was any. Called between steps."""
        now, worked, self.arrived = monotonic(), False, False
        for sender in senders:
            worked |= sender.work()
        for first, waiting in list(self._waiting.items()):
            if waiting.fetch.ended or now > waiting.until:
                del self._waiting[first]
                self._end(waiting, now)
                worked = self.arrived = True
        if self._warming is not None and self._warming.asked.ended and self._warming.current not in self._waiting:
            self._fetch_more(self._warming, now)
        for fetch, blocks in [late for late in self._late if late[0].ended]:
            self._late.remove((fetch, blocks))
            self._store.give_back(blocks)
        return worked

    def close(self) -> None:
        """Threads end by themselves, and with them the last that holds the engine's memory."""
        for waiting in self._waiting.values():
            waiting.fetch.given_up = True
        if self._warming is not None:
            self._warming.asked.given_up = True
        for link in self._links.values():
            link.close()

    def _waits(self, command: Add, now: float) -> bool:
        """Whether the request waits for blocks from now on."""
        request = command.request
        if request.prompt_logprobs is not None:
            return False
        tokens = [*request.prompt, *request.answered]
        waiting = self._begin(tokens, request.cache_salt, command.source, now)
        if waiting is None:
            return False
        # To compute the blocks instead would take that long, so a request never waits twice as long for nothing.
        patience = self._core.scheduler.costs.prompt_seconds * self._store.block_tokens * len(waiting.fetch.keys)
        waiting.until = min(waiting.until, now + min(max(patience, LEAST_SECONDS), MOST_SECONDS))
        waiting.requests.append((request, now - command.age))
        return True

    def _begin(
        self, tokens: Sequence[int], cache_salt: bytes, address: str, now: float, *, ahead: bool = False
    ) -> _Waiting | None:
        """The fetch of the last blocks of these tokens; None where there is none to be fetched.

        What is on its way already is not asked for again, only what is missing behind it. ``ahead``: no request waits
        for it, but a gateway does, which has weighed the fetch of all blocks of a request against computing them.
        """
        store = self._store
        if not store.moves:
            return None
        try:
            missing = store.missing(tokens, cache_salt)
        except Exception:  # whatever a request holds: the core refuses it, and says why
            return None
        waiting: _Waiting | None = None
        while missing and (found := self._waiting.get(missing[0])) is not None:
            waiting, missing = found, missing[_common(missing, found.fetch.keys) :]
        if not missing:
            return waiting
        prompt_seconds = self._core.scheduler.costs.prompt_seconds
        if now < self._costs.paused_until(address):
            return waiting
        if not (ahead or self._costs.worth(address, len(missing), prompt_seconds)):
            return waiting
        # Each running request may need a block in the next step.
        if not (blocks := store.reserve(len(missing), self._core.scheduler.running)):
            return waiting
        return self._fetch(address, missing[: len(blocks)], blocks, now)

    def _fetch(self, address: str, keys: Sequence[bytes], blocks: Sequence[int], now: float) -> _Waiting:
        waiting = self._waiting[keys[0]] = _Waiting(address, Fetch(keys, blocks), now + AHEAD_SECONDS)
        self._link(address).start(waiting.fetch)
        return waiting

    def _link(self, address: str) -> PeerLink:
        if (link := self._links.get(address)) is None:
            if len(self._links) >= MOST_LINKS:
                self._links.pop(next(iter(self._links))).close()
            link = self._links[address] = PeerLink(address, self._key, self._info, self._store, self.notify)
        return link

    def _warm_up(self, command: WarmUp, now: float) -> None:
        """Nothing happens where this engine has blocks, or is being warmed already: each gateway may say so."""
        if self._store.moves and self._store.empty and self._warming is None and not self._waiting:
            asked = KeysFetch(min(command.blocks, MOST_KEYS))
            self._warming = _Warming(command.source, asked, now + WARM_SECONDS)
            self._link(command.source).start(asked)

    def _fetch_more(self, warming: _Warming, now: float) -> None:
        """The next blocks of a warm-up. It takes memory that is unused, and nobody's."""
        store = self._store
        if warming.asked.failure or now > warming.until or now < self._costs.paused_until(warming.address):
            self._warming = None
            return
        if warming.keys is None:
            warming.keys = warming.asked.keys[::-1]
        most = min(max(1, WARM_BYTES // store.block_bytes), store.unused - self._core.scheduler.running)
        part = list[bytes]()
        while warming.keys and len(part) < most:
            part += store.absent([warming.keys.pop()])
        if not part:
            self._warming = None
            return
        warming.current = part[0]
        if part[0] in self._waiting:  # a request's fetch begins with it
            warming.keys += reversed(part)
        else:
            self._fetch(warming.address, part, store.reserve(len(part), 0), now)

    def _end(self, waiting: _Waiting, now: float) -> None:
        """The requests run: they find what came, and compute the rest."""
        fetch, address, store = waiting.fetch, waiting.address, self._store
        fetch.given_up, ended, done = True, fetch.ended, fetch.done
        store.keep(fetch.blocks[:done], fetch.keys[:done])
        rest = fetch.blocks[done:]
        if ended:
            store.give_back(rest)
        else:
            fetch.failure = fetch.failure or "not all blocks came in time"
            self._late.append((fetch, rest))
        if fetch.failure:
            store.failed += 1
            self._costs.failed(address, now)
            log.warning("blocks from %s are computed instead: %s", address, fetch.failure)
        else:
            self._costs.observe(address, done, now - fetch.since)
            store.fetch_seconds = self._costs.block_seconds
        for request, arrival in waiting.requests:
            self._core.add(request, arrival)


def _common(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many of the first ones are the same."""
    return next(
        (at for at, (key, other) in enumerate(zip(keys, others, strict=False)) if key != other),
        min(len(keys), len(others)),
    )
