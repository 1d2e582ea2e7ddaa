"""Native operators for ONNX Runtime on CPU, in C: each fuses several of its operators into one pass over memory.

``source/`` has the kernels, ``compiler`` compiles them, passes that import ``DOMAIN`` put them into graphs. A bundle
holds the library it was judged with. The sources are compiled for one of ``LEVELS`` of x86-64 processors; on others
ONNX Runtime's own operators run.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from tapeout.fingerprint import cpu_features

DOMAIN = "tapeout.kernels"
LIBRARY = "kernels.so"  # its name in a bundle
NATIVE = frozenset(
    {
        "BlockGather",
        "BlockLinear",
        "CachedAttention",
        "GatedLinear",
        "HeadLinear",
        "NormLinear",
        "ResidualNormLinear",
    }
)


@dataclass(frozen=True)
class Level:
    """Processors that one library is for."""

    name: str
    needed: tuple[str, ...]  # features of tapeout.fingerprint.FEATURES
    flags: tuple[str, ...]  # for the compiler


_PLAIN = "-bmi-bmi2-lzcnt-movbe"  # FEATURES has none of these, so they are not used

# Best first. A processor with the features of the first level also has avx512dq, avx512vl and the like.
LEVELS = (
    Level(
        "AVX-512 VNNI",
        ("avx512f", "avx512bw", "avx512_vnni"),
        ("-mcpu=x86_64_v4+avx512vnni", "-mprefer-vector-width=512"),
    ),
    Level("AVX-VNNI", ("avx2", "fma", "f16c", "avx_vnni"), (f"-mcpu=x86_64_v3+avxvnni{_PLAIN}",)),
    Level("AVX2", ("avx2", "fma", "f16c"), (f"-mcpu=x86_64_v3{_PLAIN}",)),
)


def level() -> Level | None:
    """The best level of this processor; None where the kernels cannot run."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    return level_of(cpu_features())


def level_of(features: tuple[str, ...]) -> Level | None:
    """The best level of a processor with these features."""
    return next((known for known in LEVELS if set(known.needed) <= set(features)), None)


def unsupported() -> str:
    """Why the kernels cannot run here, as a clause for users; empty where they can."""
    if level():
        return ""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"native kernels are for Linux on x86-64, not {platform.system()} on {platform.machine()}"
    missing = [feature for feature in LEVELS[-1].needed if feature not in cpu_features()]
    return f"native kernels need {', '.join(missing)}, which this processor lacks"
