"""Conversations that a fleet answers: generated ones, and those of public traces.

Tokens are ranges of numbers, since only their equality counts. A trace is read from a file that the caller names;
none is part of the project.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Protocol

from tapeout.errors import RequestError
from tapeout.file_errors import file_problem

SPAN = 1 << 20  # numbers that one text takes at most
_ORIGINS = {".jsonl": "Mooncake's conversation_trace.jsonl", ".csv": "Azure's AzureLLMInferenceTrace_conv.csv"}


@dataclass(frozen=True)
class Turn:
    """``prompt``: all of it, earlier turns included. ``think_seconds``: from the end of the answer before, if any."""

    prompt: tuple[range, ...]
    answer: range
    think_seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompt))

    def tokens(self) -> list[int]:
        return list(chain.from_iterable(self.prompt))


@dataclass(frozen=True)
class Conversation:
    """``name``: by which a router without a cache would tell conversations apart. ``start``: seconds."""

    name: str
    start: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Traffic:
    """``conversations``: in the order of their starts."""

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def turns(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    def faster(self, factor: float) -> Traffic:
        """So many times as many conversations a second."""
        moved = [replace(conversation, start=conversation.start / factor) for conversation in self.conversations]
        return replace(self, conversations=tuple(moved))

    def first(self, seconds: float) -> Traffic:
        """The conversations that start within so many seconds."""
        return replace(self, conversations=tuple(c for c in self.conversations if c.start < seconds))


def multi_turn(
    seed: int,
    *,
    seconds: float,
    rate: float,
    system_prompts: int = 4,
    system_tokens: int = 256,
    message_tokens: float = 80,
    answer_tokens: float = 100,
    turns: float = 5,
    think_seconds: float = 6,
    most_tokens: int = 2048,
) -> Traffic:
    """``rate`` conversations a second, Poisson. Lengths are gamma of shape 2, turns geometric, pauses exponential.

    ``most_tokens``: a conversation ends before it would become longer.
    """
    random, texts = Random(seed), count(1)

    def text(mean: float) -> range:
        start = next(texts) * SPAN
        return range(start, start + max(1, round(random.gammavariate(2, mean / 2))))

    shared = [range(start := next(texts) * SPAN, start + system_tokens) for _ in range(system_prompts)]
    conversations, now = list[Conversation](), random.expovariate(rate)
    while now < seconds:
        made, history, think = list[Turn](), (random.choice(shared),), 0.0
        while True:
            turn = Turn((*history, text(message_tokens)), text(answer_tokens), think)
            if made and turn.prompt_tokens + len(turn.answer) > most_tokens:
                break
            made.append(turn)
            history, think = (*turn.prompt, turn.answer), random.expovariate(1 / think_seconds)
            if random.random() < 1 / turns:
                break
        conversations.append(Conversation(f"c{len(conversations)}", now, tuple(made)))
        now += random.expovariate(rate)
    return Traffic("multi-turn", tuple(conversations))


class LoggedTexts(Protocol):
    """What a log says of a call: texts of its messages, what was answered, and all tokens of both."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def responses(self) -> Sequence[str]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


def logged_traffic(calls: Sequence[LoggedTexts], seed: int, rate: float, most_tokens: int = 2048) -> Traffic:
    """Calls of a log in their order, at ``rate`` a second, Poisson: a log does not say when they came.

    Equal texts are equal tokens, so prompts share what they shared. A text has its share of the prompt's tokens, by its
    length, and an answer is found again where it is a message of a later call.
    """
    random, spans, now = Random(seed), dict[str, range](), 0.0

    def span(text: str, tokens: float) -> range:
        start = len(spans) * SPAN
        return spans.setdefault(text, range(start, start + max(1, round(tokens))))

    conversations = list[Conversation]()
    for call in calls:
        answer_tokens = min(max(1, call.completion_tokens // max(1, len(call.responses))), most_tokens // 2)
        characters = max(1, sum(map(len, call.texts)))
        prompt, room = list[range](), most_tokens - answer_tokens
        for text in call.texts:
            whole = span(text, call.prompt_tokens * len(text) / characters)
            prompt.append(whole[:room])
            room -= len(prompt[-1])
        answer = span("".join(call.responses[:1]), answer_tokens)[:answer_tokens]
        name = call.texts[0] if call.texts else ""
        now += random.expovariate(rate)
        conversations.append(Conversation(name, now, (Turn(tuple(filter(len, prompt)), answer),)))
    return Traffic("traffic log", tuple(conversations))


def read_trace(path: Path, shrink: int = 1, most_tokens: int = 2048) -> Traffic:
    """``shrink``: lengths are divided by it. Prompts are cut to ``most_tokens`` less their answer.

    A ``.jsonl`` in the format of Mooncake's traces, whose prompts share blocks of 512 tokens, or a ``.csv`` in that of
    Azure's, which say nothing of what prompts share.
    """
    read: Callable[[Path, int, int], Iterator[Conversation]] | None
    read = {".jsonl": _mooncake, ".csv": _azure}.get(path.suffix)
    if read is None:
        raise RequestError(f"a trace called {path.name}", expected="a .jsonl of Mooncake's or a .csv of Azure's format")
    try:
        conversations = sorted(read(path, shrink, most_tokens), key=lambda conversation: conversation.start)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} cannot be read: {file_problem(error)}", expected=f"lines as in {_ORIGINS[path.suffix]}"
        ) from error
    if not conversations:
        raise RequestError(f"{path} holds no request", expected="one a line")
    first = conversations[0].start
    moved = [replace(conversation, start=conversation.start - first) for conversation in conversations]
    return Traffic(path.stem, tuple(moved))


def _mooncake(path: Path, shrink: int, most_tokens: int) -> Iterator[Conversation]:
    size = 512 // shrink
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            entry = json.loads(line)
            ids: Sequence[int] = entry["hash_ids"]
            answer = _answer(number, max(1, entry["output_length"] // shrink), most_tokens)
            left = min(max(1, entry["input_length"] // shrink), most_tokens - len(answer))
            spans = list[range]()
            for id in ids:
                if left:
                    spans.append(range(start := id * SPAN, start + min(left, size)))
                    left -= len(spans[-1])
            name = str(ids[min(1, len(ids) - 1)])  # all begin with the same block
            yield Conversation(name, entry["timestamp"] / 1000, (Turn(tuple(spans), answer),))


def _azure(path: Path, shrink: int, most_tokens: int) -> Iterator[Conversation]:
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            answer = _answer(number, max(1, int(row["GeneratedTokens"]) // shrink), most_tokens)
            length = min(max(1, int(row["ContextTokens"]) // shrink), most_tokens - len(answer))
            start = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield Conversation(str(number), start, (Turn((range(number * SPAN, number * SPAN + length),), answer),))


def _answer(number: int, tokens: int, most_tokens: int) -> range:
    start = -(number + 1) * SPAN
    return range(start, start + min(tokens, most_tokens // 2))
