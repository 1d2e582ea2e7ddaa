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
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from random import Random
from time import monotonic

from runtime.gateway.engines.client import EngineDownError, Opened
from runtime.gateway.engines.unread import Unread
from runtime.gateway.fleet.change import Change
from runtime.gateway.fleet.discovery import Discovery
from runtime.gateway.fleet.flight import ElsewhereError, Flight, MovedError, seeded
from runtime.gateway.fleet.members import Members
from runtime.gateway.fleet.moves import Moves
from runtime.gateway.fleet.release import ReleasePlan
from runtime.gateway.fleet.replica import Patience, Replica, ReplicaState, ReplicaStatus
from runtime.gateway.fleet.retries import RetryBudget, retry_seconds
from runtime.gateway.fleet.scaling import EngineReport, FleetScaler
from runtime.gateway.fleet.totals import Totals
from runtime.gateway.routing.choice import EngineOption
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.limits import QueueFullError
from runtime.wire.messages import Delta, EngineInfo, EngineStats, GenerateRequest, Pool
from runtime.wire.start import EngineSettings
from tapeout.errors import RequestError, TapeoutError

CLOSE_SECONDS = 5.0  # that engines have to end what was cancelled
STATS_SECONDS = 0.1  # sums over all engines may be so old
MOST_RETRIES = 2  # of a request that has no token yet
MOST_RESUMPTIONS = 8  # in turn that brought no token: what ends every engine must not end all of them

log = logging.getLogger(__name__)


class _TimedOutError(Exception):
    """A timeout of the request has passed while it was on no engine."""


