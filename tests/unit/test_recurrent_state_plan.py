"""How a plan keeps the state of recurrences: as written, or as measured; and that budgets count what is held."""

from __future__ import annotations

import pytest

from quantization import recurrent_state
from quantization.cost_table import CostTable
from quantization.recurrent_state import choose_state, kept_in, rounds_states
from quantization.units import ALL_CANDIDATES, Candidates
from tapeout.recipe import KVCache, Plan
from tapeout.state import SEQUENCE_SLOTS, Recurrent, slot_bytes
from tests.exported import family_graph
from tests.family_engines import words

AUTO = Plan(schemes="auto", recurrent_state="auto", max_kl=100.0)
SLOTS = 4


def test_auto_takes_bfloat16_only_where_it_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, texts = family_graph("qwen3_5"), words("qwen3_5", 4, 24, 1)
    found = choose_state(AUTO, graph, ALL_CANDIDATES, texts, lambda _: None)
    assert "over 64 tokens" in found.reason  # all positions of the graph
    monkeypatch.setattr(recurrent_state, "STATE_KL", 1.0)
    half = choose_state(AUTO, graph, ALL_CANDIDATES, texts, lambda _: None)
    assert half.dtype == "bfloat16" and half.kl and half.kl > 1e-9
    monkeypatch.setattr(recurrent_state, "STATE_KL", half.kl / 2)
    exact = choose_state(AUTO, graph, ALL_CANDIDATES, texts, lambda _: None)
    assert exact.dtype == "float32" and not exact.kl and f"{half.kl:.5f}" in exact.reason
    monkeypatch.setattr(recurrent_state, "STATE_KL", 1.0)
    small = AUTO.model_copy(update={"max_kl": 9 * half.kl})  # of which it would take more than a tenth
    assert choose_state(small, graph, ALL_CANDIDATES, texts, lambda _: None).dtype == "float32"


def test_auto_keeps_float32_where_there_is_nothing_to_round_or_no_kernel() -> None:
    texts = words("lfm2", 2, 8, 1)
    for family in ("lfm2", "llama"):
        graph = family_graph(family)
        assert not rounds_states(graph)
        assert choose_state(AUTO, graph, ALL_CANDIDATES, texts, lambda _: None).dtype == "float32"
    found = choose_state(AUTO, family_graph("qwen3_5"), Candidates(states=("float32",)), texts, lambda _: None)
    assert found.dtype == "float32" and found.reason == "the target has no other"


def test_a_state_that_is_asked_for_is_that_of_recurrences_alone() -> None:
    asked = Plan(recurrent_state="bfloat16")
    kept = {
        family: choose_state(asked, family_graph(family), ALL_CANDIDATES, [], lambda _: None).dtype
        for family in ("lfm2", "qwen3_5")
    }
    assert kept == {"lfm2": "float32", "qwen3_5": "bfloat16"}


def test_budgets_count_the_state_that_an_engine_holds() -> None:
    graph, table = family_graph("qwen3_5"), CostTable("ort-cpu", 1, SLOTS, 64, {}, {}, {})
    kept = {dtype: kept_in(graph, dtype) for dtype in ("float32", "bfloat16")}
    delta = sum(
        tensor.nbytes
        for one in graph.record.state
        for tensor in (one.tensors if isinstance(one, Recurrent) else ())
        if tensor.name == "delta"
    )
    assert slot_bytes(kept["float32"].state) - slot_bytes(kept["bfloat16"].state) == delta // 2 > 0
    counted = {dtype: table.cache(record, KVCache()).bytes for dtype, record in kept.items()}
    assert counted["float32"] - counted["bfloat16"] == SLOTS * SEQUENCE_SLOTS * delta // 2
