"""What a product costs on this machine: measured seconds by kernel, shape and row count, kept by fingerprint.

A planner compares kernels by these. Each figure is the median of the fastest half of its samples, with the kernels of a
shape timed in turn, so that a change of the machine's load strikes all of them alike.

M  rows      K  input channels      N  output channels
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engines import fingerprint
from engines.threads import physical_cores
from pipeline.artifact import canonical_json

ROW_COUNTS = (1, 4, 8, 16, 32, 128, 512)
GROUP_SIZES = (32, 64, 128, 256)
FLOAT, STATIC_INT8 = "fp32", "static int8"
SAMPLES, SAMPLE_SECONDS, MOST_CALLS = 6, 0.004, 50
MIDPOINT = 128
CACHE = Path.home() / ".cache" / "tapeout" / "costs"
LIBRARIES = ("onnxruntime",)


def block_kernel(bits: int, group_size: int) -> str:
    return f"{bits}-bit g{group_size}"


def kernels(columns: int) -> tuple[str, ...]:
    """Those that a weight of K input channels can have."""
    blocks = [block_kernel(bits, size) for bits in (4, 8) for size in GROUP_SIZES if columns % size == 0]
    return (FLOAT, *blocks, STATIC_INT8)


def costs(
    columns: int,
    outputs: int,
    *,
    rows: Sequence[int] = ROW_COUNTS,
    threads: int = 0,
    cache: Path = CACHE,
    measure: Callable[[int, int, Sequence[int], int], dict[str, dict[int, float]]] | None = None,
) -> dict[str, dict[int, float]]:
    """Kernel -> row count -> seconds of one product ``[M, K] x [K, N]``, from the cache where this machine has it."""
    threads = threads or physical_cores()
    here = fingerprint.current(LIBRARIES).model_dump(mode="json")
    key = {"fingerprint": here, "threads": threads, "shape": [columns, outputs], "rows": list(rows)}
    path = cache / f"{hashlib.sha256(canonical_json(key)).hexdigest()}.json"
    if path.is_file():
        stored = json.loads(path.read_text())["seconds"]
        return {kernel: {int(m): float(s) for m, s in by_rows.items()} for kernel, by_rows in stored.items()}
    seconds = (measure or measure_shape)(columns, outputs, rows, threads)
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**key, "seconds": seconds}, indent=1) + "\n")
    partial.replace(path)
    return seconds


def measure_shape(columns: int, outputs: int, rows: Sequence[int], threads: int) -> dict[str, dict[int, float]]:
    """Time every kernel of one shape; the sessions' threads must not spin, or they would steal from each other."""
    generator = np.random.default_rng(0)
    sessions = {kernel: _session(product_model(kernel, columns, outputs), threads) for kernel in kernels(columns)}
    seconds: dict[str, dict[int, float]] = {kernel: {} for kernel in sessions}
    for count in rows:
        feeds = {"x": generator.standard_normal((count, columns)).astype(np.float32)}
        samples: dict[str, list[float]] = {kernel: [] for kernel in sessions}
        for _ in range(SAMPLES):
            for kernel, session in sessions.items():
                samples[kernel].append(_sample(session, feeds))
        for kernel, times in samples.items():
            seconds[kernel][count] = statistics.median(sorted(times)[: SAMPLES // 2])
    return seconds


def _sample(session: Any, feeds: dict[str, NDArray[Any]]) -> float:
    session.run(None, feeds)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SAMPLE_SECONDS and calls < MOST_CALLS:
        session.run(None, feeds)
        calls += 1
    return elapsed / max(1, calls)


def _session(model: onnx.ModelProto, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def product_model(kernel: str, columns: int, outputs: int) -> onnx.ModelProto:
    """One product with random weights, as the kernel passes write it."""
    generator = np.random.default_rng(0)
    nodes, stored = list[Any](), dict[str, NDArray[Any]]()
    if kernel == FLOAT:
        stored["weight"] = generator.standard_normal((columns, outputs)).astype(np.float32)
        nodes.append(helper.make_node("MatMul", ["x", "weight"], ["y"]))
    elif kernel == STATIC_INT8:
        stored["step"], stored["zero"] = np.array(0.03, np.float32), np.array(MIDPOINT, np.uint8)
        stored["codes"] = generator.integers(-128, 128, (columns, outputs)).astype(np.int8)
        stored["scales"] = np.full(outputs, 0.01, np.float32)
        nodes.append(helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["rounded"]))
        inputs = ["rounded", "codes", "step", "scales", "zero"]
        nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, ["y"], domain="com.microsoft"))
    else:
        bits, block = (int(part) for part in kernel.replace("-bit g", " ").split())
        blocks = columns // block
        stored["codes"] = generator.integers(0, 256, (outputs, blocks, block * bits // 8)).astype(np.uint8)
        stored["scales"] = np.full((outputs, blocks), 0.01, np.float32)
        attributes: dict[str, Any] = {
            "K": columns,
            "N": outputs,
            "bits": bits,
            "block_size": block,
            "accuracy_level": 4,
        }
        nodes.append(
            helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft", **attributes)
        )
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", outputs])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def table(columns: int, outputs: int, seconds: dict[str, dict[int, float]]) -> str:
    """Billions of operations a second (a multiply and an add are two), a line a kernel, for people to read."""
    counts = sorted({count for by_rows in seconds.values() for count in by_rows})
    lines = [f"{columns}x{outputs}".ljust(14) + "".join(f"M={count}".rjust(8) for count in counts)]
    for kernel, by_rows in seconds.items():
        rates = (2 * count * columns * outputs / by_rows[count] / 1e9 for count in counts)
        lines.append(kernel.ljust(14) + "".join(f"{rate:8.0f}" for rate in rates))
    return "\n".join(lines)
