"""Limits that gateways share: never exceeded, whatever is lost, whoever dies and whatever the clock does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.gateway.accounts.leases import LEASE_SECONDS, LeaseState, LimitAnswer, LimitAsk, LimitState, lease
from runtime.gateway.accounts.shared_quotas import BUDGET, REQUESTS, LeasedLimit

SIZE = 600


@dataclass
class Books:
    """What the database does, without one. ``step``: of its clock, beside the time that has passed."""

    step: float = 0.0
    limit: LimitState = field(default_factory=lambda: LimitState(0.0, 0.0))
    rows: dict[str, LeaseState] = field(default_factory=dict[str, LeaseState])

    def sync(self, holder: str, ask: LimitAsk, now: float) -> LimitAnswer:
        seconds = now + self.step
        others = [state.held for name, state in self.rows.items() if name != holder and state.counts(seconds)]
        self.limit, self.rows[holder], answer = lease(ask, self.limit, self.rows.get(holder), others, seconds)
        return answer


class Gateway:
    def __init__(self, name: str, kind: str, size: int = SIZE) -> None:
        self.name, self.limit, self.lost = name, LeasedLimit(kind), False
        self.limit.resize(size)

    def sync(self, books: Books, now: float, outcome: str = "whole", need: float = 0.0) -> None:
        """``outcome``: ``whole``, ``no answer`` (the transaction has ended) or ``nothing`` (it has not begun)."""
        self.limit.need += need
        ask = self.limit.ask("k", now, self.lost)
        self.limit.need -= need
        self.lost = outcome != "whole"
        if ask is None or outcome == "nothing":
            return
        answer = books.sync(self.name, ask, now)
        if not self.lost:
            self.limit.answered(ask, answer, now)

    def admit(self, amount: float, now: float) -> bool:
        fits = self.limit.fits(amount, now)
        if fits:
            self.limit.take(amount)
        return fits


EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.sampled_from([0.01, 1.0, 20.0, 100.0])),
    st.tuples(st.just("step"), st.sampled_from([-3600.0, -1.0, 3600.0])),
    st.tuples(st.just("admit"), st.sampled_from([1, 7, 60, 300])),
    st.tuples(st.just("settle"), st.floats(0, 1)),
    st.tuples(st.sampled_from(["whole", "no answer", "nothing"]), st.sampled_from([0, 1, 60, 300])),
    st.tuples(st.just("kill"), st.just(0)),
)


def takes(place: int, amount: int, times: int = 1) -> list[tuple[int, tuple[str, float]]]:
    """Fetches it and uses it."""
    return [(place, ("whole", amount)), (place, ("admit", amount))] * times


# One asks for less and hears no answer; another takes what it has given back.
GIVEN_BACK = [(0, ("whole", 300)), (0, ("no answer", 0)), *takes(1, 300, 2), (0, ("admit", 300))]
# One holds what it wants for a minute; then that is more than is fair, and it hears no answer.
AHEAD = [*takes(0, 60), (0, ("pass", 1.0)), (0, ("whole", 0))]
UNFAIR = [*AHEAD, *takes(1, 240), (0, ("no answer", 0)), *takes(1, 60, 3), *[(0, ("admit", 60))] * 4]
# One is away for so long that the others no longer count what it holds.
EXPIRED = [*AHEAD, (0, ("nothing", 0)), (0, ("pass", 100.0)), *takes(1, 300, 2), *[(0, ("admit", 60))] * 4]
# The same, and it comes back: it asks for some of that, or gives it back.
LATE = [*AHEAD, (0, ("pass", 100.0)), *takes(1, 300, 2)]
LATE_USE, LATE_RETURN = [*LATE, *takes(0, 7)], [*LATE, (0, ("whole", 0)), (0, ("whole", 0)), *takes(1, 7)]
STEP_BACK = [*takes(0, 300, 2), (0, ("step", -3600.0)), *takes(0, 300)]
COURSE = st.lists(st.tuples(st.integers(0, 3), EVENTS), max_size=150)


@settings(max_examples=300, deadline=None)
@given(COURSE)
@example([(0, ("whole", 300)), (1, ("whole", 300)), (0, ("kill", 0)), (0, ("whole", 300)), (1, ("admit", 300))])
@example(GIVEN_BACK)
@example(UNFAIR)
def test_a_budget_is_never_exceeded_by_any_course_of_events(course: list[tuple[int, tuple[str, float]]]) -> None:
    books, now, starts = Books(), 1000.0, 4
    gateways = [Gateway(str(place), BUDGET) for place in range(4)]
    running: list[list[float]] = [[] for _ in gateways]
    spent = 0.0  # by requests that have ended, or died
    for place, (event, value) in course:
        gateway = gateways[place]
        match event:
            case "pass":
                now += value
            case "step":
                books.step += value
            case "admit":
                if gateway.admit(value, now):
                    running[place].append(value)
            case "settle":
                if running[place]:
                    reserved = running[place].pop()
                    spent += reserved * value
                    gateway.limit.give_back(reserved * (1 - value))
            case "kill":
                spent += sum(running[place])
                gateways[place], running[place], starts = Gateway(str(starts), BUDGET), [], starts + 1
            case outcome:
                gateway.sync(books, now, outcome, value)
        assert spent + sum(map(sum, running)) <= SIZE + 1e-6
        assert books.limit.taken <= SIZE + 1e-6
    for place, gateway in enumerate(gateways):  # and all of it comes back that no dead one has
        gateway.limit.give_back(sum(running[place]))
        gateway.limit.fair = 0.0
        gateway.lost = False
        gateway.sync(books, now)
    if not any(event == "kill" for _, (event, _) in course):
        assert books.limit.taken == pytest.approx(spent, abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(COURSE)
@example(EXPIRED)
@example(LATE_USE)
@example(LATE_RETURN)
@example(STEP_BACK)
def test_a_rate_is_never_exceeded_in_any_window(course: list[tuple[int, tuple[str, float]]]) -> None:
    """Requests are not given back. A step forward of the database's clock fills the bucket once."""
    books, now, starts = Books(), 1000.0, 4
    gateways = [Gateway(str(place), REQUESTS) for place in range(4)]
    for gateway in gateways:
        gateway.sync(books, now)
    most, at, steps = float(SIZE), now, 0  # the level of one bucket that all gateways use
    for place, (event, value) in course:
        match event:
            case "pass":
                now += value  # gateways may be stopped: none does what it does every second
            case "step":
                books.step += value
                steps += value > 0
            case "admit":
                if gateways[place].admit(value, now):
                    most = min(float(SIZE), most + (now - at) * SIZE / 60) - value
                    at = now
                    while most < -1e-6 and steps:
                        most, steps = most + SIZE, steps - 1
                    assert most > -1e-6
            case "settle":
                pass
            case "kill":
                gateways[place], starts = Gateway(str(starts), REQUESTS), starts + 1
            case outcome:
                gateways[place].sync(books, now, outcome, value)


