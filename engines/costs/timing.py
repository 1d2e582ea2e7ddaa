"""How alternatives are timed on this machine: in turn with each other; times are kept by the target's fingerprint.

A time is that of the fastest sample, since other work on the machine only adds. A sample runs copies that have data of
their own. Together they are several times the last-level cache, so data comes from memory as it does in a model; the
data of a model that fits into the cache does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.target import Target
from tapeout.artifact import canonical_json
from tapeout.cache import cache_folder
from tapeout.cores import physical_cores

ROUNDS = 7  # samples of each alternative, taken in turn
STREAMED_CACHES = 4  # most data of one sample, in sizes of the last-level cache
USUAL_CACHE_BYTES = 32 << 20  # where the system does not tell
METHOD = 3  # counted up when times taken before do not compare with those taken now

Seconds = dict[str, dict[int, float]]  # alternative -> tokens of a step -> seconds


def kept(
    names: Iterable[str],
    tokens: Sequence[int],
    described: Callable[[int], Mapping[str, Any]],
    measure: Callable[[Collection[int]], Seconds],
    *,
    target: Target[Any],
    threads: int,
    only_kept: bool,
) -> Seconds:
    """Times of ``names`` at ``tokens``, from the cache where this machine has them; ``measure`` takes the others.

    ``described``: what is measured at a number of tokens: all that times depend on, but target, machine, threads and
    method.
    ``only_kept``: times that are not in the cache are left out, not measured.
    """
    threads = threads or physical_cores()
    paths = {count: _folder() / f"{_key(described(count), target, threads)}.json" for count in tokens}
    missing = [count for count, path in paths.items() if not path.is_file()]
    if missing and not only_kept:
        measured = measure(missing)
        _folder().mkdir(parents=True, exist_ok=True)
        for count in missing:
            _keep(paths[count], {name: by_tokens[count] for name, by_tokens in measured.items()})
    found: Seconds = {name: {} for name in names}
    for count, path in paths.items():
        if only_kept and not path.is_file():
            continue
        for name, seconds in json.loads(path.read_text()).items():
            found[name][count] = float(seconds)
    return found


def _folder() -> Path:
    return cache_folder() / "costs"


def _key(described: Mapping[str, Any], target: Target[Any], threads: int) -> str:
    content = {
        **described,
        "method": METHOD,
        "target": target.name,
        "fingerprint": target.fingerprint().model_dump(mode="json"),
        "kernels": target.kernels_version(),
        "threads": threads,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _keep(path: Path, seconds: Mapping[str, float]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(seconds, indent=1) + "\n")
    partial.replace(path)


def fastest(samples: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Seconds of each alternative, sampled in turn, so that a change of the machine's load affects all alike."""
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for number in range(ROUNDS + 1):
        for name, sample in samples.items():
            seconds = sample()
            if number:  # the first round warms up
                taken[name].append(seconds)
    return {name: min(times) for name, times in taken.items()}


def streamed_bytes(weights: int) -> int:
    """Bytes a sample reads, for a model with so many weights: several caches full, but no more than the model."""
    return min(STREAMED_CACHES * last_level_cache_bytes(), weights)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the first core, from Linux."""
    sizes = [re.fullmatch(r"(\d+)([KM]?)\s*", path.read_text()) for path in folder.glob("index*/size")]
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    return max((int(found[1]) * units[found[2]] for found in sizes if found), default=USUAL_CACHE_BYTES)
