"""Small bundles of the target ``cuda``, and the stand-in for a driver that runs them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import EngineBundle
from engines.compile import build
from engines.kernels.cuda import ARCHITECTURES, compiler, device
from engines.load import find_target
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import Scheme
from tests.exported import family_graph
from tests.families import LAYERS
from tests.lowering import FixedWeights

MAX_TOKENS = 640  # more than a part of keys
SCHEMES = {
    "qkv": Scheme(bits=6, group_size=32, symmetric=True),
    "o": Scheme(bits=8, group_size=64, symmetric=True),
    "gate_up": Scheme(bits=5, group_size=32, symmetric=True),
    "lm_head": Scheme(bits=8, group_size=64, symmetric=True),
}
OTHERS = Scheme(bits=4, group_size=32, symmetric=False)


def small_graph(max_tokens: int = MAX_TOKENS, family: str = "llama-rope-scaling") -> Artifact[PortableGraph]:
    """A model with heads that kernels take: two of queries, one of keys."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    return family_graph(family, max_position_embeddings=max_tokens, **sizes)


def small_weights(graph: Artifact[PortableGraph], *, decoded: bool = False, larger: float = 1) -> FixedWeights:
    """In a mix of formats. ``decoded``: the same numbers as floats.

    ``larger``: so many times as large are inputs of the first down projection, and its weights are smaller by as much.
    """
    checkpoint = open_checkpoint(graph.folder)
    tensors: dict[str, Any] = {name: checkpoint.linear(name) for name in checkpoint.names()}
    changed = {"layers.0.mlp.up_proj": larger, "layers.0.mlp.down_proj": 1 / larger}
    for group in graph.record.groups:
        for member in group.members:
            scheme = SCHEMES.get(group.name.rpartition(".")[2], OTHERS)
            factor = changed.get(member.removeprefix("model.").removesuffix(".weight"), 1)
            values = np.asarray(checkpoint.weight(member)) * np.float32(factor)
            rounded: QuantizedWeight = round_to_nearest(values, scheme)
            tensors[member] = rounded.dequantize() if decoded else rounded
    return FixedWeights(tensors)


def small_bundle(
    folder: Path,
    *,
    target: str = "cuda:host",
    cache: str = "int8",  # fp8, or float
    decoded: bool = False,
    slots: int = 4,
    max_tokens: int = MAX_TOKENS,
    larger: float = 1,  # see small_weights
) -> Artifact[EngineBundle]:
    graph = small_graph(max_tokens)
    step = 0.02 if cache == "int8" else 0.005
    scale = np.full((graph.record.kv_heads, graph.record.head_size), step, np.float32)
    return build(
        graph,
        small_weights(graph, decoded=decoded, larger=larger),
        folder,
        target=find_target(target),
        precision="float32" if decoded else "mix",
        slots=slots,
        kv_scales={f"layers.{n}.{part}_scale": scale for n in range(LAYERS) for part in "kv" if cache != "float"},
        kv_dtype=cache,
        parents={},
    )


def without_machine_code(patch: pytest.MonkeyPatch) -> None:
    """Bundles carry a few bytes in place of machine code, which takes minutes to compile. The stand-in reads none."""

    def cubins(architectures: Sequence[str] = ARCHITECTURES, selected: Sequence[str] = ()) -> dict[str, Path]:
        folder = compiler.compiler.cache() / "no-machine-code"
        folder.mkdir(parents=True, exist_ok=True)
        for architecture in architectures:
            (folder / architecture).write_text(f"no machine code of {architecture}")
        return {architecture: folder / architecture for architecture in architectures}

    patch.setattr(compiler, "cubins", cubins)


class Counts(ctypes.Structure):
    """What the stand-in was asked for since it was loaded."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("allocations", "copies_up", "copies_down", "copies", "launches", "graph_launches", "waits")
    )


class StandIn(ctypes.Structure):
    """What device the stand-in is, and which launch from now on fails with which error."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("version", "major", "minor")),
        ("order", ctypes.c_uint32),
        *((name, ctypes.c_int64) for name in ("bytes", "fail_at", "error")),
        *((name, ctypes.c_int32) for name in ("init_error", "memory_error", "wait_error")),
    )


PLAIN = {"version": 13000, "major": 9, "minor": 0, "bytes": 1 << 40}


@contextmanager
def stand_in(library: Path, **changed: int) -> Iterator[Callable[[], dict[str, int]]]:
    """The stand-in of a bundle's library; gives a function that counts since its last call."""
    loaded, before = ctypes.CDLL(str(library)), Counts()
    loaded.tapeout_stand_in_set(ctypes.byref(StandIn(**{**PLAIN, **changed})))
    loaded.tapeout_stand_in_counts(ctypes.byref(before))

    def count() -> dict[str, int]:
        nonlocal before
        now = Counts()
        loaded.tapeout_stand_in_counts(ctypes.byref(now))
        found = {name: getattr(now, name) - getattr(before, name) for name, _ in Counts._fields_}
        before = now
        return found

    try:
        yield count
    finally:
        loaded.tapeout_stand_in_set(ctypes.byref(StandIn(**PLAIN)))


def with_gpu(patch: pytest.MonkeyPatch, library: Path) -> None:
    """The driver of this machine is the stand-in."""
    patch.setattr(device, "DRIVER", str(library))


def planted_engine(folder: Path, library: Path, before: str, after: str) -> Path:
    """A library like ``library`` whose engine has a defect; kernels and the stand-in are those of ``library``."""
    source = folder / "source"
    shutil.copytree(compiler.SOURCE, source)
    text = (source / "engine.cpp").read_text()
    assert text.count(before) == 1, f"engine.cpp no longer has: {before}"
    (source / "engine.cpp").write_text(text.replace(before, after))
    header = source / "driver.hpp"  # whose functions are in another library here
    header.write_text(header.read_text().replace('visibility("protected")', 'visibility("default")'))
    made = folder / "planted.so"
    flags = (*compiler.HOST_FLAGS, "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *compiler.host_target_flags())
    command = [sys.executable, "-m", compiler.compiler.COMPILER, "cc", *flags, "-o", str(made), "engine.cpp"]
    done = subprocess.run(
        [*command, "-x", "none", str(library.resolve()), *compiler.compiler.LINKED, *compiler.LINKED],
        cwd=source,
        capture_output=True,
        text=True,
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(compiler.compiler.cache() / "compiler")},
    )
    assert done.returncode == 0, done.stderr
    return made
