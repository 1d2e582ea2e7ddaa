"""What a product costs on this machine: measured seconds by kernel, shape and row count, kept by fingerprint.

A planner compares kernels by these. What is timed is what the target's own passes make of a linear alone, without the
norm or gate that a native kernel takes in, over copies with weights of their own: together they are several times the
processor's cache, so weights come from memory as they do in a model; those of a model that fits into the cache do not.

M  rows      K  input channels      N  output channels
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from engines import fingerprint
from engines.compile import step_bytes
from engines.passes.base import INTERNAL, Lowering
from engines.passes.linears import OP
from engines.sessions import cpu_options
from engines.targets import ort_cpu
from engines.threads import physical_cores
from pipeline.artifact import canonical_json
from pipeline.errors import BuildError
from pipeline.graph import LinearGroup, PortableGraph
from pipeline.kernels import Kernel

CACHE = Path.home() / ".cache" / "tapeout" / "costs"
ROUNDS = 7  # samples of each kernel, taken in turn
STREAMED_CACHES = 4  # most weights of one sample, in sizes of the last-level cache
USUAL_CACHE_BYTES = 32 << 20  # where the system does not tell
FEW_OUTPUTS = 32  # no fewer are packed together
METHOD = 3  # counted up when figures taken before do not compare with those taken now

FloatArray = NDArray[np.float32]
Store = Callable[[Kernel, FloatArray], Any]  # a weight [N, K] as a checkpoint holds it for a kernel
Seconds = dict[str, dict[int, float]]  # kernel name -> M -> seconds of one product


@dataclass(frozen=True)
class Shape:
    columns: int  # K
    outputs: int  # N


def costs(
    shape: Shape,
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    store: Store,
    *,
    streamed: int,
    threads: int = 0,
    cache: Path | None = None,
    only_kept: bool = False,
) -> Seconds:
    """Seconds of one product ``[M, K] x [K, N]``, from the cache where this machine has them.

    ``streamed``: bytes of weights that a sample reads. ``only_kept``: what is not there is left out, not measured.
    """
    cache = CACHE if cache is None else cache
    threads = threads or physical_cores()
    paths = {count: cache / f"{_key(shape, kernels, count, threads, streamed)}.json" for count in rows}
    missing = [count for count, path in paths.items() if not path.is_file()]
    if missing and not only_kept:
        measured = measure(shape, kernels, missing, store, threads=threads, streamed=streamed)
        cache.mkdir(parents=True, exist_ok=True)
        for count in missing:
            _keep(paths[count], {name: by_rows[count] for name, by_rows in measured.items()})
    found: Seconds = {kernel.name: {} for kernel in kernels}
    for count, path in paths.items():
        if only_kept and not path.is_file():
            continue
        for name, seconds in json.loads(path.read_text()).items():
            found[name][count] = float(seconds)
    return found


def _key(shape: Shape, kernels: Sequence[Kernel], rows: int, threads: int, streamed: int) -> str:
    """Figures compare within one measurement, so its kernels are part of what names it."""
    library = ort_cpu.library()
    content = {
        "method": METHOD,
        "fingerprint": fingerprint.current(ort_cpu.LIBRARIES).model_dump(mode="json"),
        "threads": threads,
        "streamed": streamed,
        "shape": [shape.columns, shape.outputs],
        "rows": rows,
        "kernels": [kernel.model_dump(mode="json") for kernel in kernels],
        "library": "" if library is None else library.parent.name,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _keep(path: Path, seconds: Mapping[str, float]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(seconds, indent=1) + "\n")
    partial.replace(path)


def measure(
    shape: Shape, kernels: Sequence[Kernel], rows: Sequence[int], store: Store, *, threads: int, streamed: int
) -> Seconds:
    """Time every kernel, in turn, so that a change of the machine's load strikes all of them alike.

    Each figure is its fastest sample: whatever else the machine does only adds. ``streamed``: bytes of weights that a
    sample reads.
    """
    weight = np.random.default_rng(0).standard_normal((shape.outputs, shape.columns)).astype(np.float32)
    runs = {kernel.name: _Products(store(kernel, weight), shape, streamed, threads) for kernel in kernels}
    seconds: Seconds = {name: {} for name in runs}
    for count in rows:
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(ROUNDS + 1):
            for name, run in runs.items():
                taken = run.sample(count)
                if number:  # the first round warms up
                    samples[name].append(taken)
        for name, times in samples.items():
            seconds[name][count] = min(times)
    return seconds


class _Products:
    """A session over copies of one product, which share their input and their output but no weights."""

    def __init__(self, stored: Any, shape: Shape, streamed: int, threads: int) -> None:
        self.shape = shape
        self.copies = -(-streamed // _model_bytes(stored, shape))
        options = cpu_options(threads, ort_cpu.library())
        # Threads spin within a run, as the engine's do, but not on into the run of another session.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        model = ir.to_proto(product_model(stored, shape, self.copies)).SerializeToString()
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def sample(self, rows: int) -> float:
        """Seconds of one product, over one run of all copies."""
        x = np.random.default_rng(0).standard_normal((rows, self.shape.columns)).astype(np.float32)
        y = np.empty((rows, self.shape.outputs), np.float32)
        binding = self.session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        for copy in range(self.copies):
            binding.bind_output(f"y{copy}", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        start = time.perf_counter()
        self.session.run_with_iobinding(binding)
        return (time.perf_counter() - start) / self.copies


def streamed_bytes(weights: int) -> int:
    """What a sample reads on behalf of a model of so many weights: several caches full, but no more than the model."""
    return min(STREAMED_CACHES * last_level_cache_bytes(), weights)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the first core, as Linux tells it."""
    sizes = [re.fullmatch(r"(\d+)([KM]?)\s*", path.read_text()) for path in folder.glob("index*/size")]
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    return max((int(found[1]) * units[found[2]] for found in sizes if found), default=USUAL_CACHE_BYTES)


