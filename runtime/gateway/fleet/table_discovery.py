"""Engines that register themselves in a table of a database, see :mod:`runtime.wire.engine_table`."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from runtime.gateway.fleet.discovery import DiscoveryError, Listing
from runtime.wire.address import Address, read_key
from runtime.wire.engine_table import EngineTable
from tapeout.database import DatabaseRefusedError
from tapeout.errors import one_line

OLD_SECONDS = 10.0  # without a word from an engine, until it is no longer listed


class TableDiscovery:
    """A :class:`runtime.gateway.fleet.discovery.Discovery`. ``key``: a file, which is read at every look.

    An engine that was listed leaves the list when it has looked old for :data:`OLD_SECONDS` of this gateway's time:
    after the database was away, or its clock has stepped, all rows look old until they are written again.
    """

    def __init__(self, url: str, key: Path | None) -> None:
        self._table, self._key = EngineTable(url, "`table` in the file of the fleet"), key
        self._listed: dict[str, float | None] = {}  # and since when they look old

    def read(self) -> Listing:
        key = read_key(self._key)
        try:
            ages = self._table.read()
        except DatabaseRefusedError:
            raise
        except Exception as error:  # SQLAlchemy's, and its drivers'
            raise DiscoveryError(
                f"the table of engines cannot be read: {one_line(getattr(error, 'orig', None) or error)}",
                expected="a database that answers",
                remedy="start it, or correct `table` in the file of the fleet",
            ) from error
        now, before = monotonic(), self._listed
        self._listed = {}
        for address, age in ages.items():
            Address.parse(address).require_key(key)
            if age < OLD_SECONDS:
                self._listed[address] = None
            elif address in before:
                since = before[address]
                self._listed[address] = now if since is None else since
        left = [address for address, since in self._listed.items() if since is not None and now - since >= OLD_SECONDS]
        for address in left:
            del self._listed[address]
        return Listing(tuple(self._listed), key)
