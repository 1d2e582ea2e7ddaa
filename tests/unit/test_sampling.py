"""Sampling against transformers' own filters, and each request's independence of its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.messages import SamplingSettings
from runtime.sampling import Sampler, candidates, sample
from tapeout.errors import RequestError


def reference(logits: np.ndarray, settings: SamplingSettings) -> np.ndarray:
    """The distribution transformers would draw from, [V]."""
    import torch
    from transformers.generation import logits_process as hf

    scores: Any = torch.from_numpy(logits.astype(np.float64))[None]
    ids: Any = torch.zeros((1, 0), dtype=torch.long)
    processors: list[Any] = [hf.TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        processors.append(hf.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(hf.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(hf.MinPLogitsWarper(settings.min_p))
    for processor in processors:
        scores = processor(ids, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(temperature=1.0),
        SamplingSettings(temperature=0.3),
        SamplingSettings(temperature=0.8, top_k=40),
        SamplingSettings(temperature=1.0, top_p=0.9),
        SamplingSettings(temperature=2.0, top_p=0.99),  # a nucleus wider than the first guess
        SamplingSettings(temperature=1.0, min_p=0.05),
        SamplingSettings(temperature=1.5, top_k=100, top_p=0.7, min_p=0.02),
        SamplingSettings(temperature=1.0, top_k=10_000),
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(settings: SamplingSettings) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 5000).astype(np.float32)
    tokens, kept = candidates(logits.astype(np.float64) / settings.temperature, settings)
    ours = np.zeros(len(logits))
    ours[tokens] = kept
    np.testing.assert_allclose(ours, reference(logits, settings), atol=1e-9)


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], dtype=np.float32))
    sampler = Sampler(SamplingSettings(temperature=1.0, seed=3), 4)
    counts = np.bincount([sample(logits, [sampler])[0] for _ in range(20_000)], minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.015)


@given(
    seed=st.integers(0, 2**32),
    neighbours=st.integers(0, 4),
    place=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_a_request_draws_the_same_alone_and_among_neighbours(
    seed: int, neighbours: int, place: int, temperature: float
) -> None:
    place = min(place, neighbours)
    generator = np.random.default_rng(seed)
    steps = generator.normal(0, 3, (6, neighbours + 1, 300)).astype(np.float32)
    settings = SamplingSettings(temperature=temperature, top_p=0.95, repetition_penalty=1.3, seed=seed)
    alone = Sampler(settings, 300, prompt=[5, 7])
    ours = Sampler(settings, 300, prompt=[5, 7])
    others = [Sampler(SamplingSettings(temperature=1.0, top_k=5, seed=i), 300) for i in range(neighbours)]
    batch = [*others[:place], ours, *others[place:]]
    for logits in steps:
        assert sample(logits, batch)[place] == sample(logits[place : place + 1], [alone])[0]


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)

    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingSettings(temperature=1.0, seed=seed), 1000)
        return [sample(logits, [sampler])[0] for _ in range(8)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_repetition_penalty_is_that_of_transformers_and_counts_the_prompt_once() -> None:
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = np.array([[3.0, 2.9, -1.0, -1.05]], dtype=np.float32)
    sampler = Sampler(SamplingSettings(repetition_penalty=1.2), 4, prompt=[0, 0])
    expected: Any = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([[0, 0]]), torch.from_numpy(logits))
    assert sample(logits, [sampler]) == [int(expected.argmax())] == [1]
    # Token 1 was drawn, so it is penalised from now on (2.9 / 1.2 < 3 / 1.2).
    assert sample(logits, [sampler]) == [0]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert sample(np.array([[1.0, 4.0, 4.0]], dtype=np.float32), [Sampler(SamplingSettings(), 3)]) == [1]
    tokens, _ = candidates(np.array([1.0, 4.0, 4.0, 4.0]), SamplingSettings(temperature=1, top_k=2))
    assert tokens.tolist() == [1, 2]


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full((1, 50), -np.inf, dtype=np.float32)
    logits[0, [3, 9]] = 0.0
    sampler = Sampler(SamplingSettings(temperature=1.0, seed=0), 50)
    assert {sample(logits, [sampler])[0] for _ in range(50)} == {3, 9}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_logits_are_an_error_that_names_the_request(broken: float) -> None:
    logits = np.zeros((3, 10), dtype=np.float32)
    logits[1, 4] = broken
    with pytest.raises(RequestError, match=r"request 1 is (nan|inf) \(token 4\)"):
        sample(logits, [Sampler(SamplingSettings(), 10) for _ in range(3)])


def test_logits_that_mask_everything_are_an_error() -> None:
    with pytest.raises(RequestError, match="request 0 is -inf"):
        sample(np.full((1, 10), -np.inf, dtype=np.float32), [Sampler(SamplingSettings(), 10)])


def test_logits_and_requests_must_match() -> None:
    with pytest.raises(RequestError, match="2 requests"):
        sample(np.zeros((2, 10), dtype=np.float32), [Sampler(SamplingSettings(), 10)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_name_themselves(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} is"):
        SamplingSettings(**{name: value})  # pyright: ignore[reportArgumentType]
