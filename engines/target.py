"""What a target is: how it lowers a graph, compiles it, opens a bundle, probes it for parity and times its kernels.

A module in ``engines/targets`` is a target. It defines ``TARGET``, a :class:`GraphTarget` or a :class:`HardwareTarget`;
``engines.load`` finds it by the module's name. Backends are imported inside the methods that need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from engines.bundle import EngineBundle, LoweredGraph, LoweredRecord, PortableEvidence
from engines.protocol import Engine, FloatArray, IntArray
from tapeout import fingerprint
from tapeout.artifact import Artifact
from tapeout.errors import BuildError, RequestError
from tapeout.fingerprint import Fingerprint
from tapeout.number_format import Activations
from tapeout.schemes import CANDIDATE_SCHEMES, Scheme
from tapeout.throughput import Throughput

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from engines.kernels.kernel_set import KernelSet
    from engines.kernels.serving import ServingKernels
    from engines.passes.base import Pass

# What a matmul computes in, by the types of codes of its weight and of its input; "" stands for a float type.
FORMATS = {("", ""): "float", ("INT4", ""): "int4", ("FLOAT8E4M3FN", "FLOAT8E4M3FN"): "fp8"}
RecordT = TypeVar("RecordT", bound=LoweredRecord)
Progress = Callable[[str, int, int], None]  # phase, steps done, steps in all


class Probe(Protocol):
    """The inside of a bundle, for comparing it with a reference layer by layer."""

    def __call__(self, tokens: Sequence[int]) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Logits ``[S, V]`` of one document, and each linear's output ``[S, out]`` by parameter name."""
        ...

    def attention(self) -> Mapping[str, FloatArray]:
        """What attention gave in the last call, ``[S, in]``, by the parameter name of the linear that reads it.

        Parity judges both on their own. Empty where attention computes in float32: the error of that linear tells.
        """
        ...

    def states(self) -> Mapping[str, FloatArray]:
        """Recurrent state that the tokens of the last call left, by name ``LAYER.TENSOR``, in the graph's order."""
        ...

    def choices(self) -> Mapping[str, IntArray]:
        """Experts ``[S, k]`` that the tokens of the last call chose, by the down projection of their layer."""
        ...

    def embedding(self) -> Iterable[FloatArray]:
        """The embedding of every token id as the graph computes it: ``[rows, H]`` at a time, in the order of ids."""
        ...


@dataclass(frozen=True)
class Precision:
    """A precision that ``tapeout build --precision`` can name, and what it needs."""

    float_type: str = "fp16"  # of everything that is not quantized, and of the KV cache
    weights: Scheme | None = None  # linears must be stored in this scheme, or
    choices: tuple[Scheme, ...] = ()  # in one of these, by a plan of a KL of at most
    max_kl: float = 0.0

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """That its passes compute; the first is the smallest."""
        return self.choices or (() if self.weights is None else (self.weights,))


@dataclass(frozen=True)
class Capabilities:
    """What a target declares. Callers ask this, never the target's class or attributes."""

    libraries: tuple[str, ...]  # distributions whose versions enter the fingerprint
    kv_dtypes: tuple[str, ...]
    recurrent_dtypes: tuple[str, ...] = ("float32",)  # of the state of recurrences
    activations: tuple[Activations, ...] = ("float", "int8")  # of quantized linears, that engines compute or leave out
    compilers: tuple[str, ...] = ()  # distributions that compile its kernels; a build needs them, an engine does not
    float_type: str = "fp32"  # where the plan decides: of a KV cache that is not quantized
    precisions: Mapping[str, Precision] = field(default_factory=dict[str, Precision])  # empty: the plan decides
    parity_probe: bool = False  # ``probe`` is implemented
    int8_activations: bool = False  # linears and experts over blocks of codes round inputs to int8, by row and block
    fp8_activations: bool = False  # linears over E4M3 round inputs to E4M3, by token
    timed: bool = False  # ``timer`` is implemented, so a plan can be chosen for this target
    operators: tuple[str, ...] | None = None  # of tapeout/operators; None: all, as the runtime computes their bodies
    maps_experts: bool = False  # engines can leave the weights of experts in their file
    uneven_heads: bool = False  # attention whose keys have another size than its values
    ahead_of_time: bool = False  # a bundle for all levels is built on any machine
    schemes: tuple[Scheme, ...] = CANDIDATE_SCHEMES  # that a plan chooses from for linears
    throughput: Throughput | None = None  # a plan is chosen by it where nothing is timed

    def precision(self, name: str) -> Precision:
        """:class:`BuildError` for a precision that the target does not declare."""
        if not self.precisions:
            return Precision(float_type=self.float_type)
        if name not in self.precisions:
            raise BuildError(f"precision {name!r}", expected=f"one of {', '.join(self.precisions)}")
        return self.precisions[name]


