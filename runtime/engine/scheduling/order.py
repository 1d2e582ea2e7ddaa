"""Who comes first, and who rests: priorities, what each tenant was served, and age.

It knows tenants and arrivals, and nothing of memory, of budgets or of what a step feeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import inf

from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.engine.scheduling.tenant_shares import TenantShares
from runtime.wire.limits import Limits

SHARED_SECONDS = 60.0  # after two tenants had requests at once, an engine counts as shared for so long
LEAST_REST = 0.25  # of the longest rest: for less, a prompt does not have a step alone
REST_STEPS = 7.0  # of the answers that rest: their longest rest is as long as these, where that is more than the limit
Rank = tuple[float, bool, float, float, str]
Group = tuple[str, int]  # tenant and priority


class ServiceOrder:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._shares = TenantShares()
        self._heavy: frozenset[str] = frozenset()  # tenants that take much more than another one that is active
        self._large: frozenset[str] = frozenset()  # tenants that take a large part of an engine that is shared
        self._shared_until = -inf
        self.lately_shared = False  # more than one tenant had requests at once, not long ago
        self._active: dict[str, int] = {}  # requests, by tenant
        self._served: dict[str, float] = {}  # tokens fed, by tenant

    @property
    def shared(self) -> bool:
        """More than one tenant has requests."""
        return len(self._active) > 1

    def arrived(self, tenant: str) -> None:
        if tenant not in self._active:
            # A tenant that was away has not saved up its share.
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def left(self, tenant: str) -> None:
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant], self._served[tenant]

    def feed(self, fed: Mapping[str, int], now: float) -> None:
        """A step has ended. ``fed``: its tokens, by tenant; one whose last request ended with it may be among them."""
        for tenant, tokens in fed.items():
            if tenant in self._served:
                self._served[tenant] += tokens
            self._shares.add(tenant, tokens, now)

    def weigh(self, now: float) -> None:
        """Find out which tenants are heavy, and which are large, until the next call."""
        self._heavy = frozenset[str]()
        if self.shared:
            self._heavy, self._shared_until = self._shares.heavy(self._active, now), now + SHARED_SECONDS
        self.lately_shared = now < self._shared_until
        self._large = self.large_tenants() if self.lately_shared else frozenset()

    def rank(self, sequence: ScheduledSequence, now: float) -> Rank:
        """Who comes first: by priority, which rises with waiting; then tenants that do not take much more than others;
        then those that were served least; then by age.
        """
        heavy = sequence.tenant in self._heavy
        priority = sequence.priority - (now - sequence.arrival) // self._limits.aging_seconds
        if heavy:  # however long it waits by what its own tenant sends, it does not pass others by that
            priority = max(priority, min(sequence.priority, 0))
        return priority, heavy, self._served[sequence.tenant], sequence.arrival, sequence.id

    def heavy(self, sequence: ScheduledSequence) -> bool:
        return sequence.tenant in self._heavy

    def large(self, sequence: ScheduledSequence) -> bool:
        return sequence.tenant in self._large

    def large_tenants(self) -> frozenset[str]:
        """Of those that have requests, those that lately took a large part of the engine."""
        return self._shares.large(self._active)

    def light(self, sequences: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        return [sequence for sequence in sequences if sequence.tenant not in self._heavy]

    def rest(
        self,
        decoding: Sequence[ScheduledSequence],
        prompts: Sequence[ScheduledSequence],
        waiting: Set[Group],
        prompt_seconds: float,
        decode_seconds: float,
        now: float,
    ) -> float | None:
        """Seconds for which requests of heavy tenants rest in the next step, so that prompts of others have it to
        themselves; None where there is no such prompt, where one of theirs has a higher priority, or where they have
        rested long enough. ``prompt_seconds``: that a token of a prompt takes. ``decode_seconds``: that a step of all
        that decode takes, without prompts.
        """
        if not self._heavy:
            return None
        groups = {(sequence.tenant, sequence.priority) for sequence in prompts} | waiting
        light = [priority for tenant, priority in groups if tenant not in self._heavy]
        resting = [sequence for sequence in decoding if sequence.tenant in self._heavy]
        heavy = [priority for tenant, priority in groups if tenant in self._heavy]
        heavy += [sequence.priority for sequence in resting]
        if not light or min(heavy, default=min(light)) < min(light):
            return None
        # Where steps are long, a prompt of others would need many short rests, each behind such a step.
        longest = max(self._limits.rest_seconds, REST_STEPS * decode_seconds)
        # One whose first token is still being computed has none that is long ago.
        left = min((sequence.last or now for sequence in resting), default=now) + longest - now
        least = LEAST_REST * longest
        if own := [sequence.pending for sequence in self.light(prompts)]:
            least = min(least, min(own) * prompt_seconds)
        return left if left > least else None

    def check(self, requests: int) -> None:
        """The bookkeeping adds up; for tests. ``requests``: that there are."""
        assert sum(self._active.values()) == requests and self._active.keys() == self._served.keys()
