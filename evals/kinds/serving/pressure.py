"""Requests of every kind at once, under pressure: the core that serves has too few blocks, and shares them.

The core is the server's own: continuous batching, prefix cache, preemption, drafts, sampler and constraints. It gets
requests whose prompts share beginnings that end inside a block and at the end of one. Short answers come first, so it
expects all to be short, admits too many and must preempt. All are asked twice, so the second time their prompts lie in
blocks. Each kind of settings is a tenant, so that all of them run at once. Where an engine takes two steps at once, the
greedy ones are then asked alone: only among such requests does a step begin before the tokens of the last are known.
At last come conversations: prompts that go on behind an earlier prompt and its answer, whose blocks were written token
by token, or by drafts of which some were rejected.

Then each token of each answer is compared with what must follow by the logits of a prefill in one piece of the same
engine (:mod:`evals.kinds.serving.expected`), which knows nothing of blocks, batches and requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engines.protocol import EngineCapabilities, FloatArray
from engines.sequences import Sequences
from evals.answers import Answer, Answerer, Ask
from evals.kinds.serving import AHEAD, CHOICES, GREEDY, PRESSED, TURNS, Pressed, Pressure, ServingSettings
from evals.kinds.serving.expected import passed_over, score_error
from evals.kinds.serving.served_log import Streams
from tapeout.progress import ProgressBar

FIRST = 8  # short answers that come before all others
SHORT_TOKENS = 2  # of each of them
SHARE = 0.2  # of the blocks that all requests need together, as many as the core gets
ANSWER_TOKENS = 24  # at most, where the engine has room
LEAST_TAIL = 8  # tokens of a prompt behind what it shares, where there is room
REPEATED = 2  # tokens that are repeated at the end of a prompt, so that drafts are found
# By which a chosen token may fall short: logits of quantized values differ where they are added up in another order.
# A defect of the core gives a token of another sequence, which falls short by several.
TOLERANCE = 0.25
DRAW_TOLERANCE = 0.05  # in probability
# What these requests keep from token to token must outlast a preemption, so they rank last and are preempted first.
STATEFUL = ("penalties", "draws", "least_length", CHOICES)
STOPPING = ("greedy", "least_length", CHOICES)
LIKELY = 10.0  # bias of tokens that are to come
TALKS = 8  # conversations of two turns
TURN_TOKENS = 4  # of the answer of a second turn
TEXTS = ("yes, of course", "no, never", "it depends on the day")

MakeAnswerer = Callable[..., Answerer]


def under_pressure(
    candidate: Sequences,
    answerer: MakeAnswerer,
    decode: Callable[[Sequence[int]], str],
    streams: Streams,
    settings: ServingSettings,
    stop_tokens: Collection[int],
) -> Pressure:
    """``answerer(engine, blocks=)``: the core that serves, over an engine. ``streams``: of the text of prompts.

    ``decode``: text of tokens, for answers that must be one of some texts.
    """
    has = candidate.engine.capabilities
    asks = pressing_asks(has, streams, settings, frozenset(stop_tokens))
    core = answerer(candidate.engine, blocks=few_blocks(has, [ask for _, ask in asks]))
    asks = [(name, ask) for name, ask in asks if core.constrains or not ask.choices]
    short = [Ask(ask.prompt, min(SHORT_TOKENS, ask.max_new_tokens)) for _, ask in asks[:FIRST]]
    core.answer(short)
    found: dict[int, list[Answer]] = {}
    for order in (range(len(asks)), range(len(asks))[::-1]):
        answers = core.answer([asks[number][1] for number in order], progress="answers under pressure")
        for number, answer in zip(order, answers, strict=True):
            found.setdefault(number, []).append(answer)
    if has.steps_at_once > 1:
        alone = [(AHEAD, ask) for name, ask in asks if name in GREEDY]
        answers = core.answer([ask for _, ask in alone], progress="greedy answers alone")
        found |= {number: [answer] for number, answer in enumerate(answers, len(asks))}
        asks += alone
    shares = is_shared(has)
    if shares:
        for ask, answer in _talks(has, core, streams):
            found[len(asks)] = [answer]
            asks.append((TURNS, ask))
    results: dict[str, list[tuple[Answer, int, float]]] = {name: [] for name in (*PRESSED, TURNS, AHEAD)}
    for number, (name, ask) in enumerate(ProgressBar(asks, title="comparing answers", unit="request")):
        compared: dict[Answer, tuple[int, float]] = {}
        for answer in found[number]:  # mostly it is answered the same both times
            bare = replace(answer, cached=0, accepted=0, preempted=0)
            if bare not in compared:
                compared[bare] = compare(ask, bare, partial(_logits, candidate, ask.prompt), decode)
            results[name].append((answer, *compared[bare]))
    answers = tuple(_pressed(name, rows) for name, rows in results.items() if rows)
    return Pressure(
        shares=shares,
        scarce=shares and has.blocks > 0,
        constrains=core.constrains,
        steps_at_once=has.steps_at_once,
        steps_ahead=core.steps_ahead,
        answers=answers,
    )


def _talks(has: EngineCapabilities, core: Answerer, streams: Streams) -> list[tuple[Ask, Answer]]:
    """Requests of two turns, and their answers. The first ones end before, at and behind the end of a block.

    One token comes between the turns, and log-probabilities are compared: a single wrong position changes few tokens.
    """
    size, new_tokens = has.block_tokens, min(ANSWER_TOKENS, has.max_tokens // 3)
    asks: list[Ask] = []
    for number in range(TALKS):
        # Of the whole first turn; its last token is never fed.
        whole = -(-(size + new_tokens) // size) * size + (0, 1, -1)[number % 3]
        prompt = streams.next(max(2 * REPEATED, min(whole, has.max_tokens) - new_tokens)).tokens
        if drafted := number % 2:
            prompt[-2 * REPEATED : -REPEATED] = prompt[-REPEATED:]
        ask = Ask(tuple(prompt), new_tokens, seed=number, tenant=TURNS)
        asks.append(_drafted(ask, 1 + number // 2 % 3, has.vocab_size) if drafted else ask)
    first = core.answer(asks, progress="first turns")
    longest = has.max_tokens - TURN_TOKENS
    prompts = [
        (*ask.prompt, *answer.tokens, *streams.next(1).tokens)[:longest]
        for ask, answer in zip(asks, first, strict=True)
    ]
    more = [Ask(prompt, TURN_TOKENS, tenant=TURNS, logprobs=min(5, has.vocab_size)) for prompt in prompts]
    second = core.answer(more, progress="second turns")
    return list(zip(asks + more, first + second, strict=True))


def _drafted(ask: Ask, turn: int, vocabulary: int) -> Ask:
    """With settings under which the end of the prompt, which repeats, comes again, and drafts of it hold."""
    first, *others = dict.fromkeys(ask.prompt[-REPEATED:])
    likely = {first: LIKELY, **dict.fromkeys(others, LIKELY)}
    # Mostly the first of them comes, so that many drafts hold, and some do not.
    drawn = {"logit_bias": likely | {first: LIKELY + 2}, "temperature": 2.0, "top_k": REPEATED}
    settings: list[dict[str, Any]] = [
        {"logit_bias": likely},
        drawn,
        {"logit_bias": likely | {first: 2 * LIKELY}, "presence_penalty": 1.0, "frequency_penalty": 2.0},
        drawn | {"logprobs": min(5, vocabulary)},
    ]
    return replace(ask, **settings[turn % len(settings)])


def pressing_asks(
    has: EngineCapabilities, streams: Streams, settings: ServingSettings, stops: frozenset[int]
) -> list[tuple[str, Ask]]:
    """Kind of settings and request, as many as the settings ask for; kinds and shared beginnings take turns."""
    new_tokens = min(ANSWER_TOKENS, -(-has.max_tokens // 2))
    longest = has.max_tokens - new_tokens
    size = has.block_tokens if has.shares_blocks else 2 * LEAST_TAIL
    lengths = sorted({min(end + off, longest) for end in (size, 2 * size) for off in (-1, 0, 5)})
    # Behind beginnings that differ come the same tokens, so that a block is not found by its own tokens alone.
    behind = streams.next(max(lengths)).tokens
    shared = [(streams.next(min(size, length)).tokens + behind)[:length] for length in lengths]
    asks: list[tuple[str, Ask]] = []
    for number in range(settings.pressed):
        name, turn = PRESSED[number % len(PRESSED)], number // len(PRESSED)
        prefix = shared[(number + turn) % len(shared)]
        # The answer goes on in another block than the prompt ends in, so that it needs one more while it runs.
        before_end = 1 + 5 * number % min(new_tokens, size)
        length = -(-(len(prefix) + LEAST_TAIL + before_end) // size) * size - before_end
        tail = streams.next(max(1, length - len(prefix))).tokens
        if name == "drafts":
            tail = (tail[:REPEATED] * len(tail))[: len(tail)]
        prompt = tuple((prefix + tail)[:longest])
        # The others do not stop, so that they do outgrow the blocks that are expected, whatever the model would say.
        own_stops = stops if name in STOPPING else frozenset[int]()
        ask = Ask(prompt, new_tokens, own_stops, seed=number, tenant=name, priority=int(name in STATEFUL))
        asks.append((name, _with_settings(name, ask, turn, has.vocab_size)))
    return asks


def _with_settings(name: str, ask: Ask, turn: int, vocabulary: int) -> Ask:
    """``turn``: how many requests of this kind came before."""
    seed, tokens = ask.seed, ask.max_new_tokens
    match name:
        case "penalties":  # tokens come again, so that penalties change much
            likely = dict.fromkeys(ask.prompt[-REPEATED:], LIKELY)
            return replace(ask, presence_penalty=0.6, frequency_penalty=0.9, repetition_penalty=1.3, logit_bias=likely)
        case "logit_bias":
            named = [(seed * 7919 + 13 * one) % vocabulary for one in range(6)]
            return replace(ask, logit_bias={token: 4.0 * (-1.0) ** at for at, token in enumerate(named)})
        case "draws":
            filters: list[dict[str, Any]] = [
                {"top_k": 20},
                {"top_p": 0.6},
                {"min_p": 0.2},
                {},
                {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
            ]
            return replace(ask, temperature=0.8, presence_penalty=0.5, **filters[turn % len(filters)])
        case "least_length":  # it would stop at once
            stopping = dict.fromkeys(ask.stop_tokens, 4 * LIKELY)
            return replace(ask, min_new_tokens=max(1, tokens - 2), logit_bias=stopping)
        case "logprobs":
            return replace(ask, logprobs=min(5, vocabulary))
        case "leaves":
            return replace(ask, leaves_after=max(1, tokens // 2))
        case "choices":
            return replace(ask, choices=TEXTS)
        case "drafts":
            return _drafted(ask, turn, vocabulary)
        case _:
            return ask


def is_shared(has: EngineCapabilities) -> bool:
    """Requests share the state of prompts, and are long enough to outgrow what they begin with; several run at once."""
    return has.shares_blocks and has.max_tokens >= 3 * has.block_tokens and has.max_batch > 1


def few_blocks(has: EngineCapabilities, asks: Sequence[Ask]) -> int | None:
    """Blocks for a share of the requests, and for the largest; None where a sequence is one block, or has none."""
    if not has.shares_blocks or not has.blocks:
        return None
    needs = [-(-(len(ask.prompt) + ask.max_new_tokens) // has.block_tokens) for ask in asks]
    return max(max(needs) + 1, int(SHARE * sum(needs)))


def compare(
    ask: Ask,
    answer: Answer,
    logits_of: Callable[[tuple[int, ...]], FloatArray],
    decode: Callable[[Sequence[int]], str],
) -> tuple[int, float]:
    """How many tokens are wrong, and the furthest that any falls short. An answer that ends wrongly is wrong whole.

    ``logits_of``: ``[T, V]``, before each of the T tokens of an answer.
    """
    if not answer.tokens or not ends_rightly(ask, answer):
        return max(1, len(answer.tokens)), 0.0
    if ask.choices:
        text = decode(answer.tokens[:-1] if answer.ending == "stop" else answer.tokens)
        right = text in ask.choices if answer.ending == "stop" else any(one.startswith(text) for one in ask.choices)
        return (0 if right else len(answer.tokens)), 0.0
    logits = logits_of(answer.tokens)
    gaps = [
        passed_over(ask, answer.tokens[:at], row, token)
        for at, (token, row) in enumerate(zip(answer.tokens, logits, strict=True))
    ]
    tolerance = DRAW_TOLERANCE if ask.temperature else TOLERANCE
    wrong = {at for at, gap in enumerate(gaps) if not gap <= tolerance}
    if ask.logprobs is not None:
        if [(score.token, len(score.top)) for score in answer.scores] != [(one, ask.logprobs) for one in answer.tokens]:
            return len(answer.tokens), max(gaps)
        errors = [score_error(score, row) for score, row in zip(answer.scores, logits, strict=True)]
        wrong |= {at for at, error in enumerate(errors) if not error <= TOLERANCE}
    return len(wrong), max(gaps)


def _logits(engine: Sequences, prompt: Sequence[int], answer: Sequence[int]) -> FloatArray:
    whole = [*prompt, *answer[:-1]]
    return engine.prefill(0, whole, positions=range(len(prompt) - 1, len(whole)))


def ends_rightly(ask: Ask, answer: Answer) -> bool:
    """At its first stop token behind the least length, at its limit, or once its client leaves."""
    stops = [at for at, token in enumerate(answer.tokens, 1) if token in ask.stop_tokens and at > ask.min_new_tokens]
    match answer.ending:
        case "stop":
            return stops == [len(answer.tokens)]
        case "length":
            return not stops[:-1] and len(answer.tokens) == ask.max_new_tokens
        case "cancelled":
            return ask.leaves_after is not None and len(answer.tokens) >= ask.leaves_after and not stops
        case _:
            return False


def _pressed(name: str, rows: Sequence[tuple[Answer, int, float]]) -> Pressed:
    return Pressed(
        settings=name,
        answers=len(rows),
        tokens=sum(len(answer.tokens) for answer, _, _ in rows),
        wrong=sum(wrong for _, wrong, _ in rows),
        gap=max(gap for _, _, gap in rows),
        preempted=sum(answer.preempted for answer, _, _ in rows),
        cached=sum(answer.cached for answer, _, _ in rows),
        accepted=sum(answer.accepted for answer, _, _ in rows),
    )
