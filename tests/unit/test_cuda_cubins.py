"""Machine code for GPUs that are not here: what each kernel consists of, and that builds give the same bytes again."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from engines.kernels.cuda import ARCHITECTURES, compiler
from tapeout.errors import BuildError
from tests.cubins import DISASSEMBLER, Kernel, kernels_of

# threads of a block, and blocks of a multiprocessor that registers must have room for
WEIGHTS = [
    *(("F16", bits, rows) for bits in (4, 5, 6, 8) for rows in ("plain", "any")),
    ("F16", 16, "any"),
    ("E4M3", 8, "any"),
]
FEW = {
    f"linear_few_{kind}_{bits}_{rows}_{groups}": (128, 3 if groups == 2 else 4)
    for kind, bits, rows in WEIGHTS
    for groups in (1, 2)
}
WIDE = {
    f"linear_{name}_{kind}_{bits}_{rows}_{groups}": (256, 1 if name == "whole" or (groups, bits) == (8, 8) else 2)
    for kind, bits, rows in WEIGHTS
    for name in ("split", "whole")
    for groups in (4, 8)
}
# PTX has mma of E4M3 from sm89 on. These architectures have no such instruction (their own is wgmma or tcgen05): before
# sm89 our sources convert to half, on the others the compiler does.
IN_HALF = {"sm80", "sm90", "sm100"}
CODE_LOADS = {"8": 2, "16": 4}  # of 16 bytes, of a chunk of a tile; of others one
# Of the loop over a chunk of 512 bytes with one group of eight tokens. At 173 decode was bound by instructions (H200).
MOST_INSTRUCTIONS = 68
HEADS = {(cache, channels) for cache in ("Int8", "Fp8", "Half") for channels in (64, 128, 256)}
PARTS = {f"attention_parts_{cache}_{channels}": (256, 1) for cache, channels in HEADS}
PROMPTS = {f"attention_prompt_{cache}_{channels}": (128, 2) for cache, channels in HEADS}
ROWS = {
    **{f"block_gather_{bits}": (128, 4) for bits in (4, 5, 6, 8, 16)},
    **dict.fromkeys(
        ("rotary_cache_Int8", "rotary_cache_Fp8", "rotary_cache_Half", "gated_rows", "argmax_parts"),
        (256, 4),
    ),
    **dict.fromkeys(("quantize_rows", "gated_codes", "finite_rows"), (256, 4)),
    **dict.fromkeys(("choose_rows", "norm_rows"), (512, 2)),
}
LIMITS = FEW | WIDE | PARTS | PROMPTS | ROWS
REGISTERS = 65536  # of a multiprocessor


def installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.timeout(1800)  # all kernels take 30 to 70 s for each of five architectures

needs_nvrtc = pytest.mark.skipif(not installed(compiler.NVRTC), reason=f"{compiler.NVRTC} is not installed")


@pytest.fixture(scope="module")
def cubins() -> dict[str, Path]:
    for package in (compiler.NVRTC, DISASSEMBLER):
        if not installed(package):
            pytest.skip(f"{package} is not installed")
    return compiler.cubins()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest, cubins: dict[str, Path]) -> dict[str, Kernel]:
    return kernels_of(cubins[request.param])


def test_every_kernel_is_there_and_has_registers_for_all(kernels: dict[str, Kernel]) -> None:
    assert kernels.keys() == LIMITS.keys()
    for name, kernel in kernels.items():
        threads, blocks = LIMITS[name]
        assert kernel.frame_bytes == 0, name
        assert not [one for one in kernel.instructions if one.startswith(("LDL", "STL"))], name
        registers = -(-kernel.registers // 8) * 8  # as they are given out
        assert registers * threads * blocks <= REGISTERS, f"{name}: {kernel.registers} registers"


@pytest.mark.parametrize("architecture", ["sm80", "sm90", "sm100"])
def test_two_blocks_of_decode_attention_fit_a_multiprocessor(architecture: str, cubins: dict[str, Path]) -> None:
    """Where shared memory has room for two: while one adds its sums the other loads."""
    found = kernels_of(cubins[architecture])
    for name, (threads, _) in PARTS.items():
        if not name.endswith("256"):
            assert -(-found[name].registers // 8) * 8 * threads * 2 <= REGISTERS, name


def in_tensor_cores(kernel: Kernel) -> int:
    return kernel.count("HMMA", "16816", "F32")


def ahead_of(bits: str) -> int:
    """Chunks that a warp of few tokens has on their way."""
    return 2 if bits == "16" else 4


def test_linears_are_on_tensor_cores_and_load_16_bytes(kernels: dict[str, Kernel]) -> None:
    for name in FEW:
        _, _, kind, bits, _, groups = name.split("_")
        kernel, ahead = kernels[name], ahead_of(bits)
        once = kernel.count("LDG", "128", "NA")  # codes, when the kernel begins and for later chunks
        assert once >= 2 * ahead * CODE_LOADS.get(bits, 1), name
        if kind != "E4M3":
            matmuls = 4 * int(groups) * ahead
            assert in_tensor_cores(kernel) and in_tensor_cores(kernel) % matmuls == 0, name
            assert kernel.count("LDG", "128") - once >= 2 * int(groups) * ahead, name  # activations
    for name in WIDE:
        _, split, kind, bits, _, groups = name.split("_")
        kernel, tiles = kernels[name], 1 if split == "split" else 2
        assert kernel.count("LDGSTS", "128") >= tiles * CODE_LOADS.get(bits, 1) + 1, name  # and activations
        assert kernel.count("LDS", "128") >= tiles * CODE_LOADS.get(bits, 1), name
        if kind != "E4M3":
            assert in_tensor_cores(kernel) == 4 * tiles * int(groups), name
            assert kernel.count("LDS", "128") >= 2 * int(groups), name


def test_the_loop_of_few_tokens_is_short(kernels: dict[str, Kernel]) -> None:
    """Weights in 4 bits come from memory faster than a longer one decodes them."""
    kernel = kernels["linear_few_F16_4_plain_1"]
    (loop,) = [loop for loop in kernel.loops if any(one.startswith("HMMA") for one in loop)]
    chunks = sum(count for one, count in loop.items() if one.startswith("HMMA")) / 4
    assert loop.total() / chunks <= MOST_INSTRUCTIONS, f"{loop.total() / chunks:.0f} instructions"


def test_attention_is_on_tensor_cores_and_loads_16_bytes(kernels: dict[str, Kernel]) -> None:
    for name in PARTS | PROMPTS:
        channels = int(name.rpartition("_")[2])
        scores = 8 * (64 if name in PARTS and channels == 256 else channels) // 16  # of which it has a loop
        most = 128 if name in PROMPTS or "Half" not in name else 64  # channels of results at once
        values = 4 * min(channels, most) // 8
        assert kernels[name].count("HMMA", "16816", "F32") == scores + values, name
        assert kernels[name].count("LDG", "128") >= channels // 64 * 4, name
    for name in PROMPTS:
        assert kernels[name].count("LDS", "128") >= 40, name
        assert kernels[name].count("STS", "128") >= 4, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_linears_in_fp8_are_on_tensor_cores(architecture: str, cubins: dict[str, Path]) -> None:
    found = kernels_of(cubins[architecture])
    for name in (*FEW, *WIDE):
        _, split, kind, _, _, groups = name.split("_")
        if kind != "E4M3":
            continue
        kernel, matmuls = found[name], 2 * int(groups) * {"few": ahead_of("8"), "whole": 2}.get(split, 1)
        in_half, in_fp8 = kernel.count("HMMA", "16816", "F32"), kernel.count("QMMA", "16832", "F32", "E4M3")
        wanted = (2 * matmuls, 0) if architecture in IN_HALF else (0, matmuls)
        assert (in_half % max(wanted[0], 1), in_fp8 % max(wanted[1], 1)) == (0, 0), name
        assert (bool(in_half), bool(in_fp8)) == (architecture in IN_HALF, architecture not in IN_HALF), name


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_sources_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Of a few kernels, in two folders."""
    found: list[bytes] = []
    for name in ("one", "two"):
        source = tmp_path / name / "source"
        source.mkdir(parents=True)
        for path in (*compiler.SOURCE.glob("*.*h"), compiler.SOURCE / "rows.cu"):
            shutil.copyfile(path, source / path.name)
        monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / name / "cache"))
        path = compiler.cubin(architecture, source)
        assert path.name == f"cuda-{architecture}.cubin" and path.is_relative_to(tmp_path / name)
        found.append(path.read_bytes())
    assert found[0] == found[1]


