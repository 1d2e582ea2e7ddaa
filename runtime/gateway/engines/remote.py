"""An engine that somebody else runs, on this machine or another: it is connected to, and its files are fetched."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.connection import EngineConnection
from runtime.gateway.engines.reopening import ReopeningClient
from runtime.wire.address import Address
from runtime.wire.codec import WireError
from runtime.wire.start import EngineSettings
from tapeout.errors import RequestError
from tapeout.file_hashes import sha256_file

MOST_FILE_BYTES = 1 << 28


class RemoteClient(ReopeningClient["RemoteEngine"]):
    """``address``: ``tcp:HOST:PORT`` or ``unix:PATH``. ``cache``: a folder for files of bundles, by digest.

    After ``stuck_seconds`` without a report the engine is connected to again; nothing else can be done from here.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        cache: Path,
        *,
        quiet_seconds: float = 5.0,
        stuck_seconds: float = 10.0,
        open_seconds: float = 30.0,
    ) -> None:
        self._key, self._cache = key, cache
        super().__init__(
            self.start(address, None),
            quiet_seconds=quiet_seconds,
            stuck_seconds=stuck_seconds,
            open_seconds=open_seconds,
        )

    def start(self, bundle: str, settings: EngineSettings | None) -> RemoteEngine:
        if settings is not None:
            raise RequestError(
                f"settings for the engine at {bundle}",
                expected="an address alone: an engine that runs elsewhere has its settings already",
                remedy="start another engine with these settings, and swap to its address",
            )
        return RemoteEngine(bundle, self._key, self._cache)


class RemoteEngine(EngineConnection):
    """A connection to an engine that listens at an address, which stands where others have a bundle's folder."""

    remedy = "retry in a few seconds: it is connected to again"

    def __init__(self, address: str, key: bytes, cache: Path) -> None:
        self._address = Address.parse(address)
        self._address.require_key(key)
        super().__init__(f"the engine at {address}", address, key)
        self._cache = cache

    async def connect(self) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            if address.path:
                await loop.create_unix_connection(lambda: self, address.path)
            else:
                await loop.create_connection(lambda: self, address.host, address.port)
        except OSError as error:
            key = "" if address.path else " --key-file KEY"
            raise EngineDownError(
                f"nothing answers at {address}: {error.strerror or error}",
                expected="an engine",
                remedy=f"start it there: `tapeout engine BUNDLE --listen {address}{key}`",
            ) from error

    async def files(self) -> Path:
        """Those that are not in the cache, or have changed there, are fetched."""
        folder = self._cache / self.info.digest
        for name, sha256 in self.info.files.items():
            if Path(name).name != name or not self.info.digest.isalnum():
                raise WireError(f"a file called {name!r} of {self.info.digest!r}", expected="names without folders")
            path = folder / name
            if not path.is_file() or sha256_file(path) != sha256:
                folder.mkdir(parents=True, exist_ok=True)
                await self._fetch(path, sha256)
        return folder

    async def close(self) -> None:
        """The engine itself goes on, without the requests of this connection."""
        self._closing = True
        self.fail("was left")

    async def _fetch(self, path: Path, sha256: str) -> None:
        part, digest, size = path.with_name(f"{path.name}.{os.getpid()}.part"), hashlib.sha256(), 0
        try:
            with part.open("wb") as file:
                while data := await self.read(sha256, size):
                    digest.update(data)
                    size += file.write(data)
                    if size > MOST_FILE_BYTES:
                        raise WireError(f"{path.name} of more than {MOST_FILE_BYTES} bytes", expected="less")
            if digest.hexdigest() != sha256:
                raise WireError(
                    f"{path.name} from {self.name} has sha256 {digest.hexdigest()[:12]}…",
                    expected=f"{sha256[:12]}… as the engine itself says",
                    remedy="check the bundle on the machine of the engine: `tapeout verify`",
                )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
