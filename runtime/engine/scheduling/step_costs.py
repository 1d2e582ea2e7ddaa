"""How long a step takes, learned from the steps so far: how many prompt tokens it may feed, and whether drafts pay.

Pure arithmetic: no clock is read here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MIN_CHUNK = 8  # prompt tokens that a step may always feed, or prompts would not progress
MIN_DRAFTS = 4  # in a step from which the cost of a draft is learned: fewer tell more of the noise
# Steps of fewer tokens, without decodes, take as long as weights take to read, whatever a token costs.
ALONE = 64
MANY = 256  # tokens of a step of prompts, of which a token is said to take so long
REMEMBERED = 5  # steps whose median counts: one that the machine has held up does not
FORGET_DRAFTS = 64  # steps with decodes and without drafts, after which what a draft costs is found out again
# A step without prompts and drafts is due after so many with them: by how much these are longer is not known else.
PLAIN_AFTER, FIRST_PLAIN_AFTER, FIRST_PLAIN = 16, 4, 3  # sooner while there were fewer than FIRST_PLAIN


class _Typical:
    """The latest numbers. ``median``: of two, the lower one. ``high``: the second largest, of one or two the largest:
    what one number in five exceeds. Both 0 before any.
    """

    def __init__(self) -> None:
        self.median = self.high = 0.0
        self._latest = deque[float](maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, number: float) -> None:
        self._latest.append(number)
        ordered = sorted(self._latest)
        self.median, self.high = ordered[(len(ordered) - 1) // 2], ordered[-2 if len(ordered) > 2 else -1]


class _Decode:
    """Steps with about the same number of decodes: seconds of plain ones, and how many others came since the last."""

    def __init__(self) -> None:
        self.seconds, self.others = _Typical(), 0


class StepCosts:
    """``itl_factor``: prompts may make a step with decodes so many times longer than it is without them.

    ``itl_seconds``: they may always make it this long. Both bound the inter-token latency of the requests that decode.
    Where the prompts that wait would take longer than ``backlog_seconds``, throughput counts more: both bounds grow in
    that proportion. ``step_seconds`` bounds any step, so that arrivals and cancellations do not wait longer.

    A decode step is bandwidth-bound: its time hardly grows with the number of sequences, and not by a simple law. So
    it is kept for each number of decodes, from 8 on in classes of a seventh to a quarter. Prompt tokens and drafts
    are compute-bound: one time per token is enough for each of them. They differ, and a step has one kind or the other:
    a prompt's tokens all look at what was read of it before, so eight of them took 3.4 ms after 1,900 others, which
    said of drafts that they never pay. Of the latest steps the median counts, and for how much a step may feed the
    second largest, since steps may be shorter than their bound but not longer. A step that is plain, with
    decodes alone, is planned now and then where there would be none (:meth:`plain_due`): with drafts in every step the
    first plain one, slow since everything was cold, counted for ever (measured: 15.7 ms instead of 9.5 at 16 streams,
    so steps with prompts took 26 ms instead of 16).

    In a mixture of experts tokens read experts that no other token of the step has chosen: eight prompt tokens beside
    one decode may make it read four times as much, and beside 64 decodes hardly more. ``reads``: bytes of weights that
    a step of so many tokens is expected to read, over those of a step of one. What is learned of prompts and drafts is
    the time without these reads, so it holds beside any number of decodes.
    """

    def __init__(
        self,
        itl_factor: float = 1.5,
        itl_seconds: float = 0.0075,
        backlog_seconds: float = 0.1,
        step_seconds: float = 1.0,
        reads: Callable[[int], float] = lambda tokens: 1.0,
    ) -> None:
        self.itl_factor, self.itl_seconds = itl_factor, itl_seconds
        self.backlog_seconds, self.step_seconds, self._reads = backlog_seconds, step_seconds, reads
        self._decodes: dict[int, _Decode] = {}  # by the least number of the class
        self._prompt, self._draft = _Typical(), _Typical()  # seconds that a token adds to a step
        self._without_drafts = 0  # steps with decodes since the last that had some
        self._drafted = 0  # drafts of the last step that had some

    def observe(self, decodes: int, prompt_tokens: int, drafts: int, seconds: float) -> None:
        """One step: ``decodes`` sequences fed one token each, and beside them tokens of prompts or drafts."""
        if seconds <= 0 or not decodes + prompt_tokens:
            return
        read = self._reading(decodes, prompt_tokens + drafts)
        more = max(seconds - self.decode_seconds(decodes) - read, 0.1 * seconds)
        if not drafts and prompt_tokens >= (MIN_CHUNK if decodes else ALONE):
            self._prompt.add(more / prompt_tokens)
        elif not prompt_tokens and drafts >= MIN_DRAFTS:
            self._draft.add(more / drafts)
        if decodes:
            self._without_drafts = 0 if drafts else self._without_drafts + 1
            self._drafted = drafts or self._drafted
            if self._without_drafts == FORGET_DRAFTS:  # else one that seems too high would never be measured again
                self._draft, self._drafted = _Typical(), 0
            of_class = self._decodes.setdefault(_least_of_class(decodes), _Decode())
            if prompt_tokens or drafts:
                of_class.others += 1
            else:
                of_class.seconds.add(seconds)
                of_class.others = 0

    def plain_due(self, decodes: int) -> bool:
        """The next step should feed nothing but its decodes, so that their time is known."""
        known = self._decodes.get(_least_of_class(decodes)) if decodes else None
        if known is None:
            return False
        return known.others >= (FIRST_PLAIN_AFTER if len(known.seconds) < FIRST_PLAIN else PLAIN_AFTER)

    def decode_seconds(self, decodes: int) -> float:
        """Of a step without prompts; drawn from the nearest number of decodes that was seen. 0 if there was none."""
        if not decodes:
            return 0.0
        known = self._decodes.get(_least_of_class(decodes))
        if known and known.seconds:
            return known.seconds.median
        seen = [least for least, other in self._decodes.items() if other.seconds]
        if not seen:
            return 0.0
        nearest = min(seen, key=lambda least: abs(least - decodes))
        return self._decodes[nearest].seconds.median * self._reads(decodes) / self._reads(nearest)

    def _reading(self, decodes: int, tokens: int) -> float:
        """Seconds that such tokens take for weights which a step of the decodes, or of one token, does not read."""
        before = max(1, decodes)
        return (
            self.decode_seconds(before) * (self._reads(decodes + tokens) / self._reads(before) - 1) if tokens else 0.0
        )

    def worth(self, decodes: int, drafts: int = 1) -> float:
        """How likely a draft must be accepted to pay, where so many requests decode and each has ``drafts``; at least
        0.5 until costs are known.

        A step of B requests gives B tokens. A draft makes it longer by the cost of a token, and gives one more token
        with probability p: throughput rises if p is above ``cost * B / seconds``. In a mixture of experts the first
        drafts cost most: they read experts that the later ones choose as well.
        """
        seconds, cost = self.decode_seconds(decodes), self._draft.median
        if not seconds:
            return 0.5
        read = self._reading(decodes, decodes * drafts) / drafts / seconds
        return min(1.0, cost * decodes / seconds + read) if cost else min(1.0, max(0.5, read))

    def prompt_budget(self, decodes: int, most: int, backlog: int) -> int:
        """Prompt tokens that a step with so many decodes may feed, at most ``most``: all of them until costs are known,
        and none in a step that is to be plain.

        ``backlog``: prompt tokens that wait to be fed.

        >>> costs = StepCosts(itl_factor=1.8, itl_seconds=0.02, backlog_seconds=5, step_seconds=1)
        >>> costs.observe(16, 0, 0, 0.013)
        >>> costs.observe(0, 256, 0, 0.128)
        >>> costs.prompt_budget(16, 256, 2000), costs.prompt_budget(16, 256, 20_000)  # in 23 ms, or twice
        (20, 67)
        >>> costs.prompt_budget(0, 4096, 4096)  # in a second
        2000
        """
        return self._budget(decodes, most, self._prompt.high, backlog)

    def prompt_tokens(self, decodes: int, most: int, seconds: float) -> int:
        """Prompt tokens that a step of so many seconds may feed beside its decodes, at most ``most``."""
        cost = self._prompt.high
        return min(most, max(MIN_CHUNK, self._within(seconds, decodes, cost))) if cost else most

    def piece(self, decodes: int) -> int:
        """Prompt tokens of a step that has nothing else and takes about as long as one of so many decodes, but not so
        few that a token of it takes longer than of a longer step.
        """
        cost = self._prompt.high
        return max(ALONE, self._within(self.decode_seconds(decodes), 0, cost)) if cost else ALONE

    @property
    def prompt_seconds(self) -> float:
        """That a prompt token takes in a step of many; 0 until it is known."""
        return self.prompt_seconds_beside(0, MANY)

    def prompt_seconds_beside(self, decodes: int, tokens: int) -> float:
        """That each of so many prompt tokens adds to a step; 0 until it is known."""
        cost = self._prompt.median
        return cost + self._reading(decodes, tokens) / tokens if cost and tokens else cost

    def chunk(self, decodes: int, most: int, backlog: int) -> int:
        """Prompt tokens of a step with so many decodes, as :meth:`prompt_budget`, where it is not to be plain."""
        return self._fitting(decodes, most, self._prompt.high, backlog)

    def draft_budget(self, decodes: int, most: int) -> int:
        """The same of drafts, in a step without prompts; at most twice as many as in the last one that had some.

        A few tokens more cost next to nothing until a linear's group of tokens is full (``block_product.c``). Without
        that limit steps of 16 streams went from 8 drafts to 78 and took 29 ms instead of 9.
        """
        return self._budget(decodes, min(most, max(MIN_CHUNK, 2 * self._drafted)), self._draft.high, 0)

    def _budget(self, decodes: int, most: int, cost: float, backlog: int) -> int:
        return 0 if self.plain_due(decodes) else self._fitting(decodes, most, cost, backlog)

    def _fitting(self, decodes: int, most: int, cost: float, backlog: int) -> int:
        if not cost:
            return most
        base, bound = self.decode_seconds(decodes), self.step_seconds
        if decodes:
            patience = max(1.0, backlog * cost / self.backlog_seconds)
            bound = min(bound, patience * max(self.itl_factor * base, self.itl_seconds))
        return min(most, max(MIN_CHUNK, self._within(bound, decodes, cost)))

    def _within(self, seconds: float, decodes: int, cost: float) -> int:
        """The most tokens beside decodes that a step of so many seconds has time for; they take ``cost`` each, and the
        time to read what they choose.
        """
        left = seconds - self.decode_seconds(decodes)
        low, beyond = 0, max(0, int(left / cost)) + 1
        if not self._reading(decodes, beyond):
            return beyond - 1
        while beyond - low > 1:
            middle = (low + beyond) // 2
            if self._reading(decodes, middle) + middle * cost <= left:
                low = middle
            else:
                beyond = middle
        return low


def _least_of_class(decodes: int) -> int:
    """1 to 7 are classes of their own; then there are four between a power of two and the next.

    >>> [_least_of_class(decodes) for decodes in (1, 7, 8, 9, 15, 16, 19, 20, 64, 79)]
    [1, 7, 8, 8, 14, 16, 16, 20, 64, 64]
    """
    width = max(1, 1 << decodes.bit_length() - 3) if decodes > 3 else 1
    return decodes - decodes % width