def test_a_bundle_gets_the_kernels_that_it_selects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (compiler.NVRTC, DISASSEMBLER):
        if not installed(package):
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path))
    found = kernels_of(compiler.cubin("sm80", selected=("CACHE_Half", "GATHER_6")))
    always = {
        "argmax_parts",
        "choose_rows",
        "finite_rows",
        "gated_codes",
        "gated_rows",
        "norm_rows",
        "quantize_rows",
    }
    assert found.keys() == always | {"block_gather_6", "rotary_cache_Half"}


@needs_nvrtc
def test_sources_that_do_not_compile_are_an_error_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    for content in ("__global__ void f( {}", "static __global__ void f(int x) { int unused = x; }"):
        (source / "broken.cu").write_text(content)
        with pytest.raises(BuildError, match=r"do not compile: (.|\n)*broken\.cu") as caught:
            compiler.cubin("sm90", source)
        assert caught.value.remedy == f"reinstall {compiler.NVRTC} in the version that pyproject.toml names"
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_what_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="no architecture 'sm70'") as caught:
        compiler.cubin("sm70")
    assert caught.value.expected == "one of sm80, sm89, sm90, sm100, sm120"
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "NVRTC", "no-such-compiler")
    with pytest.raises(BuildError, match="the package no-such-compiler is not installed") as caught:
        compiler.cubin("sm90")
    assert caught.value.remedy == 'pip install ".[cuda]"'
    monkeypatch.setattr(compiler.compiler, "COMPILER", "no_such_compiler")
    with pytest.raises(BuildError, match="the package no_such_compiler is not installed"):
        compiler.host_library()
    assert not [*tmp_path.iterdir()]


@needs_nvrtc
def test_another_version_of_the_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a wheel of another version of CUDA, whose libraries have other names."""
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "LIBRARIES", ("libnvrtc-builtins.so.12.9", "libnvrtc.so.12"))
    with pytest.raises(BuildError, match=r"cannot be loaded: .*libnvrtc-builtins\.so\.12\.9") as caught:
        compiler.cubin("sm90")
    assert "13.0.88 is installed" in (caught.value.expected or "") and '".[cuda]"' in (caught.value.remedy or "")


def test_a_source_for_the_host_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("int f(int unused) { return 0; }")
    with pytest.raises(BuildError, match=r"do not compile: (.|\n)*broken\.cu"):
        compiler.host_library(tmp_path)
