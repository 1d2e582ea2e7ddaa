"""The prompt tokens of a step follow from what steps have cost."""

from __future__ import annotations

import random

import pytest

from runtime.step_costs import MIN_CHUNK, StepCosts


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
            made.observe(count, prompt_tokens, seconds(count, prompt_tokens) * noise.uniform(0.9, 1.1))
    budget = made.prompt_budget(decodes, 4096, 0)
    bound = max(1.8 * seconds(decodes, 0), 0.02)
    assert 0.8 * bound <= seconds(decodes, budget) <= 1.2 * bound


def test_prompts_alone_get_as_much_as_a_step_may_last() -> None:
    made = costs()
    made.observe(0, 100, 0.1)
    assert made.prompt_budget(0, 256, 0) == 256 and made.prompt_budget(0, 4096, 0) == 1000


def test_prompts_always_progress() -> None:
    made = costs()
    made.observe(16, 0, 10.0)
    made.observe(0, 100, 1000.0)
    assert made.prompt_budget(16, 256, 0) == made.prompt_budget(0, 256, 0) == MIN_CHUNK
    assert made.prompt_budget(16, 3, 0) == 3


def test_a_number_of_decodes_that_was_not_seen_costs_as_the_nearest() -> None:
    made = costs()
    made.observe(8, 0, 0.01)
    made.observe(32, 0, 0.03)
    assert [made.decode_seconds(n) for n in (0, 1, 19, 21, 99)] == [0, 0.01, 0.01, 0.03, 0.03]


def test_costs_are_not_forgotten_while_nothing_is_learned_of_them() -> None:
    made = costs()
    made.observe(0, 100, 0.1)
    for _ in range(10_000):
        made.observe(4, 0, 0.01)
    assert made.prompt_budget(4, 256, 0) == MIN_CHUNK and made.prompt_budget(0, 4096, 0) == 1000


def test_a_slower_machine_is_noticed() -> None:
    made = costs()
    made.observe(0, 100, 0.1)
    for _ in range(30):
        made.observe(0, 100, 0.4)
    assert made.prompt_budget(0, 4096, 0) == pytest.approx(250, rel=0.02)


def test_a_long_backlog_makes_steps_longer_but_not_endless() -> None:
    made = costs()
    made.observe(16, 0, 0.01)
    made.observe(0, 100, 0.1)
    assert [made.prompt_budget(16, 4096, backlog) for backlog in (5000, 10_000, 10**6)] == [MIN_CHUNK, 30, 990]


def test_prompts_may_always_make_a_step_last_fifteen_milliseconds() -> None:
    """A step of one stream takes 2 ms here: 1.7 times that would leave prompts next to nothing."""
    made = StepCosts()
    made.observe(1, 0, 0.002)
    made.observe(0, 256, 0.0256)
    assert made.prompt_budget(1, 4096, 0) == 130
