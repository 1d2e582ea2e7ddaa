"""The library of kernels: made once, whole or not at all, and said where it cannot be made or run."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.bundle import IOContract, LoweredRecord
from engines.compile import build
from engines.kernels import cpu as native
from engines.kernels.cpu import LEVELS, Level, compiler, serving, unsupported
from engines.load import find_target
from engines.sessions import cpu_options
from engines.targets import ort_cpu
from pipeline.recipe import load_recipe
from pipeline.stages.cost_table import timed_target
from pipeline.stages.wiring import STAGES
from tapeout.artifact import FileEntry
from tapeout.errors import ArtifactError, BuildError, FingerprintError
from tapeout.fingerprint import Fingerprint, cpu_features
from tests.lowering import model_of

COMPILES = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="kernels are made on Linux on x86-64"
)
BEST, WIDE, MIDDLE, LEAST = (level for level in LEVELS if level.machine == "x86_64")
LOWERED = LoweredRecord(
    precision="float32",
    io=IOContract(inputs=(), state=(), max_tokens=1, slots=1, vocab_size=1),
    operator_counts={},
    passes=(),
    weight_bytes=0,
    step_bytes=0,
    plan={},
    linear_outputs=(),
    stop_tokens=(),
)
SMALL = '__attribute__((visibility("default"))) int answer(void) { return 42; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of libraries. The compiler's own is that of every test, which spares each some seconds."""
    kept = compiler.cache() / "compiler"
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    kept.mkdir(parents=True, exist_ok=True)
    (folder / "compiler").symlink_to(kept)
    monkeypatch.setenv("TAPEOUT_CACHE", str(folder.parent))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of one small file, quickly compiled, beside the header that the table of operators needs."""
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copyfile(compiler.SOURCE / "ort.h", folder / "ort.h")
    (folder / "answer.c").write_text(f"{SMALL}\n")
    monkeypatch.setattr(compiler, "SOURCE", folder)
    return folder


def files(cache: Path) -> list[Path]:
    """Everything but the compiler's own."""
    return [p for folder in cache.iterdir() if folder.name != "compiler" for p in folder.rglob("*")]


