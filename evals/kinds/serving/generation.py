"""Greedy generation: many prompts, decoded together in neighbouring slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from engines.protocol import FloatArray, TokenArray
from tapeout.errors import EvidenceError
from tapeout.progress import ProgressBar


class Decoder(Protocol):
    """What generation asks of :class:`engines.sequences.Sequences`, or of two of them that are fed the same."""

    slots: int
    max_tokens: int

    def prefill(self, slot: int, tokens: Sequence[int], *, start: int = 0) -> FloatArray: ...

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int]) -> TokenArray: ...

    def copy_slot(self, source: int, target: int, length: int) -> None: ...


@dataclass(frozen=True)
class Response:
    """What an engine answered. The token that ended it is included when ``stopped``; else the limit ended it."""

    tokens: tuple[int, ...]
    stopped: bool


@dataclass
class _GreedySequence:
    """One live sequence; its slot is its place in the list of live sequences."""

    prompt: int
    length: int  # KV positions its slot holds
    tokens: list[int] = field(default_factory=list[int])


def greedy(
    engine: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    finished: Callable[[Sequence[int]], bool] | None = None,
    progress: str | None = None,
) -> list[Response]:
    """Answer every prompt with the likeliest token each time, in the order of the prompts.

    Live sequences always fill slots 0..B-1: one that ends is replaced by the next waiting prompt, or by the last live
    sequence once none waits. The schedule depends on the prompts and answers alone, so a run can be repeated exactly.
    ``finished`` may end a response early by its tokens so far; that counts as stopped. What all prompts begin with,
    such as a system prompt, is computed once and copied to the other slots, as a server's prefix cache does.
    :class:`EvidenceError` for an empty prompt and for one that leaves no room for ``max_new_tokens``.
    """
    for number, prompt in enumerate(prompts):
        if not prompt or len(prompt) + max_new_tokens > engine.max_tokens:
            raise EvidenceError(
                f"prompt {number} has {len(prompt)} tokens",
                expected=f"1 to {engine.max_tokens - max_new_tokens}: the engine holds {engine.max_tokens} positions, "
                f"{max_new_tokens} of them for the answer",
                remedy="leave out that prompt, lower `shadow.max_new_tokens` or raise `export.max_positions`",
            )
    stops = frozenset(stop_tokens)
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*(prompt[:-1] for prompt in prompts), strict=False))
    common = sum(1 for _ in same)
    begun: set[int] = set()  # slots that hold the common tokens
    responses: dict[int, Response] = {}
    live: list[_GreedySequence] = []
    waiting = iter(range(len(prompts)))
    bar = ProgressBar(title=progress or "", unit="prompt", total=len(prompts), hidden=not progress)

    def accept(sequence: _GreedySequence, token: int) -> bool:
        """Append a token; True when that ends the response."""
        sequence.tokens.append(token)
        stopped = token in stops or (finished is not None and finished(sequence.tokens))
        if not stopped and len(sequence.tokens) < max_new_tokens:
            return False
        responses[sequence.prompt] = Response(tuple(sequence.tokens), stopped)
        bar.update()
        return True

    def first_token(slot: int, prompt: Sequence[int]) -> int:
        if common and begun and slot not in begun:
            engine.copy_slot(0, slot, common)
        start = common if begun else 0
        begun.add(slot)
        return int(engine.prefill(slot, prompt[start:], start=start)[0].argmax())

    def admit(slot: int) -> _GreedySequence | None:
        """Prefill waiting prompts into the slot until one has more than its first token to say."""
        for number in waiting:
            sequence = _GreedySequence(number, len(prompts[number]))
            if not accept(sequence, first_token(slot, prompts[number])):
                return sequence
        return None

    with bar:
        while len(live) < engine.slots and (sequence := admit(len(live))) is not None:
            live.append(sequence)
        while live:
            chosen = engine.decode_greedy(
                [sequence.tokens[-1] for sequence in live], [sequence.length for sequence in live]
            )
            for slot in reversed(range(len(live))):
                live[slot].length += 1
                if not accept(live[slot], int(chosen[slot])):
                    continue
                if (sequence := admit(slot)) is not None:
                    live[slot] = sequence
                    continue
                # Sequences behind this slot were dealt with before it, so the last one's state is settled.
                last = live.pop()
                if slot < len(live):
                    engine.copy_slot(len(live), slot, last.length)
                    live[slot] = last
    return [responses[number] for number in range(len(prompts))]
