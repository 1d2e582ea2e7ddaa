"""Opens the engine of a bundle, in the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engines.kernels.serving import Clipping, Clippings
from runtime.wire.messages import EngineInfo
from runtime.wire.start import EngineSettings
from tapeout.errors import RequestError

if TYPE_CHECKING:
    from engines.kernels.sampling import Sampler
    from engines.protocol import Engine

TEXT = frozenset({".jinja", ".json"})  # suffixes of files that a server on another machine may ask for


class Opened(NamedTuple):
    """``tokenizer``: the text of ``tokenizer.json``; None for a model that cannot have constraints.

    ``kernel``: chooses tokens; without one numpy does. ``threads``: of the engine, where each takes a core.
    ``clippings``: values that the engine stored on static grids, and clipped. ``folder``: holds ``info.files``.
    """

    engine: Engine
    info: EngineInfo
    tokenizer: str | None = None
    kernel: Sampler | None = None
    threads: int = 0
    clippings: Clippings = Clipping
    folder: Path = Path()


# Of a folder. What a user can act on is raised as a ``TapeoutError``.
Opener = Callable[[Path, EngineSettings], Opened]


def open_bundle(folder: Path, settings: EngineSettings) -> Opened:
    from engines.bundle import EngineBundle
    from engines.load import at_level, find_target, load
    from engines.protocol import MovesBlocks
    from tapeout import artifact

    bundle = artifact.load_record(folder, EngineBundle)
    record = bundle.record
    slots, snapshots, kv_bytes = settings.slots, settings.snapshots, settings.kv_bytes
    if settings.kv_free:
        kv_bytes = find_target(record.target).free_state_bytes(at_level(bundle, settings.level))
    if settings.snapshot_share is not None:
        snapshots = record.io.snapshots_in(settings.snapshot_share, slots or record.io.slots, kv_bytes)
    if kv_bytes is not None:
        slots = record.io.sequences_in(kv_bytes, snapshots)
        if not slots:
            raise RequestError(
                f"{kv_bytes} bytes of keys, values and recurrent state",
                expected=f"room for one sequence of {record.io.max_tokens} tokens, beside all snapshots",
                remedy="raise --kv-bytes, or lower --snapshots where that is given",
            )
    public_key = None if settings.public_key is None else Path(settings.public_key)
    engine = load(
        folder,
        threads=settings.threads,
        slots=slots,
        snapshots=snapshots,
        level=settings.level,
        public_key=public_key,
        map_experts=settings.map_experts,
    )
    has = engine.capabilities
    here = at_level(bundle, settings.level)
    info = EngineInfo(
        digest=engine.digest,
        name=folder.resolve().name,
        max_tokens=has.max_tokens,
        vocab_size=has.vocab_size,
        block_tokens=has.block_tokens,
        blocks=has.blocks,
        block_bytes=has.block_bytes,
        weight_bytes=record.step_bytes,
        stop_tokens=frozenset(record.stop_tokens),
        threads=has.threads,
        files={name: file.sha256 for name, file in bundle.files.items() if Path(name).suffix in TEXT},
        level=here.record.hardware[0].level,
        moves_blocks=isinstance(engine, MovesBlocks) and not has.slots,
        slot_bytes=has.slot_bytes if has.slots else 0,
        mapped_bytes=has.mapped_bytes,
    )
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    threads = max(1, has.threads)
    kernels = find_target(record.target).serving_kernels
    library = kernels.library(here)
    sampler = kernels.sampler(library, has.vocab_size, threads)
    return Opened(engine, info, text, sampler, threads, kernels.clippings(library), folder)
