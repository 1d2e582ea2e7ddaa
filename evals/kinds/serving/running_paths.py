"""Steps as the server makes them, of every size from one sequence to as many as may run at once.

The sequences are short, so that many of them fit in the memory of few long ones: no more than the engine was opened
with. They join one by one. At each size, some decode beside the prompt of the one that joins, all of them decode, all
choose their likeliest token in the opposite order, and all are fed drafts. At the end some at a time lose their memory,
as those that were preempted, and are fed again elsewhere beside the others' next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.protocol import EngineCapabilities
from engines.sequences import Sequences, SlotEntry, room_for
from evals.kinds.serving import ServingSettings
from evals.kinds.serving.served_log import LoggedPlace, ServedLog, Stream, Streams, anchor
from tapeout.progress import ProgressBar

SPREAD = 71  # prompts have 1 to so many tokens
AGAIN = 8  # sequences that are fed again in one step
FULL = 8  # batch sizes that this divides have steps as full of drafts as a server makes them


class Running(NamedTuple):
    """``length``: of the prompt; the tokens behind it are decoded. ``slot``: where it lies."""

    stream: Stream
    length: int
    slot: int

    def entry(self, at: int) -> SlotEntry:
        """Its token at a position."""
        return SlotEntry(self.slot, (self.stream.tokens[at],), at)


def most_running(has: EngineCapabilities, settings: ServingSettings) -> int:
    """Sequences that the engine has room for, up to those that the settings ask for.

    As the server's, each has one slot of recurrent state.
    """
    return min(settings.max_running, _room(has, settings))


def drafted_tokens(has: EngineCapabilities, settings: ServingSettings) -> int:
    """Drafts that the server feeds a sequence, at most: recurrent state cannot drop those that are rejected."""
    return settings.draft_tokens if has.shares_blocks and not has.slots else 0


def running_paths(candidate: Sequences, streams: Streams, settings: ServingSettings, log: ServedLog) -> None:
    has, ahead = candidate.engine.capabilities, settings.draft_tokens + 1
    most, longest = most_running(has, settings), _longest(has, settings)
    engine = Sequences(candidate.engine, min(most + AGAIN, _room(has, settings)), longest)
    running: list[Running] = []
    for number in range(most):
        length = max(1, min(1 + 11 * number % SPREAD, has.max_tokens - ahead))
        running.append(Running(streams.next(min(length + ahead, has.max_tokens)), length, number))
    wanted = [range(one.length - 1, len(one.stream.tokens)) for one in running]
    anchor(candidate, None, [one.stream for one in running], wanted)
    for size in ProgressBar(range(1, most + 1), title="batch sizes", unit="size"):
        _join(engine, running[:size], log)
        _decode(engine, running[:size], log)
        _draft(engine, running[:size], settings, log)
    _resume_each(engine, running, log)


def _room(has: EngineCapabilities, settings: ServingSettings) -> int:
    return room_for(has, _longest(has, settings), copies=False)


def _longest(has: EngineCapabilities, settings: ServingSettings) -> int:
    return min(SPREAD + settings.draft_tokens + 1, has.max_tokens)


def _join(engine: Sequences, running: Sequence[Running], log: ServedLog) -> None:
    """The last one's prompt, beside a decoded token of each of the others."""
    *before, last = running
    batch = [*(one.entry(one.length) for one in before), SlotEntry(last.slot, last.stream.tokens[: last.length], 0)]
    ends = [*(one.length for one in before), last.length - 1]
    for row, (one, end, logits) in enumerate(zip(running, ends, engine.feed(batch), strict=True)):
        log.add(LoggedPlace("joining", row, 0, len(running)), one.stream, end, logits[0])
    engine.feed([SlotEntry(last.slot, last.stream.tokens[last.length :], last.length, ())])


def _decode(engine: Sequences, running: Sequence[Running], log: ServedLog) -> None:
    """One token of each, at a place behind its prompt that differs from size to size."""
    size = len(running)
    places = [one.length + size % (len(one.stream.tokens) - one.length) for one in running]
    batch = [one.entry(at) for one, at in zip(running, places, strict=True)]
    if engine.engine.capabilities.slots:
        engine.feed(batch)  # goes back to these places: then the next steps are of one token each
    found = engine.feed(batch)
    chosen = engine.choose(batch[::-1])
    for row, (one, at, logits, choice) in enumerate(zip(running, places, found, chosen[::-1], strict=True)):
        log.add(LoggedPlace("running", row, 0, size), one.stream, at, logits[0], chosen=int(choice[0]))


def _draft(engine: Sequences, running: Sequence[Running], settings: ServingSettings, log: ServedLog) -> None:
    """Any number of drafts for every second one, up to what a step has room for, beside single tokens of the others;
    nearly as many for all at some sizes.
    """
    size = len(running)
    most = min(drafted_tokens(engine.engine.capabilities, settings), settings.step_tokens // size - 1)
    if most < 1:
        return
    counts = [most - row % 2 if size % FULL == 0 else (row + size) % 2 * (1 + row % most) for row in range(size)]
    fed = [one.stream.tokens[one.length :][: count + 1] for one, count in zip(running, counts, strict=True)]
    batch = [
        SlotEntry(one.slot, tokens, one.length, range(len(tokens))) for one, tokens in zip(running, fed, strict=True)
    ]
    for row, (one, found) in enumerate(zip(running, engine.feed(batch), strict=True)):
        for at, logits in enumerate(found):
            log.add(LoggedPlace("drafts", row, 0, size), one.stream, one.length + at, logits)


def _resume_each(engine: Sequences, running: list[Running], log: ServedLog) -> None:
    """Some at a time are fed again in spare slots, beside the others' next tokens; in the next step they are of these.

    Their slots are the spare ones of the next. Where there are fewer, others are fed again where they are.
    """
    most = len(running)
    spare = list(range(most, engine.slots))
    ends = [len(one.stream.tokens) - 1 for one in running]
    for first in ProgressBar(range(0, most + AGAIN, AGAIN), title="sequences fed again", unit="step"):
        batch = [one.entry(end) for one, end in zip(running, ends, strict=True)]
        places = list(ends)
        for turn, number in enumerate(range(first, min(first + AGAIN, most))):
            one = running[number]
            if turn < len(spare):
                running[number], spare[turn] = one._replace(slot=spare[turn]), one.slot
            batch[number] = SlotEntry(running[number].slot, one.stream.tokens[:-1], 0)
            places[number] = ends[number] - 1
        for row, (one, at, logits) in enumerate(zip(running, places, engine.feed(batch), strict=True)):
            log.add(LoggedPlace("resumed", row, 0, most), one.stream, at, logits[0])
