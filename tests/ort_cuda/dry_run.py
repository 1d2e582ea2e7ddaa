"""Runs an ``ort-cuda`` engine over the stand-in, in a process of its own, and prints what it did as JSON.

``python -m tests.ort_cuda.dry_run BUNDLE [PHASE=BATCHxTOKENS@START ...]``: the engine is opened, then each phase is one
step of so many sequences with so many new tokens from a position on.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime as ort

from engines.bundle import EngineBundle
from engines.protocol import Entry
from engines.targets.ort_cuda import engine as ort_cuda
from engines.targets.ort_cuda.device import RUNTIME
from tapeout import artifact

BATCHES = (1, 2, 4, 32)  # the last is more than the plain kernels of 4 bits take
SEQUENCES = 40


@dataclass(frozen=True)
class DryRun:
    """Counts of each phase, as ``kind name`` of ``standin.c``. ``placed``: operators of nodes, by provider.

    ``addresses``: where each phase's inputs lay, with those of the first.
    """

    version: str
    placed: dict[str, list[str]]
    phases: dict[str, dict[str, int]]
    errors: dict[str, list[str]]


class Counts:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(RUNTIME)

    def taken(self) -> dict[str, int]:
        """Since the last call."""
        with tempfile.NamedTemporaryFile("r") as file:
            self._library.standin_report(file.name.encode())
            lines = [line.split(" ", 1) for line in file.read().splitlines()]
        self._library.standin_reset()
        return {name: int(count) for count, name in lines}


def placed(model: Path) -> dict[str, list[str]]:
    """Operators of all nodes after ONNX Runtime's own optimizations, by provider."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(str(model), options, providers=[ort_cuda.PROVIDER])
    found: dict[str, list[str]] = {}
    for part in session.get_provider_graph_assignment_info():  # pyright: ignore[reportAttributeAccessIssue]
        found.setdefault(part.ep_name, []).extend(node.op_type for node in part.get_nodes())
    return found


def main(folder: Path, phases: list[str]) -> DryRun:
    bundle = artifact.load(folder, EngineBundle)
    nodes, counts = placed(folder / "model.onnx"), Counts()
    counts.taken()
    engine = ort_cuda.CudaPagedEngine(bundle, sequences=SEQUENCES, batches=BATCHES)
    found = {"open": counts.taken()}
    errors: dict[str, list[str]] = {}
    each = -(-bundle.record.io.max_tokens // engine.capabilities.block_tokens)
    for phase in phases:
        name, _, shape = phase.partition("=")
        batch, tokens, start = (int(part) for part in shape.replace("@", "x").split("x"))
        entries = [Entry([3] * tokens, start, range(row * each, (row + 1) * each), "logits") for row in range(batch)]
        results = engine.step(entries)
        found[name] = counts.taken()
        errors[name] = [str(result.error) for result in results if result.error is not None]
    engine.copy_block(0, 1, 5)
    found["copy"] = counts.taken()
    engine.close()
    engine.close()
    found["close"] = counts.taken()
    return DryRun(ort.__version__, nodes, found, errors)


if __name__ == "__main__":
    print(json.dumps(asdict(main(Path(sys.argv[1]), sys.argv[2:]))))
