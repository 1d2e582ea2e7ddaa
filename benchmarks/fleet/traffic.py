"""Traffic that only benchmarks draw."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

from runtime.simulation.traffic import SPAN, Conversation, Traffic, Turn


def without_pauses(workload: Traffic) -> Traffic:
    """Each turn begins as soon as the answer before it has ended."""
    made = [
        replace(conversation, turns=tuple(replace(turn, think_seconds=0.0) for turn in conversation.turns))
        for conversation in workload.conversations
    ]
    return replace(workload, conversations=tuple(made))


def single_turn(seed: int, *, seconds: float, rate: float, prompt_tokens: float, answer_tokens: float) -> Traffic:
    """Prompts that share nothing; gaps between them are gamma of shape 0.5, so they come in bursts."""
    random, texts, now = Random(seed), count(1), 0.0
    conversations = list[Conversation]()
    while (now := now + random.gammavariate(0.5, 2 / rate)) < seconds:
        lengths = [max(1, round(random.gammavariate(2, mean / 2))) for mean in (prompt_tokens, answer_tokens)]
        prompt, answer = (range(start := next(texts) * SPAN, start + length) for length in lengths)
        conversations.append(Conversation(f"c{len(conversations)}", now, (Turn((prompt,), answer),)))
    return Traffic("single-turn", tuple(conversations))
