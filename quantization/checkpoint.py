"""QuantizedModel: a checkpoint in the compressed-tensors layout, and how every linear in it came to be.

The folder is a Hugging Face checkpoint (``config.json`` with its ``quantization_config``, ``model.safetensors`` or
shards with an index, tokenizer files) that transformers loads by itself, unless experts of a mixture are quantized. It
refuses linears in FP8, whose bytes have a layout of our own.
When the KV cache is int8, int4 or fp8 there is ``kv_scales.safetensors``, too: float32 ``layers.N.k_scale`` and
``layers.N.v_scale``, ``[kv heads, head size]``, and in the metadata the ``bits`` of their codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from safetensors import safe_open

from quantization.proof import QuantizationProof
from tapeout.artifact import Frozen, ParentTypes, Record
from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.number_format import Activations, FloatArray
from tapeout.recipe import Quantize
from tapeout.schemes import FLOAT, Scheme
from tapeout.tensor_writer import write_tensors

KV_SCALES = "kv_scales.safetensors"
INPUTS: Mapping[Activations, str] = {"float": "", "int8": "a8", "fp8": "f8"}  # of linears, in a summary


class LinearReport(Frozen):
    """How one linear was quantized. Errors are mean squared output errors over the mean squared output, on
    calibration samples that no choice was fitted to; ``error_rtn`` is what RTN would have given. With int8 activations
    both include the rounding of the inputs.

    For an embedding that is not tied, of whose inputs there is no Gram matrix, the errors are those of its weights. Of
    ``experts`` of a mixture they are means, weighted by how many tokens of calibration chose each, and the method is
    that of most of them.
    """

    name: str
    group: str
    out_features: int
    in_features: int
    experts: int = 0
    scheme: Scheme
    method: str  # "float", or a module of quantization/methods
    input_scale: str  # "identity", or the AWQ or SmoothQuant candidate that was folded into the producer
    error_rtn: float
    error: float


# What the metadata of their scales say of codes, in the words of ``kv_cache_scheme``; integers are the default there.
_CODES: Mapping[str, dict[str, str]] = {
    "int8": {"bits": "8"},
    "int4": {"bits": "4"},
    "fp8": {"bits": "8", "type": "float"},
}


class KVScheme(Frozen):
    dtype: Literal["float32", "int8", "int4", "fp8"]
    granularity: Literal["per_tensor", "per_channel"]


@dataclass(frozen=True)
class KVScales:
    """Static scales of keys and values: ``layers.N.k_scale|v_scale`` ``[kv heads, head size]``; none for a float cache.

    ``dtype`` of the codes means nothing without scales.
    """

    scales: Mapping[str, FloatArray]
    dtype: str

    def write(self, folder: Path) -> None:
        write_tensors(folder / KV_SCALES, self.scales, _CODES[self.dtype])

    @classmethod
    def read(cls, folder: Path) -> KVScales:
        """What ``write`` left in a checkpoint's folder. :class:`QuantizationError` if it does not say of what codes."""
        path = folder / KV_SCALES
        if not path.is_file():
            return cls({}, "int8")
        with safe_open(path, framework="numpy") as file:
            stated = {name: value for name, value in (file.metadata() or {}).items() if name in ("bits", "type")}
            dtype = next((dtype for dtype, codes in _CODES.items() if codes == stated), None)
            if dtype is None:
                raise QuantizationError(
                    f"{path} has codes of {stated.get('bits', 'no')} bits",
                    expected="8 or 4 bits, or 8 of type float, in its metadata",
                    remedy="run `dvc repro quantize`",
                )
            return cls({name: file.get_tensor(name) for name in file.keys()}, dtype)  # noqa: SIM118


class QuantizedModel(Record):
    artifact_type: ClassVar[str] = "QuantizedModel"
    schema_version: ClassVar[int] = 4
    remedy: ClassVar[str] = "run `dvc repro quantize`"
    parent_types: ClassVar[ParentTypes] = {
        "graph": ("PortableGraph",),
        "calibration": ("Calibration",),
        "plan": ("PrecisionPlan",),
    }

    asked: Quantize  # by the recipe: the methods that were compared
    linears: tuple[LinearReport, ...]  # every linear, then the embedding and the output head
    kv_cache: KVScheme
    recurrent_state: str = "float32"  # of recurrences
    proof: QuantizationProof
    source_bytes: int  # of the float checkpoint's weights
    notes: tuple[str, ...]  # where the plan could not be followed to the letter; experts that calibration hardly saw

    @property
    def summary(self) -> str:
        """The plan in a few words, such as ``w4:30 w8:121 w8a8:60 kv-int8``: how many tensors have how many bits.

        Codes that are no integers are called by their format: ``fp8-dynamic:60``.
        """
        counts = Counter(_label(linear.scheme) for linear in self.linears)
        return " ".join(
            [
                *(f"{label}:{n}" for (_, label), n in sorted(counts.items())),
                f"kv-{self.kv_cache.dtype}",
                *([f"state-{self.recurrent_state}"] if self.recurrent_state != "float32" else []),
            ]
        )


def _label(scheme: Scheme) -> tuple[int, str]:
    """Bits, and what a summary calls a scheme."""
    if scheme.expert_bits:
        return scheme.bits, f"w{min(scheme.expert_bits)}-{scheme.bits}"
    if formats()[scheme.format].number_type == "int" or scheme == FLOAT:
        return scheme.bits, f"w{scheme.bits}{INPUTS[scheme.activations]}"
    return scheme.bits, scheme.format
