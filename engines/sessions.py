"""How ONNX Runtime is started on CPU: for bundles, and for small models that are timed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort
from numpy.typing import NDArray

from engines.bundle import EngineBundle
from engines.kernels.cpu import all_native, unsupported
from engines.kernels.cpu.serving import cannot_run
from tapeout.artifact import Artifact
from tapeout.cores import physical_cores
from tapeout.errors import BuildError
from tapeout.resources import available_memory

if TYPE_CHECKING:
    import onnx_ir as ir

MAPPED_SHARE = 0.5  # of the available memory: weights of more bytes are not copied
# Entries of a session that native/source/provider.c reads.
THREADS_ENTRY = "tapeout.threads"
CHOOSE_ENTRY = "tapeout.choose_threads"
MAPPED_ENTRY = "tapeout.mapped_experts"


def cpu_options(
    threads: int, library: Path | None, operators: Collection[str] = (), *, chooses: bool = False
) -> ort.SessionOptions:
    """Options for :func:`open_session`. ``threads``: 0 means every physical core.

    ``library``: native kernels that the graph uses, an execution provider of ONNX Runtime.

    ``operators``: all of the graph, where they are known. Native operators start threads of their own where no other
    has work for several: two sets of threads that wait for work would take each other's cores.

    ``chooses``: where such threads are started and ``threads`` is 0, one computes if all are no faster: see
    :func:`threads_of`.
    """
    options, count = ort.SessionOptions(), threads or physical_cores()
    own = all_native(operators) and library is not None and not unsupported()
    options.intra_op_num_threads = 1 if own else count
    if own:
        options.add_session_config_entry(THREADS_ENTRY, str(count))
        if chooses and not threads and count > 1:
            options.add_session_config_entry(CHOOSE_ENTRY, "1")
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if library is not None:
        reason = unsupported()
        if reason:
            raise cannot_run(library, reason)
        options.add_provider_for_devices(_devices(library.resolve()), {})
    return options


def open_session(model: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """``model``: a path, or the bytes of a model. What the provider of ``options`` does not take, ONNX Runtime runs."""
    return ort.InferenceSession(model, options, providers=None if options.has_providers() else ["CPUExecutionProvider"])


def threads_of(threads: int, library: Path | None) -> int:
    """That compute in the session that the calling thread opened last, with these arguments of :func:`cpu_options`."""
    chosen = getattr(ctypes.CDLL(str(library)), "tapeout_chosen_threads", None) if library is not None else None
    if chosen is not None:
        chosen.restype = ctypes.c_size_t
    return (chosen() if chosen else 0) or threads or physical_cores()


def _devices(library: Path) -> list[ort.OrtEpDevice]:
    """Of the execution provider in ``library``, under a name for its path and its bytes.

    For the path, too: who reads a library's counts opens it by its path, and must find the one that the session runs.
    """
    key = hashlib.sha256(bytes(library) + b"\0" + library.read_bytes())
    return _registered(library, f"tapeout-{key.hexdigest()[:16]}")


@functools.cache
def _registered(library: Path, name: str) -> list[ort.OrtEpDevice]:
    if not (found := _devices_of(name)):
        try:
            ort.register_execution_provider_library(name, str(library))
        except Exception as error:  # ONNX Runtime's errors have no class in common
            raise BuildError(
                f"{library} cannot be loaded: {str(error).splitlines()[0]}",
                expected="native kernels that this version compiled, and memory for them",
                remedy="build the bundle again with `dvc repro`, or `tapeout stage build-candidate`",
            ) from error
        found = _devices_of(name)
    return found


def _devices_of(name: str) -> list[ort.OrtEpDevice]:
    return [device for device in ort.get_ep_devices() if device.ep_name == name]


class SessionTimer:
    """See :class:`engines.target.Timer`."""

    def __init__(self, model: ir.Model, threads: int, library: Path | None) -> None:
        import onnx_ir as ir  # late: it takes a third of the time to open an engine

        options = cpu_options(threads, library, {node.op_type for node in model.graph.all_nodes()})
        # Threads spin within a run, as the engine's do, but not on into the run of another session.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = open_session(ir.to_proto(model).SerializeToString(), options)

    def bind(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = dict(arrays)  # their memory is bound by address
        self._binding = self._session.io_binding()
        for bind, values in (
            (self._binding.bind_input, self._session.get_inputs()),
            (self._binding.bind_output, self._session.get_outputs()),
        ):
            for value in values:
                array = self._arrays[value.name]
                bind(value.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - start


def map_experts(options: ort.SessionOptions, weights: Path) -> None:
    """Native operators leave the weights of experts in their file, as far as they have pages of their own there."""
    options.add_session_config_entry(MAPPED_ENTRY, str(weights.resolve()))


def keep_mapped(options: ort.SessionOptions, bundle: Artifact[EngineBundle]) -> bool:
    """Leave the weights of an engine that is large for this machine in their file, which ONNX Runtime maps.

    It would pack float matrices into copies of their own: twice as fast, and as much memory as the file has bytes.
    True where they are left.
    """
    mapped = bundle.record.weight_bytes > MAPPED_SHARE * available_memory()
    if mapped:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return mapped
