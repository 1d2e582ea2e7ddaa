"""The arithmetic of a run: order of measurements, medians, paired ratios, classes, bars and domination.

Speeds are tokens per second. Entry i of every list of speeds was measured in round i, so a paired ratio compares two
measurements that are close in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from pydantic import Field

from tapeout.artifact import Frozen

Kind = Literal["dense", "experts", "recurrent"]  # of models; a hybrid with experts is recurrent

NEAR_LOSSLESS_KL = 0.02
# The most bits per weight of our own bundles in the 4-bit class, scales and embeddings included. The limit is the size
# of the largest peer of the class: llama.cpp Q4_K_M of the default model (105 MB for 134.5 million weights).
FOUR_BIT_LIMIT = 6.25
ROOFLINE_SHARE: dict[Kind, float] = {"dense": 0.85, "experts": 0.75, "recurrent": 0.75}
MEMORY_BYTES = 250e6  # allowed above weights and KV cache of dense models
MEMORY_SHARE = 0.1  # of weights, KV cache and recurrent state, allowed above them for all others

ClassName = Literal["near-lossless", "4-bit"]
CLASSES: tuple[ClassName, ...] = ("near-lossless", "4-bit")


class Workload(NamedTuple):
    """``decode`` at batch size ``size``, or ``prefill`` of one prompt of ``size`` tokens."""

    phase: Literal["decode", "prefill"]
    size: int

    def __str__(self) -> str:
        return f"decode, B={self.size}" if self.phase == "decode" else f"prefill, {self.size:,} tokens"


# The ratio to the fastest rival that is required of dense models, by class, phase and size.
BARS: dict[ClassName, dict[Workload, float]] = {
    "near-lossless": {
        Workload("decode", 1): 1.3,
        Workload("decode", 8): 2.0,
        Workload("decode", 32): 2.0,
        Workload("prefill", 128): 1.3,
        Workload("prefill", 1024): 1.3,
    },
    "4-bit": {
        Workload("decode", 1): 1.2,
        Workload("decode", 8): 2.0,
        Workload("decode", 32): 2.0,
        Workload("prefill", 128): 1.0,
        Workload("prefill", 1024): 1.0,
    },
}
# Those of the other kinds, in both classes.
_EXPERTS = {
    Workload("decode", 1): 1.1,
    Workload("decode", 8): 1.5,
    Workload("decode", 32): 2.0,
    Workload("prefill", 512): 1.3,
}
_RECURRENT = {
    Workload("decode", 1): 1.1,
    Workload("decode", 8): 2.0,
    Workload("decode", 32): 2.0,
    Workload("prefill", 512): 1.2,
    Workload("prefill", 4096): 1.2,
}
BARS_BY_KIND: dict[Kind, dict[ClassName, dict[Workload, float]]] = {
    "dense": BARS,
    "experts": dict.fromkeys(CLASSES, _EXPERTS),
    "recurrent": dict.fromkeys(CLASSES, _RECURRENT),
}


class Sample(Frozen):
    """All rounds of one system on one workload, in tokens per second."""

    phase: Literal["decode", "prefill"]
    size: int
    tokens_per_s: tuple[float, ...]


class Turns(Frozen):
    """Decode at batch 1 and plain reads of memory in turns (:mod:`benchmarks.peers.roofline`).

    Entry i of both is one turn, in bytes per second: the median step, and the better of the reads beside it.
    """

    steps: tuple[float, ...]
    reads: tuple[float, ...]

    @property
    def share(self) -> float:
        """The bandwidth of a step as a share of that of a read: the median over the turns.

        >>> Turns(steps=(8e9, 30e9, 9e9), reads=(10e9, 40e9, 10e9)).share
        0.8
        """
        return median(step / read for step, read in zip(self.steps, self.reads, strict=True))


class Measured(Frozen):
    """All figures of one system: one line of the results table.

    ``weight_bits``, ``by_format`` and ``unclassed``: see :class:`benchmarks.peers.systems.System`. ``kl`` in nats and
    ``top_token`` as a share, both against the float reference over ``predictions`` positions; None without logits.
    ``budget_bytes`` (weights, and KV cache and recurrent state of the largest workload) and ``turns`` are known only
    for our bundles. ``experts``: how many different experts of a layer a decode step chose, by its number of sequences:
    the mean over steps and layers, for the tokens that this system decoded.
    """

    name: str
    ours: bool
    unclassed: bool
    by_format: bool = False
    weight_bits: float
    file_bytes: int
    peak_bytes: int
    samples: tuple[Sample, ...]
    kl: float | None = None
    top_token: float | None = None
    predictions: int = 0
    budget_bytes: int | None = None
    turns: Turns | None = None
    experts: dict[int, float] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)

    def speeds(self, workload: Workload) -> tuple[float, ...]:
        """Speeds of all rounds of a workload; empty if this system failed in it."""
        return next((s.tokens_per_s for s in self.samples if (s.phase, s.size) == workload), ())

    def speed(self, workload: Workload) -> float | None:
        rounds = self.speeds(workload)
        return median(rounds) if rounds else None


@dataclass(frozen=True)
class Bar:
    """A required value of one of our bundles. ``peer``: the rival of a speed bar; ``met`` is None if there is none."""

    name: str
    class_name: ClassName
    what: str
    value: float | None
    bound: float
    peer: str | None
    met: bool | None


def schedule(systems: Sequence[str], workloads: Sequence[Workload], rounds: int) -> Iterator[tuple[int, Workload, str]]:
    """In every round, every system in turn on each workload; each round starts with the next system.

    >>> [name for _, _, name in schedule(["a", "b", "c"], [Workload("decode", 1)], 3)]
    ['a', 'b', 'c', 'b', 'c', 'a', 'c', 'a', 'b']
    """
    for number in range(rounds):
        first = number % len(systems)
        for workload in workloads:
            for name in (*systems[first:], *systems[:first]):
                yield number, workload, name


def paired_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """Median of the ratios of the single rounds. ``ValueError`` if the numbers of rounds differ or are zero.

    >>> paired_ratio([10, 30, 20], [10, 10, 10])
    2.0
    """
    return median(mine / theirs for mine, theirs in zip(ours, other, strict=True))


def classes(measured: Measured) -> tuple[ClassName, ...]:
    """Near-lossless by measured KL, 4-bit by bits per weight. An unclassed system or one without KL is in no class.

    A system of about four bits may be in both classes. An 8-bit system whose KL is above the bound is in none. One that
    is classed ``by_format`` is in the 4-bit class or near-lossless, by its bits per weight alone.
    """
    if measured.by_format:
        return ("4-bit",) if measured.weight_bits <= FOUR_BIT_LIMIT else ("near-lossless",)
    if measured.unclassed or measured.kl is None:
        return ()
    found: list[ClassName] = []
    if measured.kl <= NEAR_LOSSLESS_KL:
        found.append("near-lossless")
    if measured.weight_bits <= FOUR_BIT_LIMIT:
        found.append("4-bit")
    return tuple(found)


def rivals(ours: Measured, class_name: ClassName, systems: Sequence[Measured]) -> list[Measured]:
    """The peers of the class; in the 4-bit class only those whose KL, where it is known, is no lower than ours."""
    peers = [m for m in systems if not m.ours and class_name in classes(m)]
    if class_name == "near-lossless" or ours.by_format:
        return peers
    return [m for m in peers if m.by_format or (m.kl is not None and ours.kl is not None and ours.kl <= m.kl)]


def speed_bar(
    ours: Measured, class_name: ClassName, workload: Workload, systems: Sequence[Measured], kind: Kind = "dense"
) -> Bar:
    """The smallest of our paired ratios to the rivals."""
    rounds = ours.speeds(workload)
    ratios = {
        m.name: paired_ratio(rounds, m.speeds(workload))
        for m in rivals(ours, class_name, systems)
        if rounds and m.speeds(workload)
    }
    bound = BARS_BY_KIND[kind][class_name][workload]
    if not ratios:
        return Bar(ours.name, class_name, str(workload), None, bound, None, None)
    peer = min(ratios, key=lambda name: ratios[name])
    return Bar(ours.name, class_name, str(workload), ratios[peer], bound, peer, ratios[peer] >= bound)


def bars(systems: Sequence[Measured], kind: Kind = "dense") -> list[Bar]:
    """Every bar of each of our bundles, in each of its classes, for the workloads that were run."""
    found: list[Bar] = []
    for ours in (m for m in systems if m.ours):
        for name in classes(ours):
            workloads = [workload for workload in BARS_BY_KIND[kind][name] if ours.speeds(workload)]
            found += [speed_bar(ours, name, workload, systems, kind) for workload in workloads]
            if ours.turns is not None:
                share = ours.turns.share
                least = ROOFLINE_SHARE[kind]
                met = least <= share <= 1  # above one, the bandwidth was measured too low
                found.append(Bar(ours.name, name, "share of the roofline, B=1", share, least, None, met))
            if ours.budget_bytes is not None:
                bound = ours.budget_bytes + (MEMORY_BYTES if kind == "dense" else MEMORY_SHARE * ours.budget_bytes)
                peak = ours.peak_bytes
                found.append(Bar(ours.name, name, "peak memory, MB", peak / 1e6, bound / 1e6, None, 0 < peak <= bound))
    return found


def dominators(systems: Sequence[Measured], workload: Workload) -> list[str]:
    """Peers that have both a higher speed and a lower KL than all our bundles on this workload.

    A bundle without a speed or a KL is ignored. If no bundle has both, there is no answer: ``ValueError``, not an
    empty list.
    """
    ours = [(m.speed(workload), m.kl) for m in systems if m.ours]
    complete = [(speed, kl) for speed, kl in ours if speed is not None and kl is not None]
    if not complete:
        raise ValueError(f"no bundle of ours has both a speed and a KL at {workload}")
    found: list[str] = []
    for peer in (m for m in systems if not m.ours):
        speed, kl = peer.speed(workload), peer.kl
        if speed is None or kl is None:
            continue
        if all(speed > our_speed and kl < our_kl for our_speed, our_kl in complete):
            found.append(peer.name)
    return found


def dominated_bundles(systems: Sequence[Measured], workload: Workload) -> list[tuple[str, str]]:
    """All pairs (peer, bundle) in which the peer has both a higher speed and a lower KL than that one bundle."""
    found: list[tuple[str, str]] = []
    for peer in (m for m in systems if not m.ours):
        for ours in (m for m in systems if m.ours):
            try:
                if dominators([ours, peer], workload):
                    found.append((peer.name, ours.name))
            except ValueError:
                continue
    return found
