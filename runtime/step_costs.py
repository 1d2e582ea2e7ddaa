"""How long a step takes, learned from the steps so far: how many prompt tokens it may feed, and whether drafts pay.

Pure arithmetic: no clock is read here.
"""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest step, once there are more
MIN_CHUNK = 16  # prompt tokens that a step may always feed, or prompts would not progress


class _Mean:
    """Of all numbers at first, then of the newest ones."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, number: float) -> None:
        self._count += 1
        self.value += max(SMOOTHING, 1 / self._count) * (number - self.value)


class StepCosts:
    """``itl_factor``: prompts may make a step with decodes so many times longer than it is without them.

    ``itl_seconds``: they may always make it this long. Both bound the inter-token latency of the requests that decode.
    Where the prompts that wait would take longer than ``backlog_seconds``, throughput counts more: both bounds grow in
    that proportion. ``step_seconds`` bounds any step, so that arrivals and cancellations do not wait longer.

    A decode step is bandwidth-bound: its time hardly grows with the number of sequences, and not by a simple law. So
    its mean is kept for each number of decodes. Prompt tokens are compute-bound: one mean per token is enough.
    """

    def __init__(
        self,
        itl_factor: float = 1.7,
        itl_seconds: float = 0.015,
        backlog_seconds: float = 1.0,
        step_seconds: float = 1.0,
    ) -> None:
        self.itl_factor, self.itl_seconds = itl_factor, itl_seconds
        self.backlog_seconds, self.step_seconds = backlog_seconds, step_seconds
        self._decode: dict[int, _Mean] = {}  # seconds of a step by its number of decodes
        self._token = _Mean()  # seconds that a token adds to a step: of a prompt, or drafted

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """One step: ``decodes`` sequences fed one token each, others ``prompt_tokens`` together."""
        if seconds <= 0 or not decodes + prompt_tokens:
            return
        if not prompt_tokens:
            self._decode.setdefault(decodes, _Mean()).add(seconds)
        elif prompt_tokens >= MIN_CHUNK:  # fewer tell more of the noise of a step than of their cost
            self._token.add(max(seconds - self.decode_seconds(decodes), 0.1 * seconds) / prompt_tokens)

    def decode_seconds(self, decodes: int) -> float:
        """Of a step without prompts; of the nearest number of decodes that was seen. 0 if there was none."""
        if not decodes or not self._decode:
            return 0.0
        known = self._decode.get(decodes) or self._decode[min(self._decode, key=lambda seen: abs(seen - decodes))]
        return known.value

    def worth(self, decodes: int) -> float:
        """How likely a draft must be accepted to pay, where so many requests decode; 0.5 until costs are known.

        A step of B requests gives B tokens. A draft makes it longer by the cost of a token, and gives one more token
        with probability p: throughput rises if p is above ``cost * B / seconds``.
        """
        seconds, cost = self.decode_seconds(decodes), self._token.value
        return min(1.0, cost * decodes / seconds) if seconds and cost else 0.5

    def prompt_budget(self, decodes: int, most: int, backlog: int) -> int:
        """Prompt tokens that a step with so many decodes may feed, at most ``most``; all of them until costs are known.

        ``backlog``: prompt tokens that wait to be fed.

        >>> costs = StepCosts(itl_factor=1.8, itl_seconds=0.02, backlog_seconds=5, step_seconds=1)
        >>> costs.observe(16, 0, 0.013)
        >>> costs.observe(0, 256, 0.128)
        >>> costs.prompt_budget(16, 256, 2000), costs.prompt_budget(16, 256, 20_000)  # in 23 ms, or twice
        (20, 67)
        >>> costs.prompt_budget(0, 4096, 4096)  # in a second
        2000
        """
        cost, base = self._token.value, self.decode_seconds(decodes)
        if not cost:
            return most
        bound = self.step_seconds
        if decodes:
            patience = max(1.0, backlog * cost / self.backlog_seconds)
            bound = min(bound, patience * max(self.itl_factor * base, self.itl_seconds))
        return min(most, max(MIN_CHUNK, int((bound - base) / cost)))