class FleetClient:
    """``cache``: a folder for files of bundles, by digest. ``patience``: see :class:`Patience`. ``scalers``: by pool,
    if it is to say how many engines there should be.

    :meth:`open` waits for the first engine, and must come first.
    """

    def __init__(
        self,
        discovery: Discovery,
        cache: Path,
        *,
        patience: Patience | None = None,
        scalers: Mapping[Pool, FleetScaler] | None = None,
    ) -> None:
        self._patience, self._scalers = patience or Patience(), scalers or {}
        self.router = FleetRouter()
        self._change = Change()
        self._members = Members(
            discovery,
            cache,
            self._patience,
            self.router,
            changed=self._replica_changed,
            left=lambda replica: self._moves.leave_draining(replica),
        )
        self._flights: set[Flight] = set()
        self._budget = RetryBudget(monotonic())
        self._moves = Moves(self._flights, self._members, self.router, self._change, self._budget)
        self._random = Random()
        self._totals = Totals()
        self._stats, self._stats_until = EngineStats(), 0.0
        self._draining = self._ended = False
        self.counts: Counter[str] = Counter(retries=0, resumptions=0, moves=0, lost=0)

    async def open(self, opened: Opened | None = None) -> None:
        """Wait for an engine. :class:`TapeoutError` if the list of engines cannot be read at all.

        ``opened``: of the first engine of each bundle.
        """
        await self._members.open(opened)
        while not self.ready:
            await self._change.wait()

    @property
    def plan(self) -> ReleasePlan | None:
        return self._members.plan

    @property
    def info(self) -> EngineInfo:
        return self._members.info

    @property
    def bundles(self) -> Mapping[str, EngineInfo]:
        return self._members.bundles

    def info_for(self, opening: bytes) -> EngineInfo:
        return self._members.info_for(opening)

    @property
    def stats(self) -> EngineStats:
        """Sums over all engines; counters since each was connected to."""
        if (now := monotonic()) > self._stats_until:
            self._stats_until = now + STATS_SECONDS
            connections = [replica.connection for replica in self._members.all]
            self._stats = self._totals.of([(c.first, c.stats) for c in connections if c is not None and c.first])
        return self._stats

    @property
    def unread(self) -> Unread:
        return self._members.unread

    @property
    def ready(self) -> bool:
        return not self._draining and self._members.ready

    def away(self) -> str:
        """How the engines are, while none is ready: nobody here starts them again."""
        return f"no engine is ready ({self._states()})"

    @property
    def healthy(self) -> bool:
        """To start a gateway again helps no engine."""
        return True

    @property
    def silent_seconds(self) -> float | None:
        found = [c.silent_seconds for replica in self._members.all if (c := replica.connection) is not None]
        return min(found, default=None)

    @property
    def replicas_wanted(self) -> Mapping[Pool, int]:
        """Engines that there should be of each pool, by the file of the fleet; none if that does not say by what.

        `scaling` is of all engines, whichever pool somebody has started them for; one that does both is of each pool.
        """
        listing, found = self._members.listing, dict[Pool, int]()
        if listing is None:
            return found
        # Nobody starts external servers by this number.
        ready = [one for one in self._members.listed.values() if one.ready and one.address in listing.engines]
        for pool, scaler in self._scalers.items():
            reports = {
                one.address: EngineReport(self.router.load(one.address), one.stats, one.info.cold_seconds)
                for one in ready
                if one.info is not None and ("mixed" in (pool, one.pool) or pool == one.pool)
            }
            found[pool] = scaler.look(reports, monotonic())
        return found

    def statuses(self) -> list[ReplicaStatus]:
        own = Counter(flight.replica for flight in self._flights)
        return [replica.status(own[replica]) for replica in self._members.all]

    async def files(self) -> Path:
        for replica in self._members.listed.values():
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
        flight = Flight(seeded(request), session, digest or self.info.digest, now - age, now)
        self._budget.arrived()
        self._flights.add(flight)
        refused: set[Replica] = set()
        failures = 0  # in turn, without a token between
        lost_before = False  # it had no token yet when its engine was lost
        try:
            while True:
                option = await self._place(flight, refused)
                replica = self._members.listed[option.engine]
                connection = replica.connection
                assert connection is not None, "only an engine that is ready is chosen"
                try:
                    stream = flight.land(replica, connection, option.source)
                    self.router.sent(option)
                    if replica.pool == "prefill" and not flight.answered:
                        self._moves.fetch_along(flight)
                    while True:
                        for delta in await stream.next():
                            if delta.tokens:
                                if flight.brought < flight.attempts and replica.pool == "prefill":
                                    self._moves.hand_over(flight)
                                flight.brings(delta.tokens, connection.info.level)
                                failures = 0
                                refused.clear()
                            yield delta if flight.attempts == 1 else delta._replace(id=request.id)
                            if delta.finish_reason is not None:
                                return
                except EngineDownError as error:
                    flight.homeless_since, failures = monotonic(), failures + 1
                    if flight.answered and not connection.resumes(request):
                        self.counts["lost"] += 1
                        raise _cannot_resume(error) from error
                    # Many may wait at an engine that is lost, and none of them is to blame: the first time is free.
                    free = not lost_before and (connection.down or isinstance(error, ElsewhereError))
                    lost_before = lost_before or not flight.answered
                    self._require_another(flight, failures, error, free=free)
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
            self._change.notify()

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
            flight.cancel()
        self._change.notify()
        if not await self._all_ended(CLOSE_SECONDS):
            for flight in list(self._flights):
                flight.give_up(_shutting_down())

    async def close(self) -> None:
        self._draining = self._ended = True
        self._change.notify()
        await self._members.close()
        self._moves.close()
        await asyncio.gather(*[replica.close() for replica in self._members.all])

    async def _place(self, flight: Flight, refused: set[Replica]) -> EngineOption:
        """The engine that the request goes to now; waits until there is one."""
        until = flight.homeless_since + self._patience.wait
        timeout = flight.timeout
        while True:
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
            await self._change.wait(min(until, timeout) - now)

    def _candidates(self, flight: Flight, refused: set[Replica]) -> list[Replica]:
        return flight.candidates(self._members.listed.values(), refused)

    def _require_another(self, flight: Flight, failures: int, error: EngineDownError, *, free: bool) -> None:
        """Raises the error where a request that has lost its engine has no other attempt."""
        if self._ended:
            raise _shutting_down()
        if isinstance(error, MovedError):
            self.counts["moves"] += 1
        elif flight.answered:
            if failures > MOST_RESUMPTIONS:
                self.counts["lost"] += 1
                raise error
            self.counts["resumptions"] += 1
        elif free:
            self.counts["retries"] += 1
        else:
            self._require_retry(failures, error)

    def _require_other(self, flight: Flight, failures: int, refused: set[Replica], error: RequestError) -> None:
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

    def _nobody(self, flight: Flight) -> EngineDownError:
        self.counts["lost"] += 1
        which = f"engine of level {flight.level}" if flight.answered and flight.level else "engine"
        if len(self.bundles) > 1:
            which += f" of bundle {flight.digest[:12]}"
        return EngineDownError(
            f"no {which} has taken the request for {self._patience.wait:g} seconds ({self._states()})",
            expected="at least one that is ready",
            remedy="retry later, and look at the engines",
        )

    def _states(self) -> str:
        # "open" is the breaker's word: of engines it reads as its opposite.
        named = {ReplicaState.OPEN: "not answering", ReplicaState.HALF_OPEN: "being tried again"}
        states = Counter(named.get(replica.state, replica.state.value) for replica in self._members.all)
        return ", ".join(f"{count} {state}" for state, count in states.items()) or "none listed"

    def _replica_changed(self, replica: Replica) -> None:
        self._moves.leave_silent(replica)
        if replica.lingers:
            self._moves.leave_draining(replica)
        if replica.state is ReplicaState.READY and not replica.suspected:
            self._moves.warm(replica)
        self._change.notify()

    async def _all_ended(self, timeout: float) -> bool:
        end = monotonic() + timeout
        while self._flights and (seconds := end - monotonic()) > 0:
            await self._change.wait(seconds)
        return not self._flights


def _cannot_resume(error: EngineDownError) -> EngineDownError:
    return EngineDownError(
        f"{error.found}, in the midst of an answer that is drawn or has penalties",
        expected="that it ends: only greedy answers go on on another external server",
        remedy="send the request again",
    )


def _shutting_down() -> EngineDownError:
    return EngineDownError("the server is shutting down", remedy="send the request to another server")
