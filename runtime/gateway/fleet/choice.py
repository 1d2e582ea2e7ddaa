"""Which engine a request goes to. A choice is a function of plain data, so that others can take its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.wire.messages import EngineInfo, EngineStats, GenerateRequest

RUNNING_TOKENS = 16  # of a prompt, that delay a new request as much as one that runs does


class ReplicaLoad(NamedTuple):
    """What is known of an engine that takes requests. ``stats``: of its last report.

    ``own``: requests of this gateway on it. ``own_waiting_tokens``: prompt tokens of those without a token yet. The
    engine's report may show them already, or not yet.
    """

    address: str
    info: EngineInfo
    stats: EngineStats
    own: int = 0
    own_waiting_tokens: int = 0


# The addresses that a request should be tried at, the best first; among ``replicas``, which are in random order.
Choose = Callable[[GenerateRequest, Sequence[ReplicaLoad]], Sequence[str]]


def least_loaded(request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
    """By tokens that are fed before the request's own, as far as they are known.

    >>> info = EngineInfo("d", "n", 1, 2, 3, 4, 5, 6, frozenset())
    >>> busy = ReplicaLoad("a", info, EngineStats(running=2, waiting_tokens=100))
    >>> least_loaded(GenerateRequest("r", [1], 1), [busy, ReplicaLoad("b", info, EngineStats(), own=1)])
    ['b', 'a']
    """
    return [replica.address for replica in sorted(replicas, key=_tokens)]


def _tokens(replica: ReplicaLoad) -> int:
    stats = replica.stats
    requests = max(stats.running + stats.waiting, replica.own)
    return max(stats.waiting_tokens, replica.own_waiting_tokens) + RUNNING_TOKENS * requests
