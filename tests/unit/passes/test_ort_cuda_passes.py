"""Graphs lowered for ``ort-cuda``: what each operator is given, and what is refused or said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from engines.bundle import ATTENTION_METADATA, SLOT_MAPPING, EngineBundle
from engines.compile import build
from engines.load import find_target
from engines.passes.graph import rotary_tables
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.schemes import Scheme
from tests.exported import family_graph
from tests.ort_cuda.bundles import cuda_bundle, kv_scales, rounded

# Inputs of PagedAttention by their places.
COS, SLOTS, QUERY_NORM, KEY_SCALE, METADATA = 8, 10, 12, 14, 16


def graph_of(bundle: Artifact[EngineBundle]) -> ir.Graph:
    return ir.load(bundle.folder / "model.onnx").graph


def attention(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "PagedAttention"]


def floats(graph: ir.Graph) -> set[str]:
    """Names of float32 values, logits aside."""
    values = [*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs)]
    return {value.name or "" for value in values if value.dtype == ir.DataType.FLOAT} - {"logits"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral-short-window"])
@pytest.mark.parametrize("int8_cache", [False, True])
def test_attention_gets_bounds_slots_and_caches_in_their_layout(family: str, int8_cache: bool, tmp_path: Path) -> None:
    bundle = cuda_bundle(family, tmp_path / "bundle", int8_cache=int8_cache)
    graph, record = graph_of(bundle), family_graph(family).record
    nodes = attention(graph)
    assert len(nodes) == record.layers
    for node in nodes:
        names = [None if value is None else value.name for value in node.inputs]
        assert names[SLOTS] == SLOT_MAPPING and names[METADATA] == ATTENTION_METADATA
        assert names[1] is names[2] is None, "queries, keys and values stay packed"
        assert names[COS] and node.attributes["do_rotary"].as_int() == 1
        cache = node.inputs[3]
        assert cache is not None and cache.shape is not None and cache.is_graph_input()
        assert list(cache.shape)[2:] == [record.kv_heads, record.head_size]
        assert cache.dtype == (ir.DataType.INT8 if int8_cache else ir.DataType.FLOAT16)
        scales = node.inputs[KEY_SCALE]
        assert (scales is not None) == int8_cache
        if scales is not None:
            assert scales.dtype == ir.DataType.FLOAT and list(scales.shape or ()) == [
                record.kv_heads,
                1,
                record.head_size,
            ]
            assert node.attributes["k_quant_type"].as_string() == node.attributes["v_quant_type"].as_string()
            assert node.attributes["k_quant_type"].as_string() == "PER_CHANNEL"
    metadata = next(value for value in graph.inputs if value.name == ATTENTION_METADATA)
    assert metadata.dtype == ir.DataType.INT32 and list(metadata.shape or ()) == [3]
    assert {name.rpartition("scale")[1] for name in floats(graph)} <= {"scale"}, "all else is float16"
    assert {value.name for value in graph.outputs} == {"logits"}


def test_norms_of_heads_are_fused(tmp_path: Path) -> None:
    graph = graph_of(cuda_bundle("qwen3", tmp_path / "bundle"))
    for node in attention(graph):
        weights = node.inputs[QUERY_NORM : QUERY_NORM + 2]
        assert all(value is not None and value.dtype == ir.DataType.FLOAT16 for value in weights)
        assert node.attributes["qk_norm_epsilon"].as_float() == pytest.approx(1e-6)
    assert not {node.op_type for node in graph} & {"RMSNormalization", "Shape", "Transpose"}


def test_soft_caps_windows_and_folded_norm_weights(tmp_path: Path) -> None:
    bundle = cuda_bundle("gemma2", tmp_path / "bundle")
    graph = graph_of(bundle)
    windows = [node.attributes.get("local_window_size") for node in attention(graph)]
    assert any(windows) and not all(windows)
    assert all(node.attributes["softcap"].as_float() > 0 for node in attention(graph))
    assert "Add" not in bundle.record.operator_counts, "1 + weight is folded"
    checkpoint = open_checkpoint(family_graph("gemma2").folder)
    name = "model.norm.weight"
    folded = graph.initializers["model.norm.folded.weight"].const_value
    assert folded is not None
    np.testing.assert_array_equal(folded.numpy(), (checkpoint.weight(name) + 1).astype(np.float16))


STORED = {
    "4 bits": (Scheme(bits=4, group_size=32, symmetric=True), (4, 32), ""),
    "larger groups": (Scheme(bits=4, group_size=64, symmetric=True), (4, 32), ""),
    "6 bits": (Scheme(bits=6, group_size=32, symmetric=True), (8, 32), ""),
    "zero points": (Scheme(bits=4, group_size=32, symmetric=False), (4, 32), "zero points"),
    "small groups": (Scheme(bits=8, group_size=16, symmetric=True), (8, 16), "too small for the fused kernel"),
    "floats of 4 bits": (Scheme(format="mxfp4", bits=4, group_size=32, symmetric=True), (8, 32), ""),
    "static int8": (Scheme(bits=8, activations="int8"), None, "static int8 inputs"),
}


@pytest.mark.parametrize(("scheme", "stored", "note"), STORED.values(), ids=STORED)
def test_codes_are_stored_as_the_provider_takes_them(
    scheme: Scheme, stored: tuple[int, int] | None, note: str, tmp_path: Path
) -> None:
    weights, _ = rounded("llama", qkv=scheme)
    bundle = cuda_bundle("llama", tmp_path / "bundle", weights)
    nodes = [node for node in graph_of(bundle) if node.op_type == "MatMulNBits"]
    found = {(n.attributes["bits"].as_int(), n.attributes["block_size"].as_int()) for n in nodes}
    assert found == ({stored} if stored else set())
    (report,) = (report for report in bundle.record.passes if report.name == "nbits_linears")
    said = [sentence for sentence in report.declined if sentence.startswith("layers.0.qkv: ")]
    assert bool(said) == bool(note) and all(note in sentence for sentence in said)
    assert bundle.record.plan["layers.0.o"] == "MatMul fp16"
    for node in nodes:
        scales = node.inputs[2]
        assert scales is not None and scales.dtype == ir.DataType.FLOAT16 and len(node.inputs) <= 4


def test_a_bundle_names_the_runtime_and_no_gpu(tmp_path: Path) -> None:
    record = cuda_bundle("llama", tmp_path / "bundle").record
    (hardware,) = record.hardware
    assert record.target == "ort-cuda" and hardware.libraries == {"onnxruntime-gpu": "1.31.1"}
    assert hardware.features == () and hardware.more_features and hardware.level == ""
    assert {tensor.dtype for one in record.io.state for tensor in one.tensors} == {"float16"}


def test_the_same_bundle_is_built_twice(tmp_path: Path) -> None:
    first, second = (cuda_bundle("llama", tmp_path / name).digest for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize(
    ("family", "operator"), [("lfm2", "CausalConv"), ("mixtral", "Experts"), ("granite_swa", "AttentionWithSinks")]
)
def test_operators_other_than_attention_are_refused_by_name(family: str, operator: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"the model has {operator}, which ort-cuda does not compute"):
        cuda_bundle(family, tmp_path / "bundle")


def test_rotary_angles_in_float16_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rotary embedding that is written in a way that no pass knows."""
    monkeypatch.setattr(rotary_tables, "_halves", lambda _: None)
    with pytest.raises(BuildError, match="rotary angles in the graph") as refused:
        cuda_bundle("youtu", tmp_path / "bundle")
    assert "ort-cpu" in refused.value.remedy


def test_a_4_bit_cache_is_refused(tmp_path: Path) -> None:
    graph = family_graph("llama")
    with pytest.raises(BuildError, match="a KV cache in int4, where ort-cuda has float16 and int8"):
        build(
            graph,
            open_checkpoint(graph.folder),
            tmp_path / "bundle",
            target=find_target("ort-cuda"),
            precision="test",
            slots=2,
            kv_scales=kv_scales(graph),
            kv_dtype="int4",
            parents={"graph": graph},
        )
