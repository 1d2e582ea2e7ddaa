"""Engines of the target ``cuda`` at level host, and at levels of GPUs over the stand-in for a driver."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from engines.bundle import EngineBundle
from engines.compile import build
from engines.kernels.cuda import HOST_FILE, device, layout
from engines.kernels.cuda import library as device_library
from engines.kernels.cuda.library import DeviceStep, StepResults
from engines.kernels.cuda.plan import PLAN_FILE, VERSION, LaunchPlan, PlanOperation
from engines.load import at_level, find_target, load, open_probe, runs_here
from engines.protocol import Draw, Engine, Entry, Filters, Finish, FloatArray, Result
from engines.targets.cuda import engine as cuda_engine
from pipeline.cli import build as command
from pipeline.cli import doctor, generate
from pipeline.cli.serve import require_judged
from pipeline.registry.levels import level_to_serve
from pipeline.stages import hardware
from quantization.compressed_tensors import open_checkpoint
from runtime.engine.opening import open_bundle
from runtime.engine.sampling import BatchSampler, SampledToken, logprobs_of
from runtime.wire.messages import GenerateRequest, SamplingSettings
from runtime.wire.start import EngineSettings
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, BuildError, DeviceError, FingerprintError, RequestError, ResourceError
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.cuda import Launch
from tests.cuda_bundles import (
    MAX_TOKENS,
    planted_engine,
    small_bundle,
    small_graph,
    stand_in,
    with_gpu,
    without_machine_code,
)
from tests.exported import build_float, family_graph
from tests.lowering import FixedWeights

COLUMNS = MAX_TOKENS // 64
SEQUENCES = 20
FREE = EngineSettings(kv_free=True)
NOWHERE = layout.Arena((), defaultdict(lambda: 256), (0, 0), 0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Artifact[EngineBundle]:
    """Of all levels, without machine code."""
    with pytest.MonkeyPatch.context() as patch:
        without_machine_code(patch)
        return small_bundle(tmp_path_factory.mktemp("cuda") / "bundle", target="cuda", slots=SEQUENCES)


@pytest.fixture(scope="module")
def library(bundle: Artifact[EngineBundle]) -> Path:
    return bundle.folder / HOST_FILE


@pytest.fixture
def opened(bundle: Artifact[EngineBundle]) -> Iterator[Engine]:
    with closing(load(bundle.folder, level="host")) as engine:
        yield engine


def blocks(sequence: int) -> range:
    return range(sequence * COLUMNS, (sequence + 1) * COLUMNS)


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, count).tolist()


def logits_of(results: Sequence[Result]) -> list[FloatArray]:
    assert not [result.error for result in results if result.error]
    return [result.logits for result in results if result.logits is not None]


def kl(p: FloatArray, q: FloatArray) -> float:
    a, b = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1)[:, None] for x in (p, q))
    return float((np.exp(a) * (a - b)).sum(axis=1).mean())


@pytest.mark.parametrize(
    ("cache", "bound", "divergence"), [("int8", 1e-2, 1e-5), ("float", 3e-3, 3e-6), ("fp8", 0.2, 2e-3)]
)
def test_an_engine_equals_the_float_engine_of_its_weights(
    tmp_path: Path, cache: str, bound: float, divergence: float
) -> None:
    """A prompt, then tokens one by one. Activations are rounded to 16 bits; a key may fall on the next code of 8.

    The CPU has no cache in FP8: the other engine has one in float, and the bounds are those of three bits of mantissa.
    """
    tokens, found = words(150), list[FloatArray]()
    for target, decoded in (("cuda:host", False), ("ort-cpu", True)):
        kept = "float" if decoded and cache == "fp8" else cache
        built = small_bundle(tmp_path / target, target=target, decoded=decoded, cache=kept)
        with closing(load(built.folder, threads=1)) as engine:
            parts = logits_of(engine.step([Entry(tokens[:140], 0, blocks(1), "logits", range(140))]))
            for at in range(140, 150):
                parts += logits_of(engine.step([Entry([tokens[at]], at, blocks(1), "logits")]))
        found.append(np.concatenate(parts))
    assert found[0].shape == (150, 203)
    assert np.abs(found[0] - found[1]).max() < bound * np.abs(found[1]).max()
    assert kl(found[1], found[0]) < divergence


@pytest.mark.parametrize("family", ["llama-rope-scaling", "qwen3"])
def test_the_float_engine_is_that_of_a_cpu_in_half(tmp_path: Path, family: str) -> None:
    """The baseline of a recipe: linears and the embedding in float16, in graphs and without; norms of heads."""
    tokens, found = words(100, 9), list[FloatArray]()
    graph = small_graph(family=family)
    for target in ("cuda:host", "ort-cpu"):
        built = build(graph, open_checkpoint(graph.folder), tmp_path / target, target=find_target(target),
                      precision="float32", slots=2, kv_scales={}, parents={})  # fmt: skip
        assert target == "ort-cpu" or {*built.record.plan.values()} == {"BlockLinear fp16", "BlockGather fp16"}
        with closing(load(built.folder, threads=1)) as engine:
            parts = logits_of(engine.step([Entry(tokens[:95], 0, blocks(0), "logits", range(95))]))
            for at in range(95, 100):
                parts += logits_of(engine.step([Entry([tokens[at]], at, blocks(0), "logits")]))
        found.append(np.concatenate(parts))
    assert np.abs(found[0] - found[1]).max() < 2e-3 * np.abs(found[1]).max()
    assert kl(found[1], found[0]) < 1e-6


def test_weights_beyond_half_are_refused_by_name(tmp_path: Path) -> None:
    graph = small_graph()
    checkpoint = open_checkpoint(graph.folder)
    tensors: dict[str, Any] = {name: checkpoint.linear(name) for name in checkpoint.names()}
    name = next(group for group in graph.record.groups if group.name == "layers.1.down").members[0]
    tensors[name] = np.array(tensors[name])
    tensors[name][3, 4] = 7e4
    for precision, remedy in (("float32", "build for ort-cpu"), ("mix", "give it a scheme in plan.schemes")):
        with pytest.raises(BuildError, match=r"layers\.1\.down has weights beyond the range of float16") as caught:
            build(graph, FixedWeights(tensors), tmp_path / "bundle", target=find_target("cuda:host"),
                  precision=precision, slots=1, kv_scales={}, parents={})  # fmt: skip
        assert (caught.value.remedy or "").startswith(remedy)
    tensors[name] = round_to_nearest(tensors[name], Scheme(bits=8, group_size=32, symmetric=True))
    build(graph, FixedWeights(tensors), tmp_path / "bundle", target=find_target("cuda:host"), precision="mix",
          slots=1, kv_scales={}, parents={})  # fmt: skip


def largest_inputs(folder: Path, tokens: Sequence[int]) -> FloatArray:
    """Of the first down projection, by token, each in a sequence of its own."""
    probe, found = open_probe(small_bundle(folder, cache="float"), folder, threads=1), list[float]()
    for token in tokens:
        _, linears = probe([token])
        gate, up = (linears[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        found.append(float(np.abs(gate / (1 + np.exp(-gate)) * up).max()))
    return np.array(found)


@pytest.mark.parametrize("cache", ["int8", "fp8", "float"])
def test_a_token_beyond_half_is_an_error_of_its_sequence(tmp_path: Path, cache: str) -> None:
    """Also one whose logits nobody wants, over caches of codes, which keep no NaN: what follows it would be wrong."""
    tokens = words(40)
    inputs = largest_inputs(tmp_path / "probed", tokens)
    worst = tokens[int(inputs.argmax())]
    others = [token for token, largest in zip(tokens, inputs, strict=False) if largest < 0.4 * inputs.max()]
    factor = 65504 / (0.8 * float(inputs.max()))  # so the others stay in the range
    with closing(load(small_bundle(tmp_path / "bundle", cache=cache, larger=factor).folder)) as engine:
        (alone,) = logits_of(engine.step([Entry(others, 0, blocks(0), "logits")]))
        long = Entry([worst, *others[:9]], 0, blocks(1))
        for entry in (
            *(long, long._replace(positions=[]), long._replace(wanted="logits")),
            *(long._replace(wanted="top", top=3, positions=[3, 4]), long._replace(wanted="logits", positions=[0])),
        ):
            results = engine.step([entry, Entry(others, 0, blocks(0), "logits")])
            assert results[0].error and "within the range of float16" in results[0].error.expected
            np.testing.assert_array_equal(logits_of(results[1:])[0], alone)
        one = [Entry([token], 0, blocks(2 + n), "token", []) for n, token in enumerate((others[0], worst))]
        results = engine.step(one)  # of one token each, and no results: not a graph's
        assert results[0].error is None and results[1].error
        results = engine.step([entry._replace(positions=None) for entry in one])
        assert results[0].error is None and results[1].error


def test_a_plan_costs_no_more_quality_than_on_a_cpu(tmp_path: Path) -> None:
    """KL against the float engine of the checkpoint, of the same plan on both targets."""
    tokens, found = words(100, 8), dict[str, FloatArray]()
    bundles = {
        "float": build_float(small_graph(), tmp_path / "float", 1),
        "cpu": small_bundle(tmp_path / "cpu", target="ort-cpu"),
        "host": small_bundle(tmp_path / "host"),
    }
    for name, built in bundles.items():
        with closing(load(built.folder, threads=1)) as engine:
            (found[name],) = logits_of(engine.step([Entry(tokens, 0, blocks(0), "logits", range(100))]))
    on_cpu, on_host = (kl(found["float"], found[name]) for name in ("cpu", "host"))
    assert 1e-4 < on_host <= on_cpu + 0.002


def test_a_probe_has_every_linear_and_the_embedding(tmp_path: Path) -> None:
    """Of a document longer than a piece, against the float engine of the same weights."""
    tokens, found = words(270, 3), list[tuple[FloatArray, dict[str, FloatArray], FloatArray]]()
    for target, decoded in (("cuda:host", False), ("ort-cpu", True)):
        built = small_bundle(tmp_path / target, target=target, decoded=decoded, cache="float")
        probe = open_probe(built, tmp_path, threads=1)
        found.append((*probe(tokens), np.concatenate([*probe.embedding()])))
    (logits, linears, embedding), (wanted_logits, wanted, wanted_embedding) = found
    np.testing.assert_allclose(embedding, wanted_embedding, rtol=1e-6)
    assert linears.keys() == wanted.keys() and len(linears) == 2 * 7 + 1
    for name, value in {**linears, "logits": logits}.items():
        expected = wanted_logits if name == "logits" else wanted[name]
        assert value.shape == expected.shape and len(value) == 270
        assert np.abs(value - expected).max() < 5e-3 * np.abs(expected).max(), name


def test_a_step_is_one_copy_up_one_down_and_one_wait(opened: Engine, library: Path) -> None:
    """And nothing is allocated. A decode step is one launch of a graph, others launch kernel by kernel."""
    layers, prompt = 2, words(70)
    with stand_in(library) as counted:
        opened.step([Entry(prompt, 0, blocks(0), positions=())])
        once = {"allocations": 0, "copies_up": 1, "copies": 0, "graph_launches": 0, "waits": 1}
        found = counted()
        assert found == once | {"copies_down": 1, "launches": found["launches"]}  # whether tokens are finite
        assert found["launches"] <= 1 + 9 * layers + 1
        opened.step([Entry(prompt, 0, blocks(1)), Entry([4], 70, blocks(0))])
        found = counted()
        assert found == once | {"copies_down": 1, "launches": found["launches"]}
        assert found["launches"] <= 1 + 10 * layers + 5  # prompts and decodes have an attention each
        opened.step([Entry([4], 70, blocks(0)), Entry([5], 70, blocks(1), "logits")])
        found = counted()
        assert found == once | {"copies_down": 2, "graph_launches": 1, "launches": found["launches"]}
        assert found["launches"] == 1 + 8 * layers + 4
        drawn = Entry([6], 70, blocks(1), draw=Draw(Filters(1.0, 0, 0.9, 0), [5]))
        opened.step([Entry([5], 70, blocks(0)), drawn])
        found = counted()
        assert found == once | {"copies_down": 1, "graph_launches": 1, "launches": found["launches"]}
        assert found["launches"] == 1 + 8 * layers + 4
        opened.step([Entry([5], 70, blocks(0)), drawn._replace(ranked=5)])
        assert counted() == found | {"copies_down": 2}
        opened.copy_block(0, COLUMNS, 9)
        assert counted() == dict.fromkeys(found, 0) | {"copies": 2 * layers}


def test_sequences_decode_alike_alone_and_in_every_bucket(opened: Engine) -> None:
    """Prompts of other lengths; the results of all buckets, and of a step without graph, are the same bits."""
    prompts = [words(3 + 5 * number, number) for number in range(SEQUENCES)]
    opened.step([Entry(prompt, 0, blocks(number), positions=()) for number, prompt in enumerate(prompts)])
    entries = [Entry([7 + number], len(prompt), blocks(number), "logits") for number, prompt in enumerate(prompts)]
    alone = [logits_of(opened.step([entry]))[0] for entry in entries]
    for count in (2, 3, 5, 9, 17, 20):
        chosen = entries[-count:]
        for entry, logits in zip(chosen, logits_of(opened.step(chosen)), strict=True):
            np.testing.assert_array_equal(logits, alone[entries.index(entry)])
    mixed = logits_of(opened.step([entries[3]._replace(tokens=[10, 11], positions=[0]), *entries[4:8]]))
    for logits, expected in zip(mixed, alone[3:8], strict=True):
        np.testing.assert_array_equal(logits, expected)


def course(engine: Engine, seed: int) -> Iterator[list[Result]]:
    """Random steps: sequences come, decode in changing company, are forked, and go."""
    rng, lengths = np.random.default_rng(seed), dict[int, int]()
    for _ in range(14):
        if len(lengths) < 6 and rng.random() < 0.5:
            number, count = int(rng.integers(SEQUENCES)), int(rng.integers(1, 90))
            lengths.pop(number, None)
            entries = [Entry(rng.integers(3, 200, count).tolist(), 0, blocks(number))]
            new = {number: count}
        else:
            entries, new = [], {}
        if len(lengths) > 1 and rng.random() < 0.2:
            source, target = rng.permutation(list(lengths))[:2].tolist()
            engine.copy_block(blocks(source)[0], blocks(target)[0], 1 + int(rng.integers(20)))
        chosen = [number for number in lengths if rng.random() < 0.8]
        for number in chosen:
            kind = rng.choice(["token", "logits", "top"])
            entries.append(Entry([int(rng.integers(3, 200))], lengths[number], blocks(number), kind, top=3))
            lengths[number] += 1
        lengths |= new
        if entries:
            yield engine.step(entries)


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that launches all kernels one by one."""
    monkeypatch.setattr(cuda_engine, "bucket_of", lambda count: 0)


