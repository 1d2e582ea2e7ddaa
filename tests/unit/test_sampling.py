"""Sampling against transformers' own filters, penalties in OpenAI's sense, and each request's independence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kernels.cpu import LEVELS, Level, compiler
from engines.kernels.cpu.sampling import SamplingKernel
from engines.kernels.sampling import ONE
from engines.protocol import FloatArray
from runtime.engine.draw import candidates, filters_of, random_bits
from runtime.engine.sampling import MOST_LOGPROBS, BatchSampler
from runtime.wire.messages import GenerateRequest, SamplingSettings
from tapeout.errors import RequestError

V = 50


def request(id: str = "a", prompt: tuple[int, ...] = (0,), **fields: Any) -> GenerateRequest:
    return GenerateRequest(id, prompt, fields.pop("max_new_tokens", 100), **fields)


def settings_of(**fields: Any) -> SamplingSettings:
    return SamplingSettings(**({"temperature": 1.0, "seed": 1} | fields))


libraries: list[Path | None] = [None]  # the one that the tests run with


@pytest.fixture(scope="module", params=["numpy", *LEVELS], ids=str, autouse=True)
def library(request: pytest.FixtureRequest) -> None:
    """Every test runs without the native kernel, and with that of every level that this processor has."""
    if isinstance(request.param, Level) and (refusal := request.param.refusal()):
        pytest.skip(refusal)
    libraries[0] = compiler.library(request.param) if isinstance(request.param, Level) else None


def sampler_of(*requests: GenerateRequest, vocab_size: int = V) -> BatchSampler:
    library = libraries[0]
    sampler = BatchSampler(vocab_size, kernel=SamplingKernel(library, vocab_size, 2) if library else None)
    for one in requests:
        sampler.add(one)
    return sampler


def tokens(sampler: BatchSampler, logits: FloatArray, steps: int, id: str = "a") -> list[int]:
    return [sampler.choose([id], logits[None])[0].token for _ in range(steps)]


def logits_of(values: Mapping[int, float], rest: float = -30.0, vocab_size: int = V) -> FloatArray:
    logits = np.full(vocab_size, rest, np.float32)
    logits[list(values)] = list(values.values())
    return logits


def reference(logits: FloatArray, settings: SamplingSettings) -> FloatArray:
    """The distribution transformers would draw from, ``[V]``."""
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
        SamplingSettings(temperature=100.0),
        SamplingSettings(temperature=0.8, top_k=40),
        SamplingSettings(temperature=1.0, top_p=0.9),
        SamplingSettings(temperature=2.0, top_p=0.99),
        SamplingSettings(temperature=1.0, top_p=1e-9),
        SamplingSettings(temperature=1.0, min_p=0.05),
        SamplingSettings(temperature=1.0, min_p=1.0),
        SamplingSettings(temperature=1.5, top_k=100, top_p=0.7, min_p=0.02),
        SamplingSettings(temperature=1.0, top_k=10_000),
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(settings: SamplingSettings) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 5000).astype(np.float32)
    kept, weights = candidates(logits, filters_of(settings))
    ours = np.zeros(len(logits))
    ours[kept] = weights / weights.sum()
    expected = reference(logits, settings)
    assert (expected[ours == 0] < 1 / ONE).all() and (ours[expected == 0] == 0).all()
    np.testing.assert_allclose(ours, expected, rtol=3e-6, atol=1 / ONE)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    sampler = sampler_of(request(sampling=settings_of(temperature=temperature)))
    assert set(tokens(sampler, logits_of({3: 1.0, 4: 1.001}), 30)) == {4}


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_at_a_huge_temperature_tokens_are_alike(temperature: float) -> None:
    sampler = sampler_of(request(sampling=settings_of(temperature=temperature)), vocab_size=4)
    assert set(tokens(sampler, np.array([9.0, 0.0, -9.0, 3.0], np.float32), 100)) == {0, 1, 2, 3}


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = sampler_of(request(sampling=settings_of(seed=3), max_new_tokens=20_000), vocab_size=4)
    counts = np.bincount(tokens(sampler, logits, 20_000), minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_random_bits_are_those_of_splitmix64_and_differ_by_seed_and_position() -> None:
    bits = [random_bits(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(bits)) == len(bits) and all(0 <= x < 1 << 64 for x in bits)
    ones = sum(x.bit_count() for x in bits) / len(bits)
    assert abs(ones - 32) < 0.5
    neighbours = [(a ^ b).bit_count() for a, b in itertools.pairwise(bits)]
    assert abs(sum(neighbours) / len(neighbours) - 32) < 0.5


@given(
    seed=st.integers(0, 2**32),
    neighbours=st.integers(0, 4),
    place=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_a_request_draws_the_same_alone_and_among_neighbours(
    seed: int, neighbours: int, place: int, temperature: float
) -> None:
    generator = np.random.default_rng(seed)
    steps = generator.normal(0, 3, (6, neighbours + 1, V)).astype(np.float32)
    ours = request(
        prompt=(5, 7),
        sampling=settings_of(
            temperature=temperature, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.5, seed=seed
        ),
        logprobs=2,
    )
    others = [request(str(i), sampling=settings_of(top_k=5, seed=i)) for i in range(neighbours)]
    place = min(place, neighbours)
    ids = [*(one.id for one in others[:place]), "a", *(one.id for one in others[place:])]
    alone, batch = sampler_of(ours), sampler_of(ours, *others)
    for logits in steps:
        assert batch.choose(ids, logits)[place] == alone.choose(["a"], logits[place : place + 1])[0]


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    logits = np.zeros(1000, dtype=np.float32)

    def draws(seed: int | None) -> list[int]:
        return tokens(sampler_of(request(sampling=settings_of(seed=seed)), vocab_size=1000), logits, 8)

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)
    assert draws((1 << 64) - 1) != draws(0)


def test_repetition_penalty_is_that_of_transformers_and_counts_the_prompt_once() -> None:
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = np.array([3.0, 2.9, -1.0, -1.05], dtype=np.float32)
    sampler = sampler_of(request(prompt=(0, 0), sampling=SamplingSettings(repetition_penalty=1.2)), vocab_size=4)
    expected: Any = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([[0, 0]]), torch.from_numpy(logits[None]))
    # Token 1 was drawn first, so it is penalized from then on (2.9 / 1.2 < 3 / 1.2).
    assert tokens(sampler, logits, 2) == [int(expected.argmax()), 0] == [1, 0]


def test_presence_and_frequency_count_the_response_only() -> None:
    logits = logits_of({1: 5.0, 2: 4.0, 3: 3.0})
    # The prompt says 1, which does not count. Presence lowers each token of the response once.
    presence = request(prompt=(1, 1), sampling=SamplingSettings(presence_penalty=1.5))
    assert tokens(sampler_of(presence), logits, 5) == [1, 2, 1, 1, 1]
    # After n times, 1 is at 5 - 0.75 n and 2 at 4 - 0.75 n.
    frequency = request(prompt=(1, 1), sampling=SamplingSettings(frequency_penalty=0.75))
    assert tokens(sampler_of(frequency), logits, 6) == [1, 1, 2, 1, 2, 3]
    negative = request(sampling=SamplingSettings(frequency_penalty=-1.0, logit_bias={2: 1.5}))
    assert tokens(sampler_of(negative), logits, 4) == [2, 2, 2, 2]


def test_logit_bias_is_added_before_the_penalties() -> None:
    logits = logits_of({1: 5.0, 2: 4.0})
    assert tokens(sampler_of(request(sampling=SamplingSettings(logit_bias={2: 1.5, 1: 0.0}))), logits, 2) == [2, 2]
    # (4 + 1.5) / 2 < (5 + 0) / 1: a bias that came after the penalty would leave 2 ahead.
    both = SamplingSettings(logit_bias={2: 1.5}, repetition_penalty=1.12)
    assert tokens(sampler_of(request(prompt=(2,), sampling=both)), logits, 1) == [1]
    ban = settings_of(temperature=2.0, logit_bias={token: -100.0 for token in range(V) if token != 9})
    assert set(tokens(sampler_of(request(sampling=ban)), np.zeros(V, np.float32), 50)) == {9}


def test_stop_tokens_are_excluded_until_there_are_enough_tokens() -> None:
    logits = logits_of({1: 5.0, 2: 4.0, 3: 3.0})
    early = request(stop_tokens=frozenset({1, 2}), min_new_tokens=3)
    sampler = sampler_of(early)
    assert sampler.needs("a") == "logits"
    assert tokens(sampler, logits, 3) == [3, 3, 3]
    assert sampler.needs("a") == "token"
    assert tokens(sampler, logits, 1) == [1]
    biased = replace(early, sampling=SamplingSettings(logit_bias={2: 3.0}))
    assert tokens(sampler_of(biased), logits, 4) == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, "token"),
        ({"stop_tokens": frozenset({1})}, "token"),
        ({"sampling": SamplingSettings(top_k=5, top_p=0.5, min_p=0.1)}, "token"),  # greedy: filters keep the likeliest
        ({"sampling": settings_of()}, "logits"),
        ({"sampling": SamplingSettings(logit_bias={1: 1.0})}, "logits"),
        ({"sampling": SamplingSettings(presence_penalty=0.1)}, "logits"),
        ({"sampling": SamplingSettings(frequency_penalty=0.1)}, "logits"),
        ({"sampling": SamplingSettings(repetition_penalty=1.1)}, "logits"),
        ({"logprobs": 0}, "logits"),
        ({"min_new_tokens": 2, "stop_tokens": frozenset({1})}, "logits"),
        ({"min_new_tokens": 2}, "token"),
    ],
    ids=str,
)
def test_the_engine_chooses_where_the_likeliest_token_is_the_answer(fields: dict[str, Any], wanted: str) -> None:
    assert sampler_of(request(**fields)).needs("a") == wanted


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = logits_of({1: 4.0, 2: 4.0, 3: 4.0})
    assert tokens(sampler_of(request()), logits, 1) == [1]
    assert set(tokens(sampler_of(request(sampling=settings_of(top_k=2))), logits, 60)) == {1, 2}
    assert set(tokens(sampler_of(request(sampling=settings_of(top_p=0.5))), logits, 60)) == {1, 2}


def test_masked_tokens_are_never_drawn() -> None:
    logits = logits_of({3: 0.0, 9: 0.0}, rest=-np.inf)
    for fields in ({}, {"top_k": 40}, {"top_p": 0.999}, {"temperature": 1e30}):
        assert set(tokens(sampler_of(request(sampling=settings_of(**fields))), logits, 50)) == {3, 9}


def test_logprobs_are_of_the_raw_distribution() -> None:
    import torch

    logits = np.random.default_rng(4).normal(0, 3, V).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), 0).numpy()
    settings = settings_of(temperature=3.0, top_k=20, logit_bias={7: 50.0})
    (choice,) = sampler_of(request(sampling=settings, logprobs=5)).choose(["a"], logits[None])
    found = choice.logprobs
    assert found is not None and choice.token == found.token == 7
    assert found.logprob == pytest.approx(expected[7], abs=1e-5)
    order = np.argsort(-expected)[:5].tolist()
    assert [token for token, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(expected[order], abs=1e-5)


@given(seed=st.integers(0, 2**32), count=st.integers(0, V))
def test_the_chosen_tokens_logprob_is_identical_in_the_top_list(seed: int, count: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
    (choice,) = sampler_of(request(logprobs=count)).choose(["a"], logits[None])
    found = choice.logprobs
    assert found is not None and len(found.top) == count
    if count:
        assert found.top[0] == (found.token, found.logprob)  # greedy: the largest of the list, to the bit
        assert found.logprob == max(value for _, value in found.top)
    (other,) = sampler_of().score([11], logits[None], V)
    assert dict(other.top)[11] == other.logprob


def test_masked_logits_have_a_logprob_of_minus_infinity() -> None:
    (found,) = sampler_of().score([4], logits_of({3: 0.0}, rest=-np.inf)[None], 2)
    assert found.logprob == -math.inf and found.top == ((3, 0.0), (0, -math.inf))


def test_prompts_are_scored_like_responses() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (6, V)).astype(np.float32)
    sampler = sampler_of(request(logprobs=3))
    said = [sampler.choose(["a"], row[None])[0] for row in logits]
    assert sampler.score([choice.token for choice in said], logits, 3) == [choice.logprobs for choice in said]
    assert sampler.score([], logits[:0], 3) == []
    logits[2, 3] = np.nan
    with pytest.raises(RequestError, match="NaN"):
        sampler.score([0] * 6, logits, 0)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("fields", [{}, {"sampling": settings_of()}, {"logprobs": 3}], ids=str)
def test_broken_logits_fail_their_request_alone(broken: float, fields: dict[str, Any]) -> None:
    logits = np.zeros((3, V), dtype=np.float32)
    logits[1, 4] = broken
    choices = sampler_of(*(request(id, **fields) for id in "abc")).choose(list("abc"), logits)
    assert choices[1] == (-1, None, "the logits hold NaN or infinity")
    assert choices[0].error is choices[2].error is None


def test_a_request_that_excludes_every_token_fails_alone() -> None:
    none = logits_of({}, rest=-np.inf)
    only_stop = logits_of({1: 0.0}, rest=-np.inf)
    early = request("b", stop_tokens=frozenset({1}), min_new_tokens=3)
    sampler = sampler_of(request("a", sampling=settings_of()), early, request("c"))
    first, second, third = sampler.choose(list("abc"), [none, only_stop, only_stop])
    assert first.error == second.error and "no token may be chosen" in (first.error or "")
    assert third == (1, None, None)


def test_a_penalty_that_overflows_fails_alone() -> None:
    extreme = request("a", prompt=(3,), sampling=SamplingSettings(repetition_penalty=1e-9))
    failed, good = sampler_of(extreme, request("b")).choose(["a", "b"], np.full((2, V), 1e30, np.float32))
    assert failed.error and good.error is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": SamplingSettings(logit_bias={V: 1.0})}, f"token {V} in logit_bias"),
        ({"sampling": SamplingSettings(logit_bias={-1: 1.0})}, "token -1 in logit_bias"),
        ({"stop_tokens": frozenset({99999})}, "token 99999 in stop_tokens"),
        ({"prompt": (1, -1)}, "token -1 in the prompt"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": MOST_LOGPROBS + 1}, "logprobs is"),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs is"),
        ({"min_new_tokens": 101}, "min_new_tokens is 101"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ],
)
def test_requests_that_the_model_cannot_follow_are_refused(fields: dict[str, Any], message: str) -> None:
    sampler = sampler_of()
    with pytest.raises(RequestError, match=message):
        sampler.add(request(**fields))
    sampler.add(request())  # the refused one was not added
    with pytest.raises(RequestError, match="request a is there already"):
        sampler.add(request())
    sampler.remove("a")
    sampler.remove("a")
    sampler.add(request())


def test_logits_are_not_changed_and_may_be_read_only() -> None:
    logits = np.random.default_rng(2).normal(0, 1, (2, V)).astype(np.float32)
    before = logits.copy()
    logits.setflags(write=False)
    strong = settings_of(logit_bias={1: 5.0}, repetition_penalty=2.0, presence_penalty=1.0)
    sampler = sampler_of(*(request(id, sampling=strong, logprobs=2) for id in "ab"))
    for _ in range(3):
        sampler.choose(["a", "b"], logits)
    assert (logits == before).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("presence_penalty", float("nan")),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_name_themselves(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} is"):
        SamplingSettings(**{name: value})  # pyright: ignore[reportArgumentType]