@COMPILES
def test_the_same_sources_give_the_same_bytes_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels themselves: those that every test uses, and others by a compiler that has kept nothing of them."""
    first = compiler.library(BEST)
    copy = tmp_path / "elsewhere" / "source"
    shutil.copytree(compiler.SOURCE, copy)
    monkeypatch.setattr(compiler, "SOURCE", copy)
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "other"))
    second = compiler.library(BEST)
    assert second.parent.parent == tmp_path / "other" / "kernels" != first.parent.parent
    assert first.parent.name == second.parent.name and first.name == Path(BEST.file).name
    assert first.read_bytes() == second.read_bytes()


@COMPILES
def test_what_is_compiled_is_not_compiled_again(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiler.library(BEST)
    assert files(cache) == [path]

    def never(source: Path, path: Path, flags: tuple[str, ...]) -> None:
        raise AssertionError(f"{path} is compiled again")

    monkeypatch.setattr(compiler, "_compile", never)
    assert compiler.library(BEST) == path
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="compiled again"):
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DANSWER"))
        compiler.library(BEST)
    with pytest.raises(AssertionError, match="compiled again"):
        compiler.library(LEAST)
    (source / "more.h").write_text("")  # not compiled itself, but what is may include it
    with pytest.raises(AssertionError, match="compiled again"):
        compiler.library(BEST)


@COMPILES
@pytest.mark.parametrize("content", ["int broken(", "int f(int unused) { return 0; }\n"], ids=["no C", "a warning"])
def test_sources_that_do_not_compile_are_an_error_and_leave_nothing(cache: Path, source: Path, content: str) -> None:
    (source / "broken.c").write_text(content)
    with pytest.raises(BuildError, match=r"the kernels in .*source do not compile: (.|\n)*broken\.c") as caught:
        compiler.library(BEST)
    assert caught.value.expected == "a library"
    assert caught.value.remedy == "reinstall ziglang in the version that pyproject.toml names"
    assert files(cache) == []
    (source / "broken.c").unlink()
    assert compiler.library(BEST).is_file()


def test_a_machine_without_the_compiler_is_told_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILER", "no_such_compiler")
    with pytest.raises(BuildError, match="no compiler: the package no_such_compiler is not installed") as caught:
        compiler.library(BEST)
    assert caught.value.expected == "the pinned compiler that native kernels are built with"
    assert caught.value.remedy == 'pip install ".[pipeline]"'
    assert files(cache) == []


@COMPILES
def test_two_that_compile_at_once_end_with_one_whole_library(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = compiler._compile  # pyright: ignore[reportPrivateUsage]

    def slowly(source: Path, path: Path, flags: tuple[str, ...]) -> None:
        compiled.append(path.name)
        deadline = time.monotonic() + 20
        while len(compiled) < 2 and time.monotonic() < deadline:  # until neither has found the other's
            time.sleep(0.01)
        compile_(source, path, flags)

    monkeypatch.setattr(compiler, "_compile", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(compiler.library, BEST) for _ in range(2)])
    assert first == second
    assert compiled == [first.name, first.name]
    assert files(cache) == [first]
    assert ctypes.CDLL(str(first)).answer() == 42


@COMPILES
def test_a_compiler_that_stops_half_way_leaves_no_library(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(command: list[str], **_: object) -> None:
        Path(command[command.index("-o") + 1]).write_bytes(b"\x7fELF")
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler.subprocess, "run", half)
    with pytest.raises(KeyboardInterrupt):
        compiler.library(BEST)
    assert files(cache) == []


def machine(monkeypatch: pytest.MonkeyPatch, system: str, kind: str, features: tuple[str, ...]) -> None:
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setattr(native.platform, "machine", lambda: kind)
    monkeypatch.setattr(native, "cpu_features", lambda: features)


@pytest.mark.parametrize(
    ("system", "kind", "features", "said"),
    [
        ("Linux", "x86_64", (*BEST.needed, *LEAST.needed), ""),
        ("Linux", "x86_64", ("avx", *LEAST.needed, "avx_vnni"), ""),
        ("Linux", "riscv64", (), "native kernels are for Linux on x86_64 or aarch64, not Linux on riscv64"),
        ("Darwin", "x86_64", LEAST.needed, "native kernels are for Linux on x86_64 or aarch64, not Darwin on x86_64"),
        ("Windows", "AMD64", LEAST.needed, "native kernels are for Linux on x86_64 or aarch64, not Windows on AMD64"),
        ("Linux", "x86_64", ("avx", "fma", "f16c"), "native kernels need avx2, which this processor lacks"),
        ("Linux", "x86_64", ("avx",), "native kernels need avx2, fma, f16c, which this processor lacks"),
    ],
)
def test_why_they_cannot_run_here_is_a_clause_for_users(
    monkeypatch: pytest.MonkeyPatch, system: str, kind: str, features: tuple[str, ...], said: str
) -> None:
    machine(monkeypatch, system, kind, features)
    assert unsupported() == said


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ((*LEAST.needed, *BEST.needed), BEST),
        ((*LEAST.needed, *WIDE.needed), WIDE),
        (LEAST.needed, LEAST),
        ((*LEAST.needed, "avx_vnni"), MIDDLE),
        ((*LEAST.needed, "avx512f", "avx512bw"), LEAST),  # AVX-512 without VNNI
        (BEST.needed[:2], None),
        ((), None),
    ],
)
def test_the_library_is_for_the_best_level_that_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], level: Level | None
) -> None:
    compiled: list[Level] = []
    monkeypatch.setattr(compiler, "library", compiled.append)
    machine(monkeypatch, "Linux", "x86_64", features)
    assert native.level() == level and bool(unsupported()) == (level is None)
    ort_cpu.library()
    assert compiled == ([] if level is None else [level])
    machine(monkeypatch, "Linux", "riscv64", features)
    assert native.level() is None


def test_where_they_cannot_run_nothing_is_compiled_and_sessions_start_without(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, "Linux", "x86_64", ())
    monkeypatch.setattr(compiler, "library", lambda level: pytest.fail(f"compiled for nothing: {level}"))
    assert ort_cpu.library() is None
    assert cpu_options(2, None).intra_op_num_threads == 2
    with pytest.raises(BuildError, match="cannot run here"):  # not an illegal instruction
        cpu_options(2, cache / "kernels.so")


def held(folder: Path, *levels: Level) -> Any:
    """What :func:`engines.kernels.cpu.serving.library_of` reads of a bundle."""
    hardware = [
        Fingerprint(machine=level.machine, features=level.needed, libraries={}, level=level.name, more_features=True)
        for level in levels
    ]
    files = {level.file: None for level in levels}
    return SimpleNamespace(folder=folder, files=files, record=SimpleNamespace(hardware=hardware))


@COMPILES
@pytest.mark.parametrize("built", LEVELS, ids=lambda level: level.name)
def test_a_library_for_a_better_processor_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Level
) -> None:
    """A bundle from elsewhere, by whatever way it is opened."""
    monkeypatch.setattr(serving, "verify_files", lambda folder, files: None)
    monkeypatch.setattr(serving, "cpu_features", lambda: LEAST.needed)
    if built == LEAST:
        assert serving.library_of(held(tmp_path, built)) == tmp_path / built.file
        return
    with pytest.raises(BuildError) as caught:
        serving.library_of(held(tmp_path, built))
    lacking = ", ".join(feature for feature in built.needed if feature not in LEAST.needed)
    reason = f"it needs {lacking}, which this processor lacks" if built.machine == "x86_64" else "it is for aarch64"
    assert caught.value.found == f"{tmp_path / built.file} cannot run here: {reason}"


@COMPILES
def test_an_edited_library_and_one_that_the_bundle_lacks_are_not_loaded(tmp_path: Path) -> None:
    made = held(tmp_path, LEAST)
    made.files = {}
    with pytest.raises(BuildError, match="the bundle does not carry it"):
        serving.library_of(made)
    path = tmp_path / LEAST.file
    path.parent.mkdir()
    path.write_bytes(b"edited")
    made.files = {LEAST.file: FileEntry(hashlib.sha256(b"as built").hexdigest(), 6)}
    with pytest.raises(ArtifactError, match=f"{LEAST.name}.so has sha256"):
        serving.library_of(made)


@COMPILES
@pytest.mark.parametrize(
    ("operators", "pin", "carried"),
    [
        (("BlockLinear", "Reshape"), "", LEVELS),  # the level alone selects kernels
        (("BlockLinear", "Reshape"), LEAST.name, (LEAST,)),
        (("CachedAttention", "MatMul"), LEAST.name, (LEAST,)),  # and ONNX Runtime's by the processor's features
    ],
    ids=["all of ours", "pinned", "some of ours"],
)
def test_a_bundle_carries_the_levels_that_its_graph_can_run_at(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operators: tuple[str, ...],
    pin: str,
    carried: tuple[Level, ...],
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    monkeypatch.setattr(native, "cpu_features", lambda: ("amx_int8", *LEAST.needed))
    target = ort_cpu.TARGET.at(pin) if pin else ort_cpu.TARGET
    made = target.complete(
        LOWERED.model_copy(update={"operator_counts": dict.fromkeys(operators, 1)}), model_of([], []), folder
    )
    assert [path.name for path in sorted(folder.rglob("*.so"))] == sorted(f"{level.name}.so" for level in carried)
    if "Reshape" in operators:
        assert [(one.level, one.features, one.more_features) for one in made.hardware] == [
            (level.name, level.needed, True) for level in carried
        ]
    else:
        assert [one.level for one in made.hardware] == [pin]
        assert made.hardware[0].features == cpu_features() and not made.hardware[0].more_features


@COMPILES
def test_a_plan_for_a_pinned_level_is_timed_with_its_library(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AVX2 codes of 6 bits are faster than those of 8, with AVX-512 they are not."""
    timed: list[Path] = []

    def timer(model: object, threads: int, library: Path) -> None:
        timed.append(library)

    monkeypatch.setattr("engines.sessions.SessionTimer", timer)
    monkeypatch.setattr(native, "cpu_features", lambda: BEST.needed + MIDDLE.needed)
    targets = [find_target(name) for name in ("ort-cpu", f"ort-cpu:{LEAST.name}")]
    for target in targets:
        target.timer(model_of([], []), 1)
    assert timed == [compiler.library(BEST), compiler.library(LEAST)]
    assert [target.kernels_version() for target in targets] == [path.parent.name for path in timed]
    assert timed[0].parent != timed[1].parent


