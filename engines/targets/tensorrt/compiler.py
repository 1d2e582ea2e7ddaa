"""Compiles a LoweredGraph to an engine for one compute capability. TensorRT for RTX needs no GPU for it.

One optimization profile is for prefill (batch 1, 1 to max_tokens tokens), and one for each decode batch bucket (one
token each); there is always a bucket of one. KV buffers are ``[batch, kv_heads, max_tokens, head_size]`` and updated in
place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from engines.bundle import CompiledEngine, EngineBundle, LoweredGraph, Profile
from engines.compile import MODEL_FILE, copy_text_files
from engines.passes.tensorrt.fixed_kv_cache import WRITE_POSITIONS
from engines.target import Compilation, Progress
from tapeout import artifact
from tapeout.artifact import Artifact, ArtifactRef
from tapeout.errors import BuildError

if TYPE_CHECKING:
    from engines.targets.tensorrt import TensorRT

ENGINE_FILE = "engine.plan"
PREFILL_TOKENS = 128  # the prompt length prefill kernels are chosen for
# Layers that the parser must make of the nodes for KV caches, attention, rotary embedding and quantized linears.
NATIVE = {
    "KV_CACHE_UPDATE": "TensorScatter",
    "ATTENTION_INPUT": "Attention",
    "ROTARY_EMBEDDING": "RotaryEmbedding",
    "QUANTIZE": "QuantizeLinear",
    "DEQUANTIZE": "DequantizeLinear",
}
REMEDIES = {
    "fp8": "choose --precision int4 or fp16 for it; FP8 needs sm89 or later",
    "auto": "choose --precision int4 or fp16 for it; FP8 needs sm89 or later",
    "bf16": "choose --precision fp16 for it; BF16 needs sm80 or later",
}


def load_module(name: str) -> Any:
    """The Python module of a TensorRT, imported only now. :class:`BuildError` says how to get it."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        remedy = (
            'pip install "tapeout[tensorrt-rtx]"'
            if name == "tensorrt_rtx_bindings"
            else "install TensorRT 11 from NVIDIA: pip install tensorrt"
        )
        raise BuildError(f"cannot import {name}: {error}", expected="TensorRT's libraries", remedy=remedy) from error


def capabilities(module: Any) -> tuple[str, ...]:
    """Compute capabilities this module can compile for with no GPU present; empty: only for the GPU that is present."""
    known = getattr(module, "ComputeCapability", None)
    if known is None:
        return ()
    return tuple(sorted((n.lower() for n in known.__members__ if n.startswith("SM")), key=lambda n: int(n[2:])))


def require_capability(module: Any, capability: str) -> None:
    """:class:`BuildError` if ``module`` cannot compile for it here."""
    known = capabilities(module)
    if known:
        if capability not in known:
            raise BuildError(
                f"{module.__name__} {module.__version__} cannot compile for {capability}",
                expected=f"one of {', '.join(known)}",
                remedy="choose one of those, or the target `tensorrt` on a machine with that GPU",
            )
        return
    from engines.targets.tensorrt import hardware

    here = hardware.capability()
    if here != capability:
        raise BuildError(
            f"{module.__name__} compiles only for the GPU that is present, which is {here or 'none'}",
            expected=capability,
            remedy="build on a machine with that GPU, or choose the target `tensorrt-rtx`",
        )


def compile_bundle(
    target: TensorRT, lowered: Artifact[LoweredGraph], folder: Path, wanted: Compilation
) -> Artifact[EngineBundle]:
    """See :meth:`engines.target.HardwareTarget.compile`."""
    module = load_module(target.module)
    builder = _Build(module, lowered, wanted)
    plan = builder.run()
    evidence = wanted.evidence
    with artifact.create(folder, EngineBundle) as draft:
        (draft.folder / ENGINE_FILE).write_bytes(plan)
        copy_text_files(lowered.folder, draft.folder)
        here = target.fingerprint()
        draft.finish(
            EngineBundle(
                **lowered.record.fields(),
                target=target.name,
                hardware=(here.model_copy(update={"features": (wanted.hardware,)}),),
                compiled=CompiledEngine(
                    capability=wanted.hardware,
                    executed_on=None,
                    engine_bytes=plan.nbytes,
                    network=builder.operator_counts(),
                    profiles=builder.profiles,
                    warnings=builder.log.warnings(),
                    portable=evidence,
                ),
            ),
            parents={
                **lowered.parents,
                "lowered": lowered,
                **({"portable": ArtifactRef("PortableReport", evidence.report)} if evidence else {}),
            },
        )
    return artifact.load(folder, EngineBundle)


