"""What an engine's process is told when it is started. Plain data, so that it fits a command line and a log."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from runtime.wire.limits import Limits
from runtime.wire.messages import Pool


@dataclass(frozen=True)
class EngineSettings:
    """How a bundle is opened. ``threads``: 0 means every physical core, or one where that is as fast.

    ``slots``: room for so many sequences of full length; as built if None. ``kv_bytes``: most memory of the KV cache,
    instead of ``slots``; with ``kv_free`` all that the engine leaves of its device. ``snapshots``: of recurrent state
    that are kept for prefixes; one for each of these sequences if None. ``snapshot_share``: instead, of all memory of
    state, 0 to below 1. ``public_key``: a file. ``public_key``, ``level``, ``map_experts``: see
    :func:`engines.load.load`.
    ``background``: the process runs only while no other wants the processor. ``pool``, ``source``: see
    :class:`EngineInfo`.
    """

    threads: int = 0
    slots: int | None = None
    kv_bytes: int | None = None
    public_key: str | None = None
    level: str = ""
    background: bool = False
    snapshots: int | None = None
    snapshot_share: float | None = None
    pool: Pool = "mixed"
    source: str = ""
    map_experts: bool | None = None
    kv_free: bool = False


@dataclass(frozen=True)
class Start:
    """``bundle``: a folder. ``cores``: that the process may use, whatever its parent was bound to meanwhile.

    >>> start = Start("candidate", EngineSettings(threads=2))
    >>> Start.decode(start.encode()) == start
    True
    """

    bundle: str
    settings: EngineSettings = field(default_factory=EngineSettings)
    limits: Limits = field(default_factory=Limits)
    cores: frozenset[int] = frozenset()

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Start:
        return msgspec.json.decode(text, type=cls)
