"""Operators of our own for ONNX Runtime on CPU, in C: what its operators do on the way, done in one pass over memory.

``source/`` has the kernels, ``compiler`` makes a library of them, the passes that import ``DOMAIN`` put them into
graphs, and a bundle holds the library it was judged with. They are written for x86-64 with AVX-512 VNNI; elsewhere ONNX
Runtime's own operators run.
"""

from __future__ import annotations

import platform

from engines.fingerprint import cpu_features

DOMAIN = "tapeout.kernels"
LIBRARY = "kernels.so"  # its name in a bundle
NEEDED = ("avx512f", "avx512bw", "avx512_vnni")  # a processor with these has avx512dq, avx512vl and the like, too


def unsupported() -> str:
    """Why the kernels cannot run here, as a clause for users; empty where they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"native kernels are for Linux on x86-64, not {platform.system()} on {platform.machine()}"
    missing = [feature for feature in NEEDED if feature not in cpu_features()]
    return f"native kernels need {', '.join(missing)}, which this processor lacks" if missing else ""
