"""What selects kernels on this machine, as a value that can be compared with the one a bundle was built on."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from engines.bundle import Fingerprint
from pipeline.errors import FingerprintError

# Instruction sets ONNX Runtime's CPU kernels dispatch on (onnxruntime/core/mlas/lib/platform.cpp).
FEATURES = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "sve", "bf16"),
)


def cpu_features() -> tuple[str, ...]:
    """Those of ``FEATURES`` this processor has, from the kernel's own list; empty where there is none to read."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return ()
    for line in path.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.partition(":")[2].split())
            return tuple(feature for feature in FEATURES if feature in present)
    return ()


def current(libraries: tuple[str, ...]) -> Fingerprint:
    return Fingerprint(
        machine=platform.machine(),
        features=cpu_features(),
        libraries={name: metadata.version(name) for name in libraries},
    )


def require_match(built: Fingerprint, here: Fingerprint, where: str) -> None:
    """Refuse a bundle built for other hardware or libraries: its evidence was not taken on what would run here."""
    differences: list[str] = []
    if built.machine != here.machine:
        differences.append(f"machine is {here.machine}, not {built.machine}")
    missing = [f for f in built.features if f not in here.features]
    extra = [f for f in here.features if f not in built.features]
    if missing:
        differences.append(f"this CPU lacks {', '.join(missing)}")
    if extra:
        differences.append(f"this CPU also has {', '.join(extra)}, which selects other kernels")
    for name, version in built.libraries.items():
        if here.libraries.get(name) != version:
            differences.append(f"{name} is {here.libraries.get(name, 'not installed')}, not {version}")
    if differences:
        raise FingerprintError(
            f"{where} was built for other hardware or libraries: {'; '.join(differences)}",
            expected="the machine and versions the bundle was built and judged on",
            remedy="run `dvc repro` here, so that it is built and judged for this machine",
        )
