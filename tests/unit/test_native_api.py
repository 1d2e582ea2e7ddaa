"""The places of ONNX Runtime's API that ``ort.h`` names, called in the installed runtime.

No package brings the official header: not the wheels of onnxruntime, and not Debian 12. So every entry that can be
called without a kernel is, with what it must answer; the others run in every session of a native kernel.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from engines import native
from engines.native import compiler
from tests.kept import kept
from tests.native import least_level

pytestmark = pytest.mark.skipif(bool(native.unsupported()), reason=native.unsupported() or "they can")

HEADER = (compiler.SOURCE / "ort.h").read_text()
PLACES = {name: int(place) for name, place in re.findall(r"^  ([A-Z_]+) = (\d+), +/\* \w+ \*/$", HEADER, re.MULTILINE)}
VERSIONS = {name: int(v) for name, v in re.findall(r"^#define (API_VERSION|OP_VERSION) +(\d+)", HEADER, re.MULTILINE)}
IN_KERNELS = {
    "ATTRIBUTE_FLOAT",
    "ATTRIBUTE_INT",
    "CONSTANT_INPUT",
    "GET_INPUT",
    "GET_OUTPUT",
}  # called while a kernel is made or runs
# Entries that only this test calls.
GET_ERROR_CODE, GET_ERROR_MESSAGE, CREATE_OPTIONS, CREATE_TENSOR, CREATE_MEMORY_INFO = 1, 2, 10, 49, 69
RELEASE_MEMORY_INFO, RELEASE_VALUE, RELEASE_OPTIONS = 94, 96, 100
FLOAT = 1


class Base(Structure):
    _fields_ = (("get", ctypes.CFUNCTYPE(c_void_p, c_uint32)), ("version", ctypes.CFUNCTYPE(c_char_p)))


@pytest.fixture(scope="module")
def base() -> Base:
    (path,) = (Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*")
    library = ctypes.CDLL(str(path))
    library.OrtGetApiBase.restype = POINTER(Base)
    return library.OrtGetApiBase().contents


def call(base: Base, place: int, *arguments: Any, result: Any = c_void_p) -> Any:
    table = ctypes.cast(base.get(VERSIONS["API_VERSION"]), POINTER(c_void_p))
    return ctypes.CFUNCTYPE(result)(table[place])(*arguments)


def error(base: Base, status: int | None) -> tuple[int, str]:
    assert status, "no error"
    at = c_void_p(status)
    code = call(base, GET_ERROR_CODE, at, result=c_int)
    message = call(base, GET_ERROR_MESSAGE, at, result=c_char_p).decode()
    call(base, PLACES["RELEASE_STATUS"], at, result=None)
    return code, message


def test_the_runtime_is_the_one_that_is_supported(base: Base) -> None:
    assert base.version().decode() == ort.__version__
    newest = int(ort.__version__.split(".")[1])
    assert VERSIONS["OP_VERSION"] <= VERSIONS["API_VERSION"] <= newest
    # One table for all versions: it only grows at its end.
    assert base.get(VERSIONS["API_VERSION"]) == base.get(newest) == base.get(1) is not None
    assert base.get(newest + 1) is None


def test_every_place_is_an_entry_of_its_own(base: Base) -> None:
    assert len(PLACES) == 15 and len(set(PLACES.values())) == 15
    table = ctypes.cast(base.get(VERSIONS["API_VERSION"]), POINTER(c_void_p))
    assert all(table[place] for place in PLACES.values())


def test_statuses_are_created_and_released(base: Base) -> None:
    status = call(base, PLACES["CREATE_STATUS"], c_int(2), c_char_p(b"a message"))
    assert error(base, status) == (2, "a message")


def test_domains_are_created_filled_added_and_released(base: Base) -> None:
    options, domain, op = c_void_p(), c_void_p(), ctypes.create_string_buffer(512)
    assert call(base, CREATE_OPTIONS, byref(options)) is None
    assert call(base, PLACES["CREATE_DOMAIN"], c_char_p(b"a.domain"), byref(domain)) is None and domain.value
    assert call(base, PLACES["DOMAIN_ADD"], domain, op) is None
    assert call(base, PLACES["ADD_DOMAIN"], options, domain) is None
    call(base, RELEASE_OPTIONS, options, result=None)
    call(base, PLACES["RELEASE_DOMAIN"], domain, result=None)


def test_data_type_and_shape_of_a_tensor_are_read(base: Base) -> None:
    memory, tensor, data = c_void_p(), c_void_p(), (c_float * 6)()
    shape = (c_int64 * 2)(2, 3)
    assert call(base, CREATE_MEMORY_INFO, c_int(0), c_int(0), byref(memory)) is None
    assert (
        call(
            base,
            CREATE_TENSOR,
            *(memory, data, c_size_t(24), shape, c_size_t(2), c_int(FLOAT), byref(tensor)),
        )
        is None
    )
    found, kind, dims, rank = c_void_p(), c_int(), POINTER(c_int64)(), c_size_t()
    assert call(base, PLACES["TENSOR_DATA"], tensor, byref(found)) is None
    assert call(base, PLACES["TENSOR_TYPE_SHAPE"], tensor, byref(kind), byref(dims), byref(rank)) is None
    assert found.value == ctypes.addressof(data)
    assert (kind.value, dims[: rank.value]) == (FLOAT, [2, 3])
    call(base, RELEASE_VALUE, tensor, result=None)
    call(base, RELEASE_MEMORY_INFO, memory, result=None)


def test_a_parallel_for_needs_a_context(base: Base) -> None:
    status = call(base, PLACES["PARALLEL_FOR"], None, None, c_size_t(2), c_size_t(0), None)
    assert error(base, status)[1] == "Invalid context"


# A node whose result depends on both kinds of attributes, its inputs and its outputs.
SESSION = """
import sys
import numpy as np
import tests.native as kernels
from pathlib import Path
from tapeout.schemes import Scheme
kernels.library = lambda: Path(sys.argv[1])
linear = kernels.random_linear(40, 64, Scheme(bits=8, group_size=32, symmetric=True))
x, weight = np.ones((3, 64), np.float32), np.ones(64, np.float32)
(y,) = kernels.linear_session("NormLinear", linear, weight=weight, epsilon=3.0)(x)
kernels.check(y, kernels.expected(x / 2, linear, slack=3e-6))
"""


def session(library: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SESSION, library], capture_output=True, text=True)


def with_moved_entry(name: str) -> Path:
    """The library with another place of this entry. Kept, so that each content is compiled once per machine."""
    place = f"  {name} = {PLACES[name]},"
    assert place in HEADER
    sources = {path.name: path.read_text() for path in sorted(compiler.SOURCE.iterdir())}
    sources["ort.h"] = HEADER.replace(place, f"  {name} = {PLACES[name] + 1},")
    flags = tuple("-O0" if flag == "-O3" else flag for flag in compiler.FLAGS)

    def write(folder: Path) -> None:
        (folder / "source").mkdir(parents=True)
        for file, text in sources.items():
            (folder / "source" / file).write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            (folder / "kernels").mkdir()
            (folder / "kernels" / "compiler").symlink_to(
                compiler.cache() / "compiler"
            )  # what the compiler itself keeps
            patch.setenv("TAPEOUT_CACHE", str(folder))
            patch.setattr(compiler, "FLAGS", flags)
            compiler.library(least_level(), folder / "source").rename(folder / "library.so")

    key = repr((metadata.version(compiler.COMPILER), flags, compiler.target_flags(least_level()), sources))
    return kept(f"moved-{name.lower()}", key, write) / "library.so"


@pytest.mark.parametrize("moved", ["", *sorted(IN_KERNELS)])
@pytest.mark.usefixtures("native_operators")
def test_a_session_notices_a_moved_entry(moved: str) -> None:
    done = session(with_moved_entry(moved) if moved else compiler.library(least_level()))
    assert (done.returncode == 0) == (not moved), done.stderr[-2000:]