@pytest.mark.parametrize("seed", range(3))
def test_courses_of_steps_equal_those_without_graphs(
    opened: Engine, bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    found = [list(course(opened, seed))]
    with closing(load(bundle.folder, level="host")) as other:
        plain(monkeypatch)
        found.append(list(course(other, seed)))
    assert len(found[0]) > 5
    for before, after in zip(*found, strict=True):
        for a, b in zip(before, after, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


def test_a_sequence_of_every_length_decodes_as_in_a_prompt(opened: Engine) -> None:
    """Beyond a part of the keys, across blocks."""
    tokens = words(MAX_TOKENS, 9)
    every = logits_of(opened.step([Entry(tokens, 0, blocks(2), "logits", [62, 63, 64, 511, 512, 639])]))[0]
    for row, at in zip(every, (62, 63, 64, 511, 512, 639), strict=True):
        found = logits_of(opened.step([Entry([tokens[at]], at, blocks(2), "logits")]))
        np.testing.assert_array_equal(found[0][0], row)


def test_values_that_share_memory_are_never_held_at_once(bundle: Artifact[EngineBundle]) -> None:
    plan = LaunchPlan.model_validate_json((bundle.folder / PLAN_FILE).read_bytes())
    shared = layout.shared_values(plan)
    assert sorted(name for piece in shared for name in piece) == sorted(plan.values)
    assert len(shared) < len(plan.values) / 2
    held = dict[int, str]()  # by piece, who wrote last
    places = {name: number for number, piece in enumerate(shared) for name in piece}
    for operation in plan.operations:
        read = [name for field, name in operation.pointers.items() if field not in operation.writes and name in places]
        assert all(held[places[name]] == name for name in read), operation
        written = [operation.pointers[field] for field in operation.writes if field in operation.pointers]
        assert not {places[name] for name in read} & {places[name] for name in written}, operation
        held |= {places[name]: name for name in written}


@pytest.mark.parametrize("cache", ["int8", "fp8", "float"])
def test_a_plan_selects_all_kernels_that_it_launches(tmp_path: Path, library: Path, cache: str) -> None:
    """And no others: those of a cubin (test_cuda_cubins.py) that one of its operations launches, for any tokens."""
    built = small_bundle(tmp_path / "bundle", cache=cache)
    plan = LaunchPlan.model_validate_json((built.folder / PLAN_FILE).read_bytes())
    loaded, names = ctypes.CDLL(str(library)), set[str]()
    for operation in plan.operations:
        kind = {"linear": "block_linear", "gather": "block_gather"}.get(operation.kind, operation.kind)
        for tokens, few in ((1, 1), (16, 0), (32, 4), (64, 0), (300, 4)):
            made, launches = device_library._operation(operation, NOWHERE), (Launch * 4)()
            parameters = getattr(made.parameters, operation.kind)
            parameters.M = parameters.count = parameters.B = parameters.parts = parameters.most_tokens = tokens
            parameters.few_tokens = few
            more = {"block_linear": (ctypes.c_uint32(1),), "attention": (ctypes.c_uint32(1),)}.get(kind, ())
            count = getattr(loaded, f"tapeout_cuda_{kind}")(ctypes.byref(parameters), *more, launches)
            names |= {one.kernel.decode() for one in launches[:count]}
    selections = {
        re.sub(r"linear_(?:few|split|whole)_(F16_\d_(?:plain|any))_.*", r"LINEAR_\1", name)
        .replace("block_gather", "GATHER")
        .replace("rotary_cache", "CACHE")
        .replace("attention_parts", "ATTENTION")
        .replace("attention_prompt", "ATTENTION")
        for name in names
    }
    always = {"argmax_parts", "choose_rows", "finite_rows", "gated_rows", "norm_rows"}
    assert selections - always == set(plan.selected)


@pytest.mark.parametrize("half_scales", [0, 1])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
def test_a_plan_selects_the_linears_that_are_launched(
    library: Path, bits: int, zero_points: bool, half_scales: int
) -> None:
    """``plan.py`` and ``launch.cpp`` each say which weights are plain: here for every group, format and count."""
    loaded, launches = ctypes.CDLL(str(library)), (Launch * 4)()
    for e4m3, shift, tokens in itertools.product((0, 1) if bits == 8 else (0,), range(5, 14), (1, 16, 17, 32, 300)):
        numbers: dict[str, int | float] = {
            "weight.N": 96,
            "weight.K": 1 << shift,
            "weight.bits": bits,
            "weight.group_shift": shift,
            "weight.half_scales": half_scales,
            "weight.e4m3": e4m3,
        }
        points = {"weight.zero_points": "points"} if zero_points else {}
        linear = PlanOperation(kind="linear", name="y", pointers=points, numbers=numbers, writes=("y",))
        plan = LaunchPlan(
            version=VERSION, operations=(linear,), values={}, tensors={}, heads=0, head_size=0, vocabulary=0, logits=""
        )
        parameters = device_library._operation(linear, NOWHERE).parameters.linear
        parameters.M = tokens
        for many_blocks in (1, 1 << 20):
            loaded.tapeout_cuda_block_linear(ctypes.byref(parameters), ctypes.c_uint32(many_blocks), launches)
            _, _, kind, stored, rows, _ = launches[0].kernel.decode().split("_")
            assert plan.selected == (f"LINEAR_{kind}_{stored}_{rows}",), (numbers, tokens)


def test_pieces_of_the_arena_are_apart(bundle: Artifact[EngineBundle]) -> None:
    plan = LaunchPlan.model_validate_json((bundle.folder / PLAN_FILE).read_bytes())
    arena = layout.arena(plan, {"weights.bin": 9999, "constants.bin": 1}, {"past_key_values.0.key": 640}, COLUMNS)
    end = 0
    for piece in arena.pieces:
        assert piece.offset % layout.ALIGNMENT == 0 and piece.offset >= end + layout.GUARD and piece.nbytes > 0
        end = piece.offset + piece.nbytes
    assert end + layout.GUARD <= arena.nbytes


def test_a_bundle_runs_at_the_levels_of_the_machine(
    bundle: Artifact[EngineBundle], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = [one.level for one in bundle.record.hardware]
    assert levels == ["sm120", "sm100", "sm90", "sm89", "sm80", "host"]
    assert at_level(bundle).record.hardware[0].level == "host"  # there is no GPU here
    with_gpu(monkeypatch, library)
    for capability, level in (((8, 0), "sm80"), ((8, 6), "sm80"), ((8, 9), "sm89"), ((10, 3), "sm100")):
        with stand_in(library, major=capability[0], minor=capability[1]):
            assert at_level(bundle).record.hardware[0].level == level
            with pytest.raises(FingerprintError, match="sm120: this machine lacks sm120"):
                at_level(bundle, "sm120")


def test_the_level_host_says_that_it_is_an_emulation(
    bundle: Artifact[EngineBundle], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence taken there says so, and a server does not choose it where a bundle is for GPUs."""
    assert runs_here(bundle).emulated and runs_here(bundle).level == "host"
    with pytest.raises(FingerprintError, match=r"has kernels for sm120, .*, none of which this machine has"):
        level_to_serve(bundle, ["host", "sm90"], "it")
    with_gpu(monkeypatch, library)
    with stand_in(library, major=9, minor=0):
        assert not runs_here(bundle).emulated and level_to_serve(bundle, ["host", "sm90"], "it") == "sm90"
        with pytest.raises(FingerprintError, match="no evidence for sm90"):
            level_to_serve(bundle, ["host"], "it")


def test_an_emulation_is_served_to_nobody(
    bundle: Artifact[EngineBundle], library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a verdict: a container that lost its GPU would take seconds for a token. One of host alone is."""
    with pytest.raises(FingerprintError, match=r"none of which this machine has \(no driver: ") as caught:
        require_judged(bundle.folder, unsafe=True)
    assert "docker run --gpus all" in (caught.value.remedy or "")
    assert require_judged(small_bundle(tmp_path / "host").folder, unsafe=True).level == ""
    with_gpu(monkeypatch, library)
    with stand_in(library, major=9, minor=0):
        assert require_judged(bundle.folder, unsafe=True).level == ""


def test_who_generates_is_told_that_it_is_emulated(
    bundle: Artifact[EngineBundle], capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = SamplingSettings(temperature=0)
    generate.run(bundle.folder, "a", system=None, raw=True, max_new_tokens=1, stop=(), sampling=sampling)
    assert (
        "emulated on the processor, where a token takes seconds: this machine has no sm120" in capsys.readouterr().err
    )


def test_the_doctor_says_what_runs(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (doctor.cuda().status, doctor.cuda().found) == (doctor.Status.ABSENT, device.find_gpu())
    with_gpu(monkeypatch, library)
    with stand_in(library, major=8, minor=9, version=13010):
        assert doctor.cuda().found == "stand-in for a GPU: sm89, driver for CUDA 13.1"
    with stand_in(library, major=7, minor=5):
        assert doctor.cuda().found == "stand-in for a GPU: no kernels for its compute capability 7.5"
    with stand_in(library, version=12080):
        assert doctor.cuda().found == "the driver is for CUDA 12.8, and 13.0 is needed"


def test_an_engine_opens_over_a_driver(
    bundle: Artifact[EngineBundle], library: Path, opened: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its library's name, with machine code of its level; results are those of level host."""
    with_gpu(monkeypatch, library)
    step = [Entry(words(20), 0, blocks(0), "logits")]
    with stand_in(library, major=9, minor=0), closing(load(bundle.folder)) as engine:
        assert engine.capabilities.threads == 0 and opened.capabilities.threads == 1
        np.testing.assert_array_equal(logits_of(engine.step(step)), logits_of(opened.step(step)))


@pytest.mark.parametrize("version", [None, VERSION - 1, VERSION + 1])
def test_a_plan_of_another_version_is_refused_with_the_command_that_rebuilds_it(
    bundle: Artifact[EngineBundle], tmp_path: Path, version: int | None
) -> None:
    """Planted: a bundle's library is given structures that it does not know, and reads beyond them."""
    body = json.loads((bundle.folder / PLAN_FILE).read_text())
    assert body.pop("version") == VERSION
    (tmp_path / PLAN_FILE).write_text(json.dumps(body | ({} if version is None else {"version": version})))
    with pytest.raises(ArtifactError, match=f"version {version or 1} of the plan") as caught:
        cuda_engine.open_engine(replace(bundle, folder=tmp_path), sequences=1)
    assert "dvc repro build-baseline build-candidate" in caught.value.remedy


def test_a_pinned_level_is_all_that_a_bundle_carries(tmp_path: Path) -> None:
    built = small_bundle(tmp_path / "bundle", target="cuda:host")
    assert [one.level for one in built.record.hardware] == ["host"]
    assert sorted(name for name in built.files if name.startswith("kernels/")) == [HOST_FILE]
    with pytest.raises(BuildError, match="no level 'sm70'"):
        find_target("cuda:sm70")


def test_a_build_without_a_level_has_all_levels(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple[str, str]]()

    def build_at(request: Any, target: Any, level: str, progress: Any) -> Artifact[EngineBundle]:
        asked.append((target.name, level))
        return bundle

    monkeypatch.setattr(hardware, "build_at", build_at)
    command.build(None, "cuda", (), Console(width=300))  # type: ignore[arg-type]
    assert asked == [("cuda", "")]
    printed = capsys.readouterr().out
    assert "kernels for sm120, sm100, sm90, sm89, sm80, host" in printed and "set build.target to cuda," in printed


FAULTS: dict[str, tuple[dict[str, int], type[Exception], str]] = {
    "a driver that is too old": (
        {"version": 12080},
        FingerprintError,
        "driver is too old: the driver is for CUDA 12.8",
    ),
    "no GPU": ({"major": 0}, FingerprintError, "the driver finds no GPU"),
    "a GPU that the machine code is not for": (
        {"major": 7, "minor": 5},
        FingerprintError,
        "no kernels for this GPU: .* 7.5",
    ),
    "too little memory": ({"bytes": 1 << 20}, ResourceError, "no memory on the device: .* where 0.00 of 0.00 GB"),
    "an ECC error at load": ({"memory_error": 214}, DeviceError, r"cuMemAlloc: uncorrectable ECC error .* \(214\)"),
    "a driver that does not start": ({"init_error": 802}, DeviceError, r"cuInit: .* \(802\)"),
}


@pytest.mark.parametrize(("device_is", "error", "message"), FAULTS.values(), ids=FAULTS)
def test_what_a_device_lacks_is_one_clear_error(
    bundle: Artifact[EngineBundle],
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    device_is: dict[str, int],
    error: type[Exception],
    message: str,
) -> None:
    """Found when an engine is opened, after the level was chosen."""
    with_gpu(monkeypatch, library)
    hardware = next(one for one in bundle.record.hardware if one.level == "sm90")
    chosen = replace(bundle, record=bundle.record.model_copy(update={"hardware": (hardware,)}))
    with stand_in(library, **device_is), pytest.raises(error, match=message) as caught:
        find_target("cuda").open(chosen, threads=0, slots=None)
    assert caught.value.remedy  # type: ignore[attr-defined]


MACHINES = {  # that have no sm90: why, and what to do
    "no driver": ({}, "no driver: libno-such-driver.so.1 cannot be loaded", "docker run --gpus all"),
    "an old driver": ({"version": 12080}, "the driver is for CUDA 12.8, and 13.0 is needed", "update the driver"),
    "a driver that does not start": ({"init_error": 802}, r"cuInit gives an error of .* \(802\)", "tapeout doctor"),
    "no GPU": ({"major": 0}, "the driver does not start: .* \\(100\\)", "tapeout doctor"),
    "another GPU": ({"major": 7, "minor": 5}, "stand-in for a GPU has compute capability 7.5", "use such a GPU"),
}


@pytest.mark.parametrize(("machine", "reason", "remedy"), MACHINES.values(), ids=MACHINES)
def test_a_level_of_a_gpu_is_refused_with_what_is_missing(
    bundle: Artifact[EngineBundle],
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: dict[str, int],
    reason: str,
    remedy: str,
) -> None:
    """Without a driver, too, `dvc repro here` would help nobody."""
    monkeypatch.setattr(device, "DRIVER", str(library) if machine else "libno-such-driver.so.1")
    with stand_in(library, **machine), pytest.raises(FingerprintError, match=f"lacks sm90.*{reason}") as caught:
        load(bundle.folder, level="sm90")
    assert remedy in (caught.value.remedy or "") and "580" in (caught.value.expected or "")


def test_another_processor_is_not_said_to_lack_a_gpu(
    bundle: Artifact[EngineBundle], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, library)
    monkeypatch.setattr("engines.targets.cuda.cpu_features", tuple)
    with stand_in(library, major=9, minor=0), pytest.raises(FingerprintError, match="lacks avx2") as caught:
        load(bundle.folder, level="sm90")
    assert "compute capability" not in str(caught.value)


def test_a_lost_device_fails_steps_and_the_next_ones_run(opened: Engine, library: Path) -> None:
    """Found when a step is waited for, as a GPU reports what its kernels did; also with another step behind it."""
    with stand_in(library, wait_error=214):
        steps = [opened.begin([Entry([5], at, blocks(0))]) for at in (0, 1)]
        for finish in steps:
            with pytest.raises(DeviceError, match="uncorrectable ECC error"):
                finish()
    alone = opened.step([Entry([5], 0, blocks(0))])
    assert alone[0].error is None and opened.step([Entry([5], 1, blocks(0))])[0].error is None


@pytest.mark.parametrize(("number", "message"), [(719, "unspecified launch failure"), (214, "uncorrectable ECC error")])
def test_an_error_in_a_step_says_what_the_device_said(opened: Engine, library: Path, number: int, message: str) -> None:
    with stand_in(library, fail_at=5, error=number), pytest.raises(DeviceError, match=message) as caught:
        opened.step([Entry([5], 0, blocks(0))])
    assert "nvidia-smi" in (caught.value.remedy or "")
    opened.step([Entry([5], 0, blocks(0))])


def test_the_cache_takes_what_is_left_of_a_device(
    bundle: Artifact[EngineBundle], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nine tenths of what is free; a device that has too little for one sequence is an error, as is a CPU."""
    with_gpu(monkeypatch, library)
    sequence = bundle.record.io.token_bytes * MAX_TOKENS
    found = dict[int, int]()
    for memory in (300 << 20, 900 << 20):
        with stand_in(library, bytes=memory), closing(open_bundle(bundle.folder, FREE).engine) as engine:
            taken = engine.capabilities.blocks * bundle.record.io.token_bytes * 64
            found[memory] = taken // sequence
    assert found[300 << 20] > SEQUENCES
    more = (found[900 << 20] - found[300 << 20]) * sequence
    assert abs(more - 0.9 * (600 << 20)) <= sequence
    with stand_in(library, bytes=20 << 20), pytest.raises(RequestError, match="0 bytes of keys, values"):
        open_bundle(bundle.folder, FREE)
    with stand_in(library, init_error=802), pytest.raises(DeviceError, match=r"cuInit: .* \(802\)"):
        device.free_memory()
    with pytest.raises(RequestError, match="--kv-bytes free for ort-cpu"):
        find_target("ort-cpu").free_state_bytes(bundle)


def test_a_closed_engine_gives_its_memory_back(bundle: Artifact[EngineBundle], library: Path) -> None:
    with stand_in(library, bytes=1 << 30):
        for _ in range(6):  # an engine takes 240 MB
            engine = load(bundle.folder, level="host")
            engine.close()
            engine.close()


def test_a_model_that_kernels_do_not_compute_is_refused_by_name(tmp_path: Path) -> None:
    refused: tuple[tuple[str, dict[str, int], str], ...] = (
        ("gemma2", {}, "no attention for layer 0"),
        ("llama", {}, "heads of 16 channels"),
        ("gemma", {"head_dim": 64}, "Mul of .*: CUDA kernels have no Add, Gelu, Mul, Split"),
    )
    for family, sizes, message in refused:
        graph = family_graph(family, **sizes)
        with pytest.raises(BuildError, match=message):
            build(
                graph,
                open_checkpoint(graph.folder),
                tmp_path / family,
                target=find_target("cuda:host"),
                precision="float32",
                slots=1,
                kv_scales={},
                parents={},
            )


# Planted defects.


def test_planted_overlap_of_pool_and_activations_is_found(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = layout.arena

    def overlapping(*given: Any) -> layout.Arena:
        made = known(*given)
        at = next(n for n, piece in enumerate(made.pieces) if piece.name.startswith("activations"))
        moved = layout.MemoryPiece(made.pieces[at].name, made.pieces[at].offset - 512, made.pieces[at].nbytes)
        pieces = (*made.pieces[:at], moved, *made.pieces[at + 1 :])
        return layout.Arena(pieces, made.places, made.activations, made.nbytes)

    monkeypatch.setattr(layout, "arena", overlapping)
    with pytest.raises(ArtifactError, match="activations 0 overlaps past_key_values"):
        load(bundle.folder, level="host")


def test_a_planted_write_behind_a_piece_is_found(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations have room for fewer tokens than a step has."""
    monkeypatch.setattr(layout, "RUN_TOKENS", 64)
    with (
        closing(load(bundle.folder, level="host")) as engine,
        pytest.raises(DeviceError, match=r"activations \d was written behind its end"),
    ):
        engine.step([Entry(words(65), 0, blocks(0))])


def test_a_planted_bucket_that_is_off_by_one_is_found(opened: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket below: it has no room for the last sequences."""
    monkeypatch.setattr(cuda_engine, "bucket_of", lambda count: max(b for b in layout.BUCKETS if b < max(count, 2)))
    with pytest.raises(DeviceError, match="a step of 5 sequences, 5 tokens and 5 results in the graph of 4"):
        opened.step([Entry([5], 0, blocks(number)) for number in range(5)])


def test_a_planted_value_that_is_overwritten_too_early_is_found(
    bundle: Artifact[EngineBundle], opened: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual sum shares memory with what is computed before it is read again."""
    step = [Entry(words(9), 0, blocks(0), "logits")]
    expected = logits_of(opened.step(step))[0]

    def all_in_two(plan: LaunchPlan) -> list[list[str]]:
        names = [name for piece in known(plan) for name in piece]
        return [names[::2], names[1::2]]

    known = layout.shared_values
    monkeypatch.setattr(layout, "shared_values", all_in_two)
    with closing(load(bundle.folder, level="host")) as engine:
        (result,) = engine.step(step)
    assert result.logits is None or not np.array_equal(result.logits, expected)


STALE = {
    "a graph has the inputs of another bucket": (
        "const Places at = places_of(e, step->M, step->B, step->P);\n  for",
        "const Places at = places_of(e, step->M, step->B + (launched && step->bucket), step->P);\n  for",
    ),
    "a graph has the parts of a short sequence": (
        "step.keys = e->settings.columns * ATTENTION_BLOCK;", "step.keys = ATTENTION_PART + 0 * e->settings.columns;",
    ),
    "padding of a bucket has a token": ("offsets[i + 1] = step->M", "offsets[i + 1] = i + 1"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), STALE.values(), ids=STALE)
def test_a_planted_stale_argument_of_a_graph_is_found(
    bundle: Artifact[EngineBundle],
    library: Path,
    opened: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
) -> None:
    """By results of decode steps, against those of a sound engine."""
    prompts = [words(600, 4), words(30, 5), words(9, 6)]
    fed = [Entry(prompt, 0, blocks(number), positions=()) for number, prompt in enumerate(prompts)]
    decoded = [Entry([6], len(prompt), blocks(number), "logits") for number, prompt in enumerate(prompts)]
    known, planted = device_library._loaded, planted_engine(tmp_path, library, before, after)

    def results(engine: Engine) -> list[FloatArray | None]:
        """Two of a bucket, three of a larger one, and the first again: its cache was not touched."""
        steps = [fed, decoded[:2], decoded, decoded[:1]]
        return [result.logits for step in steps for result in engine.step(step)]

    expected = results(opened)
    monkeypatch.setattr(device_library, "_loaded", lambda path: known(planted))
    with closing(load(bundle.folder, level="host")) as engine:
        found = results(engine)
    assert any(a is None or not np.array_equal(a, b) for a, b in zip(found, expected, strict=True) if b is not None)


def test_a_step_that_begins_ahead_reads_the_tokens_on_the_device(opened: Engine) -> None:
    """In other orders, in buckets and without, beside prompts: as if each token had been waited for."""
    prompts = [words(9 + number, seed=number) for number in range(5)]
    plain = [opened.step([Entry(prompt, 0, blocks(0))])[0].tokens for prompt in prompts]
    expected: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(5):
            start = 0 if len(tokens) == len(prompt) else len(tokens) - 1
            (result,) = opened.step([Entry(tokens[start:], start, blocks(number))])
            assert result.tokens is not None
            tokens += result.tokens.tolist()
        expected.append(tokens[len(prompt) :])
    assert [one[0] for one in expected] == [int(found[0]) for found in plain if found is not None]

    found: dict[int, list[int]] = {number: [] for number in range(5)}
    orders = [[0, 1, 2, 3], [3, 1, 0, 4, 2], [2, 0, 4, 1, 3], [0, 3, 4], [3, 4, 0]]
    waiting: list[tuple[list[int], Finish]] = []
    before: list[int] = []
    fed = dict.fromkeys(range(5), 0)
    for order in orders:
        entries = [
            Entry((0,), len(prompts[n]) + fed[n] - 1, blocks(n), follows=before.index(n))
            if fed[n]
            else Entry(prompts[n], 0, blocks(n))
            for n in order
        ]
        waiting.append((order, opened.begin(entries)))
        before = order
        for n in order:
            fed[n] += 1
        if len(waiting) == 2:
            read(found, *waiting.pop(0))
    read(found, *waiting.pop(0))
    assert found == {number: expected[number][: fed[number]] for number in range(5)}


def logits_after(engine: Engine, sequence: int, prompt: list[int]) -> FloatArray:
    return logits_of(engine.step([Entry(prompt, 0, blocks(sequence), "logits")]))[0][0]


def test_draws_and_log_probabilities_are_those_of_the_server(opened: Engine) -> None:
    """To the bit, in a prompt, in graphs and in a batch with whole logits: as the host chooses from the same logits."""
    sampler = BatchSampler(opened.capabilities.vocab_size)
    asked = [
        SamplingSettings(temperature=2.0, seed=1),
        SamplingSettings(temperature=2.0, top_k=7, top_p=0.8, min_p=0.05, seed=2),
        SamplingSettings(temperature=0.7, top_p=0.9, seed=3),
        SamplingSettings(),
    ]
    prompts = [words(5 + 3 * number, seed=number) for number in range(4)]
    for number, one in enumerate(asked):
        sampler.add(GenerateRequest(f"{number}", prompts[number], 9, one, logprobs=number or None))
    expected = dict[int, list[SampledToken]]()
    for number, prompt in enumerate(prompts):
        tokens, expected[number] = list(prompt), []
        for _ in range(4):
            expected[number] += sampler.choose([f"{number}"], logits_after(opened, number, tokens)[None])
            tokens.append(expected[number][-1].token)

    for step in range(4):
        entries = list[Entry]()
        for number, prompt in enumerate(prompts):
            said = [one.token for one in expected[number][:step]]
            entry = Entry(said[-1:] or prompt, len(prompt) + len(said) - 1 if said else 0, blocks(number), "logits")
            entries.append(sampler.handed_over(entry, f"{number}", step))
        beside = Entry([5 + step], step, blocks(9), "logits")
        results = opened.step([*entries, beside] if step == 2 else entries)
        for number, result in enumerate(results[:4]):
            assert result.error is None and result.tokens is not None
            wanted = expected[number][step]
            assert result.tokens.tolist() == [wanted.token]
            found = logprobs_of(result.tokens.tolist(), result.ranked or ())
            assert found == (() if wanted.logprobs is None else (wanted.logprobs,))


def test_draws_that_do_not_fit_their_entry_are_refused(opened: Engine) -> None:
    draw = Draw(Filters(1.0, 0, 1.0, 0), [1])
    wrong = [
        Entry([5], 0, blocks(0), "logits", draw=draw),
        Entry([5, 6], 0, blocks(1), positions=[0, 1], draw=draw),
        Entry([5], 0, blocks(2), ranked=129),
    ]
    found = [str(result.error).splitlines()[0] for result in opened.step(wrong)]
    assert found == ["a draw beside logits", "1 random numbers", "the 129 likeliest tokens"]


PINNED = {
    "two steps share their inputs": (
        "Begun* to = &e->steps[e->begun % STEPS];",
        "Begun* to = &e->steps[e->begun % STEPS];\n  to->inputs = e->steps[0].inputs;",
        "pinned memory was written before it was copied",
    ),
    "a step that failed is not waited for": (
        "e->driver.cuStreamSynchronize(e->stream); /* the failure is the first one's */",
        "",
        "pinned memory was written before it was copied",
    ),
    "two steps share their results": (
        "memcpy(to, step->results, step->result_bytes);",
        "memcpy(to, e->steps[0].results, step->result_bytes);",
        "other tokens",
    ),
}


def steps_behind_a_failure(engine: Engine, library: Path, at: int) -> list[list[int]]:
    """Tokens of two steps at once, after one whose launch ``at`` failed."""
    with stand_in(library, fail_at=at, error=719), pytest.raises(DeviceError, match="unspecified launch failure"):
        engine.begin([Entry([9, 9, 9], 0, blocks(2))])
    waiting = [engine.begin([Entry([5 + n], 0, blocks(n))]) for n in range(2)]
    return [result.tokens.tolist() for finish in waiting for result in finish() if result.tokens is not None]


@pytest.mark.parametrize("at", [1, 5])
def test_inputs_of_a_step_that_failed_are_not_read_behind_it(opened: Engine, library: Path, at: int) -> None:
    alone = [opened.step([Entry([5 + n], 0, blocks(n))])[0].tokens for n in range(2)]
    assert steps_behind_a_failure(opened, library, at) == [one.tolist() for one in alone if one is not None]


@pytest.mark.parametrize(("before", "after", "message"), PINNED.values(), ids=PINNED)
def test_planted_memory_that_two_steps_share_is_found(
    bundle: Artifact[EngineBundle],
    library: Path,
    opened: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    message: str,
) -> None:
    expected = steps_behind_a_failure(opened, library, 5)
    assert len(expected) == 2 and expected[0] != expected[1]
    known, planted = device_library._loaded, planted_engine(tmp_path, library, before, after)
    monkeypatch.setattr(device_library, "_loaded", lambda path: known(planted))
    with closing(load(bundle.folder, level="host")) as engine:
        try:
            found = "other tokens" if steps_behind_a_failure(engine, library, 5) != expected else "nothing"
        except DeviceError as error:
            found = error.found
    assert message in found


class PackedSteps:
    """A device that keeps what it is given, and chooses token 0."""

    def __init__(self) -> None:
        self.steps: list[DeviceStep] = []

    def begin(self, step: DeviceStep, *, ranking: bool, logits: bool) -> Callable[[], StepResults]:
        self.steps.append(step)
        return lambda: StepResults(np.zeros(len(step.rows), np.int64))

    def copy_block(self, source: int, target: int, tokens: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("counts", "few"),
    [([3] * 200 + [1] * 56, 1), ([4] * 128, 4), ([4] * 129, 1), ([30, 1, 4, 2, 300, 1], 4), ([30, 300], 0)],
)
def test_sequences_that_are_cut_into_parts_lie_where_there_is_room_for_parts(
    bundle: Artifact[EngineBundle], counts: list[int], few: int
) -> None:
    """Kernels write parts of attention at the places of their tokens."""
    kept, io, own = PackedSteps(), bundle.record.io, -(-max(counts) // 64)
    engine = cuda_engine.CudaEngine(kept, io, digest="", blocks=own * len(counts), threads=1)
    batch = [Entry([5] * count, 0, range(own * n, own * (n + 1))) for n, count in enumerate(counts)]
    assert not [one.error for one in engine.step(batch) if one.error]
    (step,) = kept.steps
    ends = [int(step.offsets[n + 1]) for n, count in enumerate(np.diff(step.offsets)) if count <= step.few_tokens]
    assert step.few_tokens == few and len(ends) == sum(count <= few for count in counts)
    assert max(ends, default=0) <= layout.FEW_ROWS


def read(found: dict[int, list[int]], order: list[int], finish: Finish) -> None:
    for number, result in zip(order, finish(), strict=True):
        assert result.error is None and result.tokens is not None
        found[number] += result.tokens.tolist()


def test_what_follows_nothing_is_refused(opened: Engine) -> None:
    finish = opened.begin([Entry([5], 0, blocks(0), positions=()), Entry([5, 999_999], 0, blocks(1))])
    entries = [Entry((0,), 1, blocks(n), follows=place) for n, place in enumerate((0, 1, 7))]
    after = opened.begin(entries)
    finish()
    for result in after():
        assert result.error is not None and "of the step before" in str(result.error)


def test_a_third_step_at_once_is_refused(opened: Engine) -> None:
    waiting = [opened.begin([Entry([5 + n], 0, blocks(0))]) for n in range(2)]
    with pytest.raises(DeviceError, match="more than 2 steps at once"):
        opened.begin([Entry([5], 0, blocks(0))])
    tokens = [result.tokens for finish in waiting for result in finish()]
    for n, token in enumerate(tokens):
        assert token == opened.step([Entry([5 + n], 0, blocks(0))])[0].tokens
