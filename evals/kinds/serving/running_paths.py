"""Steps as the server makes them, of every size from one sequence to as many as may run at once.

The sequences lie in blocks of the engine's pool, in tables of their own, so that many short ones fit in the memory of
few long ones: no more than the engine was opened with. They join one by one. At each size, some decode beside the
prompt of the one that joins, all of them decode, all choose their likeliest token in the opposite order, and all are
fed drafts. At the end each in turn loses its blocks, as one that was preempted, and is fed again in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.protocol import Engine, EngineCapabilities, Entry, FloatArray, Result, Wanted
from engines.sequences import Sequences
from evals.kinds.serving import ServingSettings
from evals.kinds.serving.served_log import LoggedPlace, ServedLog, Stream, Streams, anchor
from tapeout.progress import ProgressBar

SPREAD = 97  # prompts have 1 to so many tokens


class Running(NamedTuple):
    """``length``: of the prompt; the tokens behind it are decoded. ``table``: its blocks."""

    stream: Stream
    length: int
    table: Sequence[int]


def most_running(has: EngineCapabilities, settings: ServingSettings) -> int:
    """Sequences that the engine has room for, up to those that the settings ask for."""
    return min(settings.max_running, has.max_batch, has.blocks // _blocks_each(has, settings))


def running_paths(candidate: Sequences, streams: Streams, settings: ServingSettings, log: ServedLog) -> None:
    engine, ahead = candidate.engine, settings.draft_tokens + 1
    has = engine.capabilities
    most, each = most_running(has, settings), _blocks_each(has, settings)
    tables = [range(first * each, (first + 1) * each) for first in range(has.blocks // each)][: most + 1]
    running: list[Running] = []
    for number in range(most):
        length = max(1, min(1 + 11 * number % SPREAD, has.max_tokens - ahead))
        stream = streams.next(min(length + ahead, has.max_tokens))
        running.append(Running(stream, length, tables[number]))
    wanted = [range(one.length - 1, len(one.stream.tokens)) for one in running]
    anchor(candidate, None, [one.stream for one in running], wanted)
    for size in ProgressBar(range(1, most + 1), title="batch sizes", unit="size"):
        _join(engine, running[:size], log)
        _decode(engine, running[:size], log)
        _draft(engine, running[:size], settings, log)
    spare = tables[most] if len(tables) > most else None
    for number in ProgressBar(range(most), title="sequences fed again", unit="sequence"):
        spare = _resume(engine, running, number, spare, log)


def _blocks_each(has: EngineCapabilities, settings: ServingSettings) -> int:
    return -(-min(SPREAD + settings.draft_tokens + 1, has.max_tokens) // has.block_tokens)


def _join(engine: Engine, running: Sequence[Running], log: ServedLog) -> None:
    """The last one's prompt, beside a decoded token of each of the others."""
    *before, last = running
    batch = [_token(one, 0, "logits") for one in before]
    batch.append(Entry(last.stream.tokens[: last.length], 0, last.table, "logits"))
    ends = [*(one.length for one in before), last.length - 1]
    for row, (one, end, logits) in enumerate(zip(running, ends, _logits(engine.step(batch)), strict=True)):
        log.add(LoggedPlace("joining", row, 0, len(running)), one.stream, end, logits[0])
    rest = last.stream.tokens[last.length :]
    engine.step([Entry(rest, last.length, last.table, positions=())])


def _decode(engine: Engine, running: Sequence[Running], log: ServedLog) -> None:
    """One token of each, at a place behind its prompt that differs from size to size."""
    size = len(running)
    behind = [size % (len(one.stream.tokens) - one.length) for one in running]
    found = _logits(engine.step([_token(one, at, "logits") for one, at in zip(running, behind, strict=True)]))
    chosen = engine.step([_token(one, at, "token") for one, at in zip(running[::-1], behind[::-1], strict=True)])
    for row, (one, at, logits, choice) in enumerate(zip(running, behind, found, chosen[::-1], strict=True)):
        log.add(LoggedPlace("running", row, 0, size), one.stream, one.length + at, logits[0], chosen=_chosen(choice))


def _draft(engine: Engine, running: Sequence[Running], settings: ServingSettings, log: ServedLog) -> None:
    """As many drafts for each as a step has room for; fewer for every other one."""
    size = len(running)
    most = min(settings.draft_tokens, settings.step_tokens // size - 1)
    if most < 1 or not engine.capabilities.shares_blocks:  # the server drafts nothing then
        return
    fed = [one.stream.tokens[one.length :][: most + 1 - row % 2] for row, one in enumerate(running)]
    batch = [
        Entry(tokens, one.length, one.table, "logits", range(len(tokens)))
        for one, tokens in zip(running, fed, strict=True)
    ]
    for row, (one, found) in enumerate(zip(running, _logits(engine.step(batch)), strict=True)):
        for at, logits in enumerate(found):
            log.add(LoggedPlace("drafts", row, 0, size), one.stream, one.length + at, logits)


def _resume(
    engine: Engine, running: list[Running], number: int, spare: Sequence[int] | None, log: ServedLog
) -> Sequence[int] | None:
    """One is fed again in the spare blocks, beside the others' next tokens, then all decode; the blocks it had."""
    one = running[number]
    running[number] = one._replace(table=one.table if spare is None else spare)
    ends = [len(other.stream.tokens) - 1 for other in running]
    steps = [[_token(other, end - other.length, "logits") for other, end in zip(running, ends, strict=True)]] * 2
    whole = Entry(one.stream.tokens[:-1], 0, running[number].table, "logits")
    steps[0] = [*steps[1][:number], whole, *steps[1][number + 1 :]]
    for step, fed_again in zip(steps, (1, 0), strict=True):
        for row, (other, end, logits) in enumerate(zip(running, ends, _logits(engine.step(step)), strict=True)):
            at = end - fed_again if row == number else end
            log.add(LoggedPlace("resumed", row, 0, len(running)), other.stream, at, logits[0])
    return None if spare is None else one.table


def _token(one: Running, behind: int, wanted: Wanted) -> Entry:
    """The token that lies so many behind the prompt."""
    at = one.length + behind
    return Entry((one.stream.tokens[at],), at, one.table, wanted)


def _logits(results: Sequence[Result]) -> list[FloatArray]:
    found = [_sound(result).logits for result in results]
    return [logits for logits in found if logits is not None]


def _sound(result: Result) -> Result:
    if result.error is not None:
        raise result.error
    return result


def _chosen(result: Result) -> int:
    tokens = _sound(result).tokens
    assert tokens is not None
    return int(tokens[0])
