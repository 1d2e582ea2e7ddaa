"""Where the parts of a run take place, how they record what they find, and how they take times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks.gpu.driver import Driver
from benchmarks.gpu.llama import EIGHT_BILLION, SMALL, TINY, Shape, write_bundle
from engines.bundle import EngineBundle
from engines.kernels.cuda import HOST, HOST_FILE, cubin_file, device
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, FingerprintError

Call = Callable[[], object]
WARMUPS, SLEEP_CYCLES = 3, 100_000


class Record(Protocol):
    """Writes down a figure or a check with what it is of. A check that has not held fails the run."""

    def __call__(self, name: str, **found: Any) -> None: ...


class LeftOutError(Exception):
    """This part cannot run here; the text says why."""


def recorder(path: Path) -> Record:
    """Appends a line of JSON at once."""

    def record(name: str, **found: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")
        print(name, " ".join(f"{key}={value}" for key, value in found.items()), flush=True)

    return record


@dataclass(frozen=True)
class Place:
    """``kernels``: the folder that :mod:`benchmarks.gpu.prepare` makes. ``level``: of the machine code that runs.

    At level ``host`` all runs over the stand-in for a driver, at small sizes: a rehearsal, whose times mean nothing.
    """

    kernels: Path
    scratch: Path
    level: str

    @property
    def rehearsal(self) -> bool:
        return self.level == HOST

    @property
    def library(self) -> Path:
        return self.kernels / Path(HOST_FILE).name

    @property
    def machine_code(self) -> Path | None:
        return None if self.rehearsal else self.kernels / Path(cubin_file(self.level)).name

    @property
    def driver_library(self) -> str:
        return str(self.library) if self.rehearsal else device.DRIVER

    @property
    def torch_device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    @property
    def large(self) -> Shape:
        return TINY if self.rehearsal else EIGHT_BILLION

    @property
    def small(self) -> Shape:
        return TINY if self.rehearsal else SMALL

    @cached_property
    def driver(self) -> Driver:
        """In the context that PyTorch uses."""
        if not self.rehearsal:
            import torch

            torch.cuda.init()
        return Driver(self.driver_library, self.machine_code.read_bytes() if self.machine_code else b"")

    def stream(self) -> int:
        """On which PyTorch computes now, also while it captures."""
        if self.rehearsal:
            return self.driver.stream
        import torch

        return torch.cuda.current_stream().cuda_stream

    def bundle(self, shape: Shape, level: str) -> Artifact[EngineBundle]:
        """In a folder that ends with the machine."""
        return write_bundle(self.scratch / f"{shape.name}-{level}", shape, self.kernels, level)


def place_here(kernels: Path, scratch: Path, *, rehearsal: bool) -> Place:
    """:class:`FingerprintError` without a GPU that there is machine code for, unless it is a rehearsal."""
    if not (kernels / Path(HOST_FILE).name).is_file():
        raise ArtifactError(
            f"no kernels in {kernels}",
            expected=f"{Path(HOST_FILE).name} and machine code",
            remedy="run `python -m benchmarks.gpu.prepare`, on any machine that builds, and bring its folder along",
        )
    if rehearsal:
        return Place(kernels, scratch, HOST)
    gpu = device.find_gpu()
    if isinstance(gpu, str):
        raise FingerprintError(gpu, expected="an NVIDIA GPU", remedy="use such a machine, or --rehearsal")
    levels = [level for level in reversed(gpu.architectures) if (kernels / Path(cubin_file(level)).name).is_file()]
    if not levels:
        raise ArtifactError(
            f"no machine code for {gpu.name} in {kernels}",
            expected=f"that of {' or '.join(gpu.architectures) or 'another GPU'}",
            remedy="run `python -m benchmarks.gpu.prepare` for it",
        )
    return Place(kernels, scratch, levels[0])


def milliseconds(place: Place, calls: Sequence[Call], *, rounds: int = 20, graph: bool = True) -> float:
    """Of one call: the median over rounds of all calls, which should together touch more than a cache holds.

    ``graph``: they are captured in one CUDA graph, so that launches leave no gaps.
    """
    if place.rehearsal:
        start = time.perf_counter()
        for call in calls:
            call()
        return 1e3 * (time.perf_counter() - start) / len(calls)
    import torch

    torch.cuda.synchronize()  # what calls read was made on another stream, which this one does not wait for
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            for call in calls:
                call()
    torch.cuda.synchronize()

    def all_calls() -> None:
        for call in calls:
            call()

    replay: Call = all_calls
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            all_calls()
        replay = captured.replay

    times = list[float]()
    for number in range(WARMUPS + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]  # the host launches meanwhile
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if number >= WARMUPS:
            times.append(begin.elapsed_time(end) / len(calls))
    return median(times)


def peers(record: Record, name: str, made: dict[str, Callable[[], float]], **of: Any) -> dict[str, float]:
    """Times of others by name; one that does not run here is recorded with its reason."""
    found = dict[str, float]()
    for peer, time_of in made.items():
        try:
            found[peer] = time_of()
        except Exception as error:  # whatever a library of another raises, the rest goes on
            lines = str(error).strip().splitlines() or [type(error).__name__]
            record(name, peer=peer, does_not_run=lines[0][:200], **of)
        else:
            record(name, peer=peer, ms=found[peer], **of)
    return found
