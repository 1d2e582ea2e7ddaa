"""Opens the engine of a bundle, in the engine's process. What says how is plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engines.kernels.cpu.clipping import Clipping, Clippings, clippings
from runtime.wire.limits import Limits
from runtime.wire.messages import EngineInfo
from tapeout.errors import RequestError

if TYPE_CHECKING:
    from engines.kernels.cpu.sampling import SamplingKernel
    from engines.protocol import Engine


class Opened(NamedTuple):
    """``tokenizer``: the text of ``tokenizer.json``; None for a model that cannot have constraints.

    ``kernel``: chooses tokens; without one numpy does. ``threads``: of the engine, where each takes a core.
    ``clippings``: values that the engine stored on static grids, and clipped.
    """

    engine: Engine
    info: EngineInfo
    tokenizer: str | None = None
    kernel: SamplingKernel | None = None
    threads: int = 0
    clippings: Clippings = Clipping


class OpenEngine(Protocol):
    """Called in the engine's process, so it must pickle. What a user can act on is a ``TapeoutError``."""

    def __call__(self, folder: Path) -> Opened: ...


@dataclass(frozen=True)
class OpenBundle:
    """``threads``: 0 means every physical core, or one where that is as fast.

    ``slots``: room for so many sequences of full length; as built if None. ``kv_bytes``: most memory of the KV cache,
    instead of ``slots``. ``public_key``, ``level``: see
    :func:`engines.load.load`.
    """

    threads: int = 0
    slots: int | None = None
    kv_bytes: int | None = None
    public_key: Path | None = None
    level: str = ""

    def __call__(self, folder: Path) -> Opened:
        from engines.bundle import EngineBundle
        from engines.kernels.cpu.sampling import sampling_kernel
        from engines.load import at_level, load
        from engines.sessions import library_of
        from tapeout import artifact

        bundle = artifact.load_record(folder, EngineBundle)
        record = bundle.record
        slots = self.slots
        if self.kv_bytes is not None:
            sequence_bytes = record.io.sequence_bytes
            slots = self.kv_bytes // sequence_bytes
            if not slots:
                raise RequestError(
                    f"{self.kv_bytes} bytes of KV cache",
                    expected=f"at least {sequence_bytes}, one sequence of {record.io.max_tokens} tokens",
                )
        engine = load(folder, threads=self.threads, slots=slots, level=self.level, public_key=self.public_key)
        has = engine.capabilities
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
        )
        tokenizer = folder / "tokenizer.json"
        text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
        threads = max(1, has.threads)
        library = library_of(at_level(bundle, self.level))
        kernel = sampling_kernel(library, has.vocab_size, threads)
        return Opened(engine, info, text, kernel, threads, clippings(library))


@dataclass(frozen=True)
class Start:
    """The first message to the engine's process."""

    folder: Path
    open: OpenEngine
    limits: Limits
    cores: frozenset[int]  # that the process may use, whatever its parent was bound to meanwhile
