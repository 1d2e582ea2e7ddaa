"""Recurrences in standard operators: what the definition says, under padding, and however a text was cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.export.check.difference import largest_difference
from tapeout.errors import ExportError
from tapeout.operators import DOMAIN, computed_by_token, operators, state_left
from tapeout.operators.gated_delta.in_torch import delta_traced
from tapeout.operators.operator import Tracer
from tests.exported import family_graph
from tests.families import MAX_POSITIONS, export_model, random_model
from tests.lowering import model_of, named, op, run, value
from tests.native import Matrix
from tests.recurrences import Double, gated_delta, selective_scan

HEADS, KEY_HEADS, KEY_SIZE, VALUE_SIZE = 4, 2, 6, 5
BATCH, TOKENS = 2, 9
STATE = (HEADS, KEY_SIZE, VALUE_SIZE)


BY_CHANNEL = "GatedDelta by channel"  # of keys, each with its own decay
DEFINITIONS: dict[str, Callable[..., tuple[Double, Double]]] = {
    "GatedDelta": gated_delta,
    BY_CHANNEL: gated_delta,
    "SelectiveScan": selective_scan,
}


def decays(operator: str) -> tuple[int, ...]:
    return (HEADS, KEY_SIZE) if operator == BY_CHANNEL else (HEADS,)


@cache
def graph(operator: str) -> ir.Model:
    inputs = [
        value("value", ["batch", "tokens", HEADS, VALUE_SIZE]),
        value("query", ["batch", "tokens", KEY_HEADS, KEY_SIZE]),
        value("key", ["batch", "tokens", KEY_HEADS, KEY_SIZE]),
        value("decay", ["batch", "tokens", *decays(operator)]),
        *([value("beta", ["batch", "tokens", HEADS])] if operator != "SelectiveScan" else []),
        value("mask", ["batch", "total"], ir.DataType.INT64),
        value("past", ["batch", *STATE]),
    ]
    name = operator.partition(" ")[0]
    output = op(name, inputs, domain=DOMAIN, outputs=2)
    made = output.producer()
    assert made is not None
    model = model_of(inputs, [named("y", output), named("present", made.outputs[1])])
    model.functions[(DOMAIN, name, "")] = operators()[name].function()
    model.opset_imports[DOMAIN] = 1
    return model


def drawn(operator: str, seed: int) -> dict[str, Matrix]:
    draw = np.random.default_rng(seed)
    shapes = {"value": (HEADS, VALUE_SIZE), "query": (KEY_HEADS, KEY_SIZE), "key": (KEY_HEADS, KEY_SIZE)}
    values = {name: draw.standard_normal((BATCH, TOKENS, *shape)) for name, shape in shapes.items()}
    values["decay"] = -draw.exponential(1, (BATCH, TOKENS, *decays(operator)))
    if operator != "SelectiveScan":
        values["beta"] = draw.uniform(0, 1, (BATCH, TOKENS, HEADS))
    return {name: each.astype(np.float32) for name, each in values.items()}


@settings(max_examples=25, deadline=None)
@given(
    operator=st.sampled_from(sorted(DEFINITIONS)),
    seed=st.integers(0, 2**32 - 1),
    cut=st.integers(1, TOKENS - 1),
    hidden=st.integers(0, TOKENS),
)
def test_two_pieces_are_what_the_definition_says_whatever_is_hidden(
    operator: str, seed: int, cut: int, hidden: int
) -> None:
    """The first entry of the batch is padded on the left."""
    values = drawn(operator, seed)
    mask = np.ones((BATCH, TOKENS), np.int64)
    mask[0, :hidden] = 0
    before = np.random.default_rng(seed).standard_normal((BATCH, *STATE)).astype(np.float32)
    state, outputs = before, list[Matrix]()
    for start, end in ((0, cut), (cut, TOKENS)):
        given = {name: each[:, start:end] for name, each in values.items()}
        found = run(graph(operator), {**given, "mask": mask[:, :end], "past": state})
        outputs.append(found["y"])
        state = found["present"]
    y = np.concatenate(outputs, 1)
    for entry, first in enumerate((hidden, 0)):
        expected, kept = DEFINITIONS[operator](*(values[name][entry, first:] for name in values), before[entry])
        np.testing.assert_allclose(y[entry, first:], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[entry], kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "bailing_hybrid", "bailing_hybrid-any-decay"])
def test_transformers_is_compared_token_by_token(family: str) -> None:
    """Its rules in chunks are off by more than rounding; graphs are not."""
    assert family_graph(family).record.max_relative_error < 1e-5


@pytest.mark.parametrize("parameter", ["A_log", "dt_bias", "in_proj_b", "conv1d"])
def test_a_recurrence_slightly_off_is_seen(parameter: str, tmp_path: Path) -> None:
    model = random_model("qwen3_5")
    with torch.no_grad():
        found = getattr(model.model.layers[0].linear_attn, parameter)
        (found if isinstance(found, torch.nn.Parameter) else found.weight).mul_(1.02)
    path = family_graph("qwen3_5").folder / "model.onnx"
    assert largest_difference(model, path, tmp_path, positions=MAX_POSITIONS).error > 1e-4


@pytest.mark.parametrize("parameter", ["A_log", "dt_bias", "f_a_proj", "f_b_proj"])
def test_a_decay_by_channel_slightly_off_is_seen(parameter: str, tmp_path: Path) -> None:
    model = random_model("kimi_linear")
    with torch.no_grad():
        found = getattr(model.model.layers[0].self_attn.forget_gate, parameter)
        (found if isinstance(found, torch.nn.Parameter) else found.weight).mul_(1.05)
    path = family_graph("kimi_linear").folder / "model.onnx"
    assert largest_difference(model, path, tmp_path, positions=MAX_POSITIONS).error > 3e-5


@pytest.mark.parametrize("kept", [None, lambda state: state], ids=["at once", "token by token"])
def test_both_rules_are_computed_token_by_token(kept: Any) -> None:
    """Whatever is before and however states are kept, which are handed over as they are left."""
    model, left = random_model("kimi_linear"), list[Any]()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), state_left(model, lambda _, state: left.append(state)):
        chunked = model(ids, use_cache=False).logits
    with torch.no_grad(), computed_by_token(model, kept), state_left(model, lambda _, state: left.append(state)):
        by_token = model(ids, use_cache=False).logits
    assert 0 < (chunked - by_token).abs().max() < 1e-4
    (_, delta), (_, other) = left[:2], left[2:]
    assert delta.shape == (1, 4, 16, 16) and (delta - other).abs().max() < 1e-5


def test_bounds_of_time_steps_are_carried(tmp_path: Path) -> None:
    """transformers leaves them out of one token over a cache; graphs keep them for every token."""
    bounded, unbounded = random_model("nemotron_h", time_step_min=0.8), random_model("nemotron_h")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert (bounded(ids).logits - unbounded(ids).logits).abs().max() > 0.01
    assert export_model(bounded, tmp_path).record.max_relative_error < 1e-5


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, "queries and keys as they are"),
        ({"use_qk_l2norm_in_kernel": True, "cu_seqlens": [0, 3]}, "cu_seqlens"),
        ({"use_qk_l2norm_in_kernel": True, "A_log": torch.zeros(2)}, "A_log"),
    ],
)
def test_another_rule_is_refused(options: dict[str, Any], found: str) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    tensors = (torch.zeros(shape) for shape in ((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2), (1, 3, 2)))
    with delta_traced(random_model("qwen3_5"), cast("Tracer", None)), pytest.raises(ExportError, match=found):
        modeling_qwen3_5.torch_chunk_gated_delta_rule(*tensors, **options)
