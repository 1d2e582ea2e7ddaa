"""How operators are timed: alternatives in turn with each other; times are kept by the target's fingerprint.

A time is that of the fastest sample, since other work on the machine only adds. A sample runs copies that have data of
their own. Together they are several times the last-level cache, so data comes from memory as it does in a model; the
data of a model that fits into the cache does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.target import Target
from tapeout.artifact import canonical_json
from tapeout.cache import cache_folder
from tapeout.cores import physical_cores

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

ROUNDS = 7  # samples of each alternative, taken in turn
STREAMED_CACHES = 4  # most data of one sample, in sizes of the last-level cache
USUAL_CACHE_BYTES = 32 << 20  # where the system does not tell
METHOD = 3  # counted up when times taken before do not compare with those taken now

Seconds = dict[str, dict[int, float]]  # alternative -> tokens of a step -> seconds


@dataclass(frozen=True)
class TimedCase:
    """One alternative: copies of an operator that have data of their own, and share their input and their output."""

    copy_bytes: int  # of the data of one copy
    model: Callable[[int], ir.Model]  # of so many copies, lowered by the target
    arrays: Callable[[int, int], Mapping[str, NDArray[Any]]]  # inputs and outputs, by copies and tokens of a step
    most_copies: int | None = None


# Cases by name of the alternative, together with the numbers of tokens that their models are for.
CasesByTokens = Iterator[tuple[Collection[int], Mapping[str, TimedCase]]]


class TimedOperator(Protocol):
    """A kind of layer, as it is timed."""

    @property
    def names(self) -> Sequence[str]:
        """Of the alternatives, which are timed in turn with each other."""
        ...

    def described(self, tokens: int) -> Mapping[str, Any]:
        """All that times at a number of tokens depend on, but for what :class:`OperatorTimer` adds."""
        ...

    def cases(self, target: Target[Any], tokens: Collection[int]) -> CasesByTokens: ...


@dataclass(frozen=True)
class OperatorTimer:
    """``streamed``: bytes of data that a sample reads. ``only_kept``: times that are not kept yet are left out."""

    target: Target[Any]
    streamed: int
    threads: int = 0  # 0: every physical core
    only_kept: bool = False

    def costs(self, operator: TimedOperator, tokens: Sequence[int]) -> Seconds:
        """Seconds of one operator, from the cache where this machine has them; the others are measured, and kept."""
        paths = {count: _folder() / f"{self._key(operator.described(count))}.json" for count in tokens}
        missing = [count for count, path in paths.items() if not path.is_file()]
        if missing and not self.only_kept:
            measured = self.measure(operator, missing)
            _folder().mkdir(parents=True, exist_ok=True)
            for count in missing:
                _keep(paths[count], {name: by_tokens[count] for name, by_tokens in measured.items()})
        found: Seconds = {name: {} for name in operator.names}
        for count, path in paths.items():
            if self.only_kept and not path.is_file():
                continue
            for name, seconds in json.loads(path.read_text()).items():
                found[name][count] = float(seconds)
        return found

    def measure(self, operator: TimedOperator, tokens: Collection[int]) -> Seconds:
        """Seconds of one operator, without a look at the times that are kept."""
        seconds: Seconds = {name: {} for name in operator.names}
        for counts, cases in operator.cases(self.target, tokens):
            copies = {name: _Copies(case, self) for name, case in cases.items()}
            for count in counts:
                for each in copies.values():
                    each.bind(count)
                for name, least in fastest({name: each.sample for name, each in copies.items()}).items():
                    seconds[name][count] = least
        return seconds

    def _key(self, described: Mapping[str, Any]) -> str:
        content = {
            **described,
            "streamed": self.streamed,
            "method": METHOD,
            "target": self.target.name,
            "fingerprint": self.target.fingerprint().model_dump(mode="json"),
            "kernels": self.target.kernels_version(),
            "threads": self.threads or physical_cores(),
        }
        return hashlib.sha256(canonical_json(content)).hexdigest()


class _Copies:
    def __init__(self, case: TimedCase, timer: OperatorTimer) -> None:
        self._case, wanted = case, -(-timer.streamed // case.copy_bytes)
        self._copies = min(wanted, case.most_copies or wanted)
        self._timer = timer.target.timer(case.model(self._copies), timer.threads)

    def bind(self, tokens: int) -> None:
        self._timer.bind(self._case.arrays(self._copies, tokens))

    def sample(self) -> float:
        """Seconds of one copy, over one run of all copies."""
        return self._timer.seconds() / self._copies


def _folder() -> Path:
    return cache_folder() / "costs"


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
