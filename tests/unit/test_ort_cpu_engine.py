"""The loaded engine, float and quantized: rows that know nothing of each other, and calls that cannot be meant."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.bundle import EngineBundle
from engines.compile import build
from engines.load import find_target, load
from engines.protocol import FloatArray
from engines.sequences import Sequences
from quantization.compressed_tensors import open_checkpoint
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, FingerprintError, RequestError
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.exported import family_graph
from tests.families import LAYERS, MAX_POSITIONS, VOCAB_SIZE
from tests.lowering import FixedWeights
from tests.states import kv_dtype

SLOTS = 9
FORMATS = {
    "qkv": Scheme(bits=8, group_size=32, symmetric=True),
    "gate_up": Scheme(bits=4, group_size=32, symmetric=True),
    "lm_head": Scheme(bits=8, group_size=64, symmetric=True),
}
OTHERS = Scheme(bits=4, group_size=32, symmetric=False)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, VOCAB_SIZE, n).tolist() for n in (3, 40, 1, 17, 26, 9, 2, 33)]


def quantized_weights(graph: Artifact[PortableGraph]) -> FixedWeights:
    """Every linear rounded to nearest, in a mix of formats; a tied head is the embedding, once."""
    checkpoint = open_checkpoint(graph.folder)
    tensors = {name: checkpoint.linear(name) for name in checkpoint.names()}
    for group in graph.record.groups:
        for member in group.members:
            tensors[member] = round_to_nearest(
                checkpoint.weight(member), FORMATS.get(group.name.rpartition(".")[2], OTHERS)
            )
    return FixedWeights(tensors)


@pytest.fixture(scope="module")
def graph() -> Artifact[PortableGraph]:
    return family_graph("llama-rope-scaling")


@pytest.fixture(scope="module", params=["float32", "quantized", "4-bit KV"])
def bundle(
    request: pytest.FixtureRequest, graph: Artifact[PortableGraph], tmp_path_factory: pytest.TempPathFactory
) -> Artifact[EngineBundle]:
    quantized, bits = request.param != "float32", 4 if request.param == "4-bit KV" else 8
    step = 0.05 if bits == 8 else 0.3
    scale = np.full((graph.record.kv_heads, graph.record.head_size), step, np.float32)
    scales = {f"layers.{n}.{part}_scale": scale for n in range(LAYERS) for part in ("k", "v")} if quantized else {}
    return build(
        graph,
        # A 4-bit cache makes much of a value that falls the other way, so nothing else rounds beside it.
        quantized_weights(graph) if quantized and bits == 8 else open_checkpoint(graph.folder),
        tmp_path_factory.mktemp("bundle") / request.param,
        target=find_target("ort-cpu"),
        precision=request.param,
        slots=SLOTS,
        kv_scales=scales,
        kv_dtype=f"int{bits}",
        parents={},
    )


@pytest.fixture(scope="module")
def engine(bundle: Artifact[EngineBundle]) -> Iterator[Sequences]:
    opened = Sequences(load(bundle.folder, threads=1))
    yield opened
    opened.close()


def assert_same(actual: FloatArray, expected: FloatArray) -> None:
    """Equal within float re-association, and the same greedy token."""
    np.testing.assert_allclose(actual, expected, atol=2e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(actual.argmax(axis=-1), expected.argmax(axis=-1))


def greedy(
    engine: Sequences, prompts: Sequence[Sequence[int]], steps: int, *, first_slot: int = 0
) -> list[list[FloatArray]]:
    """Logits of ``steps`` greedy tokens of each prompt, decoded together."""
    rows = [[engine.prefill(first_slot + i, prompt)[0]] for i, prompt in enumerate(prompts)]
    for step in range(steps - 1):
        lengths = [len(prompt) + step for prompt in prompts]
        logits = engine.decode([int(row[-1].argmax()) for row in rows], lengths, first_slot=first_slot)
        for row, new in zip(rows, logits, strict=True):
            row.append(new)
    return rows


@pytest.fixture(scope="module")
def alone(engine: Sequences) -> list[list[FloatArray]]:
    """Each prompt by itself in slot 0."""
    return [greedy(engine, [prompt], 5)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("positions", [[], [0]])
def test_a_step_after_a_piece_of_one_token_is_fed_anew(engine: Sequences, positions: list[int]) -> None:
    engine.prefill(0, [5])
    expected = engine.decode([7], [1])
    engine.prefill(0, [5], positions=positions)
    np.testing.assert_array_equal(engine.decode([7], [1]), expected)
    assert engine.decode_greedy([7], [1]).tolist() == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize("batch", range(2, len(PROMPTS) + 1))
def test_a_sequence_does_not_depend_on_its_neighbours(
    engine: Sequences, alone: list[list[FloatArray]], batch: int
) -> None:
    order = np.random.default_rng(batch).permutation(len(PROMPTS))[:batch]
    together = greedy(engine, [PROMPTS[i] for i in order], 5, first_slot=SLOTS - batch)
    for index, row in zip(order, together, strict=True):
        assert_same(np.stack(row), np.stack(alone[index]))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_chunks_of_any_size_are_one_prefill(engine: Sequences, data: st.DataObject) -> None:
    tokens = PROMPTS[1]
    whole = engine.prefill(0, tokens, positions=range(len(tokens)))
    parts: list[FloatArray] = []
    start = 0
    while start < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - start))
        parts.append(engine.prefill(1, tokens[start : start + size], start=start, positions=range(size)))
        start += size
    assert_same(np.concatenate(parts), whole)


def test_logits_are_of_the_tokens_asked_for(engine: Sequences) -> None:
    tokens = PROMPTS[3]
    every = engine.prefill(0, tokens, positions=range(len(tokens)))
    assert every.shape == (len(tokens), VOCAB_SIZE) and every.dtype == np.float32
    assert_same(engine.prefill(0, tokens, positions=[0, 4]), every[[0, 4]])
    assert_same(engine.prefill(0, tokens), every[-1:])
    assert engine.prefill(0, tokens, positions=[]).shape == (0, VOCAB_SIZE)


def test_what_stood_behind_the_start_is_overwritten(engine: Sequences) -> None:
    """One shared context, followed by several continuations in turn, a long one first."""
    context, endings = PROMPTS[3], (PROMPTS[4], PROMPTS[0])
    engine.prefill(0, context)
    continued = [engine.prefill(0, ending, start=len(context)) for ending in endings]
    for ending, logits in zip(endings, continued, strict=True):
        assert_same(logits, engine.prefill(1, [*context, *ending]))


def test_a_copied_slot_continues_as_its_source_would(engine: Sequences) -> None:
    engine.prefill(2, PROMPTS[3])
    engine.prefill(5, PROMPTS[1])  # the target held something longer
    engine.copy_slot(2, 5, 10)
    rest = PROMPTS[3][10:]
    assert_same(engine.prefill(5, rest, start=10), engine.prefill(2, rest, start=10))
    assert_same(engine.decode([7], [17], first_slot=5), engine.decode([7], [17], first_slot=2))


def test_tokens_chosen_in_the_graph_are_those_of_the_largest_logits(engine: Sequences) -> None:
    prompts = [[3, 5, 7], [11, 2], [4, 4, 9, 1]]
    for slot, prompt in enumerate(prompts):
        engine.prefill(slot, prompt)
    tokens, lengths = [8, 6, 10], [len(prompt) for prompt in prompts]
    for _ in range(4):
        expected = engine.decode(tokens, lengths).argmax(axis=1)
        chosen = engine.decode_greedy(tokens, lengths)  # writes the same positions again
        assert chosen.dtype == np.int64 and chosen.tolist() == expected.tolist()
        tokens, lengths = chosen.tolist(), [length + 1 for length in lengths]


def test_buffers_take_what_the_contract_says(engine: Sequences, bundle: Artifact[EngineBundle]) -> None:
    """A token's keys and values in all layers, in every position of every slot."""
    has, io = engine.engine.capabilities, bundle.record.io
    assert has.block_bytes == has.block_tokens * io.token_bytes
    assert has.blocks * has.block_tokens >= SLOTS * MAX_POSITIONS
    assert (has.shares_blocks, has.block_tokens) == (True, 64)
    channels = sum(math.prod(tensor.shape) for state in io.state for tensor in state.tensors)
    assert [len(state.tensors) for state in io.state] == [2] * LAYERS
    assert io.token_bytes / channels == {"float32": 4, "int8": 1, "int4": 0.5}[kv_dtype(io)]


