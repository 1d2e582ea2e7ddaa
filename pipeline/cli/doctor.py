"""``tapeout doctor``: what this machine can build and run, what is missing, and how to get it. Changes nothing.

Every finding is a plain value: the command prints it, a script reads it as JSON, a test checks it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from engines.bundle import EngineBundle, IOContract
from engines.kernels import cpu as native
from engines.kernels.cuda.compiler import NVRTC
from engines.load import at_level, experts_mapped, find_target
from pipeline.registry.tracking import probe, public_uri, sqlite_path, tracking_uri, unreachable
from tapeout.artifact import Artifact, load
from tapeout.errors import TapeoutError
from tapeout.fingerprint import amx_refusal, cpu_features
from tapeout.recipe import Build
from tapeout.resources import available_memory, container_limit
from tapeout.state import SEQUENCE_SLOTS

if TYPE_CHECKING:
    from tapeout.recipe import BaseRecipe

DEFAULT_TARGET = Build().target
GIB = 1 << 30
NEEDED_MEMORY_BYTES = 6 * GIB  # the default recipe's promise
NEEDED_DISK_BYTES = 4 * GIB  # artifacts, their DVC cache and the download cache of the default recipe
PROBE_TIMEOUT_S = 20
SOURCE = "source"  # the subject of findings about one

# Features of tapeout.fingerprint that speed up quantized kernels, by the names people know.
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "amx_int8": "AMX INT8",
    "asimddp": "NEON dot product",
    "i8mm": "NEON int8 matrix multiplication",
    "sve": "SVE",
}
# Each multiplies int8 in one instruction; without any, quantized kernels use slower sequences.
INT8_DOT_PRODUCTS = ("avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")

RUN_PACKAGES = ("onnxruntime", "onnx", "tokenizers", "jinja2", "numpy")
BUILD_PACKAGES = (
    *("torch", "transformers", "onnxscript", "compressed-tensors", "datasets", "lm-eval", "dvc", "mlflow"),
    *find_target(DEFAULT_TARGET).capabilities.compilers,
)
# Package -> how to get it.
GPU_PACKAGES = {
    NVRTC: 'for the target cuda: pip install ".[cuda]" in the checkout',
    "tensorrt": "for the GPU of this machine: install TensorRT 11 from NVIDIA, as `pip install tensorrt`",
    "tensorrt-rtx-cu13-bindings": 'for GPUs of others: pip install ".[tensorrt-rtx]" in the checkout',
}
# What graphs are lowered to where there is no native kernel for a weight or a norm.
ENGINE_OPERATORS = ("MatMulNBits", "GatherBlockQuantized", "SkipSimplifiedLayerNormalization")


class Status(StrEnum):
    OK = "ok"
    LIMITED = "limited"  # works, with the drawback that is stated
    MISSING = "missing"  # the default recipe needs it
    BROKEN = "broken"  # present, but it cannot be used
    ABSENT = "absent"  # not needed


@dataclass(frozen=True)
class Finding:
    subject: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """``abilities`` follow from the three sections of findings above them."""

    machine: tuple[Finding, ...]
    software: tuple[Finding, ...]
    services: tuple[Finding, ...]
    abilities: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """The default recipe can be built, and the engines that are here can be run."""
        return not {finding.status for finding in self.abilities} & {Status.MISSING, Status.BROKEN}

    def sections(self) -> Mapping[str, tuple[Finding, ...]]:
        return {name: getattr(self, name) for name in ("machine", "software", "services", "abilities")}


def diagnose(recipe: BaseRecipe | None, folder: Path) -> Diagnosis:
    """Look at this machine. ``recipe`` None: only at what runs engines. ``folder``: where artifacts will go."""
    machine = (processor(_cpu_name(), cpu_features()), memory(), disk(folder), gpu(), cuda())
    python = Finding("Python", Status.OK, f"{platform.python_version()} at {sys.executable}")
    pins = pinned()
    run = (python, *(package(name, pins) for name in RUN_PACKAGES), operators(), native_kernels(native.level()))
    building = f"build an {DEFAULT_TARGET} engine from the recipe"
    build, services = tuple[Finding, ...](), tuple[Finding, ...]()
    if recipe is None:
        able = Finding(building, Status.ABSENT, "not looked at: there is no recipe", "name one with --params")
    else:
        services = (source(recipe.model.source), source(recipe.data.source), registry(tracking_uri()))
        packages = tuple(package(name, pins) for name in BUILD_PACKAGES)
        build = (*packages, *(optional_package(name, remedy) for name, remedy in GPU_PACKAGES.items()))
        able = _ability(building, (*machine, *run, *packages, *services))
    abilities = (ort_cuda(), _ability(f"run an {DEFAULT_TARGET} engine", run), able)
    built = tuple(
        bundle(folder / "artifacts" / name)
        for name in ("candidate", "baseline")
        if (folder / "artifacts" / name).is_dir()
    )
    return Diagnosis(machine, (*run, *build), services, (*abilities, *built))


def processor(name: str, features: tuple[str, ...]) -> Finding:
    """``features``: as :func:`tapeout.fingerprint.cpu_features` reads them."""
    import psutil

    known = [title for feature, title in INSTRUCTION_SETS.items() if feature in features]
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {psutil.cpu_count() or '?'} threads"
    found = f"{name}, {cores}; {', '.join(known) or 'no instruction set that matters here'}"
    if not set(features).intersection(INT8_DOT_PRODUCTS):
        remedy = "quantized kernels run slower without VNNI, AMX or NEON dot products"
        return Finding("processor", Status.LIMITED, found, remedy)
    return Finding("processor", Status.OK, found)


def memory() -> Finding:
    import psutil

    total = min(psutil.virtual_memory().total, container_limit() or sys.maxsize)
    free = available_memory()
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if free < NEEDED_MEMORY_BYTES:
        need = f"the default recipe needs {NEEDED_MEMORY_BYTES // GIB} GiB"
        return Finding("memory", Status.LIMITED, found, f"{need}: close other programs, or use a larger machine")
    return Finding("memory", Status.OK, found)


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {folder.resolve()}"
    if free < NEEDED_DISK_BYTES:
        return Finding(
            "disk", Status.MISSING, found, f"free {NEEDED_DISK_BYTES // GIB} GiB: `dvc gc -w` drops old artifacts"
        )
    return Finding("disk", Status.OK, found)


def gpu() -> Finding:
    """NVIDIA GPUs as ``nvidia-smi`` lists them."""
    tool = shutil.which("nvidia-smi")
    unused = f"needed only to run engines for GPUs; those of {DEFAULT_TARGET} need none"
    if tool is None:
        return Finding("NVIDIA GPU", Status.ABSENT, "no driver", unused)
    query = [tool, "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("NVIDIA GPU", Status.ABSENT, f"nvidia-smi failed: {error}", unused)
    return Finding("NVIDIA GPU", Status.OK, "; ".join(answer.strip().splitlines()))


def cuda() -> Finding:
    """Whether engines of the target ``cuda`` run here, and at which of their levels."""
    from engines.kernels.cuda.device import find_gpu

    found = find_gpu()
    if isinstance(found, str):
        return Finding("cuda engines", Status.ABSENT, found, "needed only to run engines of the target cuda")
    driver = f"driver for CUDA {found.driver // 1000}.{found.driver % 1000 // 10}"
    if not found.architectures:
        known = f"no kernels for its compute capability {found.capability_text}"
        return Finding("cuda engines", Status.ABSENT, f"{found.name}: {known}", "use another GPU")
    return Finding("cuda engines", Status.OK, f"{found.name}: {found.architectures[-1]}, {driver}", "")


def ort_cuda() -> Finding:
    """Whether engines of ``ort-cuda`` run here; they are built anywhere, and nothing here needs them."""
    from engines.targets.ort_cuda import hardware

    subject = "run an ort-cuda engine"
    found, _, remedy = hardware.refusal()
    if found:
        return Finding(subject, Status.ABSENT, f"no: {found}", f"not needed; {remedy}")
    return Finding(subject, Status.OK, f"yes: {hardware.capability()}, {hardware.PACKAGE} {hardware.VERSION}")


def pinned() -> dict[str, str]:
    """Package -> the version that this project was tested with, from its own metadata."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", "\n".join(metadata.requires("tapeout") or []), re.MULTILINE))


