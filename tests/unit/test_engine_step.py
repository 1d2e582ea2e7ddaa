"""What every engine keeps of its protocol: any mix of entries, results that depend on their own sequence alone, and
errors that stay with their entry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import sessions, step_inputs
from engines.bundle import EngineBundle, Profile
from engines.compile import build
from engines.load import find_target, load
from engines.protocol import Engine, Entry, FloatArray, Result
from engines.target import Target
from engines.targets.ort_cpu import paged_engine
from engines.targets.ort_cpu.paged_engine import PagedEngine
from engines.targets.tensorrt.engine import TensorRTEngine
from quantization.compressed_tensors import open_checkpoint
from runtime.engine.core import EngineCore
from runtime.engine.scheduling.step_costs import StepCosts
from runtime.wire.limits import Limits
from runtime.wire.messages import EngineStats, GenerateRequest
from tapeout.artifact import Artifact
from tapeout.errors import RequestError
from tapeout.portable_graph import PortableGraph
from tests.cuda_bundles import small_bundle
from tests.fake_engine import HistoryEngine
from tests.families import DENSE, LAYERS, save_checkpoint
from tests.host_gpu import MODULE, host_bundle, install
from tests.lowered import lowered
from tests.native import makes_pages_ready
from tests.ort_cuda.on_cpu import cpu_engine
from tests.standard_engine import StandardEngine, StandardTarget

SLOTS, MAX_TOKENS = 4, 320


@dataclass
class Kind:
    """``apart``: results differ by so much of the largest in another batch, or where a prompt is cut; 0: not by a bit.

    ``most_steps``: of an example, where a token takes an engine milliseconds.
    """

    open: Callable[[], Engine]
    apart: float = 0
    most_steps: int = 6


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Artifact[PortableGraph]:
    """A random llama of more positions than an engine runs at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeline.export.export import export

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**{**DENSE, "max_position_embeddings": MAX_TOKENS}, vocab_size=300)
    torch.manual_seed(0)
    checkpoint = save_checkpoint(LlamaForCausalLM(config).eval(), folder / "checkpoint")
    return export(checkpoint, "", folder / "graph", max_positions=MAX_TOKENS, tolerance=1e-3, seed=0, parents={})


def opened(graph: Artifact[PortableGraph], folder: Path, **settings: Any) -> Callable[[], PagedEngine]:
    bundle = built(graph, folder, **settings)

    def open_() -> PagedEngine:
        engine = load(bundle.folder, threads=2)
        assert isinstance(engine, PagedEngine)
        return engine

    return open_


def built(
    graph: Artifact[PortableGraph],
    folder: Path,
    *,
    target: Target[EngineBundle] | None = None,
    kv_bits: int = 32,
    precision: str = "test",
    slots: int = SLOTS,
) -> Artifact[EngineBundle]:
    scale = np.full((graph.record.kv_heads, graph.record.head_size), 0.3 if kv_bits == 4 else 0.05, np.float32)
    return build(
        graph,
        open_checkpoint(graph.folder),
        folder,
        target=target or find_target("ort-cpu"),
        precision=precision,
        slots=slots,
        kv_scales={f"layers.{n}.{part}_scale": scale for n in range(LAYERS) for part in "kv" if kv_bits < 32},
        kv_dtype=f"int{kv_bits}",
        parents={},
    )


KV_BITS = {"int8": 8, "int4": 4}
OF_GPUS = ("cuda", "ort-cuda", "tensorrt-rtx")  # fibers, the graph on the CPU, a stand-in for CUDA and TensorRT
KINDS = ("paged", "paged int8", "paged int4", *OF_GPUS, "slots", "fake paged", "fake slots")
SIXTEEN_BITS = 4e-3  # of the largest logit: ONNX Runtime sums other numbers of rows in another order
PROFILES = (
    Profile(batch=1, min_tokens=1, opt_tokens=8, max_tokens=MAX_TOKENS),
    *(Profile(batch=batch, min_tokens=1, opt_tokens=1, max_tokens=1) for batch in (1, 2, 4)),
)


