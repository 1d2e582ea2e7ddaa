"""A graph that runs in segments gives what it gives as a whole, whatever the segments are and however it is stored."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.portable_model import load_graph, read_float32, save_graph
from tapeout.segments import SegmentCall, SegmentedGraph
from tests.exported import family_graph

FAMILIES = ("llama", "qwen2", "gemma2", "gpt2")  # a head of its own, tied, weights that are computed with, [in, out]
Feeds = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module", params=FAMILIES)
def graph(request: pytest.FixtureRequest) -> Artifact[PortableGraph]:
    return family_graph(request.param, "bfloat16")


def feeds(graph: Artifact[PortableGraph]) -> Feeds:
    record, generator = graph.record, np.random.default_rng(0)
    shape = (2, record.kv_heads, 3, record.head_size)
    past = {
        f"past_key_values.{n}.{part}": generator.standard_normal(shape, np.float32)
        for n in range(record.layers)
        for part in ("key", "value")
    }
    ids = generator.integers(3, record.vocab_size, (2, 4))
    return {
        "input_ids": ids,
        "attention_mask": np.ones((2, 7), np.int64),
        "position_ids": np.arange(3, 7)[None].repeat(2, 0),
        **past,
    }


def whole(path: Path, given: Feeds) -> Feeds:
    """What any user of ONNX Runtime gets from the file."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    results = session.run(names, {name: array for name, array in given.items() if name in inputs})
    return dict(zip(names, map(np.asarray, results), strict=True))


class Kept(SegmentCall):
    """A call with whole inputs, whose outputs are kept."""

    def __init__(self, given: Feeds) -> None:
        self.given, self.outputs = given, Feeds()

    def feed(self, name: str) -> np.ndarray[Any, Any]:
        return self.given[name]

    def take(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self.outputs[name] = array


def run(graph: SegmentedGraph, given: Feeds) -> Feeds:
    call = Kept(given)
    graph.run([call])
    return call.outputs


def assert_same(found: Feeds, expected: Feeds) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_file_is_a_valid_model_of_16_bit_weights(graph: Artifact[PortableGraph], tmp_path: Path) -> None:
    """In a copy of the folder: onnx refuses weights that are linked, as those of the graph are."""
    path = Path(shutil.copytree(graph.folder, tmp_path / "copy")) / "model.onnx"
    onnx.checker.check_model(str(path))
    stored = {tensor.data_type for tensor in onnx.load(path, load_external_data=False).graph.initializer
              if tensor.external_data}  # fmt: skip
    assert stored == {onnx.TensorProto.BFLOAT16}


def test_segments_compute_what_the_whole_does(graph: Artifact[PortableGraph]) -> None:
    path, given_ = graph.folder / "model.onnx", feeds(graph)
    expected = whole(path, given_)
    one, many = SegmentedGraph(path), SegmentedGraph(path, segment_bytes=1)
    assert len(one.segments) == 1 and len(many.segments) > 2 * graph.record.layers
    assert_same(run(one, given_), expected)
    assert_same(run(many, given_), expected)
    assert_same(run(many, given_), expected)  # and again


def test_weights_are_read_once_for_all_calls(graph: Artifact[PortableGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, the second of which continues the first: its cache is what the first one's becomes."""
    path, given_ = graph.folder / "model.onnx", feeds(graph)
    cut, read = SegmentedGraph(path, segment_bytes=1), list[str]()
    monkeypatch.setattr(
        "tapeout.expert_parts.read_float32",
        lambda tensor, rows: read.append(tensor.name) or read_float32(tensor, rows),
    )
    first, alone = Kept(given_), run(cut, given_)
    again = {**given_, "attention_mask": np.ones((2, 11), np.int64), "position_ids": given_["position_ids"] + 4}
    after = again | {
        name.replace("present", "past_key_values"): array for name, array in alone.items() if name != "logits"
    }
    expected = run(cut, after)
    read.clear()

    class Continued(Kept):
        def feed(self, name: str) -> np.ndarray[Any, Any]:
            return first.outputs.pop(name.replace("past_key_values", "present")) if "past" in name else again[name]

    second = Continued(again)
    cut.run([first, second])
    assert sorted(read) == sorted(name for names in cut.segments for name in names)
    assert_same(second.outputs, expected)


def test_any_limit_holds_and_changes_nothing(graph: Artifact[PortableGraph]) -> None:
    path, given_ = graph.folder / "model.onnx", feeds(graph)
    sizes = {name: 4 * math.prod(value.shape.numpy()) for name, value in load_graph(path).graph.initializers.items()}
    expected = run(SegmentedGraph(path), given_)

    @settings(max_examples=8, deadline=None)
    @given(limit=st.integers(1, 400_000))
    def holds(limit: int) -> None:
        cut = SegmentedGraph(path, segment_bytes=limit)
        for names in cut.segments:
            assert sum(sizes[name] for name in names) <= limit or len(names) <= 2  # of one node
        assert_same(run(cut, given_), expected)

    holds()


def test_a_stored_graph_reads_back_as_it_was(graph: Artifact[PortableGraph], tmp_path: Path) -> None:
    path = graph.folder / "model.onnx"
    shutil.copy(graph.folder / "model.safetensors", tmp_path)
    save_graph(load_graph(path), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == path.read_bytes()
