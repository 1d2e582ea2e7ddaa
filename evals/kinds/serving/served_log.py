"""What serving evidence compares: streams of tokens with their anchors, and a log of comparisons by place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.protocol import FloatArray
from engines.sequences import Sequences, SlotEntry
from evals.kinds.serving import ServedItem
from evals.text import kl_divergences
from tapeout.errors import EvidenceError

STRIDE = 1009  # a prime: streams begin at different places of the text


@dataclass
class Stream:
    """One sequence of tokens, and the anchors of some of its positions: logits ``[V]`` after the token there.

    ``own`` are finite. ``float_kls``: their KL against ``reference``, where somebody asked for it.
    """

    tokens: list[int]
    own: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    reference: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    float_kls: dict[int, float] = field(default_factory=dict[int, float])

    def float_kl(self, position: int) -> float | None:
        """Of its own logits; None where the float engine was not asked."""
        if position not in self.reference:
            return None
        if position not in self.float_kls:
            self.float_kls[position] = _kl(self.reference[position], self.own[position])
        return self.float_kls[position]


def anchor(
    candidate: Sequences, baseline: Sequences | None, streams: Sequence[Stream], positions: Sequence[Sequence[int]]
) -> None:
    """``positions``: those of each stream whose anchors are wanted, ascending.

    :class:`EvidenceError` for logits of the candidate that are not finite.
    """
    for stream, wanted in zip(streams, positions, strict=True):
        for position, logits in zip(wanted, candidate.prefill(0, stream.tokens, positions=wanted), strict=True):
            _require_finite(logits, position, "one prefill in slot 0")
            stream.own[position] = logits
    if baseline is None:
        return
    for batch in batches([len(stream.tokens) for stream in streams], baseline.slots, baseline.max_tokens):
        found = baseline.feed([SlotEntry(slot, streams[n].tokens, 0, positions[n]) for slot, n in enumerate(batch)])
        for n, rows in zip(batch, found, strict=True):
            streams[n].reference.update(zip(positions[n], rows, strict=True))


def batches(lengths: Sequence[int], slots: int, tokens: int) -> list[range]:
    """Neighbours that are fed together: at most ``slots``, and at most ``tokens`` unless one alone has more.

    >>> batches([3, 4, 9, 2, 2, 2], slots=2, tokens=8)
    [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]
    """
    found: list[range] = []
    begin, total = 0, 0
    for number, length in enumerate(lengths):
        if number > begin and (number - begin == slots or total + length > tokens):
            found.append(range(begin, number))
            begin, total = number, 0
        total += length
    return [*found, range(begin, len(lengths))]


@dataclass(frozen=True)
class LoggedPlace:
    """Where logits were computed: a slot, and the batch that it was part of."""

    path: str
    slot: int
    first_slot: int
    batch: int

    def __str__(self) -> str:
        return f"path {self.path}, slot {self.slot}, batch of {self.batch} from slot {self.first_slot}"


@dataclass(frozen=True)
class LoggedEntry:
    """One position compared."""

    position: int
    agree: bool
    kl: float
    error: float
    gap: float
    float_kl: float | None


class ServedLog:
    """Collects comparisons by place."""

    def __init__(self) -> None:
        self._found: dict[LoggedPlace, list[LoggedEntry]] = {}

    def add(
        self, place: LoggedPlace, stream: Stream, position: int, logits: FloatArray, *, chosen: int | None = None
    ) -> None:
        """``chosen``: the token that the engine picked by itself, where it did; ``logits`` are those it picked by.

        Most ways of serving give the bits of the anchor. Then there is nothing to compute but the gap.
        :class:`EvidenceError` for logits that are not finite.
        """
        own = stream.own[position]
        top = int(own.argmax())
        if np.array_equal(own, logits):
            picked, kl, error, float_kl = top if chosen is None else chosen, 0.0, 0.0, stream.float_kl(position)
        else:
            _require_finite(logits, position, place)
            reference = stream.reference.get(position)
            picked, kl = int(logits.argmax()) if chosen is None else chosen, _kl(own, logits)
            error = float(np.abs(logits - own).max() / max(float(np.abs(own).max()), 1e-30))
            float_kl = None if reference is None else _kl(reference, logits)
        gap = float(logits.max() - logits[picked])
        entry = LoggedEntry(position=position, agree=picked == top, kl=kl, error=error, gap=gap, float_kl=float_kl)
        self._found.setdefault(place, []).append(entry)

    def items(self) -> list[ServedItem]:
        return [_item(place, found) for place, found in self._found.items()]


def _require_finite(logits: FloatArray, position: int, place: object) -> None:
    if not np.isfinite(logits).all():
        raise EvidenceError(
            f"the engine returned NaN or infinite logits at position {position}, {place}",
            expected="finite float32 logits in every way the engine is served, and in one prefill",
            remedy="`tapeout inspect` shows its scales and kernels; build it again, or serve at another level",
        )


def _kl(anchor: FloatArray, logits: FloatArray) -> float:
    return float(kl_divergences(anchor[None], logits[None])[0])


def _item(place: LoggedPlace, found: Sequence[LoggedEntry]) -> ServedItem:
    float_kls = [entry.float_kl for entry in found if entry.float_kl is not None]
    return ServedItem(
        path=place.path,
        slot=place.slot,
        first_slot=place.first_slot,
        batch=place.batch,
        first=min(entry.position for entry in found),
        last=max(entry.position for entry in found),
        tokens=len(found),
        agree=sum(entry.agree for entry in found),
        kl_sum=sum(entry.kl for entry in found),
        kl_max=max(entry.kl for entry in found),
        error=max(entry.error for entry in found),
        gap=max(entry.gap for entry in found),
        float_kl_sum=sum(float_kls) if len(float_kls) == len(found) else None,
    )


class Streams:
    """Cuts streams from a text, each from another place; a text that ends goes on from its beginning."""

    def __init__(self, text: Sequence[int]) -> None:
        if not text:
            raise EvidenceError("no text to serve", expected="held-out text", remedy="check calibrate.dataset")
        self._text, self._count = list(text), 0

    def next(self, length: int) -> Stream:
        begin = self._count * STRIDE % len(self._text)
        self._count += 1
        tokens = self._text[begin:]
        while len(tokens) < length:
            tokens += self._text
        return Stream(tokens[:length])
