"""Which requests feed guessed tokens in the next step: those where guesses pay, while prompts leave room for them.

It knows what steps cost and who decodes; `speculation.py` says what one request guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.engine.active import ActiveRequest
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.work import Work
from runtime.engine.speculation import Counts, Speculation

# Nobody looks for drafts where more of them than this must be accepted to pay: looking takes time, too.
MOST_WORTH = 0.8


class Drafting:
    """``most``: tokens that are guessed for a request in a step; 0 switches it off."""

    def __init__(self, scheduler: Scheduler, most: int) -> None:
        self._scheduler, self._most = scheduler, most
        self.counts = Counts()

    def of_request(self) -> Speculation | None:
        """What a new request guesses with."""
        return Speculation(self._scheduler.costs, self.counts) if self._most else None

    @property
    def may_pay(self) -> bool:
        """In the next step."""
        if not self._most or self._scheduler.feeds_prompts:
            return False
        costs, running = self._scheduler.costs, self._scheduler.running  # all of them decode
        return not costs.plain_due(running) and costs.worth(running, self._most) <= MOST_WORTH

    def drafts(self, requests: Mapping[str, ActiveRequest]) -> dict[str, Sequence[int]]:
        """Guesses for the requests that decode in the next step."""
        drafts: dict[str, Sequence[int]] = {}
        if self.may_pay:
            decoding = self._scheduler.decoding()
            for id, tokens, room in decoding:
                speculation = requests[id].speculation
                if speculation and (found := speculation.draft(tokens, min(room, self._most), len(decoding))):
                    drafts[id] = found
        return drafts

    def learn(self, work: Work, active: ActiveRequest) -> None:
        """How many of the guesses in a work were the tokens that its request then chose."""
        drafts = work.tokens[len(work.tokens) - work.drafts :]
        if active.speculation and active.error is None:
            held = sum(token == draft for token, draft in zip(active.tokens, drafts, strict=False))
            active.speculation.observe(work.drafts, held)