@pytest.mark.parametrize("kill", [False, True])
def test_saturated_gateways_use_a_rate_to_within_five_percent(kill: bool) -> None:
    """A minute from a full bucket: the bucket, and what comes back. Some of the gateways have ten times the load."""
    books, draw, admitted, starts = Books(), random.Random(1), 0, 4
    gateways = [Gateway(str(place), REQUESTS) for place in range(4)]
    synced = [0.0] * 4
    for tick in range(6000):
        now = 1000 + tick / 100
        if kill and tick % 1000 == 999:
            place = draw.randrange(4)
            gateways[place], starts = Gateway(str(starts), REQUESTS), starts + 1
        for place, gateway in enumerate(gateways):
            wanted = draw.random() < (0.9 if place < 2 else 0.09)
            short = wanted and not gateway.limit.fits(1, now)
            if now - synced[place] >= (0.02 if short else 1.0):
                gateway.sync(books, now, need=float(short))
                synced[place] = now
            admitted += wanted and gateway.admit(1, now)
    assert 0.95 * 2 * SIZE <= admitted <= 2 * SIZE


def test_an_expired_lease_no_longer_keeps_the_bucket_from_being_full() -> None:
    books = Books()
    dead, alive = Gateway("dead", REQUESTS), Gateway("alive", REQUESTS)
    dead.sync(books, 1000.0, need=400)
    alive.sync(books, 1080.0, need=1)
    assert alive.limit.free == pytest.approx(SIZE - 400 - 1)
    alive.sync(books, 1000.0 + LEASE_SECONDS + 60, need=1)
    assert alive.limit.free > SIZE - 3


def test_what_is_given_back_to_a_bucket_that_is_full_again_is_not_added() -> None:
    books = Books()
    gateway = Gateway("0", REQUESTS)
    gateway.sync(books, 1000.0, need=500)
    assert gateway.admit(500, 1000.0)
    gateway.sync(books, 1000.0)
    gateway.sync(books, 1070.0)
    gateway.limit.give_back(500)
    gateway.limit.fair = 0.0
    gateway.sync(books, 1070.0)
    assert gateway.limit.level(1070.0) == SIZE and books.limit.taken == 0
