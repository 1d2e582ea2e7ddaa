"""Compiles ``source/``: with NVRTC to machine code of a GPU, and with the CPU's compiler to a library of fibers.

Both compilers are pinned wheels and read nothing of the machine, so the same sources give the same bytes anywhere. No
GPU, driver or CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path

from engines.kernels.cpu import LEVELS, compiler
from engines.kernels.cuda import ARCHITECTURES, HOST
from tapeout.cores import physical_cores
from tapeout.errors import BuildError

SOURCE = Path(__file__).parent / "source"
NVRTC = "nvidia-cuda-nvrtc"
LIBRARIES = ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13")  # in this order: the second asks for the first by its name
# fmad: what is not written as fmaf is rounded twice, in every kernel, so that two kernels may give the same bits.
CUBIN_FLAGS = ("--std=c++17", "--fmad=false")
HOST_FLAGS = (
    *("-x", "c++", "-std=c++17", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),  # of loops that NVRTC unrolls
)
OPTIMIZED = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-s", *compiler.LINKED)
MADE = "machine code"
LINKED = ("-ldl",)  # of the driver's library, which is opened by name


def cubin(architecture: str, source: Path | None = None, selected: Sequence[str] = ()) -> Path:
    """Machine code for one of ``ARCHITECTURES``. :class:`BuildError` without NVRTC.

    ``selected``: what a plan needs (``LaunchPlan.selected``); by default all kernels.
    """
    source = source or SOURCE
    if architecture not in ARCHITECTURES:
        raise BuildError(f"no architecture {architecture!r}", expected=f"one of {', '.join(ARCHITECTURES)}")
    try:
        wheel = metadata.distribution(NVRTC)
    except metadata.PackageNotFoundError as error:
        raise BuildError(
            f"no compiler for GPUs: the package {NVRTC} is not installed",
            expected="the pinned compiler that CUDA kernels are built with",
            remedy='pip install ".[cuda]"',
        ) from error
    names = ("SELECTED_BY_NAME", *selected) if selected else ()
    definitions = (f"--define-macro={name}=1" for name in names)
    flags = (f"--gpu-architecture={architecture.replace('sm', 'sm_')}", *CUBIN_FLAGS, *definitions)
    folder = Path(str(wheel.locate_file("nvidia/cu13/lib")))
    return compiler.write_once(
        _path(_device_sources(source), (NVRTC, wheel.version, *flags), f"cuda-{architecture}.cubin"),
        lambda path: path.write_bytes(_nvrtc(folder, source, flags)),
    )


def cubins(architectures: Sequence[str] = ARCHITECTURES, selected: Sequence[str] = ()) -> dict[str, Path]:
    """Machine code by architecture; as many are compiled at once as there are cores. ``selected``: of :func:`cubin`."""
    compile_ = partial(cubin, selected=selected)
    with ThreadPoolExecutor(physical_cores()) as pool:
        return dict(zip(architectures, pool.map(compile_, architectures), strict=True))


def host_library(source: Path | None = None) -> Path:
    """All kernels as fibers, for processors of this machine's least level. :class:`BuildError` without a compiler."""
    source = source or SOURCE
    flags = (*HOST_FLAGS, *OPTIMIZED, *host_target_flags())
    compiled_by = (compiler.compiler_version(), *flags, *LINKED)
    files = [path.name for path in host_sources(source)]
    return compiler.write_once(
        _path(sorted(source.iterdir()), compiled_by, f"cuda-{HOST}.so"),
        lambda path: compiler.run_compiler(source, [*flags, "-o", str(path), *files, *LINKED], MADE),
    )


def host_sources(source: Path) -> list[Path]:
    return sorted([*source.glob("*.cu"), *source.glob("*.cpp")])


def host_target_flags() -> tuple[str, ...]:
    """Of the processors that run native kernels: :class:`BuildError` where there are none."""
    levels = [level for level in LEVELS if level.machine == platform.machine()]
    if not levels:
        raise BuildError(
            f"kernels cannot run as fibers on {platform.machine()}", expected="Linux on x86-64 or 64-bit ARM"
        )
    return compiler.target_flags(levels[-1])


def _device_sources(source: Path) -> list[Path]:
    """Kernels, and headers that they may include."""
    return [path for path in sorted(source.iterdir()) if path.suffix in (".cu", ".cuh", ".h")]


def _path(sources: Sequence[Path], compiled_by: tuple[str, ...], name: str) -> Path:
    return compiler.cache() / f"cuda-{compiler.key_of(sources, compiled_by)}" / name


def _nvrtc(folder: Path, source: Path, flags: tuple[str, ...]) -> bytes:
    """One program that includes every kernel. Headers are given by content: no path enters the machine code."""
    try:
        _, nvrtc = [ctypes.CDLL(str(folder / name)) for name in LIBRARIES]
    except OSError as error:
        raise BuildError(
            f"the compiler for GPUs cannot be loaded: {error}",
            expected=f"{' and '.join(LIBRARIES)} of the pinned {NVRTC}, where {metadata.version(NVRTC)} is installed",
            remedy='pip install ".[cuda]"',
        ) from error
    headers = _device_sources(source)
    text = "".join(f'#include "{path.name}"\n' for path in headers if path.suffix == ".cu")
    program = ctypes.c_void_p()
    contents, names = _strings([path.read_text() for path in headers]), _strings([path.name for path in headers])
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernels.cu", len(headers), contents, names
    )
    if created:
        raise compiler.not_compiled(source, f"nvrtcCreateProgram returned {created}", NVRTC, MADE)
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), _strings(flags))
        log = _result(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
        if failed or log.strip():  # a warning, too
            raise compiler.not_compiled(source, log, NVRTC, MADE)
        return _result(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: list[str] | tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _result(nvrtc: ctypes.CDLL, name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    nvrtc[f"nvrtcGet{name}Size"](program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{name}"](program, content)
    return content.raw
