"""How much an engine takes on at once, and what a request hears where that is too much."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.errors import RequestError


class QueueFullError(RequestError):
    """``retry_after``: seconds after which there should be room, from the throughput so far; None before any."""

    def __init__(self, found: str, *, expected: str, retry_after: float | None) -> None:
        super().__init__(found, expected=expected, remedy="send fewer requests at once, or retry later")
        self.retry_after = retry_after


class DisplacedError(QueueFullError):
    """The request waited in a full queue, and one of a higher priority, or of a tenant with less of the queue, took its
    place.
    """


@dataclass(frozen=True)
class Limits:
    """``step_tokens``: most tokens of a step. ``max_running``: requests that run at once.

    ``max_waiting`` and ``max_waiting_tokens`` (of their prompts) bound the queue. A request that has waited
    ``aging_seconds`` ranks as one of the next higher priority. ``scored_tokens``: most prompt tokens of a step whose
    logits are wanted, which bounds their memory. ``max_draft_tokens``: tokens that are guessed for a request in a step;
    0 switches speculation off. ``rest_seconds``: where a tenant takes much more than another one, its answers may stand
    still for so long, or for seven of their steps, while the other's prompts are computed. The others: see
    :class:`runtime.engine.scheduling.step_costs.StepCosts`.
    """

    step_tokens: int = 256
    max_running: int = 64
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    aging_seconds: float = 5.0
    scored_tokens: int = 64
    max_draft_tokens: int = 8
    itl_factor: float = 1.5
    itl_seconds: float = 0.0075
    backlog_seconds: float = 0.1
    step_seconds: float = 1.0
    rest_seconds: float = 0.2
