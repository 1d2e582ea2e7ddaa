"""What a graph is lowered to: an EngineBundle, which runs a model on one target, or a LoweredGraph for a compiler."""

from __future__ import annotations

from typing import Any, ClassVar

from tapeout.artifact import Frozen, ParentTypes, Record
from tapeout.fingerprint import Fingerprint
from tapeout.operators.experts import share_read
from tapeout.state import SEQUENCE_SLOTS, LayerState, slot_bytes, token_bytes

# What tokenizing and chat need beside the engine, as far as the model has it.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
GREEDY = (
    "greedy"  # input of a graph that gives either logits or next tokens (engines/passes/onnxruntime/greedy_head.py)
)
# Inputs of a graph over pools of blocks and slots (engines/passes/onnxruntime/cached_attention.py)
OFFSETS, STARTS, BLOCK_TABLE = "offsets", "starts", "block_table"
# Of a graph with PagedAttention (engines/passes/onnxruntime_cuda/paged_attention.py)
SLOT_MAPPING, ATTENTION_METADATA = "slot_mapping", "attention_metadata"
SLOTS = "slots"  # int32 [B]: of recurrent state, only where a layer has some
BLOCK_TOKENS = 64  # of a KV block on ort-cpu: a tile of keys of the attention kernel lies in one block
WEIGHTS_FILE = "weights.bin"  # of a lowered graph: all initializers that are not small
NEXT_TOKENS = "next_tokens"  # output of the same graph


class PassReport(Frozen):
    """What one graph pass did: how often its pattern matched, and why it declined where it could have."""

    name: str
    matched: int
    declined: tuple[str, ...]
    nodes_before: int
    nodes_after: int


