"""The prompt tokens of a step follow from what steps have cost."""

from __future__ import annotations

import itertools
import random

import pytest

from runtime.engine.scheduling.step_costs import (
    FIRST_PLAIN_AFTER,
    FORGET_DRAFTS,
    MIN_CHUNK,
    MIN_DRAFTS,
    PLAIN_AFTER,
    StepCosts,
)
from runtime.engine.speculation import Gate
from tapeout.operators.experts import share_read


def costs() -> StepCosts:
    return StepCosts(itl_factor=1.8, itl_seconds=0.02, backlog_seconds=5.0, step_seconds=1.0)


def seconds(decodes: int, prompt_tokens: int) -> float:
    """Of a processor whose decodes are bandwidth-bound, and whose prompts are compute-bound."""
    return 0.005 + 0.0005 * decodes + 0.0006 * prompt_tokens


def test_before_any_step_there_is_no_bound() -> None:
    assert costs().prompt_budget(16, 256, 0) == 256


@pytest.mark.parametrize("decodes", [1, 4, 16, 64])
def test_steps_with_decodes_keep_their_bound(decodes: int) -> None:
    """Learned from noisy steps, for a number of decodes that was seen."""
    made, noise = costs(), random.Random(decodes)
    for _ in range(200):
        for count in (1, 4, 16, 64):
            prompt_tokens = noise.choice([0, 0, 7, 40, 200])
            made.observe(count, prompt_tokens, 0, seconds(count, prompt_tokens) * noise.uniform(0.9, 1.1))
    budget = made.prompt_budget(decodes, 4096, 0)
    bound = max(1.8 * seconds(decodes, 0), 0.02)
    assert 0.8 * bound <= seconds(decodes, budget) <= 1.2 * bound


def test_prompts_alone_get_as_much_as_a_step_may_last() -> None:
    made = costs()
    made.observe(0, 100, 0, 0.1)
    assert made.prompt_budget(0, 256, 0) == 256 and made.prompt_budget(0, 4096, 0) == 1000


def test_prompts_always_progress() -> None:
    made = costs()
    made.observe(16, 0, 0, 10.0)
    made.observe(0, 100, 0, 1000.0)
    assert made.prompt_budget(16, 256, 0) == made.prompt_budget(0, 256, 0) == MIN_CHUNK
    assert made.prompt_budget(16, 3, 0) == 3


def test_a_number_of_decodes_that_was_not_seen_costs_as_the_nearest() -> None:
    made = costs()
    made.observe(8, 0, 0, 0.01)
    made.observe(32, 0, 0, 0.03)
    assert [made.decode_seconds(n) for n in (0, 1, 19, 21, 99)] == [0, 0.01, 0.01, 0.03, 0.03]


def test_costs_are_not_forgotten_while_nothing_is_learned_of_them() -> None:
    made = costs()
    made.observe(0, 100, 0, 0.1)
    for _ in range(10_000):
        made.observe(4, 0, 0, 0.01)
    assert made.prompt_budget(4, 256, 0) == 10 and made.prompt_budget(0, 4096, 0) == 1000


def test_a_slower_machine_is_noticed() -> None:
    made = costs()
    made.observe(0, 100, 0, 0.1)
    for _ in range(30):
        made.observe(0, 100, 0, 0.4)
    assert made.prompt_budget(0, 4096, 0) == pytest.approx(250, rel=0.02)


def test_a_long_backlog_makes_steps_longer_but_not_endless() -> None:
    made = costs()
    made.observe(16, 0, 0, 0.01)
    made.observe(0, 100, 0, 0.1)
    assert [made.prompt_budget(16, 4096, backlog) for backlog in (5000, 10_000, 10**6)] == [10, 30, 990]


def test_one_slow_step_decides_nothing() -> None:
    """The first of its kind is slow since everything is cold, and a later one since the machine held it up."""
    made = costs()
    for taken in (0.03, 0.01, 0.011, 0.01, 0.2, 0.01):
        made.observe(16, 0, 0, taken)
        made.observe(0, 100, 0, 10 * taken)
    assert made.decode_seconds(16) == 0.01 and made.prompt_budget(0, 4096, 0) == 909  # at 1.1 ms


