"""Requests of every kind at once, under pressure: the core that serves has too few blocks, and shares them.

The core is the server's own: continuous batching, prefix cache, preemption, drafts, sampler and constraints. It gets
requests whose prompts share beginnings that end inside a block and at the end of one. Short answers come first, so it
expects all to be short, admits too many and must preempt. All are asked twice, so the second time their prompts lie in
blocks. Each kind of settings is a tenant, so that all of them run at once. Where an engine takes two steps at once, the
greedy ones are then asked alone: only among such requests does a step begin before the tokens of the last are known.

Then each token of each answer is compared with what must follow by the logits of a prefill in one piece of the same
engine (:mod:`evals.kinds.serving.expected`), which knows nothing of blocks, batches and requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from engines.protocol import EngineCapabilities, FloatArray
from engines.sequences import Sequences
from evals.answers import Answer, Answerer, Ask
from evals.kinds.serving import AHEAD, CHOICES, GREEDY, PRESSED, Pressed, Pressure, ServingSettings
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
    results: dict[str, list[tuple[Answer, int, float]]] = {name: [] for name in (*PRESSED, AHEAD)}
    for number, (name, ask) in enumerate(ProgressBar(asks, title="comparing answers", unit="request")):
        compared: dict[Answer, tuple[int, float]] = {}
        for answer in found[number]:  # mostly it is answered the same both times
            bare = replace(answer, cached=0, accepted=0, preempted=0)
            if bare not in compared:
                compared[bare] = compare(ask, bare, partial(_logits, candidate, ask.prompt), decode)
            results[name].append((answer, *compared[bare]))
    answers = tuple(_pressed(name, rows) for name, rows in results.items() if rows)
    shares = is_shared(has)
    return Pressure(
        shares=shares,
        scarce=shares and has.blocks > 0,
        constrains=core.constrains,
        steps_at_once=has.steps_at_once,
        steps_ahead=core.steps_ahead,
        answers=answers,
    )


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
        asks.append((name, _ask(name, prompt, number, new_tokens, stops, has.vocab_size)))
    return asks


def _ask(name: str, prompt: tuple[int, ...], seed: int, tokens: int, stops: frozenset[int], vocabulary: int) -> Ask:
    # The others do not stop, so that they do outgrow the blocks that are expected, whatever the model would say.
    own_stops = stops if name in STOPPING else frozenset[int]()
    ask = Ask(prompt, tokens, own_stops, seed=seed, tenant=name, priority=int(name in STATEFUL))
    match name:
        case "penalties":
            likely = dict.fromkeys(prompt[-REPEATED:], 10.0)  # so that tokens come again, and penalties change much
            return replace(ask, presence_penalty=0.6, frequency_penalty=0.9, repetition_penalty=1.3, logit_bias=likely)
        case "logit_bias":
            named = [(seed * 7919 + 13 * one) % vocabulary for one in range(6)]
            return replace(ask, logit_bias={token: 4.0 * (-1.0) ** at for at, token in enumerate(named)})
        case "draws":
            return replace(ask, temperature=0.8, top_k=20 if seed % 2 else 0, presence_penalty=0.5)
        case "least_length":
            return replace(ask, min_new_tokens=max(1, tokens - 2))
        case "logprobs":
            return replace(ask, logprobs=min(5, vocabulary))
        case "leaves":
            return replace(ask, leaves_after=max(1, tokens // 2))
        case "choices":
            return replace(ask, choices=TEXTS)
        case "drafts":  # of what the prompt repeats, and the answer, too
            return replace(ask, logit_bias=dict.fromkeys(prompt[-REPEATED:], 10.0))
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
        if [score.token for score in answer.scores] != list(answer.tokens):
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
