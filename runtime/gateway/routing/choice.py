"""Which engine gives a request its first token soonest, as far as can be told from what each has measured of itself.

The seconds are those of the prompt tokens that wait there already and of the request's own that are not cached, at the
speed that the engine has beside its decodes. Engines of different speeds therefore need no weights, and a long
prefix that is cached on a busy engine is weighed against a free engine that has none of it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

from runtime.wire.messages import EngineLoad

# Predictions that differ by less say nothing: what is left of an engine's step is not known, and later prompts share
# its steps. A narrower bound gathers conversations on the few engines that have a system prompt already (simulated
# at 40 % load: without a bound P50 and P99 are 8 and 10 % higher; docs/negative-results.md).
NEAR, NEAR_SECONDS = 1.3, 0.003
# Of a fetch of blocks, whatever its size. More than the bound above: where engines are idle, the one that has a prompt
# is not as good as one that must fetch it.
FETCH_SECONDS = 0.005
# How much sooner another engine's first token must be for a conversation to leave the only one that has its blocks, in
# times that computing these takes: what is computed there twice others wait for, and its copy takes the memory of
# blocks that others need (docs/negative-results.md has other numbers).
SOLE_COPY = 8.0
# Of a prompt token, where no engine has computed any yet: then all are alike, and only the number of tokens counts.
UNKNOWN_SECONDS = 0.001


class Speed(NamedTuple):
    """How long prompts take on an engine, drawn from its load. ``wait``: seconds until it takes one more request.

    Tokens that do not fill a step cost ``step`` and ``token`` each. Those that do cost ``full`` each, in which their
    share of the decodes of each step is contained.
    """

    wait: float
    step: float
    token: float
    full: float

    @classmethod
    def of(cls, load: EngineLoad, sent: int = 0, unknown: float = UNKNOWN_SECONDS) -> Speed:
        """``sent``: requests that are on their way to it. ``unknown``: seconds of a prompt token, until it has measured
        any.

        >>> Speed.of(EngineLoad(prompt_seconds=0.001)).seconds(200)
        0.2
        >>> beside_decodes = EngineLoad(prompt_seconds=0.001, decode_seconds=0.01, chunk_tokens=20)
        >>> round(Speed.of(beside_decodes).seconds(10), 3), round(Speed.of(beside_decodes).seconds(200), 3)
        (0.02, 0.3)
        """
        token = load.prompt_seconds or unknown
        ends = load.running + load.waiting + sent + 1 - load.most_running  # of answers, before it can begin
        wait = 0.0
        if load.most_running and ends > 0:
            wait = ends * load.answer_tokens * load.decode_seconds / load.most_running
        return cls(wait, load.decode_seconds, token, token + load.decode_seconds / max(1, load.chunk_tokens))

    def first(self, left: float) -> Speed:
        """Of prompts for which others rest, once the step that runs has ended, in ``left`` seconds."""
        return Speed(left, 0.0, self.token, self.token)

    def seconds(self, tokens: int) -> float:
        """Until so many tokens are computed."""
        wait, step, token, full = self
        some, whole = step + tokens * token, tokens * full
        return wait + (max(whole, some))  # called for each engine: max() takes twice as long


def step_seconds(load: EngineLoad) -> float:
    """Of the steps that an engine makes now.

    >>> step_seconds(EngineLoad(backlog_tokens=100, chunk_tokens=20, prompt_seconds=0.001, decode_seconds=0.01))
    0.03
    """
    return load.decode_seconds + min(load.backlog_tokens, load.chunk_tokens) * load.prompt_seconds


class EngineOption(NamedTuple):
    """An engine that could take a request. ``seconds``: to the first token, with what speaks against it otherwise;
    ``tokens``: of the prompt to compute.

    ``tenant``: of the request. ``requests``: that are there already. ``source``: the engine that it should fetch blocks
    of the prompt from first; none if empty. ``known``: the key of the last block of the prompt that any engine has;
    empty if none has any.
    """

    engine: str
    seconds: float
    tokens: int
    requests: int = 0
    source: str = ""
    known: bytes = b""
    tenant: str = ""


_seconds = itemgetter(1)


def ranked(options: Sequence[EngineOption], tie: bytes, near: float = NEAR) -> list[EngineOption]:
    """The best first. Of those that are nearly as good as the best, the ones with the fewest requests come first: each
    makes the steps of all others longer. What is equal in this, too, is in the order that ``tie`` gives, which is the
    same in every gateway, and changes little where engines come and go (rendezvous hashing). ``near``: times the best
    one's seconds that are nearly as good.

    >>> options = [EngineOption("a", 0.3, 9), EngineOption("b", 0.1, 9), EngineOption("c", 0.2, 9)]
    >>> [option.engine for option in ranked(options, b"")]
    ['b', 'c', 'a']
    """
    best = sorted(options, key=_seconds)
    if not best:
        return best
    limit = near * best[0].seconds + NEAR_SECONDS
    alike = 1
    while alike < len(best) and best[alike].seconds <= limit:
        alike += 1
    if alike > 1:
        hashed = _hash(tie)

        def place(option: EngineOption) -> tuple[int, int]:
            # A product of 64 bits mixes two hashes in a tenth of the time that a third hash takes.
            return option.requests, -((hashed ^ _hash_of(option.engine)) * _ODD & _BITS)

        best[:alike] = sorted(best[:alike], key=place)
    return best


_ODD, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # 2**64 over the golden ratio


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest())


@lru_cache(maxsize=4096)
def _hash_of(engine: str) -> int:
    return _hash(engine.encode())
