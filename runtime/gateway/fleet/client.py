"""Many engines as one :class:`EngineClient`: a request survives the death of the engine that it runs on.

An engine that ends, is silent, or says what nobody understands loses its requests at once. One without a token is tried
elsewhere, a few times. One with tokens goes on elsewhere exactly where it was: the gateway has its tokens and its seed,
and the other engine replays them (:attr:`GenerateRequest.answered`). Only an engine of the same bundle and processor
level can do so. Without an engine, requests wait for one; then they fail. None waits forever.

Engines may have two bundles while one takes the place of the other (:mod:`runtime.gateway.fleet.release`): a request
is encoded for one of them, and only engines of that get it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from time import monotonic
from typing import NamedTuple

from runtime.gateway.engines.client import EngineDownError, Opened, OpenEngine
from runtime.gateway.engines.connection import DeltaStream
from runtime.gateway.fleet.connection import FleetConnection, ReplicaConnection
from runtime.gateway.fleet.discovery import Discovery, Listing
from runtime.gateway.fleet.external import ExternalConnection
from runtime.gateway.fleet.release import BundleChoice, ReleasePlan
from runtime.gateway.fleet.replica import Patience, Replica, ReplicaState
from runtime.gateway.fleet.retries import RetryBudget, retry_seconds
from runtime.gateway.fleet.scaling import EngineReport, FleetScaler
from runtime.gateway.fleet.totals import Totals
from runtime.gateway.routing.choice import EngineOption
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.limits import QueueFullError
from runtime.wire.messages import Delta, EngineInfo, EngineStats, GenerateRequest
from runtime.wire.start import EngineSettings
from tapeout.errors import ArtifactError, RequestError, TapeoutError, one_line

REFRESH_SECONDS = 1.0  # between two looks at the list of engines
CLOSE_SECONDS = 5.0  # that engines have to end what was cancelled
STATS_SECONDS = 0.1  # sums over all engines may be so old
MOST_RETRIES = 2  # of a request that has no token yet
MOVE_SECONDS = 2.0  # for the first token of a request elsewhere, until the next one leaves an engine that drains
MOST_RESUMPTIONS = 8  # in turn that brought no token: what ends every engine must not end all of them

log = logging.getLogger(__name__)


class _ElsewhereError(EngineDownError):
    """The engine is suspected; the request goes on elsewhere."""


class _MovedError(_ElsewhereError):
    """The engine drains; the request goes on elsewhere with its blocks."""


class _TimedOutError(Exception):
    """A timeout of the request has passed while it was on no engine."""


class ReplicaStatus(NamedTuple):
    """``info`` and ``stats`` of an engine that is connected. ``own``: requests of this gateway on it."""

    address: str
    state: ReplicaState
    why: str
    failures: int
    own: int
    info: EngineInfo | None
    stats: EngineStats


@dataclass(eq=False)
class _Flight:
    """A request on its way. ``homeless_since``: when it was last without an engine and brought no token since.

    ``session`` and ``digest``: see :meth:`EngineClient.generate`. ``left``: an engine that still has its blocks.
    ``brought``: the attempt that brought its last token, which ``progress`` tells of.
    """

    request: GenerateRequest
    session: str
    digest: str
    arrival: float
    homeless_since: float
    answered: list[int] = field(default_factory=list[int])
    level: str = ""  # of the engines that have answered
    attempts: int = 0
    left: str = ""
    brought: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    replica: Replica | None = None
    connection: FleetConnection | None = None
    stream: DeltaStream | None = None

    def next_request(self) -> GenerateRequest:
        """What the next engine gets. Its id is new: the engine before may still have the old one."""
        request, number = self.request, self.attempts
        if number:
            request = replace(request, id=f"{request.id}~{number}")
        if self.answered:
            request = replace(request, answered=tuple(self.answered), prompt_logprobs=None)
        return request

    def land(self, replica: Replica, connection: FleetConnection, source: str) -> DeltaStream:
        """``source``: see :class:`EngineOption`."""
        self.replica, self.connection = replica, connection
        self.stream = connection.add(self.next_request(), monotonic() - self.arrival, self.left or source)
        self.attempts, self.left = self.attempts + 1, ""
        return self.stream

    def leave(self) -> None:
        if self.connection is not None and self.stream is not None:
            self.connection.abandon(self.stream)
        self.replica = self.connection = self.stream = None


class FleetClient:
    """``cache``: a folder for files of bundles, by digest. ``patience``: see :class:`Patience`. ``scaler``: if it is to
    say how many engines there should be.

    :meth:`open` waits for the first engine, and must come first.
    """

    def __init__(
        self,
        discovery: Discovery,
        cache: Path,
        *,
        patience: Patience | None = None,
        scaler: FleetScaler | None = None,
    ) -> None:
        self._discovery, self._cache, self._scaler = discovery, cache, scaler
        self._patience = patience or Patience()
        self.router = FleetRouter()
        self._listing: Listing | None = None
        self._replicas: dict[str, Replica] = {}
        self._leaving: set[Replica] = set()  # no longer listed
        self._flights: set[_Flight] = set()
        self._infos: dict[str, EngineInfo] = {}  # by digest, of its first engine
        self._choice = BundleChoice()
        self._opened: Opened | None = None
        self._admitting = asyncio.Lock()
        self._change = asyncio.Event()  # replaced by another one whenever a replica changes
        self._budget = RetryBudget(monotonic())
        self._random = Random()
        self._totals = Totals()
        self._stats, self._stats_until = EngineStats(), 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._moving: set[asyncio.Task[None]] = set()  # requests away from engines that drain
        self._draining = self._ended = False
        self.counts: Counter[str] = Counter(retries=0, resumptions=0, moves=0, lost=0)

    async def open(self, opened: Opened | None = None) -> None:
        """Wait for an engine. :class:`TapeoutError` if the list of engines cannot be read at all.

        ``opened``: of the first engine of each bundle.
        """
        self._opened = opened
        self._take(await asyncio.to_thread(self._discovery.read))
        self._refreshing = asyncio.create_task(self._refresh())
        while not self.ready:
            await self._change.wait()

    @property
    def plan(self) -> ReleasePlan | None:
        """The release that is under way, or was the last one."""
        return None if self._listing is None else self._listing.plan

    @property
    def info(self) -> EngineInfo:
        """Of the stable bundle, or while that has no engine of the other one."""
        return self._info_of(next(iter(self.bundles)))

    @property
    def bundles(self) -> Mapping[str, EngineInfo]:
        """Those that have engines first, and of these the stable one. Also one whose last engine ends its requests."""
        taken, listed = self._taken(), {replica.digest for replica in self._replicas.values()}
        have = {replica.digest for replica in self._all()}
        known = [digest for digest in (*taken, *self._infos) if digest in self._infos]
        kept = [digest for digest in dict.fromkeys(known) if digest in taken or digest in have] or known
        return {digest: self._infos[digest] for digest in sorted(kept, key=lambda digest: digest not in listed)}

    def info_for(self, opening: bytes) -> EngineInfo:
        ready = {replica.digest for replica in self._replicas.values() if replica.ready} & set(self._taken())
        listed = {replica.digest for replica in self._replicas.values() if not replica.lingers}
        found = self._choice.choose(opening, self.plan, self.info.digest, ready, listed)
        return self._info_of(found) if found in self._infos else self.info

    @property
    def stats(self) -> EngineStats:
        """Sums over all engines; counters since each was connected to."""
        if (now := monotonic()) > self._stats_until:
            self._stats_until = now + STATS_SECONDS
            connections = [replica.connection for replica in self._all()]
            self._stats = self._totals.of([(c.first, c.stats) for c in connections if c is not None and c.first])
        return self._stats

    @property
    def ready(self) -> bool:
        taken = self._taken()
        return not self._draining and any(r.ready and r.digest in taken for r in self._replicas.values())

    @property
    def healthy(self) -> bool:
        """To start a gateway again helps no engine."""
        return True

    @property
    def silent_seconds(self) -> float | None:
        found = [c.silent_seconds for replica in self._all() if (c := replica.connection) is not None]
        return min(found, default=None)

    @property
    def replicas_wanted(self) -> int | None:
        """Engines that there should be, by the file of the fleet; None if it has no `scaling`."""
        if self._scaler is None or self._listing is None:
            return None
        engines = self._listing.engines  # nobody starts external servers by this number
        ready = [replica for replica in self._replicas.values() if replica.ready and replica.address in engines]
        reports = {one.address: EngineReport(self.router.load(one.address), one.stats) for one in ready}
        return self._scaler.look(reports, monotonic())

    def statuses(self) -> list[ReplicaStatus]:
        own = Counter(flight.replica for flight in self._flights)
        return [
            ReplicaStatus(
                replica.address,
                replica.state,
                replica.why,
                replica.failures,
                own[replica],
                None if replica.connection is None else replica.connection.info,
                replica.stats,
            )
            for replica in self._all()
        ]

    async def files(self) -> Path:
        for replica in self._replicas.values():
            if replica.ready and replica.connection is not None:
                return await replica.connection.files()
        raise EngineDownError("no engine is ready", remedy="retry in a few seconds")

    async def swap(self, bundle: str, settings: EngineSettings | None = None) -> None:
        raise RequestError(
            f"a gateway of many engines cannot open {bundle}",
            expected="engines that are started with it",
            remedy="start other engines, and another gateway for them",
        )

    async def generate(
        self, request: GenerateRequest, age: float = 0.0, session: str = "", digest: str = ""
    ) -> AsyncGenerator[Delta]:
        """See :meth:`EngineClient.generate`. :class:`EngineDownError` as well where no engine took it in time."""
        now = monotonic()
        flight = _Flight(_seeded(request), session, digest or self.info.digest, now - age, now)
        self._budget.arrived()
        self._flights.add(flight)
        refused: set[Replica] = set()
        failures = 0  # in turn, without a token between
        try:
            while True:
                option = await self._place(flight, refused)
                replica = self._replicas[option.engine]
                connection = replica.connection
                assert connection is not None, "only an engine that is ready is chosen"
                try:
                    stream = flight.land(replica, connection, option.source)
                    self.router.sent(option)
                    while True:
                        for delta in await stream.next():
                            if delta.tokens:
                                flight.answered += delta.tokens
                                flight.level, failures = connection.info.level, 0
                                flight.brought = flight.attempts
                                flight.progress.set()
                                refused.clear()
                            yield delta if flight.attempts == 1 else delta._replace(id=request.id)
                            if delta.finish_reason is not None:
                                return
                except EngineDownError as error:
                    flight.homeless_since, failures = monotonic(), failures + 1
                    if flight.answered and not connection.resumes(request):
                        self.counts["lost"] += 1
                        raise _cannot_resume(error) from error
                    self._require_another(flight, failures, error)
                except RequestError as error:
                    refused.add(replica)
                    failures += 1
                    self._require_other(flight, failures, refused, error)
                finally:
                    flight.leave()
                if failures > 1 or refused:
                    await asyncio.sleep(retry_seconds(failures, self._random))
                if not self._candidates(flight, refused):
                    refused.clear()
        except _TimedOutError:
            yield Delta(request.id, finish_reason="timeout")
        finally:
            self._flights.discard(flight)
            flight.progress.set()
            self._notify()

    def level_of(self, id: str) -> str:
        return next((flight.level for flight in self._flights if flight.request.id == id), "")

    async def drain(self, timeout: float) -> None:
        """See :meth:`EngineClient.drain`. Requests that are on no engine then fail."""
        self._draining = True
        if await self._all_ended(timeout):
            return
        log.warning("requests that still run after %g seconds are cancelled", timeout)
        self._ended = True
        for flight in self._flights:
            if flight.connection is not None and flight.stream is not None:
                flight.connection.abandon(flight.stream)
        self._notify()
        if not await self._all_ended(CLOSE_SECONDS):
            for flight in list(self._flights):
                if flight.connection is not None and flight.stream is not None:
                    flight.connection.give_up(flight.stream, _shutting_down())

    async def close(self) -> None:
        self._draining = self._ended = True
        self._notify()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for moving in self._moving:
            moving.cancel()
        await asyncio.gather(*[replica.close() for replica in self._all()])

    def _all(self) -> list[Replica]:
        return [*self._replicas.values(), *self._leaving]

    async def _place(self, flight: _Flight, refused: set[Replica]) -> EngineOption:
        """The engine that the request goes to now; waits until there is one."""
        until = flight.homeless_since + self._patience.wait
        timeout = _timeout(flight)
        while True:
            change = self._change
            if self._ended:
                raise _shutting_down()
            if found := self._candidates(flight, refused):
                addresses = [replica.address for replica in found]
                return self.router.choose(flight.next_request(), addresses, flight.session)[0]
            now = monotonic()
            if now >= timeout:
                raise _TimedOutError
            if now >= until:
                raise self._nobody(flight)
            with suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), min(until, timeout) - now)

    def _candidates(self, flight: _Flight, refused: set[Replica]) -> list[Replica]:
        """Engines that take requests and can go on with this one; without any, those that are about to leave."""
        found = [
            replica
            for replica in self._replicas.values()
            if replica.digest == flight.digest
            and replica not in refused
            and (not flight.answered or replica.level == flight.level)
        ]
        return [replica for replica in found if replica.ready] or [replica for replica in found if replica.lingers]

    def _require_another(self, flight: _Flight, failures: int, error: EngineDownError) -> None:
        """Raises the error where a request that has lost its engine has no other attempt."""
        if self._ended:
            raise _shutting_down()
        if isinstance(error, _MovedError):
            self.counts["moves"] += 1
        elif flight.answered:
            if failures > MOST_RESUMPTIONS:
                self.counts["lost"] += 1
                raise error
            self.counts["resumptions"] += 1
        else:
            self._require_retry(failures, error)

    def _require_other(self, flight: _Flight, failures: int, refused: set[Replica], error: RequestError) -> None:
        """Raises the error where a request that was refused cannot be tried at another engine."""
        if flight.answered:  # another engine took it: here is less room, or none now
            if monotonic() - flight.homeless_since > self._patience.wait:
                self.counts["lost"] += 1
                raise error
        elif not isinstance(error, QueueFullError) or not self._candidates(flight, refused):
            raise error
        else:
            self._require_retry(failures, error)

    def _require_retry(self, failures: int, error: TapeoutError) -> None:
        if failures > MOST_RETRIES or not self._budget.take(monotonic()):
            raise error
        self.counts["retries"] += 1

    def _nobody(self, flight: _Flight) -> EngineDownError:
        self.counts["lost"] += 1
        which = f"engine of level {flight.level}" if flight.answered and flight.level else "engine"
        if len(self.bundles) > 1:
            which += f" of bundle {flight.digest[:12]}"
        # "open" is the breaker's word: of engines it reads as its opposite.
        named = {ReplicaState.OPEN: "not answering", ReplicaState.HALF_OPEN: "being tried again"}
        states = Counter(named.get(replica.state, replica.state.value) for replica in self._all())
        here = ", ".join(f"{count} {state}" for state, count in states.items()) or "none listed"
        return EngineDownError(
            f"no {which} has taken the request for {self._patience.wait:g} seconds ({here})",
            expected="at least one that is ready",
            remedy="retry later, and look at the engines",
        )

    def _moved(self, replica: Replica) -> None:
        """A replica is in another state, or still suspected: its requests go on elsewhere, where there is such a place.

        Else they stay: a silent engine may go on.
        """
        if replica.suspected and replica.connection is not None:
            for flight in list(self._flights):
                if flight.replica is not replica or flight.stream is None:
                    continue
                moves = not flight.answered or replica.connection.resumes(flight.request)
                if moves and self._candidates(flight, {replica}):
                    replica.connection.give_up(
                        flight.stream, _ElsewhereError(f"the engine at {replica.address} is silent")
                    )
        if replica.state is ReplicaState.GONE:
            self._leaving.discard(replica)
        self._notify()

    async def _move_away(self, replica: Replica) -> None:
        """Have the requests on an engine that drains go on elsewhere, where there is such a place: there they fetch
        their blocks from this one. One after another, so that none waits for the rest of another's prompt.
        """
        while replica in self._leaving:
            change = self._change
            flight = next((flight for flight in self._flights if self._can_move(flight, replica)), None)
            if flight is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(change.wait(), REFRESH_SECONDS / 10)
                continue
            connection, stream, attempts = replica.connection, flight.stream, flight.attempts
            assert connection is not None and stream is not None, "it has tokens of this engine"
            flight.left = replica.address if connection.info.moves_blocks else ""
            connection.give_up(stream, _MovedError(f"the engine at {replica.address} drains"))
            with suppress(TimeoutError):
                async with asyncio.timeout(MOVE_SECONDS):
                    while flight in self._flights and flight.brought <= attempts:
                        flight.progress.clear()
                        await flight.progress.wait()

    def _can_move(self, flight: _Flight, replica: Replica) -> bool:
        """One without a token stays until it has some: its blocks are not there yet. One that no other engine can go
        on with ends where it is.
        """
        return (
            flight.replica is replica
            and flight.stream is not None
            and replica.connection is not None
            and bool(flight.answered)
            and replica.connection.resumes(flight.request)
            and bool(self._candidates(flight, {replica}))
        )

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _admit(self, engine: OpenEngine) -> None:
        """:class:`ArtifactError` for an engine of another bundle than those that get requests."""
        info = engine.info
        async with self._admitting:
            taken = self._taken() or (info.digest,)
            if info.digest not in taken:
                raise ArtifactError(
                    f"it serves bundle {info.digest[:12]}",
                    expected=" or ".join(digest[:12] for digest in taken) + ", as the others do",
                    remedy="start it with that bundle, or change bundles with `tapeout fleet release`",
                )
            if info.digest not in self._infos:
                if self._opened is not None:
                    await self._opened(engine)
                # Not before: conversations may get it from now on. Without a plan there is no other one to be had.
                known, new = self._infos, {info.digest: info}
                self._infos = new | known if self.plan is None else known | new
            for gone in self._infos.keys() - self.bundles.keys():
                del self._infos[gone]

    def _taken(self) -> tuple[str, ...]:
        """Digests of the bundles that get requests: of the plan, or that of the first engine.

        Without a plan and an engine of that bundle on the list, the bundle of whichever engine comes next follows it:
        who replaces all engines means it.
        """
        if self.plan is not None:
            return self.plan.digests
        listed = {replica.digest for replica in self._replicas.values()}
        return tuple(digest for digest in self._infos if digest in listed)[:1]

    def _info_of(self, digest: str) -> EngineInfo:
        """With the least room of all its engines that are listed, so that each of them takes every request."""
        known = self._infos[digest]
        found = [r.info for r in self._replicas.values() if r.info is not None and r.digest == digest] or [known]
        return replace(
            known, max_tokens=min(info.max_tokens for info in found), blocks=min(info.blocks for info in found)
        )

    async def _refresh(self) -> None:
        """Look at the list of engines, again and again. The last one is kept while there is none to be read."""
        reason = ""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                listing = await asyncio.to_thread(self._discovery.read)
            except Exception as error:  # of any kind: a source that is away must not end the watch
                if reason != (reason := one_line(error)):
                    log.error("the engines stay as they are: %s", reason)
                continue
            reason = ""
            self._take(listing)

    def _take(self, listing: Listing) -> None:
        """Connect to the engines that are new, and leave those that are no longer listed."""
        if self._listing == listing:
            return
        known = {} if self._listing is None else _connects(self._listing, self._cache)
        wanted = _connects(listing, self._cache)
        kept = {address for address in wanted if known.get(address, wanted[address]) == wanted[address]}
        for address in self._replicas.keys() - kept:
            replica = self._replicas.pop(address)
            self._leaving.add(replica)
            replica.drain()
            moving = asyncio.create_task(self._move_away(replica))
            self._moving.add(moving)
            moving.add_done_callback(self._moving.discard)
        for address, connect in wanted.items():
            if address not in self._replicas:
                self._replicas[address] = Replica(
                    address, connect, self._patience, self.router, self._admit, self._moved
                )
        before, self._listing = self._listing, listing
        if before is None:
            return
        if known.keys() != wanted.keys():
            log.info("engines from now on: %s", ", ".join(wanted))
        if before.plan != listing.plan:
            log.info("release: %s", "none" if listing.plan is None else listing.plan.model_dump_json())
        if before.plan != listing.plan or not self._taken():
            for replica in self._replicas.values():
                replica.retry()  # its bundle may get requests now

    async def _all_ended(self, timeout: float) -> bool:
        end = monotonic() + timeout
        while self._flights:
            change = self._change
            try:
                await asyncio.wait_for(change.wait(), max(end - monotonic(), 0))
            except TimeoutError:
                return not self._flights
        return True


class _Connect(NamedTuple):
    """Makes connections to one engine. Those that are equal make the same ones."""

    kind: Callable[..., FleetConnection]
    arguments: tuple[object, ...]

    def __call__(self) -> FleetConnection:
        return self.kind(*self.arguments)


def _connects(listing: Listing, cache: Path) -> dict[str, _Connect]:
    """By address."""
    own = {address: _Connect(ReplicaConnection, (address, listing.key, cache)) for address in listing.engines}
    return own | {server.url: _Connect(ExternalConnection, (server,)) for server in listing.external}


def _seeded(request: GenerateRequest) -> GenerateRequest:
    """With a seed of its own if it draws: another engine must be able to go on."""
    if request.sampling.seed is not None or not request.sampling.temperature:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))


def _timeout(flight: _Flight) -> float:
    """When a request that is on no engine has taken too long."""
    request, timeouts = flight.request, [flight.request.timeout]
    if not flight.answered:
        timeouts += [request.queue_timeout, request.first_token_timeout]
    return flight.arrival + min([seconds for seconds in timeouts if seconds is not None], default=float("inf"))


def _cannot_resume(error: EngineDownError) -> EngineDownError:
    return EngineDownError(
        f"{error.found}, in the midst of an answer that is drawn or has penalties",
        expected="that it ends: only greedy answers go on on another external server",
        remedy="send the request again",
    )


def _shutting_down() -> EngineDownError:
    return EngineDownError("the server is shutting down", remedy="send the request to another server")
