"""Stage ``serving``: the candidate in every way it is used in service, against a prefill in one piece in slot 0.

Each path below is a function over :class:`engines.sequences.Sequences`. All compare with the same anchors. The engine's
own are its logits of a stream of tokens that is fed in one call to slot 0, which parity compares with the quantized
model, and by which text and tasks are measured. Those of the float engine come from several streams in a call, each in
a slot of its own: a float engine that is larger than memory is read from its file in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from engines.protocol import FloatArray
from engines.sequences import Sequences, SlotEntry
from evals.kind import Context
from evals.kinds.serving import KIND, MOVED, Draws, ServedItem, ServingReport, ServingSettings, draws_of
from evals.kinds.serving.generation import greedy
from evals.kinds.serving.pressure import MakeAnswerer, under_pressure
from evals.kinds.serving.running_paths import drafted_tokens, most_running, running_paths
from evals.kinds.serving.served_log import LoggedPlace, ServedLog, Stream, Streams, anchor
from evals.kinds.text import HeldOutSettings
from tapeout.artifact import Artifact, Parents
from tapeout.fingerprint import Fingerprint
from tapeout.progress import ProgressBar

# Lengths on both sides of where prompts are cut into pieces, and of blocks of attention.
LENGTHS = (1, 2, 17, 63, 64, 65, 255, 256, 257, 300, 511, 513, 1024)
SHORT = 65  # lengths up to here fill the slots of an engine that has more slots than lengths
PIECES = (1, 7, 64, 255, 256, 300)
PIECED = 1024  # what is behind so many tokens of the longest prompt is fed in pieces, alone, in `mixed`
SHARED = (17, 65)  # within a block, and just behind one: with all slots
WIDELY_SHARED, SHARERS = 300, 4  # over several blocks, and with so many slots
REUSE_TOKENS = 40  # and as many more as the number of the slot, up to REUSE_SPREAD
REUSE_SPREAD = 16
MOVED_BLOCKS = 5
DRAWN_POSITIONS = range(3, 256, 8)  # of the text that tokens are drawn from


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/serving/`."""
    documents = context.encode(context.heldout_texts(context.section(HeldOutSettings).documents))
    text = [token for tokens in documents for token in tokens]
    candidate = context.engine("candidate")
    serving(
        context.section(ServingSettings),
        context.engine("baseline"),
        candidate,
        lambda: context.engine("candidate", slots=candidate.slots + 1, threads=1),
        text=text,
        draws=draws_of(context.draw_counts(drawn_logits(candidate, text))),
        answerer=context.answerer,
        decode=context.decode,
        stop_tokens=context.bundle("candidate").record.stop_tokens,
        executed_on=context.executed_on(),
        folder=folder,
        parents={
            "baseline": context.bundle("baseline"),
            "candidate": context.bundle("candidate"),
            "source": context.source(),
        },
    )


def serving(
    settings: ServingSettings,
    baseline: Sequences,
    candidate: Sequences,
    reopen: Callable[[], Sequences],
    *,
    text: Sequence[int],
    draws: tuple[Draws, ...],
    answerer: MakeAnswerer,
    decode: Callable[[Sequence[int]], str],
    stop_tokens: Collection[int],
    executed_on: Fingerprint,
    folder: Path,
    parents: Parents,
) -> Artifact[ServingReport]:
    """Write a :class:`ServingReport`. Engines: see :func:`served_items`; the core: :func:`under_pressure`."""
    has = candidate.engine.capabilities
    running = most_running(has, settings)
    pressure = under_pressure(candidate, answerer, decode, Streams(text), settings, stop_tokens)
    items = served_items(settings, baseline, candidate, reopen, text)
    record = ServingReport(
        baseline=baseline.digest,
        candidate=candidate.digest,
        asked=settings,
        slots=candidate.slots,
        max_tokens=candidate.max_tokens,
        max_running=running,
        step_tokens=settings.step_tokens,
        draft_tokens=drafted_tokens(has, settings),
        moved_tokens=moved_tokens(candidate, settings.steps),
        items=len(items),
        draws=draws,
        pressure=pressure,
        executed_on=executed_on,
    )
    return KIND.write(folder, record, parents=parents, items=items, metrics=serving_metrics(items))


def drawn_logits(engine: Sequences, text: Sequence[int]) -> FloatArray:
    """Logits ``[P, V]`` of some positions of a text, to draw tokens from."""
    positions = [position for position in DRAWN_POSITIONS if position < engine.max_tokens]
    return engine.prefill(0, Streams(text).next(positions[-1] + 1).tokens, positions=positions)


