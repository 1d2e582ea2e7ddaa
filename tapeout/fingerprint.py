"""What selects kernels on this machine, as a value that can be compared with the one a bundle was built on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tapeout.artifact import Frozen
from tapeout.errors import FingerprintError

log = logging.getLogger(__name__)


class Fingerprint(Frozen):
    """Hardware and libraries that a bundle was built for, or that it ran on."""

    machine: str
    features: tuple[str, ...]  # instruction sets that select kernels
    libraries: dict[str, str]
    level: str = ""  # of native kernels (engines/kernels/cpu); empty where there are none
    more_features: bool = False  # of a bundle whose kernels the level alone selects: it runs where there are more
    # Kernels run on other hardware than they are for: it shows what they compute, and is no evidence of that hardware.
    emulated: bool = False


# What selects kernels, as Linux calls it: of ONNX Runtime (onnxruntime/core/mlas/lib/platform.cpp, and KleidiAI in it)
# and our own (engines/kernels/cpu). More features make no difference, so a bundle opens where there are more.
FEATURES = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"),
    *("avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "amx_int8"),
    *("asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16", "sme", "sme2"),
)
AMX = "amx_int8"
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of x86-64: asm/unistd_64.h, asm/prctl.h, asm/fpu/types.h


def cpu_features() -> tuple[str, ...]:
    """Those of ``FEATURES`` that this processor has, as Linux lists them, and that this process may use; empty on other
    systems.

    Not from archspec 0.2.7: on a virtual machine whose processor it has no name for, ``archspec.cpu.host()`` gives the
    features of ``x86_64_v4``, without the ``avx512_vnni`` that the processor has.
    """
    present = _listed_features()
    return tuple(feature for feature in FEATURES if feature in present and (feature != AMX or not amx_refusal()))


def _listed_features() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(found.partition(":")[2].split())


@functools.cache
def amx_refusal() -> str:
    """Why Linux does not let this process use its processor's AMX, as a clause; empty where it does or there is none.

    The permission is asked for here, once, and holds for all threads of the process and for those it forks
    (Documentation/arch/x86/xstate.rst of Linux).
    """
    if AMX not in _listed_features():
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.syscall(*map(ctypes.c_long, (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))):
        return ""
    reason = f"Linux does not let this process use AMX, which the processor has: {os.strerror(ctypes.get_errno())}"
    log.warning("%s; native kernels of another level are used", reason)
    return reason


def current(libraries: tuple[str, ...], features: Callable[[], tuple[str, ...]] = cpu_features) -> Fingerprint:
    """This machine's. ``features``: what selects the target's kernels. A library that is missing is left out."""
    return Fingerprint(machine=platform.machine(), features=features(), libraries=dict(_installed(libraries)))


def _installed(libraries: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in libraries:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def cpu_only(features: tuple[str, ...]) -> bool:
    """Whether none of these is the compute capability of a GPU."""
    return not any(feature.startswith("sm") for feature in features)


def require_match(built: Sequence[Fingerprint], here: Fingerprint, where: str) -> Fingerprint:
    """The first of ``built`` that fits this machine. ``here``: with a level, only that one does.

    :class:`FingerprintError` for other hardware or libraries: the bundle's evidence was not taken on these.
    """
    asked = [one for one in built if here.level in ("", one.level)]
    for one in asked:
        if not _hardware(one, here) and not _libraries(one, here):
            return one
    own = [one for one in asked if one.machine == here.machine]
    if len(built) == 1 and asked:
        differences = _hardware(built[0], here)
    elif not own:
        levels = ", ".join(one.level for one in built if one.level)
        differences = [f"it has kernels for {levels or 'no level'}, not for {here.level or here.machine}"]
    else:
        differences = [f"{one.level}: {', '.join(found)}" for one in own if (found := _hardware(one, here))]
    raise FingerprintError(
        f"{where} was built for other hardware or libraries: {'; '.join([*differences, *_libraries(built[0], here)])}",
        expected="the machine and versions the bundle was built and judged on",
        remedy="run `dvc repro` here, so that it is built and judged for this machine",
    )


def _hardware(built: Fingerprint, here: Fingerprint) -> list[str]:
    """How the hardware differs, as clauses."""
    missing = [f for f in built.features if f not in here.features]
    extra = [] if built.more_features else [f for f in here.features if f not in built.features]
    unit = "CPU" if cpu_only(built.features) and cpu_only(here.features) else "machine"
    return [
        *([f"machine is {here.machine}, not {built.machine}"] if built.machine != here.machine else []),
        *([f"this {unit} lacks {', '.join(missing)}"] if missing else []),
        *([f"this {unit} also has {', '.join(extra)}, which selects other kernels"] if extra else []),
    ]


def _libraries(built: Fingerprint, here: Fingerprint) -> list[str]:
    return [
        f"{name} is {here.libraries.get(name, 'not installed')}, not {version}"
        for name, version in built.libraries.items()
        if here.libraries.get(name) != version
    ]


def judged_level(target: str, executed_on: str | None) -> str | None:
    """At which a verdict's reports were taken, as it says; None where the bundle was not executed on its target.

    >>> judged_level("ort-cpu", "ort-cpu:x86-64-avx2"), judged_level("ort-cpu", "x86_64 (avx)")
    ('x86-64-avx2', None)
    """
    place, _, level = (executed_on or "").partition(":")
    return level if place == target else None