class _Build:
    """One run of the compiler. Keeps the objects of its API alive as long as each other."""

    def __init__(self, module: Any, lowered: Artifact[LoweredGraph], wanted: Compilation) -> None:
        self._module, self._lowered, self._wanted = module, lowered, wanted
        require_capability(module, wanted.hardware)
        self.log: Any = _logger(module)
        self.log.forget()
        self._builder = module.Builder(self.log)
        self._network = self._builder.create_network(0)
        self._monitor: Any = _monitor(module, wanted.progress)
        limit = lowered.record.io.max_tokens
        self.profiles = (
            Profile(batch=1, min_tokens=1, opt_tokens=min(PREFILL_TOKENS, limit), max_tokens=limit),
            *(Profile(batch=b, min_tokens=1, opt_tokens=1, max_tokens=1) for b in sorted({1, *wanted.batches})),
        )

    def run(self) -> memoryview:
        """The serialized engine, in the compiler's own memory."""
        self._parse()
        config = self._config()
        # Nothing is timed where the GPU need not be present; TensorRT-RTX ignores a timing cache.
        timing_cache = None if capabilities(self._module) else self._wanted.timing_cache
        if timing_cache is not None:
            cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache.is_file() else b"")
            config.set_timing_cache(cache, False)
        plan = self._builder.build_serialized_network(self._network, config)
        if self._monitor.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            precision = self._lowered.record.precision
            raise BuildError(
                f"{self._module.__name__} cannot compile {precision} for {self._wanted.hardware}: {self.log.reason()}",
                expected="a precision that this GPU has",
                remedy=REMEDIES.get(precision, "see the compiler's reason above"),
            )
        if timing_cache is not None:
            timing_cache.parent.mkdir(parents=True, exist_ok=True)
            timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
        return memoryview(plan)

    def operator_counts(self) -> dict[str, int]:
        layers = Counter(self._network.get_layer(i).type.name for i in range(self._network.num_layers))
        return dict(sorted(layers.items()))

    def _parse(self) -> None:
        parser = self._module.OnnxParser(self._network, self.log)
        path = self._lowered.folder / MODEL_FILE
        if not parser.parse(_fixed_buffers(path, self._lowered.record.io.max_tokens), str(path)):
            errors = [parser.get_error(i) for i in range(parser.num_errors)]
            first = (
                f"{errors[0].node_operator()} {errors[0].node_name()}: {errors[0].desc()}" if errors else "no reason"
            )
            raise BuildError(
                f"{self._module.__name__} cannot parse the lowered graph: {first.strip()}",
                expected="operators its parser knows",
                remedy="see docs/targets.md for what the target supports",
            )
        self._parser = parser
        self._require_native()

    def _require_native(self) -> None:
        """Caches, attention, rotary embedding and quantized linears became native layers, and every attention kept its
        mask.
        """
        layers, nodes = self.operator_counts(), self._lowered.record.operator_counts
        for layer, node in NATIVE.items():
            if layers.get(layer, 0) != nodes.get(node, 0):
                raise BuildError(
                    f"the parser made {layers.get(layer, 0)} {layer} layers of {nodes.get(node, 0)} {node} nodes",
                    expected="one each",
                    remedy="report it with the versions of the libraries",
                )
        unmasked = [name for name, masked in _attentions(self._module, self._network) if not masked]
        if unmasked:
            raise BuildError(
                f"the parser dropped the mask of {', '.join(unmasked)}", expected="every attention layer to have one"
            )

    def _config(self) -> Any:
        config = self._builder.create_builder_config()
        if capabilities(self._module):
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(self._module.ComputeCapability, self._wanted.hardware.upper()), 0)
        config.progress_monitor = self._monitor
        flags = self._module.BuilderFlag
        if hasattr(flags, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(flags.REQUIRE_USER_ALLOCATION)  # needed to capture steps as CUDA graphs
        for shapes in self.profiles:
            profile = self._builder.create_optimization_profile()
            for i in range(self._network.num_inputs):
                tensor = self._network.get_input(i)
                low, best, high = (
                    _shape(tensor.name, tuple(tensor.shape), shapes.batch, tokens, logits)
                    # Logits of every token may be wanted, but serving wants those of one token.
                    for tokens, logits in ((shapes.min_tokens, 1), (shapes.opt_tokens, 1), (shapes.max_tokens,) * 2)
                )
                profile.set_shape(tensor.name, low, best, high)
            config.add_optimization_profile(profile)
        return config


def _shape(name: str, shape: tuple[int, ...], batch: int, tokens: int, logits: int) -> tuple[int, ...]:
    """Shape of an input in a profile: in each sequence ``tokens`` are fed and the logits of ``logits`` wanted."""
    if name in ("input_ids", "position_ids"):
        return (batch, tokens)
    if name == "logit_positions":
        return (batch * logits,)
    if name == WRITE_POSITIONS:
        return (batch,)
    return (batch, *shape[1:])


def _fixed_buffers(path: Path, max_tokens: int) -> bytes:
    """The model without its weights, with a static length of its KV buffers, as a KV_CACHE_UPDATE layer needs it.

    In the artifact the length is symbolic, so that portable evidence can use shorter buffers.
    """
    model = onnx.load(str(path), load_external_data=False)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "max_tokens":
                dimension.dim_value = max_tokens
    return model.SerializeToString()


def _attentions(module: Any, network: Any) -> list[tuple[str, bool]]:
    """Name of every attention layer, and whether it has a mask."""
    found: list[tuple[str, bool]] = []
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type.name == "ATTENTION_INPUT":
            # The binding returns the base class; NVIDIA's own tools reach a layer's members in this way.
            layer.__class__ = module.IAttentionInputLayer
            found.append((layer.name, layer.attention.mask is not None))
    return found


@functools.cache
def _logger(module: Any) -> Any:
    """One logger for all builds: the library keeps using the first as long as any object made with it lives."""

    class CompilerLog(module.ILogger):
        """Keeps the compiler's messages of one build; nothing is printed."""

        def __init__(self) -> None:
            super().__init__()
            self.forget()

        def forget(self) -> None:
            self._messages: dict[str, list[str]] = {"WARNING": [], "ERROR": [], "INTERNAL_ERROR": []}

        def log(self, severity: Any, msg: str) -> None:
            kept = self._messages.get(severity.name)
            if kept is not None and msg not in kept:
                kept.append(msg)

        def warnings(self) -> tuple[str, ...]:
            return tuple(self._messages["WARNING"])

        def reason(self) -> str:
            """The first error, without the compiler's source positions before it."""
            errors = [*self._messages["ERROR"], *self._messages["INTERNAL_ERROR"]]
            return errors[0] if errors else "no reason given"

    return CompilerLog()


def _monitor(module: Any, progress: Progress) -> Any:
    class Monitor(module.IProgressMonitor):
        """The compiler's phases as ``progress(phase, done, total)``; Ctrl-C ends the build at the next step."""

        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self._total: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._total[phase_name] = num_steps
            self._report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._report(phase_name, step + 1)
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            self._report(phase_name, self._total.get(phase_name, 0))

        def _report(self, phase: str, done: int) -> None:
            # An exception must not unwind through the compiler's frames.
            try:
                with contextlib.suppress(Exception):
                    progress(phase, done, self._total.get(phase, 0))
            except KeyboardInterrupt:
                self.interrupted = True

    return Monitor()