def product_bytes(shape: Shape, kernel: Kernel, store: Store) -> int:
    """What one product reads of weights: codes, scales and zero points, as the engine holds them."""
    few = Shape(shape.columns, min(shape.outputs, FEW_OUTPUTS))  # outputs are alike
    return (
        _model_bytes(store(kernel, np.zeros((few.outputs, few.columns), np.float32)), few)
        * shape.outputs
        // few.outputs
    )


def _model_bytes(stored: Any, shape: Shape) -> int:
    return step_bytes(product_model(stored, shape, 1))


def product_model(stored: Any, shape: Shape, copies: int) -> ir.Model:
    """``copies`` products of one input ``x [M, K]`` to ``y0 [M, N]`` and on, lowered by the target's own passes."""

    def value(name: str, width: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(["rows", width]), type=ir.TensorType(ir.DataType.FLOAT))

    x, names = value("x", shape.columns), [f"w{copy}" for copy in range(copies)]
    nodes = [
        ir.Node(
            INTERNAL,
            OP,
            [x],
            attributes=[
                ir.AttrStrings("weights", [name]),
                ir.AttrStrings("biases", [""]),
                ir.AttrInt64s("out_features", [shape.outputs]),
            ],
            outputs=[value(f"y{copy}", shape.outputs)],
        )
        for copy, name in enumerate(names)
    ]
    graph = ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 21}, name="products")
    model = ir.Model(graph, ir_version=10)
    lowering = Lowering(model, _record(shape, names), _RolledWeights(stored, names), max_tokens=1)
    for step in ort_cpu.KERNEL_PASSES:
        step.run(lowering)
    if any(node.domain == INTERNAL for node in model.graph):
        raise BuildError("no pass of ort-cpu takes this weight", expected="a kernel that the target has")
    return model


class _RolledWeights:
    """One stored weight with its output channels in another order by every name: ONNX Runtime keeps equal ones once."""

    def __init__(self, stored: Any, names: Sequence[str]) -> None:
        self._stored = stored
        self._shifts = {name: shift for shift, name in enumerate(names)}

    def linear(self, name: str) -> Any:
        shift = self._shifts[name]
        if isinstance(self._stored, np.ndarray):
            return np.roll(self._stored, shift, axis=0)
        return replace(self._stored, codes=np.roll(self._stored.codes, shift, axis=0))

    weight = tensor = linear


def _record(shape: Shape, names: Sequence[str]) -> PortableGraph:
    groups = [
        LinearGroup(
            name=name, members=(name,), biases=(None,), in_features=shape.columns, out_features=(shape.outputs,)
        )
        for name in names
    ]
    return PortableGraph(
        architecture="products",
        layers=0,
        hidden_size=shape.columns,
        heads=0,
        kv_heads=0,
        head_size=0,
        vocab_size=0,
        tied_embeddings=False,
        embedding="",
        rotary="none",
        max_positions=1,
        groups=tuple(groups),
        stop_tokens=(),
        max_relative_error=0.0,
        versions={},
    )


def table(shape: Shape, seconds: Seconds) -> str:
    """Billions of operations a second (a multiply and an add are two), a line a kernel, for people to read."""
    counts = sorted({count for by_rows in seconds.values() for count in by_rows})
    lines = [f"{shape.columns}x{shape.outputs}".ljust(14) + "".join(f"M={count}".rjust(8) for count in counts)]
    for kernel, by_rows in seconds.items():
        rates = (2 * count * shape.columns * shape.outputs / by_rows[count] / 1e9 for count in counts)
        lines.append(kernel.ljust(14) + "".join(f"{rate:8.0f}" for rate in rates))
    return "\n".join(lines)
