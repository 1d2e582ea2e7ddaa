"""What a simulated step takes, from what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.simulation.step_lengths import step_lengths

COUNTS = st.integers(0, 300)


@st.composite
def measured(draw: st.DrawFn) -> dict[int, float]:
    """Seconds that do not fall with the count."""
    counts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True))
    seconds = draw(st.lists(st.floats(1e-4, 1.0), min_size=len(counts), max_size=len(counts)))
    return dict(zip(sorted(counts), sorted(seconds), strict=True))


@given(measured(), measured(), COUNTS, COUNTS)
def test_more_in_a_step_never_makes_it_shorter(
    decodes: dict[int, float], prompts: dict[int, float], running: int, tokens: int
) -> None:
    lengths = step_lengths(decodes, prompts)
    assert lengths.seconds(running, tokens + 1) >= lengths.seconds(running, tokens) - 1e-9
    assert lengths.seconds(running, tokens) >= lengths.seconds(running, 0) - 1e-9 >= min(decodes.values()) - 1e-9


@given(measured(), measured())
def test_what_was_measured_is_what_is_simulated(decodes: dict[int, float], prompts: dict[int, float]) -> None:
    """Planted: decodes and prompt tokens change places."""
    lengths = step_lengths(decodes, prompts)
    for count, seconds in decodes.items():
        assert lengths.seconds(count, 0) == pytest.approx(max(seconds, min(decodes.values())))
    for count, seconds in prompts.items():
        assert lengths.seconds(0, count) == pytest.approx(max(seconds, min(decodes.values())))


@given(measured(), st.floats(1e-4, 1.0), st.integers(1, 300), COUNTS)
def test_one_number_of_prompt_tokens_gives_each_token_the_same(
    decodes: dict[int, float], token: float, running: int, tokens: int
) -> None:
    lengths = step_lengths(decodes, {64: 64 * token})
    assert abs(lengths.seconds(running, tokens) - lengths.seconds(running, 0) - tokens * token) < 1e-6