@pytest.fixture(scope="module", params=KINDS)
def kind(
    request: pytest.FixtureRequest, graph: Artifact[PortableGraph], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kind]:
    name = str(request.param)
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    if name.startswith("fake"):
        block_tokens = 16 if name == "fake paged" else 0
        yield Kind(lambda: HistoryEngine(300, slots=SLOTS, max_tokens=MAX_TOKENS, block_tokens=block_tokens))
        return
    if name == "cuda":
        on_host = small_bundle(folder, slots=SLOTS, max_tokens=MAX_TOKENS)
        yield Kind(lambda: load(on_host.folder), most_steps=2)
        return
    if name == "ort-cuda":
        bundle = built(graph, folder, target=find_target(name))
        with pytest.MonkeyPatch.context() as patch:
            yield Kind(lambda: cpu_engine(bundle, patch, sequences=SLOTS)[0], SIXTEEN_BITS, most_steps=2)
        return
    if name == "tensorrt-rtx":
        graph_of_it = lowered(graph, folder, "fp16", slots=SLOTS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TAPEOUT_CACHE", str(folder.with_name("cache")))
            install(patch, graph_of_it, PROFILES)
            compiled = host_bundle(graph_of_it, folder.with_name("compiled"), PROFILES)
            yield Kind(lambda: TensorRTEngine(MODULE, compiled), SIXTEEN_BITS, most_steps=2)
        return
    if name == "slots":
        bundle = built(graph, folder, target=StandardTarget())
        yield Kind(lambda: StandardEngine(bundle, threads=2, slots=SLOTS), 2e-4)
        return
    yield Kind(opened(graph, folder, kv_bits=KV_BITS.get(name[-4:], 32)))


@pytest.fixture(scope="module")
def engine(kind: Kind) -> Iterator[Engine]:
    opened = kind.open()
    yield opened
    opened.close()


@dataclass
class Held:
    """A sequence: its tokens so far, and its block table."""

    blocks: list[int]
    tokens: list[int] = field(default_factory=list[int])


def tables(engine: Engine, rng: np.random.Generator) -> list[Held]:
    """One sequence for each that there is room for, each in blocks from anywhere in the pool."""
    has = engine.capabilities
    each = -(-has.max_tokens // has.block_tokens)
    order = rng.permutation(has.blocks).tolist()
    return [Held(order[i : i + each]) for i in range(0, each * SLOTS, each)]


def whole(engine: Engine, tokens: Sequence[int]) -> FloatArray:
    """Logits of all tokens, fed at once in a step of their own."""
    has = engine.capabilities
    blocks = range(-(-has.max_tokens // has.block_tokens))
    (result,) = engine.step([Entry(tokens, 0, blocks, "logits", range(len(tokens)))])
    assert result.error is None and result.logits is not None
    return result.logits


def logits_of(result: Result) -> FloatArray:
    assert result.error is None and result.logits is not None
    return result.logits


def assert_same(actual: FloatArray, expected: FloatArray, kind: Kind) -> None:
    if kind.apart:
        np.testing.assert_allclose(actual, expected, atol=kind.apart * np.abs(expected).max())
    else:
        np.testing.assert_array_equal(actual, expected)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_mix_of_entries_equals_each_sequence_alone(engine: Engine, kind: Kind, data: st.DataObject) -> None:
    """Prompts in chunks, single tokens and several tokens after others, in any order and in any blocks."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    held, results = tables(engine, rng), list[tuple[list[int], int, FloatArray]]()
    for _ in range(data.draw(st.integers(1, kind.most_steps))):
        chosen = data.draw(st.lists(st.sampled_from(range(SLOTS)), min_size=1, max_size=SLOTS, unique=True))
        batch: list[Entry] = []
        for number in chosen:
            sequence, count = held[number], data.draw(st.sampled_from([1, 1, 1, 2, 7, 20]))
            start = len(sequence.tokens)
            new = rng.integers(3, engine.capabilities.vocab_size, count).tolist()
            sequence.tokens.extend(new)
            batch.append(Entry(new, start, sequence.blocks, "logits", range(count)))
        for number, entry, result in zip(chosen, batch, engine.step(batch), strict=True):
            results.append((held[number].tokens[: entry.start + len(entry.tokens)], entry.start, logits_of(result)))
    for tokens, start, logits in results:
        assert_same(logits, whole(engine, tokens)[start:], kind)


def test_a_long_prompt_equals_its_parts(kind: Kind, engine: Engine) -> None:
    """Longer than what an engine runs at once, with results from every part."""
    has = engine.capabilities
    tokens = np.random.default_rng(5).integers(3, has.vocab_size, has.max_tokens).tolist()
    every = whole(engine, tokens)
    sequence = tables(engine, np.random.default_rng(6))[0]
    wanted = range(0, has.max_tokens, 37)
    (result,) = engine.step([Entry(tokens, 0, sequence.blocks, "logits", wanted)])
    assert_same(logits_of(result), every[list(wanted)], kind)


def three(engine: Engine) -> tuple[list[Held], list[Entry]]:
    """Three sequences that hold a prompt, and the next token of each."""
    rng = np.random.default_rng(1)
    held = tables(engine, rng)[:3]
    for sequence, count in zip(held, (5, 11, 3), strict=True):
        sequence.tokens = rng.integers(3, engine.capabilities.vocab_size, count).tolist()
    engine.step([Entry(s.tokens, 0, s.blocks, positions=()) for s in held])
    return held, [Entry([7], len(s.tokens), s.blocks, "logits") for s in held]


def test_an_entry_gets_what_it_wants(engine: Engine) -> None:
    _, entries = three(engine)
    logits = [logits_of(result) for result in engine.step(entries)]
    tokens = engine.step([entry._replace(wanted="token") for entry in entries])
    assert [result.tokens.tolist() for result in tokens if result.tokens is not None] == [
        [int(row[0].argmax())] for row in logits
    ]
    top, token, nothing = engine.step(
        [
            entries[0]._replace(wanted="top", top=4),
            entries[1]._replace(wanted="token"),
            entries[2]._replace(positions=()),
        ]
    )
    assert top.tokens is not None and top.log_probabilities is not None and token.tokens is not None
    exact = logits[0][0].astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    assert top.tokens.tolist() == [np.argsort(-exact, kind="stable")[:4].tolist()]
    np.testing.assert_allclose(top.log_probabilities[0], np.sort(exact)[::-1][:4], atol=1e-5)
    assert token.tokens.tolist() == [int(logits[1][0].argmax())]
    assert nothing == Result()


BAD = {
    "no tokens": (lambda e, _: e._replace(tokens=[]), "at least one token"),
    "a token outside the vocabulary": (lambda e, _: e._replace(tokens=[10**6]), "ids of this model's vocabulary"),
    "a negative token": (lambda e, _: e._replace(tokens=[-1]), "ids of this model's vocabulary"),
    "a negative start": (lambda e, _: e._replace(start=-1), "within"),
    "a start beyond the last position": (lambda e, _: e._replace(start=10**6), "within"),
    "a block that is not there": (lambda e, _: e._replace(blocks=[10**6]), "of the blocks 0 to"),
    "a negative block": (lambda e, _: e._replace(blocks=[-1]), "of the blocks 0 to"),
    "no blocks": (lambda e, _: e._replace(blocks=[]), "of the blocks 0 to"),
    "a block that another entry writes": (lambda e, other: e._replace(blocks=other.blocks), None),
    "a position that is not fed": (lambda e, _: e._replace(positions=[1]), "ascending positions"),
    "a position twice": (lambda e, _: e._replace(positions=[0, 0]), "ascending positions"),
    "no top": (lambda e, _: e._replace(wanted="top"), "1 to"),
    "an adapter": (lambda e, _: e._replace(adapter=1), "no adapters"),
}


@pytest.mark.parametrize(("break_", "expected"), BAD.values(), ids=BAD)
def test_a_bad_entry_fails_alone(engine: Engine, break_: Callable[[Entry, Entry], Entry], expected: str | None) -> None:
    _, entries = three(engine)
    good = engine.step(entries)
    found = engine.step([entries[0], entries[1], break_(entries[2], entries[0])])
    for before, after in zip(good[:2], found[:2], strict=True):
        np.testing.assert_array_equal(logits_of(after), logits_of(before))
    assert isinstance(found[2].error, RequestError) and found[2].logits is None
    assert expected is None or expected in (found[2].error.expected or "")


def test_too_many_entries_are_refused_at_once(engine: Engine) -> None:
    _, entries = three(engine)
    with pytest.raises(RequestError, match="a step of"):
        engine.step(entries * (engine.capabilities.max_batch // 3 + 1))


@pytest.mark.parametrize("wanted", ["token", "logits"])
def test_logits_that_are_not_finite_fail_their_entry_alone(kind: Kind, wanted: str) -> None:
    """Planted in the KV cache of one sequence."""
    engine = kind.open()
    cache = engine._memory.arrays if isinstance(engine, PagedEngine) else getattr(engine, "_cache", None)
    if not isinstance(cache, dict) or getattr(cache.get("0.value"), "dtype", None) != np.float32:
        pytest.skip("an engine with a KV cache of floats")
    held, entries = three(engine)
    entries = [entry._replace(wanted=wanted) for entry in entries]  # pyright: ignore[reportArgumentType]
    good = engine.step(entries)
    cache["0.value"][held[1].blocks[0], :, 2] = np.nan
    found = engine.step(entries)
    assert found[1].error is not None and "not finite" in found[1].error.found
    for number in (0, 2):
        assert found[number].error is None
        for before, after in zip(good[number][:2], found[number][:2], strict=True):
            np.testing.assert_array_equal(after, before)
    engine.close()


def test_a_prefix_is_shared_or_copied(engine: Engine, kind: Kind) -> None:
    has, rng = engine.capabilities, np.random.default_rng(2)
    first, second, *_ = tables(engine, rng)
    size = has.block_tokens if has.shares_blocks else 9
    prefix, endings = rng.integers(3, has.vocab_size, size).tolist(), ([4, 5, 6], [8, 9])
    engine.step([Entry(prefix, 0, first.blocks, positions=())])
    if has.shares_blocks:
        second.blocks[0] = first.blocks[0]
    else:
        engine.copy_block(first.blocks[0], second.blocks[0], size)
    results = engine.step(
        [
            Entry(ending, size, sequence.blocks, "logits", range(len(ending)))
            for ending, sequence in zip(endings, (first, second), strict=True)
        ]
    )
    for ending, result in zip(endings, results, strict=True):
        assert_same(logits_of(result), whole(engine, [*prefix, *ending])[size:], kind)


def test_a_part_of_a_block_can_be_copied(engine: Engine, kind: Kind) -> None:
    has, rng = engine.capabilities, np.random.default_rng(3)
    first, second, *_ = tables(engine, rng)
    count = min(7, has.block_tokens - 1)
    tokens = rng.integers(3, has.vocab_size, count + 3).tolist()
    engine.step([Entry(tokens, 0, first.blocks, positions=())])
    engine.copy_block(first.blocks[0], second.blocks[0], count)
    (result,) = engine.step([Entry([5], count, second.blocks, "logits")])
    assert_same(logits_of(result), whole(engine, [*tokens[:count], 5])[-1:], kind)


def test_a_pool_of_any_size_can_be_opened(kind: Kind) -> None:
    engine = kind.open()
    if isinstance(engine, PagedEngine):
        assert engine.capabilities.blocks == SLOTS * -(-engine.capabilities.max_tokens // 64)
    engine.close()


def test_a_float_engine_that_stays_in_its_file_reads_it_less_often(
    graph: Artifact[PortableGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a quantized engine runs so many tokens, too."""
    tokens = np.random.default_rng(0).integers(3, 300, MAX_TOKENS).tolist()
    reads: list[int] = []

    def counted(*given: Any) -> Iterator[Any]:
        for run in step_inputs.runs(*given):
            reads.append(sum(len(piece.tokens) for piece in run))
            yield run

    monkeypatch.setattr(paged_engine, "runs", counted)
    found: list[FloatArray] = []
    for precision, share, expected in (
        ("float32", 0.5, [256, 64]),
        ("float32", 0.0, [320]),
        ("w8:4", 0.0, [256, 64]),
    ):
        engine = opened(graph, tmp_path / f"{precision}-{share}", precision=precision)
        monkeypatch.setattr(sessions, "MAPPED_SHARE", share)
        with closing(engine()) as one:
            reads.clear()
            found.append(whole(one, tokens))
        assert reads == expected
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=2e-4 * np.abs(found[0]).max())


def test_a_closed_engine_gives_its_memory_back(graph: Artifact[PortableGraph], tmp_path: Path) -> None:
    """Session, bindings and KV pool. Planted: each of them is kept."""
    engine: Any = opened(graph, tmp_path / "bundle")()
    engine.step([Entry([5], 0, [0])])
    held = [weakref.ref(owner) for owner in (engine._session, *(one.binding for one in engine._bound.values()))]
    held += [weakref.ref(pages) for pages in engine._memory._memory]
    assert len(held) > 2
    engine.close()
    assert [owner() for owner in held] == [None] * len(held)
    engine.close()


@makes_pages_ready
@pytest.mark.parametrize("kv_bits", [32, 4])
def test_pages_of_the_next_blocks_are_made_ready_a_few_at_a_time(
    graph: Artifact[PortableGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_bits: int
) -> None:
    """As far ahead as is asked for and as is allowed; planted: all of the pool, or none."""
    engine = opened(graph, tmp_path / "bundle", kv_bits=kv_bits)()
    each = engine.capabilities.block_bytes
    monkeypatch.setattr(paged_engine, "READY_AT_ONCE_BYTES", 2 * each)
    monkeypatch.setattr(paged_engine, "READY_AHEAD_BYTES", 4 * each)
    try:
        engine.step([Entry([5], 0, [block]) for block in (0, 3, 1)])
        assert engine._memory.ready == 4
        more = [(engine.prepare(3), engine._memory.ready) for _ in range(3)]
        assert more == [(True, 6), (False, 7), (False, 7)]
        engine.step([Entry([5], 0, [4])])
        assert not engine.prepare(1) and engine._memory.ready == 7
        more = [(engine.prepare(100), engine._memory.ready) for _ in range(2)]
        assert more == [(False, 9), (False, 9)]
        monkeypatch.setattr(paged_engine, "READY_AT_ONCE_BYTES", each - 1)
        engine.step([Entry([5], 0, [5])])
        assert engine.prepare(100) is False and engine._memory.ready == 10, (
            "a block that is larger than that is made ready"
        )
    finally:
        engine.close()


def test_a_4_bit_cache_serves_shared_prefixes_preemptions_and_drafts(
    graph: Artifact[PortableGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses are those of each request alone, to the token."""
    monkeypatch.setattr(StepCosts, "worth", lambda *_: 0.0)  # drafts always pay
    open_engine = opened(graph, tmp_path / "bundle", kv_bits=4, slots=1)
    prefix = np.random.default_rng(0).integers(3, 300, 130).tolist()
    requests = [GenerateRequest(f"{i}", [*prefix, *range(5 + i, 25 + i)], 60, priority=-i) for i in range(3)]

    def served(*requests: GenerateRequest, drafted: int) -> tuple[dict[str, list[int]], EngineStats]:
        core = EngineCore(open_engine(), Limits(max_draft_tokens=drafted))
        waiting, tokens = list(requests), {request.id: list[int]() for request in requests}
        for now in range(1, 1000):
            if waiting:  # one a step, so that its prompt is in blocks when the next one comes
                core.add(waiting.pop(0), now)
            for delta in core.step(now).deltas:
                tokens[delta.id] += delta.tokens
            if not core.busy and not waiting:
                break
        core.scheduler.check()
        stats = core.stats()
        core.close()
        return tokens, stats

    together, stats = served(*requests, drafted=4)
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.accepted_tokens > 0
    for request in requests:
        assert served(request, drafted=0)[0][request.id] == together[request.id] and len(together[request.id]) == 60