@dataclass(frozen=True)
class Passes:
    """``every``: the passes of a build, in order. ``attention`` and ``linears``: those of them that are timed."""

    every: tuple[Pass, ...]
    attention: tuple[Pass, ...] = ()
    linears: tuple[Pass, ...] = ()


class Timer(Protocol):
    """A small model that is loaded and can be run over and over."""

    def bind(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Inputs are read from, and outputs written to, the arrays of their names. Other names are ignored."""
        ...

    def seconds(self) -> float:
        """One run."""
        ...


@dataclass(frozen=True)
class Compilation:
    """What a compiler is asked for. ``batches``: decode buckets. ``timing_cache``: file for measured kernel timings."""

    hardware: str  # compute capability, such as "sm89"
    batches: tuple[int, ...]
    evidence: PortableEvidence | None = None
    timing_cache: Path | None = None
    progress: Progress = lambda phase, done, total: None


class Lacking(NamedTuple):
    """Why a machine does not run bundles of a target. ``found``: a clause."""

    found: str
    expected: str
    remedy: str


class Target(ABC, Generic[RecordT]):
    """Use :class:`GraphTarget` where the lowered graph is what runs, else :class:`HardwareTarget`."""

    name: str
    capabilities: Capabilities
    artifact_type: type[RecordT]  # of what a build writes

    @property
    def kernels(self) -> KernelSet | None:
        """Those that Tapeout brings for the target, which its passes put into graphs; None: it brings none."""
        return None

    @property
    def serving_kernels(self) -> ServingKernels:
        """What a server takes beside the engine; the CPU's unless a target has its own, as logits come to the host."""
        from engines.kernels.cpu.serving import CpuServing

        return CpuServing()

    def require_machine(self) -> None:
        """:class:`FingerprintError` where this machine cannot build, time or run for the target at all.

        It is asked before anything that takes long.
        """

    @abstractmethod
    def passes(self) -> Passes: ...

    @abstractmethod
    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> RecordT:
        """The record of a lowered graph in ``folder``, after any further file was added there."""

    @abstractmethod
    def open(
        self,
        bundle: Artifact[EngineBundle],
        *,
        threads: int,
        slots: int | None,
        snapshots: int | None = None,
        map_experts: bool = False,
    ) -> Engine:
        """See :func:`engines.load.load`, which checks the fingerprint before, and that there are snapshots, or experts
        that this target maps.
        """

    def at(self, level: str) -> Target[RecordT]:
        """The same target, pinned to one level of processors: bundles carry its kernels only."""
        raise BuildError(f"{self.name} has no level {level!r}", expected=self.name, remedy="see docs/targets.md")

    def features(self) -> tuple[str, ...]:
        """What selects kernels on this machine. A bundle opens only where it is the same."""
        return fingerprint.cpu_features()

    def fingerprint(self) -> Fingerprint:
        return fingerprint.current(self.capabilities.libraries, self.features)

    def lacking(self, built: Sequence[Fingerprint]) -> Lacking | None:
        """What this machine lacks of hardware that a bundle was built for, where there is more to say than features."""
        return None

    def free_state_bytes(self, bundle: Artifact[EngineBundle]) -> int:
        """Memory for keys, values and other state that weights and activations of an engine leave of what is free."""
        raise RequestError(
            f"--kv-bytes free for {self.name}",
            expected="a target with memory of its own, such as cuda",
            remedy="give a size, such as --kv-bytes 2GiB",
        )

    def probe(self, bundle: Artifact[EngineBundle], scratch: Path, *, threads: int) -> Probe:
        """``scratch``: a folder on a disk for what a probe returns; its files have no names there."""
        raise BuildError(
            f"{self.name} has no parity probe", expected="a target that declares one", remedy="see docs/targets.md"
        )

    def timer(self, model: ir.Model, threads: int) -> Timer:
        raise BuildError(f"{self.name} times no kernels", expected="a target that does", remedy="see docs/targets.md")

    def kernels_version(self) -> str:
        """Of the target's own kernels; measured times are kept under it."""
        return ""


class GraphTarget(Target[EngineBundle]):
    """The lowered graph is what runs, on the machine it is built on."""

    artifact_type = EngineBundle

    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> EngineBundle:
        return EngineBundle(**lowered.fields(), target=self.name, hardware=(self.fingerprint(),))


class HardwareTarget(Target[LoweredGraph]):
    """The lowered graph is compiled for named hardware, which need not be present."""

    artifact_type = LoweredGraph

    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> LoweredGraph:
        return LoweredGraph(
            **lowered.fields(), bits_per_weight=round(_bits_per_weight(model), 4), computed=computed(model)
        )

    def require(self, hardware: str) -> None:
        """:class:`BuildError` for hardware that cannot be compiled for, before any other work is done."""

    @abstractmethod
    def compile(self, lowered: Artifact[LoweredGraph], folder: Path, wanted: Compilation) -> Artifact[EngineBundle]:
        """Compile and write one bundle. :class:`BuildError` gives the compiler's own reason."""


def _weight_of(matmul: ir.Node) -> tuple[str, list[Any]]:
    """The operator that a matmul's weight comes from, and its initializers: codes or floats, then scales."""
    parts, last = [matmul.inputs[1]], ""
    while (producer := parts[0].producer() if parts[0] is not None else None) is not None:
        parts, last = list(producer.inputs), producer.op_type  # through a Transpose and a DequantizeLinear
    return last, [value for value in parts if value is not None and value.const_value is not None]


def _bits_per_weight(model: ir.Model) -> float:
    """Mean bits of a linear's weight, scales included, as the graph stores them."""
    size_bytes = values = 0
    for node in model.graph:
        tensors = [value.const_value for value in _weight_of(node)[1]] if node.op_type == "MatMul" else []
        if tensors:
            size_bytes += sum(tensor.nbytes for tensor in tensors)
            values += tensors[0].size
    return 8 * size_bytes / max(values, 1)


def computed(model: ir.Model) -> dict[str, str]:
    """The number format that each matmul over a weight is computed in, by the name of the weight or of its group.

    It is read from types of nodes and tensors, and not from what passes say of themselves.
    """
    found: dict[str, str] = {}
    for node in model.graph:
        operator, parts = _weight_of(node) if node.op_type == "MatMul" else ("", [])
        if not parts:
            continue
        kind = str(parts[0].dtype) if operator == "DequantizeLinear" else ""
        inputs = node.inputs[0].producer() if node.inputs[0] is not None else None
        codes = inputs.inputs[0] if inputs is not None and inputs.op_type == "DequantizeLinear" else None
        rounded = "" if codes is None else str(codes.dtype)
        name = (parts[0].name or "").removesuffix(".codes")
        found[name] = FORMATS.get((kind, rounded), f"{kind or 'float'} weights of {rounded or 'float'} inputs")
    return found
