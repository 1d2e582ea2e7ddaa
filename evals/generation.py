"""Greedy generation over the engine protocol: many prompts, decoded together in neighbouring slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engines.protocol import Engine
from tapeout.errors import EvidenceError


@dataclass(frozen=True)
class Response:
    """What an engine answered. The token that ended it is included when ``stopped``; else the limit ended it."""

    tokens: tuple[int, ...]
    stopped: bool


@dataclass
class _Row:
    """One live sequence; its slot is its place in the list of live rows."""

    prompt: int
    length: int  # KV positions its slot holds
    tokens: list[int] = field(default_factory=list[int])


def greedy(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    finished: Callable[[Sequence[int]], bool] | None = None,
    progress: str | None = None,
) -> list[Response]:
    """Answer every prompt with the likeliest token each time, in the order of the prompts.

    Live rows always fill slots 0..B-1: a row that ends is replaced by the next waiting prompt, or by the last live
    row once none waits. The schedule depends on the prompts and answers alone, so a run can be repeated exactly.
    ``finished`` may end a response early by its tokens so far; that counts as stopped.
    :class:`EvidenceError` for an empty prompt and for one that leaves no room for ``max_new_tokens``.
    """
    from tqdm import tqdm

    for number, prompt in enumerate(prompts):
        if not prompt or len(prompt) + max_new_tokens > engine.max_tokens:
            raise EvidenceError(
                f"prompt {number} has {len(prompt)} tokens",
                expected=f"1 to {engine.max_tokens - max_new_tokens}: the engine holds {engine.max_tokens} positions, "
                f"{max_new_tokens} of them for the answer",
                remedy="leave out that prompt, lower `shadow.max_new_tokens` or raise `export.max_positions`",
            )
    stops = frozenset(stop_tokens)
    responses: dict[int, Response] = {}
    live: list[_Row] = []
    waiting = iter(range(len(prompts)))
    bar = tqdm(total=len(prompts), desc=progress, unit="prompt", disable=None if progress else True)

    def accept(row: _Row, token: int) -> bool:
        """Append a token; True when that ends the response."""
        row.tokens.append(token)
        stopped = token in stops or (finished is not None and finished(row.tokens))
        if not stopped and len(row.tokens) < max_new_tokens:
            return False
        responses[row.prompt] = Response(tuple(row.tokens), stopped)
        bar.update()
        return True

    def admit(slot: int) -> _Row | None:
        """Prefill waiting prompts into the slot until one has more than its first token to say."""
        for number in waiting:
            row = _Row(number, len(prompts[number]))
            if not accept(row, int(engine.prefill(slot, prompts[number])[0].argmax())):
                return row
        return None

    while len(live) < engine.slots and (row := admit(len(live))) is not None:
        live.append(row)
    while live:
        chosen = engine.decode_greedy([row.tokens[-1] for row in live], [row.length for row in live])
        for slot in reversed(range(len(live))):
            live[slot].length += 1
            if not accept(live[slot], int(chosen[slot])):
                continue
            if (row := admit(slot)) is not None:
                live[slot] = row
                continue
            # Rows behind this slot were dealt with before it, so the last one's state is settled.
            last = live.pop()
            if slot < len(live):
                engine.copy_slot(len(live), slot, last.length)
                live[slot] = last
    bar.close()
    return [responses[number] for number in range(len(prompts))]
