"""What a run says: order of measurements, medians, paired ratios, classes, bars and domination. Pure arithmetic.

Speeds are tokens per second. Entry i of every list of speeds was taken in round i, so ratios are of neighbours in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from pydantic import Field

from tapeout.artifact import Frozen

NEAR_LOSSLESS_KL = 0.02
# The most bits a weight that our own bundle may have in the 4-bit class, scales and embeddings counted: those of the
# largest peer in it, llama.cpp Q4_K_M of the default model (105 MB of 134.5 million weights).
FOUR_BITS = 6.25
ROOFLINE_SHARE = 0.55
MEMORY_BYTES = 250e6  # above weights and KV

ClassName = Literal["near-lossless", "4-bit"]
CLASSES: tuple[ClassName, ...] = ("near-lossless", "4-bit")


class Workload(NamedTuple):
    """``decode`` at a batch, or ``prefill`` of one prompt of that many tokens."""

    phase: Literal["decode", "prefill"]
    size: int

    def __str__(self) -> str:
        return f"decode, B={self.size}" if self.phase == "decode" else f"prefill, {self.size:,} tokens"


# The smallest ratio to the best peer of the class, by phase and size.
BARS: dict[ClassName, dict[Workload, float]] = {
    "near-lossless": {
        Workload("decode", 1): 1.4,
        Workload("decode", 8): 1.3,
        Workload("decode", 32): 1.4,
        Workload("prefill", 128): 1.0,
        Workload("prefill", 1024): 1.0,
    },
    "4-bit": {
        Workload("decode", 1): 1.4,
        Workload("decode", 8): 1.3,
        Workload("decode", 32): 1.3,
        Workload("prefill", 128): 1.0,
        Workload("prefill", 1024): 1.0,
    },
}


class Sample(Frozen):
    """All rounds of one system on one workload, in tokens per second."""

    phase: Literal["decode", "prefill"]
    size: int
    tokens_per_s: tuple[float, ...]


class Measured(Frozen):
    """One row of the table.

    ``weight_bits``: see :class:`benchmarks.peers.systems.System`. ``kl`` in nats and ``top_token`` as a share, both
    against the float reference over ``predictions`` positions; None if the peer could not be asked.
    ``step_bytes`` and ``budget_bytes`` (weights and KV of the largest workload) are known of our own bundles only.
    """

    name: str
    ours: bool
    own_row: bool
    weight_bits: float
    file_bytes: int
    peak_bytes: int
    samples: tuple[Sample, ...]
    kl: float | None = None
    top_token: float | None = None
    predictions: int = 0
    step_bytes: int | None = None
    budget_bytes: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    def speeds(self, workload: Workload) -> tuple[float, ...]:
        """The rounds of a workload; empty if this system failed at it."""
        return next((s.tokens_per_s for s in self.samples if (s.phase, s.size) == workload), ())

    def speed(self, workload: Workload) -> float | None:
        rounds = self.speeds(workload)
        return median(rounds) if rounds else None


@dataclass(frozen=True)
class Bar:
    """One bar of one of our bundles. ``peer``: the fastest that counts, or None if none does: nothing is proven."""

    name: str
    class_name: ClassName
    what: str
    value: float | None
    bound: float
    peer: str | None
    met: bool | None


def schedule(systems: Sequence[str], workloads: Sequence[Workload], rounds: int) -> Iterator[tuple[int, Workload, str]]:
    """Every system in turn on each workload, in every round; each round begins with the next system.

    >>> [name for _, _, name in schedule(["a", "b", "c"], [Workload("decode", 1)], 3)]
    ['a', 'b', 'c', 'b', 'c', 'a', 'c', 'a', 'b']
    """
    for number in range(rounds):
        first = number % len(systems)
        for workload in workloads:
            for name in (*systems[first:], *systems[:first]):
                yield number, workload, name


def paired_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """Median of the ratios of neighbouring rounds. ``ValueError`` if the rounds do not pair or there are none.

    >>> paired_ratio([10, 30, 20], [10, 10, 10])
    2.0
    """
    return median(mine / theirs for mine, theirs in zip(ours, other, strict=True))


def classes(measured: Measured) -> tuple[ClassName, ...]:
    """Near-lossless by measured KL; 4-bit by the weights. A row of its own is in no class, nor is one without KL.

    A system of about four bits may be in both classes. An 8-bit one whose KL is above the bound is in none.
    """
    if measured.own_row or measured.kl is None:
        return ()
    found: list[ClassName] = []
    if measured.kl <= NEAR_LOSSLESS_KL:
        found.append("near-lossless")
    if measured.weight_bits <= FOUR_BITS:
        found.append("4-bit")
    return tuple(found)


def rivals(ours: Measured, class_name: ClassName, everyone: Sequence[Measured]) -> list[Measured]:
    """The peers of the class; in the 4-bit class only those whose KL is no lower than ours."""
    peers = [m for m in everyone if not m.ours and class_name in classes(m)]
    if class_name == "near-lossless":
        return peers
    return [m for m in peers if m.kl is not None and ours.kl is not None and ours.kl <= m.kl]


def speed_bar(ours: Measured, class_name: ClassName, workload: Workload, everyone: Sequence[Measured]) -> Bar:
    """Our paired ratio to whichever rival leaves us least ahead."""
    rounds = ours.speeds(workload)
    ratios = {
        m.name: paired_ratio(rounds, m.speeds(workload))
        for m in rivals(ours, class_name, everyone)
        if rounds and m.speeds(workload)
    }
    bound = BARS[class_name][workload]
    if not ratios:
        return Bar(ours.name, class_name, str(workload), None, bound, None, None)
    peer = min(ratios, key=lambda name: ratios[name])
    return Bar(ours.name, class_name, str(workload), ratios[peer], bound, peer, ratios[peer] >= bound)


def bars(everyone: Sequence[Measured], bandwidth_bytes_per_s: float) -> list[Bar]:
    """Every bar of every bundle of ours in each class it belongs to, for the workloads that were run."""
    found: list[Bar] = []
    for ours in (m for m in everyone if m.ours):
        for name in classes(ours):
            found += [speed_bar(ours, name, workload, everyone) for workload in BARS[name] if ours.speeds(workload)]
            share = roofline_share(ours, bandwidth_bytes_per_s)
            if share is not None:
                met = share >= ROOFLINE_SHARE
                found.append(Bar(ours.name, name, "share of the roofline, B=1", share, ROOFLINE_SHARE, None, met))
            if ours.budget_bytes is not None:
                bound = ours.budget_bytes + MEMORY_BYTES
                peak = ours.peak_bytes
                found.append(Bar(ours.name, name, "peak memory, MB", peak / 1e6, bound / 1e6, None, peak <= bound))
    return found


def roofline_share(measured: Measured, bandwidth_bytes_per_s: float) -> float | None:
    """Time to read a step's bytes at the measured bandwidth, as a share of the step's time at one stream."""
    speed = measured.speed(Workload("decode", 1))
    if speed is None or measured.step_bytes is None:
        return None
    return measured.step_bytes / bandwidth_bytes_per_s * speed


def dominators(everyone: Sequence[Measured], workload: Workload) -> list[str]:
    """Peers that are both faster and of lower KL than every one of our bundles on this workload.

    A bundle of ours that could not be timed or compared shields nothing; with none at all, no answer is possible and
    ``ValueError`` is raised rather than none found.
    """
    ours = [(m.speed(workload), m.kl) for m in everyone if m.ours]
    placed = [(speed, kl) for speed, kl in ours if speed is not None and kl is not None]
    if not placed:
        raise ValueError(f"no bundle of ours has both a speed and a KL at {workload}")
    found: list[str] = []
    for peer in (m for m in everyone if not m.ours):
        speed, kl = peer.speed(workload), peer.kl
        if speed is not None and kl is not None and all(speed > fast and kl < close for fast, close in placed):
            found.append(peer.name)
    return found


def beaten_presets(everyone: Sequence[Measured], workload: Workload) -> list[tuple[str, str]]:
    """(peer, bundle) pairs in which the peer is both faster and of lower KL than that one bundle: all of the plot."""
    found: list[tuple[str, str]] = []
    for peer in (m for m in everyone if not m.ours):
        for ours in (m for m in everyone if m.ours):
            alone = [ours, peer]
            try:
                if dominators(alone, workload):
                    found.append((peer.name, ours.name))
            except ValueError:
                continue
    return found