def test_steps_that_all_have_drafts_do_not_hide_what_a_plain_one_takes() -> None:
    """Planted: no step is plain unless one is due. The first, slow one would count for ever."""
    made, plain = costs(), list[int]()
    made.observe(16, 0, 0, 0.03)
    for number in range(200):
        more = 0 if made.plain_due(16) else 32
        assert more or made.prompt_budget(16, 256, 10**6) == 0
        made.observe(16, 0, more, seconds(16, more))
        if not more:
            plain.append(number)
    assert made.decode_seconds(16) == seconds(16, 0)
    gaps = [after - before for before, after in itertools.pairwise(plain)]
    assert gaps[0] == FIRST_PLAIN_AFTER + 1 and set(gaps[1:]) == {PLAIN_AFTER + 1}


def test_steps_that_are_plain_anyway_need_no_others() -> None:
    made = costs()
    for _ in range(100):
        made.observe(4, 0, 0, 0.01)
        assert not made.plain_due(4)
    assert not made.plain_due(0) and not made.plain_due(64)  # none without decodes, nor of a kind that was not seen


def test_a_short_prompt_alone_says_nothing_of_what_a_token_costs() -> None:
    """It takes as long as weights take to read."""
    made = costs()
    made.observe(0, 256, 0, seconds(0, 256))
    known = made.prompt_budget(0, 4096, 0)
    for _ in range(9):
        made.observe(0, MIN_CHUNK, 0, seconds(1, 0))
    assert made.prompt_budget(0, 4096, 0) == known


def test_prompts_and_drafts_teach_what_each_of_them_costs() -> None:
    """Planted: one cost for both. A chunk of a long prompt then says that drafts never pay, and none is fed again."""
    made = costs()
    made.observe(16, 0, 0, 0.006)
    made.observe(16, 32, 0, 0.0092)
    made.observe(16, 0, 20, 0.008)
    for _ in range(9):
        made.observe(16, MIN_CHUNK, 0, 0.0094)  # late in a long prompt
        made.observe(16, 1, 40, 0.03)  # both: nobody knows of which it is the cost
        made.observe(16, 0, MIN_DRAFTS - 1, 0.02)  # too few to tell
        made.observe(16, 0, 0, 0.006)
    assert made.worth(16) == pytest.approx(0.0001 * 16 / 0.006)
    for _ in range(9):
        made.observe(16, 0, 20, 0.008)
        made.observe(16, 0, 0, 0.006)
    assert made.prompt_budget(16, 256, 0) == 32


def test_drafts_at_most_double_from_step_to_step() -> None:
    """Planted: as many as the cost of a few allows. What is free up to 24 tokens is not beyond."""
    made, fed = costs(), list[int]()
    for _ in range(8):
        made.observe(16, 0, 0, 0.009)
        fed.append(made.draft_budget(16, 256))
        made.observe(16, 0, fed[-1], 0.009 + 0.0002 * max(0, fed[-1] - 8))
    assert fed[:4] == [8, 16, 32, 64] and fed[-1] < 80


def test_a_draft_that_never_pays_is_tried_again() -> None:
    """Planted: its cost is kept for ever. A few steps that the machine held up then switch drafts off."""
    made = costs()
    made.observe(16, 0, 0, 0.006)
    made.observe(16, 0, 20, 0.3)
    assert made.worth(16) == 1
    for _ in range(FORGET_DRAFTS):
        made.observe(16, 0, 0, 0.006)
    assert made.worth(16) == 0.5 and made.draft_budget(16, 256) == MIN_CHUNK, "few, or that step would be the longest"


def test_prompts_may_always_make_a_step_last_some_milliseconds() -> None:
    """A step of one stream takes 2 ms here: 1.5 times that would leave prompts next to nothing."""
    made = StepCosts()
    made.observe(1, 0, 0, 0.002)
    made.observe(0, 256, 0, 0.0256)
    assert made.prompt_budget(1, 4096, 0) == pytest.approx(55, abs=1)


def reads(tokens: int) -> float:
    """Of Qwen3-30B-A3B in 4.5 bits: 0.96 of the 1.7 GB that a step of one token reads are 8 of 128 experts."""
    return 1 + 0.56 * (share_read(tokens, 8, 128) / share_read(1, 8, 128) - 1)