def test_a_level_that_is_unknown_or_cannot_run_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="no level 'x86-64-avx9'") as caught:
        find_target("ort-cpu:x86-64-avx9")
    assert BEST.name in caught.value.expected
    with pytest.raises(BuildError, match="tensorrt has no level 'x86-64-avx2'"):
        find_target("tensorrt:x86-64-avx2")
    machine(monkeypatch, "Linux", "x86_64", LEAST.needed)
    mixed = LOWERED.model_copy(update={"operator_counts": {"CachedAttention": 1, "MatMul": 1}})
    with pytest.raises(BuildError, match=f"{BEST.name} cannot run here: it needs avx512f"):
        ort_cpu.TARGET.at(BEST.name).complete(mixed, model_of([], []), tmp_path)


@pytest.mark.parametrize(
    ("system", "kind", "features", "reason"),
    [
        ("Linux", "x86_64", ("avx", "fma", "f16c"), "native kernels need avx2, which this processor lacks"),
        ("Linux", "aarch64", (), "native kernels need asimddp, which this processor lacks"),
        ("Darwin", "arm64", ("asimddp",), "native kernels are for Linux on x86_64 or aarch64, not Darwin on arm64"),
    ],
)
def test_a_machine_without_a_level_is_refused_before_anything_is_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    kind: str,
    features: tuple[str, ...],
    reason: str,
) -> None:
    """By the first stage of a recipe, and by whatever builds or times; a level that is named is for other machines."""
    machine(monkeypatch, system, kind, features)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path(__file__).parents[2] / "params.yaml")
    nothing: Any = None
    for refused in (
        lambda: STAGES["environment"](recipe),
        lambda: timed_target(recipe),
        lambda: build(
            nothing,
            nothing,
            tmp_path / "bundle",
            target=ort_cpu.TARGET,
            precision="",
            slots=1,
            kv_scales={},
            parents={},
        ),
    ):
        with pytest.raises(FingerprintError, match=f"^ort-cpu cannot run here: {reason}") as caught:
            refused()
        assert LEAST.name in caught.value.expected and "docs/native-kernels.md" in caught.value.remedy
    assert not any(tmp_path.iterdir())
    find_target(f"ort-cpu:{LEAST.name}").require_machine()


def test_a_library_of_another_kind_is_refused_when_a_session_starts(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(np.arange(64, dtype=np.uint8).tobytes())
    with pytest.raises(BuildError, match=f"{library.name} cannot be loaded: ") as caught:
        cpu_options(1, library)
    assert "build the bundle again" in (caught.value.remedy or "")
