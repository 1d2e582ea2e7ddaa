"""PortableGraph: a checkpoint as a standard ONNX graph, with what every later stage needs to know about it.

The folder is at once a Hugging Face float checkpoint (``config.json``, ``model.safetensors`` or shards with an index,
tokenizer files, ``generation_config.json``, ``chat_template.jinja``) and an ONNX model (``model.onnx``) whose external
weights are the tensors of these safetensors files, under the same names. The files are those of the source where that
holds the same tensors: two artifacts, one copy on the disk.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Literal, NamedTuple

from tapeout.artifact import Frozen, ParentTypes, Record
from tapeout.state import LayerState, Paged


class FoldTarget(Frozen):
    """The parameter that can absorb the inverse of an input scale, so that the output stays the same.

    ``kind``: ``norm`` (its weight, and bias if any, are divided per channel) or ``linear`` (its output rows
    ``rows[0]:rows[1]`` are divided; biases too).
    ``offset``: 1.0 for norms that multiply by ``1 + weight``, else 0.
    ``repeat``, ``head_size``: for values feeding an attention output under grouped queries, each producer head
    feeds ``repeat`` consecutive consumer heads of ``head_size`` channels; a scale must be tied over those.
    """

    kind: Literal["norm", "linear"]
    weight: str
    bias: str | None = None
    offset: float = 0.0
    rows: tuple[int, int] | None = None
    repeat: int = 1
    head_size: int = 0


class LinearGroup(Frozen):
    """Linears that read the same tensor: they share one scheme, one input statistic and one input scale.

    ``name``: ``layers.N.qkv`` and ``layers.N.o`` around attention, as other operators of ``tapeout/operators`` name
    theirs; ``layers.N.gate_up``, ``layers.N.down``, or ``layers.N.NAME`` for anything else; ``lm_head`` for the output
    head. ``layers.N.experts_up`` and ``layers.N.experts_down`` are the two projections of the experts of a mixture.
    ``members``: parameter names of the weights (each ``[out, in]``), in the order they are merged.
    ``transposed``: the float checkpoint stores them ``[in, out]``, as gpt2's does. Quantized ones are ``[out, in]``.
    ``gated``: of each member, how many rows of a query alternate with as many of a gate on what that query attends to;
    0 for any other. Empty: there is none.
    ``experts``: how many the one member holds, ``[experts, out, in]``, of which ``chosen`` compute a token; 0: members
    are linears.
    """

    name: str
    members: tuple[str, ...]
    biases: tuple[str | None, ...]
    in_features: int
    out_features: tuple[int, ...]
    fold_target: FoldTarget | None = None
    transposed: bool = False
    gated: tuple[int, ...] = ()
    experts: int = 0
    chosen: int = 0

    @property
    def weights(self) -> int:
        """Of all members and experts together."""
        return max(1, self.experts) * self.in_features * sum(self.out_features)


class CachedHeads(NamedTuple):
    """What attention of a layer keeps of a token: a key and a value for each of its KV heads."""

    kv_heads: int
    head_size: int
    value_size: int

    @property
    def channels(self) -> int:
        return self.kv_heads * (self.head_size + self.value_size)


class PortableGraph(Record):
    """``dequantized``: how the checkpoint stored weights that are read as float32 here; None where they were floats."""

    artifact_type: ClassVar[str] = "PortableGraph"
    schema_version: ClassVar[int] = 8
    remedy: ClassVar[str] = "run `dvc repro export`"
    parent_types: ClassVar[ParentTypes] = {"source": ("Source",)}

    architecture: str  # transformers class name
    layers: int
    state: tuple[LayerState, ...]  # what they keep, in float32
    hidden_size: int
    # of the first attention, as the next three; 0 where there is none
    heads: int
    kv_heads: int
    head_size: int  # of queries and keys
    value_size: int
    vocab_size: int
    tied_embeddings: bool
    embedding: str  # parameter name of the token embedding, [vocab, hidden]
    rotary: Literal["half", "interleaved", "none"]
    # which factors of longrope hold for every sequence (pipeline/export/rotary.py); fixed: there is one set only
    rotary_factors: Literal["fixed", "short", "long"] = "fixed"
    max_positions: int
    model_positions: int  # the longest sequence of the model's configuration: no graph has more positions
    groups: tuple[LinearGroup, ...]
    stop_tokens: tuple[int, ...]
    dequantized: str | None = None
    max_relative_error: float  # logits on ONNX Runtime against transformers, measured at export
    versions: dict[str, str]

    @property
    def cached_heads(self) -> Counter[CachedHeads]:
        """How many layers keep keys and values of so many heads and channels: windowed ones may have others."""
        tensors = ({t.name: t.shape for t in one.tensors} for one in self.state if isinstance(one, Paged))
        return Counter(CachedHeads(shape["key"][0], shape["key"][1], shape["value"][1]) for shape in tensors)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values of every token."""
        return tuple(state.layer for state in self.state if isinstance(state, Paged))
