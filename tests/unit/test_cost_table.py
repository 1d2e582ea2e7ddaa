"""What units cost, from what products and attention do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.costs import timing
from engines.costs.attention import TimedAttention
from pipeline.stages.cost_table import cost_table, timed
from quantization.cost_table import CostTable
from quantization.plan import PlanPart
from quantization.plan_search import write_plan
from quantization.units import CACHE_CANDIDATES, candidates_for
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe, Build, DataSource, KVCache, ModelSource, Plan
from tapeout.schemes import EMBEDDING_CANDIDATES, Scheme
from tapeout.state import SEQUENCE_SLOTS, Paged, Recurrent, StateTensor, paged_buffers, recurrent_buffers
from tests.graphs import llama_graph
from tests.native import own_cache
from tests.states import attention

HEAD = (128, 1024)
EIGHT_BITS = Scheme(bits=8, group_size=64, symmetric=True)


@pytest.fixture(scope="module")
def graph(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact[PortableGraph]:
    return llama_graph(tiny_checkpoint, tmp_path_factory.mktemp("graph") / "graph")


@given(
    slots=st.integers(1, 32),
    context=st.integers(1, 4096),
    settings=st.sampled_from(CACHE_CANDIDATES),
    layers=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([8, 16]), st.sampled_from([8, 16, 48])), min_size=1),
)
def test_bytes_of_a_cache_are_those_of_its_buffers_and_scales(
    graph: Artifact[PortableGraph],
    slots: int,
    context: int,
    settings: KVCache,
    layers: list[tuple[int, int, int]],
) -> None:
    """Layers have KV heads, and channels of keys and values, of their own."""

    def state(dtype: str) -> tuple[Paged, ...]:
        return tuple(attention(n, heads, size, dtype, values) for n, (heads, size, values) in enumerate(layers))

    record = graph.record.model_copy(update={"state": state("float32")})
    buffers = sum(
        math.prod(shape) * (4 if element == "float32" else 1)
        for _, shape, element in paged_buffers(state(settings.dtype), slots, context)
    )
    channels = sum(heads * (size + values) for heads, size, values in layers)
    scales = 0 if settings.dtype == "float32" else 4 * channels
    found = CostTable("ort-cpu", 1, slots, context, {}, {}, {}).cache(record, settings)
    assert found.bytes == buffers + scales and not found.seconds


def test_attention_of_layers_with_other_heads_is_timed_by_itself(
    graph: Artifact[PortableGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiMo-V2-Flash keeps 4 KV heads of layers that attend to all tokens, and 8 of those with a window."""
    state = (attention(0, 4, 8, "float32", 16), attention(1, 8, 8, "float32"), attention(2, 8, 8, "float32"))
    timed_heads: list[tuple[int, int, int]] = []

    def costs(_timer: Any, operator: Any, tokens: list[int]) -> dict[str, dict[int, float]]:
        if isinstance(operator, TimedAttention):
            timed_heads.append((operator.graph.kv_heads, operator.graph.head_size, operator.graph.value_size))
            return {name: dict.fromkeys(tokens, float(operator.graph.kv_heads)) for name in operator.names}
        return {name: dict.fromkeys(tokens, 0.0) for name in operator.names}

    monkeypatch.setattr(timing.OperatorTimer, "costs", costs)
    record = graph.record.model_copy(update={"state": state, "layers": 3})
    found = cost_table(recipe(), record, measure=True)
    assert timed_heads == [(4, 8, 16), (8, 8, 8)]
    cache = recipe().plan.kv_cache
    assert isinstance(cache, KVCache)
    seconds = found.cache(record, cache).seconds
    assert seconds and all(taken == pytest.approx(4 + 8 + 8) for taken in seconds.values())


@given(slots=st.integers(1, 32), settings=st.sampled_from(CACHE_CANDIDATES))
def test_recurrent_state_counts_as_an_engine_holds_it(
    graph: Artifact[PortableGraph], slots: int, settings: KVCache
) -> None:
    state = Recurrent(layer=9, tensors=(StateTensor(name="delta", shape=(2, 3, 5), dtype="float32"),))
    with_state = graph.record.model_copy(update={"state": (*graph.record.state, state)})
    table = CostTable("ort-cpu", 1, slots, 64, {}, {}, {})
    held = sum(4 * math.prod(shape) for _, shape, _ in recurrent_buffers([state], SEQUENCE_SLOTS * slots))
    assert table.cache(with_state, settings).bytes == table.cache(graph.record, settings).bytes + held


def test_attention_counts_once_a_layer_and_a_prompt_one_position_of_the_head(graph: Artifact[PortableGraph]) -> None:
    head = {"8-bit g64": {1: 1.0, 8: 4.0, 128: 50.0}}
    table = CostTable("ort-cpu", 1, 8, 64, {HEAD: {"8-bit g64": 100}}, {HEAD: head}, {"int8": {8: 0.5}})
    assert table.embeddings(graph.record, EIGHT_BITS).seconds == {1: 1.0, 8: 4.0, 128: 1.0}
    assert table.embeddings(graph.record, EIGHT_BITS).bytes == 100
    assert table.cache(graph.record, KVCache()).seconds == {8: 0.5 * graph.record.layers}
    assert table.cache(graph.record, KVCache(granularity="per_tensor")).seconds == {8: 0.5 * graph.record.layers}
    *linears, tied = graph.record.groups
    groups = (*linears, tied.model_copy(update={"members": ("lm_head.weight",)}))
    untied = graph.record.model_copy(update={"tied_embeddings": False, "groups": groups})
    assert table.embeddings(untied, EIGHT_BITS).bytes == 200
    part = CostTable("ort-cpu", 1, 8, 64, {HEAD: {"8-bit g64": 100}}, {HEAD: {"8-bit g64": {128: 50.0}}}, {})
    assert not part.embeddings(graph.record, EIGHT_BITS).seconds  # a row alone was not timed


def recipe(**settings: Any) -> BaseRecipe:
    return BaseRecipe(
        model=ModelSource(source="file:m"),
        data=DataSource(source="file:d"),
        plan=Plan(workload={1: 0.5, 24: 0.5}, context=32, **settings),
        build=Build(slots=16, threads=1),
    )


def test_a_written_plan_gets_the_times_of_a_chosen_one(
    graph: Artifact[PortableGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(timing, "ROUNDS", 1)
    written = recipe()
    plan = write_plan(written.plan, graph, tmp_path / "plan").record

    def seconds() -> dict[str, float | None]:
        found = timed(plan, written, graph.record)
        parts: list[PlanPart] = [*found.units, found.embeddings, found.kv_cache]
        assert found.kv_cache.bytes and plan.kv_cache.bytes is None
        return {part.name: part.seconds for part in parts}

    assert set(seconds().values()) == {None}
    chosen = cost_table(recipe(schemes="auto", embeddings="auto", kv_cache="auto"), graph.record, measure=True)
    assert chosen.seconds[HEAD].keys() == {kernel.name for kernel in candidates_for(128, EMBEDDING_CANDIDATES)}
    assert chosen.attention.keys() == {cache.dtype for cache in CACHE_CANDIDATES}
    found = seconds()
    head, cache = chosen.seconds[HEAD]["6-bit g32"], chosen.attention["int8"]
    assert found["embeddings"] == pytest.approx(0.5 * head[1] + 0.5 * head[1] / 24)
    assert found["KV cache"] == pytest.approx(graph.record.layers * (0.5 * cache[1] + 0.5 * cache[24] / 24))
    # No menu holds this kernel at this width, so it has no time.
    assert found["layers.0.down"] is None
