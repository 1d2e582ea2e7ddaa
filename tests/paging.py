"""Mixtures with experts of many pages, and a system whose memory is short."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from engines.bundle import WEIGHTS_FILE, EngineBundle
from engines.weight_pages import MAPPINGS
from tapeout.artifact import Artifact
from tests.exported import build_float, family_graph
from tests.family_engines import make

FAMILY = "qwen3_moe"


def coded_mixture(folder: Path) -> Artifact[EngineBundle]:
    """Two layers of 32 experts, in codes."""
    return make(FAMILY, folder, num_experts=32, num_local_experts=32, moe_intermediate_size=128).bundle


def float_mixture(folder: Path) -> Artifact[EngineBundle]:
    """The same in floats."""
    graph = family_graph(FAMILY, num_experts=32, num_local_experts=32, moe_intermediate_size=128)
    return build_float(graph, folder, slots=2)


def drop_pages(bundle: Artifact[EngineBundle]) -> None:
    """As a system does whose memory is short: no process has them mapped any more, and no cache holds them."""
    path = bundle.folder / WEIGHTS_FILE
    advise = ctypes.CDLL(None, use_errno=True).madvise
    for line in MAPPINGS.read_text().splitlines():
        if line.endswith(str(path.resolve())):
            first, end = (int(address, 16) for address in line.split()[0].split("-"))
            assert not advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not written yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
