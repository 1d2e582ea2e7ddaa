"""What build writes: passes reported, weights once, a record that says what runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest

from engines.compile import ALIGNMENT_BYTES, build, lower, write_weights
from engines.graph_check import structure
from engines.kernels.cpu.packing import packed
from engines.load import find_target, load
from engines.passes.base import Lowering, PassResult
from engines.passes.graph import linears
from engines.passes.onnxruntime import linear_kernels, silu
from engines.sequences import Sequences
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tapeout.state import Paged
from tests.exported import build_float, family_graph
from tests.families import LAYERS, VOCAB_SIZE
from tests.lowering import FixedWeights, linear, lowering, model_of, named, op, parameter, value
from tests.states import attention, kv_dtype

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def graph() -> Artifact[PortableGraph]:
    return family_graph("qwen2")  # tied, with biases on q, k and v


def test_a_float_bundle_says_what_it_is(graph: Artifact[PortableGraph], tmp_path: Path) -> None:
    said: list[str] = []
    arguments = {"target": find_target("ort-cpu"), "precision": "float32", "slots": 3, "kv_scales": {}}
    weights = open_checkpoint(graph.folder)
    bundle = build(graph, weights, tmp_path / "a", parents={"graph": graph}, progress=said.append, **arguments)
    record = bundle.record
    assert [report.name for report in record.passes] == said[: len(record.passes)]
    assert [report.name for report in record.passes] == [
        step.__name__.rpartition(".")[2] for step in find_target("ort-cpu").passes().every
    ]
    matched = {report.name: report.matched for report in record.passes}
    assert matched == {
        "rotary_tables": 2 * LAYERS,
        "latent_keys": 0,
        "folded": 0,
        "linears": 7 * LAYERS + 1,
        "merge_linears": 2 * LAYERS,
        "cached_attention": LAYERS,
        "transposes": 0,
        "linear_parts": 0,
        "recurrences": 0,
        "recurrent_conv": 0,
        "native_experts": 0,
        "routers": 0,
        "token_rows": 0,
        "norms": 2 * LAYERS + 1,
        "silu": LAYERS,
        "logit_positions": 1,
        "static_int8_linears": 0,
        "block_linears": 0,
        "linear_kernels": 4 * LAYERS + 1,
        "greedy_head": 0,
        "linear_inputs": 0,
        "gated_norms": LAYERS,  # gates of linears that are not native
        "norm_rows": 0,
        "native_norms": 0,
        "embedding": 0,
    }
    assert record.operator_counts["CachedAttention"] == LAYERS and record.operator_counts["MatMul"] == 4 * LAYERS + 1
    assert record.plan["layers.0.qkv"] == "MatMul fp32" and record.plan["embedding"] == "Gather fp32"
    assert (record.io.slots, record.io.vocab_size, kv_dtype(record.io)) == (3, VOCAB_SIZE, "float32")
    assert record.io.state == tuple(attention(layer, 2, 16, "float32") for layer in range(LAYERS))
    assert set(record.io.inputs) == {"input_ids", "logit_positions", "offsets", "starts", "block_table"}
    assert bundle.parents == {"graph": graph.ref}
    assert {"model.onnx", "weights.bin", "tokenizer.json", "config.json"} <= set(bundle.files)
    assert [name for name in bundle.files if name.startswith("kernels/")] == [
        f"kernels/{bundle.record.hardware[0].level}.so"
    ]
    again = build(graph, weights, tmp_path / "b", parents={"graph": graph}, **arguments)
    assert again.digest == bundle.digest  # the same inputs, the same bundle


def test_a_record_says_what_each_layer_sees(tmp_path: Path) -> None:
    graph = family_graph("gemma2")
    state = build_float(graph, tmp_path / "bundle", 1).record.io.state
    assert [(one.layer, one.window) for one in state if isinstance(one, Paged)] == [(0, 8), (1, 0)]


def test_a_tied_table_is_stored_once_and_read_by_both_ends(
    graph: Artifact[PortableGraph], tmp_path: Path, operators_of: str
) -> None:
    checkpoint = open_checkpoint(graph.folder)
    table = round_to_nearest(checkpoint.weight(EMBEDDING), Scheme(bits=8, group_size=32, symmetric=True))
    tensors = {name: checkpoint.linear(name) for name in checkpoint.names()}
    bundle = build(
        graph,
        FixedWeights({**tensors, EMBEDDING: table}),
        tmp_path / "bundle",
        target=find_target("ort-cpu"),
        precision="mixed",
        slots=1,
        kv_scales={},
        parents={},
    )
    native = operators_of == "native"
    readers = ("BlockGather", "HeadLinear") if native else ("GatherBlockQuantized", "MatMulNBits")
    assert [bundle.record.operator_counts[reader] for reader in readers] == [1, 1]
    data = (bundle.folder / "weights.bin").read_bytes()
    codes = (packed(table.codes, 8) if native else table.codes).tobytes()
    assert data.count(codes) == 1
    engine = Sequences(load(bundle.folder, threads=1))
    try:
        assert np.isfinite(engine.prefill(0, [3, VOCAB_SIZE - 1])).all()
    finally:
        engine.close()


def test_every_pass_reports_its_matches_and_the_nodes_it_left() -> None:
    x = value("x", ["rows", 32])
    y = linear(x, "block.fc", np.ones((24, 32), np.float32))
    gated = op("Mul", [y, op("Sigmoid", [y], ["rows", 24])], ["rows", 24])
    lowered = lowering(model_of([x], [named("y", gated)]))
    reports = lower(lowered, (linears, silu, linear_kernels), lambda _: None)
    assert [(r.name, r.matched, r.nodes_before, r.nodes_after) for r in reports] == [
        ("linears", 1, 4, 3),
        ("silu", 1, 3, 2),
        ("linear_kernels", 1, 2, 2),
    ]


def consumes_nothing(model: ir.Model) -> None:
    """A consumer whose producer was removed."""
    node = next(n for n in model.graph if n.op_type == "Add")
    node.replace_input_with(0, ir.Value(name="gone", shape=ir.Shape(["rows", 32])))


def mistypes(model: ir.Model) -> None:
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.INT64)


def misshapes(model: ir.Model) -> None:
    model.graph.outputs[0].shape = ir.Shape(["rows", 7])


def misspells(model: ir.Model) -> None:
    next(n for n in model.graph if n.op_type == "Add").op_type = "Ad"


@pytest.mark.parametrize("fault", [consumes_nothing, mistypes, misshapes, misspells])
def test_a_pass_that_leaves_an_invalid_graph_is_named(fault: Callable[[ir.Model], None]) -> None:
    def run(lowered: Lowering) -> PassResult:
        fault(lowered.model)
        return PassResult(1)

    x = value("x", ["rows", 32])
    total = op("Add", [x, parameter("block.bias", np.ones(512, np.float32)[:32])], ["rows", 32])
    lowered = lowering(model_of([x], [named("y", total)]))
    planted = SimpleNamespace(__name__="engines.passes.planted", run=run)
    with pytest.raises(BuildError, match="invalid after the pass planted"):
        lower(lowered, (silu, planted), lambda _: None)


def test_the_check_reads_no_weights() -> None:
    x = value("x", ["rows", 512])
    model = model_of([x], [named("y", op("Add", [x, parameter("block.bias", np.ones(512, np.float32))]))])
    before = list(model.graph.inputs), dict(model.graph.initializers)
    assert not structure(model).graph.initializer
    assert (list(model.graph.inputs), dict(model.graph.initializers)) == before


def test_large_tensors_lie_aligned_equal_ones_once_and_small_ones_stay_inside(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    big, other = (rng.standard_normal((16, 32)).astype(np.float32) for _ in range(2))
    arrays = {"a.weight": big, "b.weight": big.copy(), "c.weight": other, "d.small": np.ones(3, np.float32)}
    x = value("x", [16, 32])
    total = x
    for name, array in arrays.items():
        if name != "d.small":
            total = op("Add", [total, parameter(name, array)], [16, 32])
    model = model_of([x], [named("y", total)])
    model.graph.register_initializer(parameter("d.small", arrays["d.small"]))
    size = write_weights(model, tmp_path / "weights.bin")
    stored = {name: v.const_value for name, v in model.graph.initializers.items()}
    offsets: dict[str, int | None] = {n: t.offset for n, t in stored.items() if isinstance(t, ir.ExternalTensor)}
    assert set(offsets) == {"a.weight", "b.weight", "c.weight"}
    assert offsets["a.weight"] == offsets["b.weight"] != offsets["c.weight"]
    assert all((offset or 0) % ALIGNMENT_BYTES == 0 for offset in offsets.values())
    assert size == (tmp_path / "weights.bin").stat().st_size == ALIGNMENT_BYTES + other.nbytes
    for name, array in arrays.items():
        tensor = stored[name]
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array)