def package(name: str, pins: Mapping[str, str]) -> Finding:
    remedy = "pip install -r requirements.lock, which `make repro` does in .venv"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, Status.MISSING, "not installed", remedy)
    tested = pins.get(name, version)
    if version.partition("+")[0] != tested:
        return Finding(name, Status.LIMITED, f"{version}; tested with {tested}", remedy)
    return Finding(name, Status.OK, version)


def optional_package(name: str, remedy: str) -> Finding:
    try:
        return Finding(name, Status.OK, metadata.version(name), "`tapeout build` compiles for GPUs with it")
    except metadata.PackageNotFoundError:
        return Finding(name, Status.ABSENT, "not installed", f"needed only to compile {remedy}")


def operators() -> Finding:
    """Whether the installed ONNX Runtime has CPU kernels for the operators that engines use."""
    subject = "onnxruntime kernels"
    try:
        # A compiled module without type information.
        from onnxruntime.capi import onnxruntime_pybind11_state as ort  # pyright: ignore[reportAttributeAccessIssue]

        kernels = {kernel.op_name for kernel in ort.get_all_opkernel_def() if kernel.provider == "CPUExecutionProvider"}
    except (ImportError, AttributeError) as error:
        return Finding(subject, Status.MISSING, str(error), "reinstall onnxruntime at its pinned version")
    if lacking := [name for name in ENGINE_OPERATORS if name not in kernels]:
        return Finding(subject, Status.MISSING, f"no {', '.join(lacking)}", "install onnxruntime at its pinned version")
    return Finding(subject, Status.OK, ", ".join(ENGINE_OPERATORS))


