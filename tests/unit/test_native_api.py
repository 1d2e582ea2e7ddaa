"""The places of ONNX Runtime's API that ``ort.h`` names, called in the installed runtime.

No package brings the official header: not the wheels of onnxruntime, and not Debian 12. So entries that can be called
without a graph are, with what they must answer; the others run in every session of native kernels, which must notice
when one of them is moved.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from engines.kernels import cpu as native
from engines.kernels.cpu import compiler, declarations
from tests.kept import kept
from tests.native import least_level

pytestmark = pytest.mark.skipif(bool(native.unsupported()), reason=native.unsupported() or "they can")

HEADER = (compiler.SOURCE / "ort.h").read_text()
ENTRY = re.compile(r"^  ([A-Z_]+) = (\d+), +/\* \w+ \*/$", re.MULTILINE)
OF_API, OF_PROVIDERS = HEADER.split("/* Of OrtEpApi. */")
PLACES = {name: int(place) for name, place in ENTRY.findall(OF_API)}
PROVIDER_PLACES = {name: int(place) for name, place in ENTRY.findall(OF_PROVIDERS)}
VERSIONS = {name: int(v) for name, v in re.findall(r"^#define (API_VERSION|OP_VERSION) +(\d+)", HEADER, re.MULTILINE)}
CALLED_HERE = {
    *("CREATE_STATUS", "RELEASE_STATUS", "CREATE_DOMAIN", "DOMAIN_ADD", "RELEASE_DOMAIN", "SESSION_ENTRY"),
    *("TENSOR_DATA", "TENSOR_TYPE_SHAPE", "PARALLEL_FOR"),
    *("EXTERNAL_OFFSET", "EXTERNAL_SIZE", "RELEASE_EXTERNAL"),
}
UNUSED = {"ATTRIBUTE_FLOAT"}  # only operators of steps ask for it, and step.c answers
IN_SESSIONS = sorted({*PLACES, *PROVIDER_PLACES} - CALLED_HERE - UNUSED)
# Entries that only this test calls.
GET_ERROR_CODE, GET_ERROR_MESSAGE, CREATE_OPTIONS, ADD_DOMAIN, CREATE_TENSOR, CREATE_MEMORY_INFO = 1, 2, 10, 28, 49, 69
RELEASE_MEMORY_INFO, RELEASE_VALUE, RELEASE_OPTIONS = 94, 96, 100
ADD_ENTRY, CREATE_EXTERNAL = 130, 389
FLOAT = 1


class Base(Structure):
    _fields_ = (("get", ctypes.CFUNCTYPE(c_void_p, c_uint32)), ("version", ctypes.CFUNCTYPE(c_char_p)))


class Allocated(Structure):
    _fields_ = (("sizes", c_size_t * 10),)


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
    assert len(PLACES) == len(set(PLACES.values())) == 36 and len(PROVIDER_PLACES) == 2
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
    assert call(base, ADD_DOMAIN, options, domain) is None
    call(base, RELEASE_OPTIONS, options, result=None)
    call(base, PLACES["RELEASE_DOMAIN"], domain, result=None)


def test_entries_of_a_session_are_read(base: Base) -> None:
    options, text, size = c_void_p(), ctypes.create_string_buffer(16), c_size_t(16)
    assert call(base, CREATE_OPTIONS, byref(options)) is None
    assert call(base, ADD_ENTRY, options, c_char_p(b"tapeout.threads"), c_char_p(b"12")) is None
    entry = (options, c_char_p(b"tapeout.threads"), text, byref(size))
    assert call(base, PLACES["SESSION_ENTRY"], *entry) is None
    assert (text.value, size.value) == (b"12", 3)
    call(base, RELEASE_OPTIONS, options, result=None)


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


def test_a_place_in_a_file_is_read_and_released(base: Base) -> None:
    def taken() -> int:
        find = ctypes.CDLL(None).mallinfo2
        find.restype = Allocated
        return find().sizes[7]  # uordblks

    def look() -> None:
        assert (
            call(base, CREATE_EXTERNAL, *(c_char_p(b"file" * 1000), c_int64(4096), c_size_t(77), byref(found))) is None
        )
        assert call(base, PLACES["EXTERNAL_OFFSET"], found, result=c_int64) == 4096
        assert call(base, PLACES["EXTERNAL_SIZE"], found, result=c_size_t) == 77
        call(base, PLACES["RELEASE_EXTERNAL"], found, result=None)

    found = c_void_p()
    look()
    before = taken()
    for _ in range(1000):
        look()
    assert taken() < before + 1000 * 4000  # the bytes of their paths


def test_a_parallel_for_needs_a_context(base: Base) -> None:
    status = call(base, PLACES["PARALLEL_FOR"], None, None, c_size_t(2), c_size_t(0), None)
    assert error(base, status)[1] == "Invalid context"


# A step with attributes of both kinds, one with values of its own, and an operator that ONNX Runtime runs. Each library
# has a process of its own.
SESSIONS = """
import json, os, sys, tempfile
import numpy as np
import tests.native as kernels
import tests.unit.test_native_experts as experts
import tests.unit.test_native_steps as steps
from pathlib import Path
from engines.weight_pages import shared_extents
from tapeout.operators.experts import ExpertGate
from tapeout.schemes import Scheme
from tests.random_linears import random_linear