def mixture_seconds(decodes: int, more: int) -> float:
    return 0.063 * reads(decodes + more) + 0.0003 * decodes + 0.005 * more


def served(made: StepCosts, counts: tuple[int, ...]) -> tuple[dict[int, list[float]], float]:
    """Of a thousand steps with such numbers of decodes in turn: how long those with prompts were, over their bound, by
    the number of decodes; and prompt tokens a second.
    """
    noise, taken, tokens = random.Random(1), 0.0, 0
    lengths: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(1000):
        count = noise.choice(counts)
        fed = made.prompt_budget(count, 256, 0) if noise.random() < 0.7 else 0
        seconds = mixture_seconds(count, fed) * noise.uniform(0.97, 1.03)
        if fed and number > 50:
            lengths[count].append(mixture_seconds(count, fed) / (1.5 * mixture_seconds(count, 0)))
        made.observe(count, fed, 0, seconds)
        taken, tokens = taken + seconds, tokens + fed
    return lengths, tokens / taken


@pytest.mark.parametrize("counts", [(8, 32), (16, 64)])
def test_steps_of_a_mixture_use_their_bound_beside_any_number_of_decodes(counts: tuple[int, int]) -> None:
    """Planted: a prompt token costs the same beside few decodes, where it reads experts of its own, and beside many."""
    lengths, speed = served(StepCosts(reads=reads), counts)
    without, slow = served(StepCosts(), counts)
    many = max(counts)
    assert all(max(lengths[count]) < 1.15 for count in counts) and min(lengths[many]) > 0.9
    assert any(max(without[count]) > 1.15 for count in counts) and min(without[many]) < 0.85
    assert speed > 1.3 * slow


def test_what_was_measured_beside_as_many_decodes_has_the_experts_in_it() -> None:
    """So nothing has to be known of them where the number of decodes stays."""
    lengths, speed = served(StepCosts(reads=reads), (32,))
    without, known = served(StepCosts(), (32,))
    assert speed == pytest.approx(known, rel=0.05)
    assert max(without[32]) < 1.1 and max(lengths[32]) < 1.1
    made = StepCosts()
    for decodes in (1, 4, 16, 64):
        made.observe(decodes, 0, 0, mixture_seconds(decodes, 0))
    assert made.decode_seconds(64) == mixture_seconds(64, 0) > 8 * made.decode_seconds(1)


def test_a_number_of_decodes_that_was_not_seen_reads_other_experts() -> None:
    made = StepCosts(reads=reads)
    made.observe(1, 0, 0, 0.063)
    assert made.decode_seconds(16) == pytest.approx(0.063 * reads(16))
    made.observe(16, 0, 0, 0.3)
    assert made.decode_seconds(16) == 0.3


def test_drafts_of_a_mixture_pay_beside_many_decodes_and_not_beside_one() -> None:
    """Planted: a cost that was learned beside 64, where all experts are read in any case."""
    known, unaware = StepCosts(reads=reads), StepCosts()
    for made in (known, unaware):
        made.observe(1, 0, 0, mixture_seconds(1, 0))
        made.observe(64, 0, 0, mixture_seconds(64, 0))
        for _ in range(9):
            made.observe(64, 0, 64, mixture_seconds(64, 64))

    def slower(decodes: int, drafts: int) -> float:
        """How much longer a step is for each draft of each request, relative to one without."""
        return (mixture_seconds(decodes, decodes * drafts) / mixture_seconds(decodes, 0) - 1) / drafts

    assert known.worth(64) == pytest.approx(slower(64, 1), rel=0.1)
    assert unaware.worth(64) == pytest.approx(slower(64, 1), rel=0.1)
    for drafts in (1, 4, 8):
        assert known.worth(1, drafts) == pytest.approx(slower(1, drafts), rel=0.15)
        assert unaware.worth(1, drafts) < 0.2 * slower(1, drafts)
    assert known.worth(1) > known.worth(1, 8) + 0.1  # the first reads experts that others choose as well
    # So either many drafts pay, or none.
    few, many = (Gate(known, hits=accepted, misses=1 - accepted).length(1) for accepted in (0.5, 0.9))
    assert few == 0 and many >= 6
    assert Gate(unaware, hits=0.5, misses=0.5).length(1) >= 3
    assert StepCosts(reads=reads).worth(1) == 0.5