def native_kernels(level: native.Level | None) -> Finding:
    """``level``: as :func:`engines.kernels.cpu.level` gives it."""
    if level is None:
        remedy = f"{DEFAULT_TARGET} needs a processor of a level in docs/native-kernels.md: use another machine"
        return Finding("native kernels", Status.MISSING, native.unsupported(), remedy)
    if refusal := amx_refusal():
        remedy = "AMX needs Linux 5.16, a sandbox that allows arch_prctl, and alternate signal stacks that can hold it"
        return Finding("native kernels", Status.LIMITED, f"{level.name}: {refusal}", remedy)
    return Finding("native kernels", Status.OK, level.name)


def registry(uri: str) -> Finding:
    """The MLflow registry that ``register`` and ``promote`` use."""
    subject, shown = "MLflow registry", public_uri(uri)
    database = sqlite_path(uri)
    if database is not None:
        if not os.access(database if database.exists() else database.absolute().parent, os.W_OK):
            return Finding(subject, Status.MISSING, f"{shown} cannot be written", "fix the folder's permissions")
        state = "exists" if database.exists() else "will be created by the register stage"
        return Finding(subject, Status.OK, f"{shown} {state}")
    if uri.startswith(("http://", "https://")):
        try:
            answer = probe(uri, PROBE_TIMEOUT_S)
        except OSError as error:  # requests' own errors are among them
            found = unreachable(uri, error)
            return Finding(subject, Status.MISSING, found.found, found.remedy)
        if answer.ok:
            return Finding(subject, Status.OK, f"{shown} answers")
        state = f"{shown} answers HTTP {answer.status_code} {answer.reason}".rstrip()
        if answer.status_code in (401, 403):
            remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        else:
            remedy = "correct MLFLOW_TRACKING_URI if that is no MLflow server; else the server's log says more"
        return Finding(subject, Status.MISSING, state, remedy)
    return Finding(subject, Status.LIMITED, f"{shown}: not probed", "`tapeout promote` will say if it fails")


def source(text: str) -> Finding:
    """Whether a source can be read: from the download cache, this disk, or over the network."""
    from pipeline.sources.cache import ENTRY, entry_folder
    from pipeline.sources.locations import FileSource, HubSource, UrlSource, WheelSource, parse
    from tapeout.errors import SourceError

    try:
        parsed = parse(text)
    except SourceError as error:
        return Finding(SOURCE, Status.MISSING, error.found, error.remedy)
    key = f"pypi://{parsed.package}=={parsed.version}" if isinstance(parsed, WheelSource) else text
    if (entry_folder(key) / ENTRY).is_file():
        return Finding(SOURCE, Status.OK, f"{text}: in the download cache")
    match parsed:
        case FileSource():
            there = parsed.path.exists()
            remedy = "" if there else "correct the source in params.yaml"
            return Finding(SOURCE, Status.OK if there else Status.MISSING, f"{parsed.path}", remedy)
        case WheelSource():
            return _index(parsed.package, parsed.version)
        case HubSource():
            return _answers(f"https://huggingface.co/api/models/{parsed.repo}", text)
        case UrlSource():
            return _answers(parsed.url, text)