def run_mapped(folder):
    ups, down = experts.random(3, 40, 32, seed=1), experts.random(3, 32, 40, seed=2)
    gate, x, (index, weight) = ExpertGate("relu2"), experts.random(5, 32), experts.choices(5, 2, 3, 0)
    session = kernels.mapped_experts(experts.experts_model(gate, None, ups, down), Path(folder))
    assert shared_extents(Path(folder) / "weights.bin")
    wanted = experts.mixed(gate, None, ups, down, None, x, index, weight)
    np.testing.assert_allclose(experts.run(session, x, index, weight), wanted, rtol=1e-4, atol=1e-4)

def run(library):
    kernels.library = lambda: Path(library)
    linear = random_linear(40, 64, Scheme(bits=8, group_size=32, symmetric=True))
    x, weight = np.ones((3, 64), np.float32), np.ones(64, np.float32)
    (y,) = kernels.linear_session("NormLinear", linear, weight=weight, epsilon=3.0)(x)
    kernels.check(y, kernels.expected(x / 2, linear, slack=3e-6))
    assert steps.same(steps.session(Path(library)).run(steps.OUTPUTS, {"x": x}), steps.node_by_node(x))
    (rows,) = kernels.gather_session(linear)(np.array([[39, 0]]))
    assert np.isfinite(rows).all()
    with tempfile.TemporaryDirectory() as folder:
        run_mapped(folder)

def ends_well(library):
    child = os.fork()
    if not child:
        try:
            run(library)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

print(json.dumps([ends_well(library) for library in sys.argv[1:]]))
"""
# What uses entries beyond those of `CALLED_HERE`; a BlockGather may be a node of its own.
USERS = ("provider.c", "step.c", "block_gather.c")


def library(*moved: str) -> Path:
    """Compiled with the next place of the ``moved`` entries; each content once per machine."""
    header = HEADER
    for name in moved:
        place = (PLACES | PROVIDER_PLACES)[name]
        assert f"  {name} = {place}," in header
        header = header.replace(f"  {name} = {place},", f"  {name} = {place + 1},")
    sources = {path.name: path.read_text() for path in sorted(compiler.SOURCE.iterdir())}
    sources |= {"ort.h": header, declarations.FILE: declarations.text()}
    # Quickly compiled: without optimizations and checks, and functions of vectors are called.
    flags = [*("-std=c11", "-O0", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=undefined", "-Dalways_inline=unused")]
    flags += compiler.target_flags(least_level())

    def run(folder: Path, *arguments: str) -> None:
        environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(compiler.cache() / "compiler")}
        command = [sys.executable, "-m", compiler.COMPILER, "cc", *flags, *arguments]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)

    def write(folder: Path) -> None:
        folder.mkdir()
        for file, text in sources.items():
            (folder / file).write_text(text)
        others = [file for file in sources if file.endswith(".c") and file not in USERS]
        if moved:
            objects = [str(library().parent / f"{file}.o") for file in others]
        else:
            objects = [f"{file}.o" for file in others]
            for file, to in zip(others, objects, strict=True):
                run(folder, "-c", file, "-o", to)
        run(folder, "-shared", *compiler.LINKED, *USERS, *objects, "-o", "library.so")

    key = repr((metadata.version(compiler.COMPILER), flags, sources))
    return kept(f"moved-{'-'.join(moved) or 'none'}".lower(), key, write) / "library.so"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, bool]:
    """Of sessions, by the entry that is moved; "" where none is."""
    libraries = {"": library()} | {name: library(name) for name in IN_SESSIONS}
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS, *map(str, libraries.values())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(libraries, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("moved", ["", *IN_SESSIONS])
def test_a_session_notices_a_moved_entry(moved: str, outcomes: dict[str, bool]) -> None:
    assert outcomes[moved] == (not moved)
