"""Native operators for ONNX Runtime on CPU, in C: each fuses several of its operators into one pass over memory.

``source/`` has the kernels, ``compiler`` compiles them, ``kernel_set`` tells passes what they take. A bundle holds the
libraries it was judged with: one for each of ``LEVELS``, over the same weights. A processor with none of these levels
is refused.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from engines.kernels.operators import OPERATORS
from tapeout.errors import BuildError
from tapeout.fingerprint import AMX, amx_refusal, cpu_features

# Operators of ONNX Runtime whose work one thread does in a few microseconds, by one code for all processors.
SMALL = frozenset(
    {
        "Concat",
        "Gather",
        "Reshape",
        "Shape",
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Split",
    }
)


@dataclass(frozen=True)
class Level:
    """Processors that one library is for."""

    name: str  # also after the colon of a target: ort-cpu:x86-64-avx2
    machine: str  # as platform.machine() gives it
    needed: tuple[str, ...]  # features of tapeout.fingerprint.FEATURES
    flags: tuple[str, ...]  # for the compiler

    @property
    def file(self) -> str:
        """The library in a bundle."""
        return library_file(self.name)

    def refusal(self) -> str:
        """Why this machine cannot run it, as a clause; empty where it can."""
        if (platform.system(), platform.machine()) != ("Linux", self.machine):
            return f"it is for Linux on {self.machine}, not {platform.system()} on {platform.machine()}"
        missing = [feature for feature in self.needed if feature not in cpu_features()]
        if missing == [AMX] and (refusal := amx_refusal()):
            return refusal
        return f"it needs {', '.join(missing)}, which this processor lacks" if missing else ""


def library_file(level: str) -> str:
    return f"kernels/{level}.so"


_PLAIN = "-bmi-bmi2-lzcnt-movbe"  # FEATURES has none of these, so they are not used

# All that a bundle carries; of each machine the best first. A processor with the features of the first two levels also
# has avx512dq, avx512vl and the like.
LEVELS = (
    Level(
        "x86-64-amx",
        "x86_64",
        ("avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "amx_int8"),  # then there is amx_tile, too
        ("-mcpu=x86_64_v4+avx512vnni+avx512vbmi+amx_tile+amx_int8", "-mprefer-vector-width=512"),
    ),
    Level(
        "x86-64-avx512vnni",
        "x86_64",
        ("avx512f", "avx512bw", "avx512_vnni"),
        ("-mcpu=x86_64_v4+avx512vnni", "-mprefer-vector-width=512"),
    ),
    Level("x86-64-avxvnni", "x86_64", ("avx2", "fma", "f16c", "avx_vnni"), (f"-mcpu=x86_64_v3+avxvnni{_PLAIN}",)),
    Level("x86-64-avx2", "x86_64", ("avx2", "fma", "f16c"), (f"-mcpu=x86_64_v3{_PLAIN}",)),
    Level("aarch64-i8mm", "aarch64", ("asimddp", "i8mm"), ("-mcpu=generic+dotprod+i8mm",)),
    Level("aarch64-dotprod", "aarch64", ("asimddp",), ("-mcpu=generic+dotprod",)),
)


def level() -> Level | None:
    """The best level of this processor; None where the kernels cannot run."""
    return next((known for known in LEVELS if not known.refusal()), None)


def find_level(name: str) -> Level:
    """:class:`BuildError` for a name that is none of ``LEVELS``."""
    for known in LEVELS:
        if known.name == name:
            return known
    raise BuildError(f"no level {name!r}", expected=f"one of {', '.join(known.name for known in LEVELS)}")


def unsupported() -> str:
    """Why the kernels cannot run here, as a clause for users; empty where they can."""
    if level():
        return ""
    machines = tuple(dict.fromkeys(known.machine for known in LEVELS))
    if platform.system() != "Linux" or platform.machine() not in machines:
        return (
            f"native kernels are for Linux on {' or '.join(machines)}, not {platform.system()} on {platform.machine()}"
        )
    least = [known for known in LEVELS if known.machine == platform.machine()][-1]
    missing = [feature for feature in least.needed if feature not in cpu_features()]
    return f"native kernels need {', '.join(missing)}, which this processor lacks"


def all_native(operators: Iterable[str]) -> bool:
    """Whether our own operators do all the work of a graph, so that the level alone says what is computed."""
    found = {*operators}
    return bool(found & OPERATORS.keys()) and found <= OPERATORS.keys() | SMALL