class IOContract(Frozen):
    """What an engine must bind. Buffers of state are updated in place.

    On ``ort-cpu`` and ``ort-cuda`` the tokens of all sequences are packed, and buffers of paged state hold blocks. On
    other targets they hold ``max_tokens`` positions of each sequence, and are bound as the outputs ``present`` too.
    """

    inputs: tuple[str, ...]
    state: tuple[LayerState, ...]
    max_tokens: int
    slots: int
    vocab_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the state of one more token, in all layers: its keys and values."""
        return token_bytes(self.state)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence, in all layers."""
        return slot_bytes(self.state)

    def sequences_in(self, memory_bytes: int, snapshots: int | None = None) -> int:
        """Sequences of ``max_tokens`` whose state fits, beside ``snapshots`` or with one for each of them."""
        each = self.token_bytes * self.max_tokens + self.slot_bytes * (SEQUENCE_SLOTS if snapshots is None else 1)
        return max(0, memory_bytes - (snapshots or 0) * self.slot_bytes) // each

    def snapshots_in(self, share: float, sequences: int, memory_bytes: int | None = None) -> int:
        """Snapshots of recurrent state that fit a share of ``memory_bytes``, or of all state that an engine for so many
        sequences holds. 0 where the model has no such state.
        """
        if not self.slot_bytes:
            return 0
        others = sequences * (self.token_bytes * self.max_tokens + self.slot_bytes)
        held = others * share / (1 - share) if memory_bytes is None else memory_bytes * share
        return int(held // self.slot_bytes)


class Profile(Frozen):
    """Shapes one optimization profile of a compiled engine covers."""

    batch: int
    min_tokens: int  # fed in one step, per batch entry
    opt_tokens: int
    max_tokens: int


class PortableEvidence(Frozen):
    """The lowered graph on ONNX Runtime's CPU kernels against the float engine, on held-out text.

    It shows what lowering and precision do to the outputs, not what the compiler did.
    """

    report: str  # digest of the PortableReport, which has every document
    documents: int
    tokens: int
    kl: float  # nats, mean over predicted positions
    top_token: float
    perplexity_ratio: float  # lowered / float


class CompiledEngine(Frozen):
    """What a vendor's compiler made of the graph. Its hardware need not have been present."""

    capability: str  # compute capability it was compiled for, such as "sm89"
    executed_on: str | None  # hardware it has run on; None: compiled only, so no verdict about it can be PASS
    engine_bytes: int
    network: dict[str, int]  # layer type -> layers, as the compiler's parser made them
    profiles: tuple[Profile, ...]
    warnings: tuple[str, ...]  # of the compiler, once each
    portable: PortableEvidence | None


class LinearOutput(Frozen):
    """A linear of the lowered graph: its output value, and the parameters merged in it with their output channels.

    ``parts``: of each head, in the checkpoint; the value has one part of all heads after the other. Empty: one order.
    """

    value: str
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    parts: tuple[int, ...] = ()


class ExpertWeights(Frozen):
    """Experts of all layers that have so many, of which a token chooses so many. ``weight_bytes``: of all of them."""

    experts: int
    chosen: int
    weight_bytes: int


class LoweredRecord(Record):
    """The record of a lowered graph, whether it runs as it is or is compiled further."""

    parent_types: ClassVar[ParentTypes] = {
        "graph": ("PortableGraph",),
        "calibration": ("Calibration",),
        "quantized": ("QuantizedModel",),
    }

    precision: str  # "float32", a summary of the plan such as "w8:151 w4:60 kv-int8", or the compiler's: fp16, int4 ...
    io: IOContract
    operator_counts: dict[str, int]  # operator -> nodes
    passes: tuple[PassReport, ...]
    weight_bytes: int
    step_bytes: int  # weights that a decode step at batch 1 reads: all but the embedding, and experts not chosen
    experts: tuple[ExpertWeights, ...] = ()
    plan: dict[str, str]  # linear group -> operator and scheme
    linear_outputs: tuple[LinearOutput, ...]
    stop_tokens: tuple[int, ...]

    def step_bytes_of(self, tokens: int) -> float:
        """Weights that a step of so many tokens is expected to read, where each expert is as likely as the others."""
        return self.step_bytes + sum(
            one.weight_bytes * (share_read(tokens, one.chosen, one.experts) - share_read(1, one.chosen, one.experts))
            for one in self.experts
        )

    @property
    def decode_bytes(self) -> int:
        """Bytes that a decode step at batch 1 moves, but for the KV cache: weights, and the state that it rewrites."""
        return self.step_bytes + 2 * self.io.slot_bytes

    def fields(self) -> dict[str, Any]:
        """These fields by name, for the record of what is built from this graph."""
        return {name: getattr(self, name) for name in LoweredRecord.model_fields}


class LoweredGraph(LoweredRecord):
    """A graph lowered for a compiler, precision and all, before it is compiled for any one device.

    It has standard operators only, so ONNX Runtime can run it: that is evidence without the target's hardware.
    The folder holds ``model.onnx``, ``weights.bin`` and the text files of the portable graph.
    """

    artifact_type: ClassVar[str] = "LoweredGraph"
    schema_version: ClassVar[int] = 4  # 4: how linears are computed
    remedy: ClassVar[str] = "run `tapeout build`"

    bits_per_weight: float  # of the linears, scales included
    computed: dict[str, str]  # by linear group or parameter: the number format that the graph's nodes compute it in


class EngineBundle(LoweredRecord):
    artifact_type: ClassVar[str] = "EngineBundle"
    schema_version: ClassVar[int] = 5  # 5: kinds of state of a layer, instead of KV heads
    remedy: ClassVar[str] = "run `dvc repro build-baseline build-candidate`"
    parent_types: ClassVar[ParentTypes] = {
        **LoweredRecord.parent_types,
        "lowered": ("LoweredGraph",),
        "portable": ("PortableReport",),
    }

    target: str
    hardware: tuple[Fingerprint, ...]  # any of these runs it, the best first; one for each level of native kernels
    compiled: CompiledEngine | None = None  # None: the graph itself is what runs
