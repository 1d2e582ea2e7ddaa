"""Two models whose attention is replaced in one process do not see each other's functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tapeout.operators.attention.in_torch import KVFunction, kv_function
from tests.families import random_model

TOKENS = torch.arange(3, 15)[None]


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(TOKENS, use_cache=False).logits


def scaled(factor: float, seen: Callable[[], Any] = lambda: None) -> KVFunction:
    def function(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen()
        return key, value * factor

    return function


def alone(model: Any, factor: float) -> Tensor:
    with kv_function(model, scaled(factor)):
        return logits(model)


def test_hooks_on_two_models_nested() -> None:
    first, second = random_model("llama"), random_model("llama", seed=1)
    expected = alone(first, 0.5), alone(second, 2.0)
    with kv_function(first, scaled(0.5)), kv_function(second, scaled(2.0)):
        assert torch.equal(logits(first), expected[0])
        assert torch.equal(logits(second), expected[1])


def test_the_inner_hook_on_one_model_holds_until_it_ends() -> None:
    model = random_model("llama")
    plain, expected = logits(model), alone(model, 0.5)
    with kv_function(model, scaled(0.5)):
        with kv_function(model, scaled(2.0)):
            assert not torch.equal(logits(model), expected)
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), plain)


def test_hooks_in_two_threads() -> None:
    factors = (0.5, 2.0)
    models = [random_model("llama", seed=seed) for seed in range(2)]
    expected = [alone(model, factor) for model, factor in zip(models, factors, strict=True)]
    barrier = threading.Barrier(2)  # in every layer, so that both threads are always in their hooks at once

    def run(model: Any, factor: float) -> Tensor:
        with kv_function(model, scaled(factor, lambda: barrier.wait(timeout=60))):
            return logits(model)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, models, factors))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_name_stays_registered() -> None:
    from transformers import AttentionInterface

    before = set(AttentionInterface())
    alone(random_model("llama"), 1.0)
    assert set(AttentionInterface()) == before