def serving_metrics(items: Sequence[ServedItem]) -> dict[str, float]:
    """Flat numbers for ``dvc metrics``, means over all positions."""
    tokens = sum(item.tokens for item in items)
    return {
        "tokens": tokens,
        "agreement": sum(item.agree for item in items) / tokens,
        "kl_mean": sum(item.kl_sum for item in items) / tokens,
        "kl_max": max(item.kl_max for item in items),
    }


def served_items(
    settings: ServingSettings,
    baseline: Sequences | None,
    candidate: Sequences,
    reopen: Callable[[], Sequences],
    text: Sequence[int],
) -> list[ServedItem]:
    """Every path, in an order in which each finds slots that hold other sequences.

    ``baseline`` None: none is asked. ``reopen`` opens the candidate with other numbers of slots and threads. It is
    called last, after the other two were closed, so that memory holds the candidate's weights once.
    """
    log, streams = ServedLog(), Streams(text)
    rounds = list(mixed_lengths(candidate.slots, candidate.max_tokens - settings.steps))
    for lengths in ProgressBar(rounds, title="as served", unit="round"):
        held = [streams.next(length + settings.steps) for length in lengths]
        prefixes = _prefixes(candidate.slots, lengths[-1]) if lengths is rounds[0] else []
        positions = [
            {
                *range(length, length + settings.steps),
                *_ends(min(length, PIECED)),
                *(end for turn in range(len(PIECES)) for end in _ends(length, turn)),
            }
            for length in lengths
        ]
        positions[-1] |= {prefix + ahead for prefix in prefixes for ahead in range(settings.steps)}
        anchor(candidate, baseline, held, [sorted(wanted) for wanted in positions])
        pieces(candidate, held, lengths, log)
        mixed(candidate, held, lengths, log)
        steps(candidate, held, lengths, settings.steps, log)
        if candidate.slots > 1:
            copy(candidate, held[-1], prefixes, settings.steps, log)
    parts: list[Callable[[], None]] = [
        partial(reuse, candidate, streams, settings.steps, log),
        partial(generation, candidate, streams, settings, log),
        partial(running_paths, candidate, streams, settings, log),
        partial(other_shape, candidate, baseline, reopen, streams, settings.steps, log),
    ]
    if candidate.slots > 1:
        parts.insert(0, partial(share, candidate, streams, settings.steps, log))
    for part in ProgressBar(parts, title="as served, further paths", unit="path"):
        part()
    return log.items()


