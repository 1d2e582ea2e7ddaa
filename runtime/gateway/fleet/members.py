"""The engines of a fleet, as its list names them, and the bundles that they may have.

An engine of another bundle than those that get requests is refused. One that is no longer listed stays here until its
requests have ended or moved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from runtime.gateway.engines.client import Opened, OpenEngine
from runtime.gateway.engines.unread import Unread
from runtime.gateway.fleet.connection import FleetConnection, ReplicaConnection
from runtime.gateway.fleet.discovery import Discovery, Listing
from runtime.gateway.fleet.external import ExternalConnection
from runtime.gateway.fleet.release import BundleChoice, ReleasePlan
from runtime.gateway.fleet.replica import Patience, Replica, ReplicaState
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.messages import EngineInfo
from tapeout.errors import ArtifactError, one_line

REFRESH_SECONDS = 1.0  # between two looks at the list of engines

log = logging.getLogger(__name__)


class Members:
    """``listed``: by address. ``leaving``: no longer listed. ``listing``: the list of engines as it was read last.

    ``changed``: is called with a replica whose state is another one, ``left`` with one that has left the list.
    """

    def __init__(
        self,
        discovery: Discovery,
        cache: Path,
        patience: Patience,
        router: FleetRouter,
        changed: Callable[[Replica], None],
        left: Callable[[Replica], None],
    ) -> None:
        self.unread = Unread()
        self.listed: dict[str, Replica] = {}
        self.leaving: set[Replica] = set()
        self.listing: Listing | None = None
        self._discovery, self._cache, self._patience, self._router = discovery, cache, patience, router
        self._changed, self._left = changed, left
        self._infos: dict[str, EngineInfo] = {}  # by digest, of its first engine
        self._choice = BundleChoice()
        self._opened: Opened | None = None
        self._admitting = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def open(self, opened: Opened | None) -> None:
        """Read the list once, and from now on again and again. See :meth:`EngineClient.open`."""
        self._opened = opened
        self._take(await asyncio.to_thread(self._discovery.read))
        self._refreshing = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    @property
    def all(self) -> list[Replica]:
        return [*self.listed.values(), *self.leaving]

    @property
    def ready(self) -> bool:
        taken = self._taken()
        return any(replica.ready and replica.digest in taken for replica in self.listed.values())

    @property
    def plan(self) -> ReleasePlan | None:
        """The release that is under way, or was the last one."""
        return None if self.listing is None else self.listing.plan

    @property
    def info(self) -> EngineInfo:
        """Of the stable bundle, or while that has no engine of the other one."""
        return self._info_of(next(iter(self.bundles)))

    @property
    def bundles(self) -> Mapping[str, EngineInfo]:
        """Those that have engines first, and of these the stable one. Also one whose last engine ends its requests."""
        taken, listed = self._taken(), {replica.digest for replica in self.listed.values()}
        have = {replica.digest for replica in self.all}
        known = [digest for digest in (*taken, *self._infos) if digest in self._infos]
        kept = [digest for digest in dict.fromkeys(known) if digest in taken or digest in have] or known
        return {digest: self._infos[digest] for digest in sorted(kept, key=lambda digest: digest not in listed)}

    def info_for(self, opening: bytes) -> EngineInfo:
        """See :meth:`EngineClient.info_for`."""
        ready = {replica.digest for replica in self.listed.values() if replica.ready} & set(self._taken())
        listed = {replica.digest for replica in self.listed.values() if not replica.lingers}
        found = self._choice.choose(opening, self.plan, self.info.digest, ready, listed)
        return self._info_of(found) if found in self._infos else self.info

    def _new(self, connect: _Connect) -> FleetConnection:
        connection = connect()
        connection.unread = self.unread
        return connection

    def _became(self, replica: Replica) -> None:
        if replica.state is ReplicaState.GONE:
            self.leaving.discard(replica)
        self._changed(replica)

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
        listed = {replica.digest for replica in self.listed.values()}
        return tuple(digest for digest in self._infos if digest in listed)[:1]

    def _info_of(self, digest: str) -> EngineInfo:
        """With the least room of all its engines that are listed, so that each of them takes every request."""
        known = self._infos[digest]
        found = [r.info for r in self.listed.values() if r.info is not None and r.digest == digest] or [known]
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
        if self.listing == listing:
            return
        known = {} if self.listing is None else _connects(self.listing, self._cache)
        wanted = _connects(listing, self._cache)
        kept = {address for address in wanted if known.get(address, wanted[address]) == wanted[address]}
        for address in self.listed.keys() - kept:
            replica = self.listed.pop(address)
            self.leaving.add(replica)
            replica.drain()
            self._left(replica)
        for address, connect in wanted.items():
            if address not in self.listed:
                self.listed[address] = Replica(
                    address, partial(self._new, connect), self._patience, self._router, self._admit, self._became
                )
        before, self.listing = self.listing, listing
        if before is None:
            return
        if known.keys() != wanted.keys():
            log.info("engines from now on: %s", ", ".join(wanted))
        if before.plan != listing.plan:
            log.info("release: %s", "none" if listing.plan is None else listing.plan.model_dump_json())
        if before.plan != listing.plan or not self._taken():
            for replica in self.listed.values():
                replica.retry()  # its bundle may get requests now


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