def test_the_engine_says_what_its_bundle_says(engine: Sequences, bundle: Artifact[EngineBundle]) -> None:
    assert engine.digest == bundle.digest
    assert (engine.vocab_size, engine.slots, engine.max_tokens) == (VOCAB_SIZE, SLOTS, MAX_POSITIONS)
    fewer = Sequences(load(bundle.folder, threads=1, slots=2))
    assert fewer.slots == 2
    fewer.close()


@pytest.mark.parametrize(
    "call",
    [lambda e: e.prefill(SLOTS, [3]), lambda e: e.decode([3], [0]), lambda e: e.copy_slot(0, -1, 1)],
    ids=["prefill", "decode", "copy_slot"],
)
def test_a_call_that_cannot_be_meant_is_refused(engine: Sequences, call: Callable[[Sequences], object]) -> None:
    with pytest.raises(RequestError):  # which calls: test_step_inputs.py
        call(engine)


def test_every_position_of_a_slot_can_be_used(engine: Sequences) -> None:
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, MAX_POSITIONS).tolist()
    whole = engine.prefill(0, tokens, positions=[MAX_POSITIONS - 1])
    engine.prefill(1, tokens[:-1])
    assert_same(engine.decode(tokens[-1:], [MAX_POSITIONS - 1], first_slot=1), whole)


def copied(bundle: Artifact[EngineBundle], folder: Path) -> Path:
    shutil.copytree(bundle.folder, folder)
    return folder


def test_a_bundle_of_other_libraries_or_hardware_is_refused(bundle: Artifact[EngineBundle], tmp_path: Path) -> None:
    record = bundle.record
    foreign = record.hardware[0].model_copy(
        update={"libraries": {"onnxruntime": "1.0"}, "features": ("amx_int8", "none")}
    )
    with artifact.create(tmp_path / "foreign", EngineBundle) as draft:
        for name in bundle.files:
            (draft.folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(bundle.folder / name, draft.folder / name)
        draft.finish(record.model_copy(update={"hardware": (foreign,)}), parents=bundle.parents)
    with pytest.raises(FingerprintError, match=r"onnxruntime is .*, not 1\.0") as caught:
        load(tmp_path / "foreign")
    assert "this CPU lacks" in caught.value.found
    assert "dvc repro" in caught.value.remedy


def test_a_bundle_that_was_edited_or_cut_is_refused(bundle: Artifact[EngineBundle], tmp_path: Path) -> None:
    cut = copied(bundle, tmp_path / "cut")
    with (cut / "weights.bin").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(ArtifactError, match=r"weights\.bin is 1000 bytes"):
        load(cut)
    edited = copied(bundle, tmp_path / "edited")
    body = json.loads((edited / "record.json").read_text())
    body["record"]["precision"] = "float64"
    (edited / "record.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="was edited"):
        load(edited)
    half = copied(bundle, tmp_path / "half")
    (half / "record.json").unlink()
    with pytest.raises(ArtifactError, match=r"no record\.json"):
        load(half)
