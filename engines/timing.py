"""How kernels are timed on this machine: in turn with those they are compared with; figures are kept by fingerprint.

Each figure is its fastest sample: whatever else the machine does only adds. A sample runs over copies with data of
their own: together they are several times the processor's cache, so data comes from memory as it does in a model; that
of a model that fits into the cache does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from engines.sessions import cpu_options
from engines.targets import ort_cpu
from engines.threads import physical_cores
from tapeout import fingerprint
from tapeout.artifact import canonical_json

CACHE = Path.home() / ".cache" / "tapeout" / "costs"
ROUNDS = 7  # samples of each kernel, taken in turn
STREAMED_CACHES = 4  # most data of one sample, in sizes of the last-level cache
USUAL_CACHE_BYTES = 32 << 20  # where the system does not tell
METHOD = 3  # counted up when figures taken before do not compare with those taken now

Seconds = dict[str, dict[int, float]]  # kernel name -> rows of a step -> seconds


def kept(
    names: Iterable[str],
    rows: Sequence[int],
    described: Callable[[int], Mapping[str, Any]],
    measure: Callable[[Collection[int]], Seconds],
    *,
    threads: int,
    only_kept: bool,
) -> Seconds:
    """Figures of ``names`` at ``rows``, from the cache where this machine has them; ``measure`` is asked for others.

    ``described``: what is measured at a row count, all that figures depend on but machine, libraries, threads and
    method. ``only_kept``: what is not there is left out, not measured.
    """
    threads = threads or physical_cores()
    paths = {count: CACHE / f"{_key(described(count), threads)}.json" for count in rows}
    missing = [count for count, path in paths.items() if not path.is_file()]
    if missing and not only_kept:
        measured = measure(missing)
        CACHE.mkdir(parents=True, exist_ok=True)
        for count in missing:
            _keep(paths[count], {name: by_rows[count] for name, by_rows in measured.items()})
    found: Seconds = {name: {} for name in names}
    for count, path in paths.items():
        if only_kept and not path.is_file():
            continue
        for name, seconds in json.loads(path.read_text()).items():
            found[name][count] = float(seconds)
    return found


def _key(described: Mapping[str, Any], threads: int) -> str:
    library = ort_cpu.library()
    content = {
        **described,
        "method": METHOD,
        "fingerprint": fingerprint.current(ort_cpu.LIBRARIES).model_dump(mode="json"),
        "threads": threads,
        "library": "" if library is None else library.parent.name,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _keep(path: Path, seconds: Mapping[str, float]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(seconds, indent=1) + "\n")
    partial.replace(path)


def fastest(samples: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Of each kernel's samples, taken in turn, so that a change of the machine's load strikes all kernels alike."""
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for number in range(ROUNDS + 1):
        for name, sample in samples.items():
            seconds = sample()
            if number:  # the first round warms up
                taken[name].append(seconds)
    return {name: min(times) for name, times in taken.items()}


def session_of(model: ir.Model, threads: int) -> ort.InferenceSession:
    options = cpu_options(threads, ort_cpu.library())
    # Threads spin within a run, as the engine's do, but not on into the run of another session.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    serialized = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def streamed_bytes(weights: int) -> int:
    """What a sample reads on behalf of a model of so many weights: several caches full, but no more than the model."""
    return min(STREAMED_CACHES * last_level_cache_bytes(), weights)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the first core, as Linux tells it."""
    sizes = [re.fullmatch(r"(\d+)([KM]?)\s*", path.read_text()) for path in folder.glob("index*/size")]
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    return max((int(found[1]) * units[found[2]] for found in sizes if found), default=USUAL_CACHE_BYTES)