def mixed_lengths(slots: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Lengths of the sequences that all slots hold together, in as many rounds as it takes to have each once.

    >>> list(mixed_lengths(4, 64))
    [(2, 17, 63, 64), (2, 17, 63, 1)]
    """
    wanted = [longest, *sorted((length for length in LENGTHS if length < longest), reverse=True)]
    short = cycle([length for length in wanted if length <= SHORT and length != longest] or wanted)
    for begin in range(0, len(wanted), slots):
        lengths = wanted[begin : begin + slots]
        filled = (*lengths, *(next(short) for _ in range(slots - len(lengths))))
        yield filled[::-1]


def _ends(length: int, turn: int = 0) -> list[int]:
    """Position of the last token of each piece of a prompt. The first piece is the one numbered ``turn``."""
    ends: list[int] = []
    at = 0
    for size in islice(cycle(PIECES), turn, None):
        at = min(at + size, length)
        ends.append(at - 1)
        if at == length:
            return ends
    raise AssertionError("pieces do not end")


def pieces(engine: Sequences, held: Sequence[Stream], lengths: Sequence[int], log: ServedLog) -> None:
    """A prompt, or its beginning, fed in pieces, each continuing the slot, in every slot."""
    for slot, (stream, length) in enumerate(zip(held, lengths, strict=True)):
        at = 0
        for end in _ends(min(length, PIECED)):
            logits = engine.prefill(slot, stream.tokens[at : end + 1], start=at)
            log.add(LoggedPlace("pieces", slot, slot, 1), stream, end, logits[0])
            at = end + 1


def mixed(engine: Sequences, held: Sequence[Stream], lengths: Sequence[int], log: ServedLog) -> None:
    """All prompts fed together, a piece of each in every step: single tokens of some beside long pieces of others."""
    ends = [iter(_ends(length, slot % len(PIECES))) for slot, length in enumerate(lengths)]
    at = [0] * len(held)
    while batch := [(slot, end) for slot, left in enumerate(ends) if (end := next(left, None)) is not None]:
        found = engine.feed([SlotEntry(slot, held[slot].tokens[at[slot] : end + 1], at[slot]) for slot, end in batch])
        for (slot, end), rows in zip(batch, found, strict=True):
            log.add(LoggedPlace("mixed", slot, 0, len(held)), held[slot], end, rows[0])
            at[slot] = end + 1


def windows(slots: int, steps: int) -> Iterator[tuple[int, int]]:
    """First slot and size of the batch of each step: all slots, then every size from the first and to the last slot.

    >>> list(windows(3, 2))
    [(0, 3), (0, 3), (0, 1), (0, 2), (0, 3), (1, 2), (2, 1)]
    """
    yield from ((0, slots) for _ in range(steps))
    yield from ((0, size) for size in range(1, slots + 1))
    yield from ((slots - size, size) for size in range(slots - 1, 0, -1))


def steps(engine: Sequences, held: Sequence[Stream], lengths: Sequence[int], count: int, log: ServedLog) -> None:
    """Batched decode steps and greedy steps in turn, of every batch size, each entry at its own length.

    After ``count`` steps the sequences start again at ``lengths``. A step and the greedy one beside it write the same
    keys and values, in either order.
    """
    for number, (first, size) in enumerate(windows(len(held), count)):
        slots = range(first, first + size)
        at = [lengths[slot] + number % count for slot in slots]
        tokens = [held[slot].tokens[position] for slot, position in zip(slots, at, strict=True)]
        greedy_first = number % 2 == 0
        chosen = engine.decode_greedy(tokens, at, first_slot=first) if greedy_first else None
        logits = engine.decode(tokens, at, first_slot=first)
        if chosen is None:
            chosen = engine.decode_greedy(tokens, at, first_slot=first)
        for entry, slot in enumerate(slots):
            log.add(LoggedPlace("decode", slot, first, size), held[slot], at[entry], logits[entry])
            place = LoggedPlace("greedy", slot, first, size)
            log.add(place, held[slot], at[entry], logits[entry], chosen=int(chosen[entry]))


def reuse(engine: Sequences, streams: Streams, count: int, log: ServedLog) -> None:
    """A short prompt in every slot, where a longer sequence was before, then decode steps of all slots."""
    room = max(1, engine.max_tokens - count)
    lengths = [min(room, REUSE_TOKENS + slot % REUSE_SPREAD) for slot in range(engine.slots)]
    held = [streams.next(length + count) for length in lengths]
    anchor(engine, None, held, [range(length - 1, length + count) for length in lengths])
    for slot, (stream, length) in enumerate(zip(held, lengths, strict=True)):
        logits = engine.prefill(slot, stream.tokens[:length])
        log.add(LoggedPlace("reuse", slot, slot, 1), stream, length - 1, logits[0])
    for step in range(count):
        at = [length + step for length in lengths]
        logits = engine.decode([stream.tokens[n] for stream, n in zip(held, at, strict=True)], at)
        for slot, stream in enumerate(held):
            log.add(LoggedPlace("reuse", slot, 0, engine.slots), stream, at[slot], logits[slot])


def _prefixes(slots: int, longest: int) -> list[int]:
    """Lengths of the prefixes that are copied, each at most as long as the one before; at least one for each slot."""
    lengths = [longest, *(length for length in (3, *LENGTHS) if length < longest)]
    return sorted((lengths * slots)[: max(slots, len(lengths))], reverse=True)


def copy(engine: Sequences, stream: Stream, prefixes: Sequence[int], count: int, log: ServedLog) -> None:
    """A shared prefix copied from slot to slot, and continued by a decode step and a prefill of ``count - 1`` tokens.

    The last slot holds the stream; every slot is copied from and copied to. What lies where a prefix goes is another
    sequence: of the round, or the stream backwards where the slot held the stream itself.
    """
    for number, length in enumerate(prefixes):
        source, target = (number - 1) % engine.slots, number % engine.slots
        if number >= engine.slots - 1:
            engine.prefill(target, stream.tokens[: length + count][::-1])
        engine.copy_slot(source, target, length)
        logits = engine.decode([stream.tokens[length]], [length], first_slot=target)
        log.add(LoggedPlace("copy", target, target, 1), stream, length, logits[0])
        if count == 1:
            continue
        behind = stream.tokens[length + 1 : length + count]
        rows = engine.prefill(target, behind, start=length + 1, positions=range(len(behind)))
        for ahead, row in enumerate(rows, start=1):
            log.add(LoggedPlace("copy", target, target, 1), stream, length + ahead, row)


def share(engine: Sequences, streams: Streams, count: int, log: ServedLog) -> None:
    """Different continuations of one prefix, one for each slot, fed in one step; they share its blocks.

    The longest prefix has four continuations, in slots spread over all: each is compared with a prefill of its own.
    """
    spread = {number * (engine.slots - 1) // (SHARERS - 1) for number in range(SHARERS)}
    for length, slots in (*((length, range(engine.slots)) for length in SHARED), (WIDELY_SHARED, sorted(spread))):
        if length + count > engine.max_tokens:
            continue
        prefix = streams.next(length).tokens
        held = [Stream([*prefix, *streams.next(count).tokens]) for _ in slots]
        anchor(engine, None, held, [range(length, length + count)] * len(held))
        engine.prefill(0, prefix, positions=())
        batch = [
            SlotEntry(slot, stream.tokens[length:], length, range(count), 0)
            for slot, stream in zip(slots, held, strict=True)
        ]
        for slot, stream, rows in zip(slots, held, engine.feed(batch), strict=True):
            for ahead, row in enumerate(rows):
                log.add(LoggedPlace("share", slot, 0, engine.slots), stream, length + ahead, row)


def generation(engine: Sequences, streams: Streams, settings: ServingSettings, log: ServedLog) -> None:
    """Free-running answers of more prompts than there are slots; each token is the likeliest one after those before."""
    room = engine.max_tokens - settings.new_tokens
    lengths = [min(room, 1 + 11 * number % 97) for number in range(max(settings.answers, engine.slots + 1))]
    prompts = [streams.next(length).tokens for length in lengths]
    answers = greedy(engine, prompts, max_new_tokens=settings.new_tokens, stop_tokens=())
    for prompt, answer in zip(prompts, answers, strict=True):
        stream = Stream([*prompt, *answer.tokens[:-1]])
        anchor(engine, None, [stream], [range(len(prompt) - 1, len(stream.tokens))])
        for ahead, token in enumerate(answer.tokens):
            position = len(prompt) - 1 + ahead
            place = LoggedPlace("generation", 0, 0, engine.slots)
            log.add(place, stream, position, stream.own[position], chosen=token)


def other_shape(
    engine: Sequences,
    baseline: Sequences | None,
    reopen: Callable[[], Sequences],
    streams: Streams,
    count: int,
    log: ServedLog,
) -> None:
    """The same engine opened with other numbers of slots and threads, in its last slots, and a sequence that goes on
    there from the blocks of the first one. Closes the first two.
    """
    room, blocks = engine.max_tokens - count, list[bytes]()
    lengths = [min(room, length) for length in (SHORT, REUSE_TOKENS)]
    held = [streams.next(length + count) for length in lengths]
    anchor(engine, baseline, held, [range(length - 1, length + count) for length in lengths])
    behind = moved_tokens(engine, count)
    moved = streams.next(behind + count)
    if behind:
        anchor(engine, baseline, [moved], [range(behind, behind + count)])
        blocks = engine.read_blocks(0, behind // engine.engine.capabilities.block_tokens)
    for opened in (engine, baseline):
        if opened is not None:
            opened.close()
    with closing(reopen()) as reopened:
        first = reopened.slots - len(held)
        for slot, (stream, length) in enumerate(zip(held, lengths, strict=True), start=first):
            logits = reopened.prefill(slot, stream.tokens[:length])
            log.add(LoggedPlace("reopened", slot, slot, 1), stream, length - 1, logits[0])
        for step in range(count):
            at = [length + step for length in lengths]
            tokens = [stream.tokens[n] for stream, n in zip(held, at, strict=True)]
            logits = reopened.decode(tokens, at, first_slot=first)
            for entry, stream in enumerate(held):
                log.add(LoggedPlace("reopened", first + entry, first, len(held)), stream, at[entry], logits[entry])
        if behind:
            go_on(reopened, moved, blocks, behind, log)


def moved_tokens(engine: Sequences, count: int) -> int:
    """Tokens of as many full blocks as are moved, with room for ``count`` tokens behind them; 0 where none can be."""
    size = engine.engine.capabilities.block_tokens
    return min(MOVED_BLOCKS, (engine.max_tokens - count) // size) * size if engine.moves_blocks else 0


def go_on(engine: Sequences, stream: Stream, blocks: Sequence[bytes], start: int, log: ServedLog) -> None:
    """A sequence whose blocks another engine has computed, in the last slot: the tokens behind them in one piece, then
    one by one.
    """
    slot, behind = engine.slots - 1, stream.tokens[start:]
    place = LoggedPlace(MOVED, slot, slot, 1)
    engine.write_blocks(slot, blocks)
    rows = engine.prefill(slot, behind, start=start, positions=range(len(behind)))
    for position, row in enumerate(rows, start):
        log.add(place, stream, position, row)
    engine.write_blocks(slot, blocks)
    for position, token in enumerate(behind, start):
        log.add(place, stream, position, engine.decode([token], [position], first_slot=slot)[0])