def _index(name: str, version: str) -> Finding:
    # pip itself asks, so that the answer holds for the user's own index, proxy and certificates.
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        found = f"the package index did not answer in {PROBE_TIMEOUT_S} s"
        return Finding(SOURCE, Status.MISSING, found, "check the network")
    offered = re.split(r"[,\s]+", done.stdout.partition("Available versions:")[2])
    if version not in offered:
        found = f"the package index does not offer {name} {version}"
        return Finding(SOURCE, Status.MISSING, found, "check `pip config list`")
    return Finding(SOURCE, Status.OK, f"the package index offers {name} {version}")


def _answers(url: str, text: str) -> Finding:
    import requests

    from tapeout.urls import redact

    try:
        requests.head(url, timeout=PROBE_TIMEOUT_S, allow_redirects=True).raise_for_status()
    except requests.RequestException as error:
        remedy = "check the network, or use a source that this machine can reach (docs/recipes.md)"
        return Finding(SOURCE, Status.MISSING, f"{redact(text)}: {type(error).__name__}", remedy)
    return Finding(SOURCE, Status.OK, f"{redact(text)} answers")


def bundle(folder: Path) -> Finding:
    """Whether a bundle can be opened on this machine."""
    subject = f"run {folder}"
    try:
        found = load(folder, EngineBundle)
        hardware = at_level(found).record.hardware[0]
    except TapeoutError as error:
        return Finding(subject, Status.BROKEN, f"no: {error.found}", error.remedy)
    target = f"{found.record.target}{hardware.level and f':{hardware.level}'}"
    kept = f"{_state(found.record.io)}{_experts(found)}"
    return Finding(subject, Status.OK, f"yes: {target}, {found.record.precision}{kept}")


def _experts(bundle: Artifact[EngineBundle]) -> str:
    if not experts_mapped(bundle):
        return ""
    return (
        f"; weights of {bundle.record.weight_bytes / 1e9:.1f} GB do not fit the {available_memory() / 1e9:.1f} GB of "
        "memory that is available: experts are left in their file, and read from the disk again and again"
    )


def _state(io: IOContract) -> str:
    """What a server keeps of each sequence."""
    return _kv_cache(io) + _recurrent(io)


def _kv_cache(io: IOContract) -> str:
    if not io.token_bytes:
        return ""
    whole = io.slots * io.max_tokens * io.token_bytes / 1024**2
    return (
        f"; {io.token_bytes / 1024:,.1f} KiB of KV cache a token ({whole:,.1f} MiB for {io.slots} sequences of "
        f"{io.max_tokens:,} tokens)"
    )


def _recurrent(io: IOContract) -> str:
    """What recurrent state means for a server, where a model has some."""
    if not io.slot_bytes:
        return ""
    slots, kib = io.slots * SEQUENCE_SLOTS, io.slot_bytes / 1024
    snapshots = io.slots * (SEQUENCE_SLOTS - 1) * io.slot_bytes
    share = snapshots / (snapshots + io.slots * (io.token_bytes * io.max_tokens + io.slot_bytes))
    return (
        f"; {slots} slots of recurrent state of {kib:.1f} KiB ({slots * kib / 1024:.1f} MiB in all), {io.slots} of "
        f"them for snapshots of prefixes ({share:.1%} of all memory of state), and no drafts"
    )


def _ability(subject: str, needs: Iterable[Finding]) -> Finding:
    lacking = [finding.subject for finding in needs if finding.status is Status.MISSING]
    if lacking:
        return Finding(subject, Status.MISSING, f"no: {', '.join(lacking)}", "see the remedies above")
    return Finding(subject, Status.OK, "yes")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: *(.+)", info.read_text(), re.MULTILINE) if info.is_file() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
