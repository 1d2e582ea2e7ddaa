"""EngineBundle: everything needed to run a model on one target, and what it was built from and for."""

from __future__ import annotations

from typing import Any, ClassVar

from tapeout.artifact import Frozen, Record, Roles
from tapeout.fingerprint import Fingerprint

KV_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}  # of a key or value, by kv_dtype
# What tokenizing and chat need beside the engine, as far as the model has it.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
GREEDY = (
    "greedy"  # input of a graph that gives either logits or next tokens (engines/passes/onnxruntime/greedy_head.py)
)
# Inputs of a graph over a pool of KV blocks (engines/passes/onnxruntime/cached_attention.py)
OFFSETS, STARTS, BLOCK_TABLE = "offsets", "starts", "block_table"
BLOCK_TOKENS = 64  # of a KV block on ort-cpu: a tile of keys of the attention kernel lies in one block
NEXT_TOKENS = "next_tokens"  # output of the same graph


class PassReport(Frozen):
    """What one graph pass did: how often its pattern matched, and why it declined where it could have."""

    name: str
    matched: int
    declined: tuple[str, ...]
    nodes_before: int
    nodes_after: int


class KVLayer(Frozen):
    heads: int
    head_size: int


class IOContract(Frozen):
    """What an engine must bind. KV buffers are of ``kv_dtype`` and updated in place.

    They are ``[blocks, heads, tokens of a block, head_size]`` on ``ort-cpu``: inputs that the graph writes. On other
    targets they are ``[slots, heads, max_tokens, head_size]``, and bound as the outputs ``present`` too.

    An ``int4`` buffer is uint8 and has ``head_size / 2`` columns: channel 2i in the low half of byte i, 2i + 1 in the
    high half, each as its code + 8.
    """

    inputs: tuple[str, ...]
    kv_dtype: str
    kv_layers: tuple[KVLayer, ...]
    max_tokens: int
    slots: int
    vocab_size: int

    @property
    def kv_element(self) -> str:
        """numpy's name of a KV buffer's element."""
        return "uint8" if self.kv_dtype == "int4" else self.kv_dtype

    def kv_shape(self, layer: KVLayer, blocks: int, tokens: int) -> tuple[int, int, int, int]:
        """Shape of a layer's buffer of keys, or of values. ``blocks``: or slots."""
        return blocks, layer.heads, tokens, layer.head_size // 2 if self.kv_dtype == "int4" else layer.head_size

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return sum(2 * layer.heads * layer.head_size for layer in self.kv_layers) * KV_BITS[self.kv_dtype] // 8


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
    """A linear of the lowered graph: its output value, and the parameters merged in it with their output channels."""

    value: str
    weights: tuple[str, ...]
    rows: tuple[int, ...]


class LoweredRecord(Record):
    """The record of a lowered graph, whether it runs as it is or is compiled further."""

    parent_roles: ClassVar[Roles] = {
        "graph": ("PortableGraph",),
        "calibration": ("Calibration",),
        "quantized": ("QuantizedModel",),
    }

    precision: str  # "float32", a summary of the plan such as "w8:151 w4:60 kv-int8", or the compiler's: fp16, int4 ...
    io: IOContract
    operator_counts: dict[str, int]  # operator -> nodes
    passes: tuple[PassReport, ...]
    weight_bytes: int
    step_bytes: int  # weights that a decode step at batch 1 reads: all but the embedding
    plan: dict[str, str]  # linear group -> operator and scheme
    linear_outputs: tuple[LinearOutput, ...]
    stop_tokens: tuple[int, ...]

    def fields(self) -> dict[str, Any]:
        """These fields by name, for the record of what is built from this graph."""
        return {name: getattr(self, name) for name in LoweredRecord.model_fields}


class EngineBundle(LoweredRecord):
    artifact_type: ClassVar[str] = "EngineBundle"
    schema_version: ClassVar[int] = 4  # 4: native attention writes caches in place
    remedy: ClassVar[str] = "run `dvc repro build-baseline build-candidate`"
    parent_roles: ClassVar[Roles] = {
        **LoweredRecord.parent_roles,
        "lowered": ("LoweredGraph",),
        "portable": ("PortableReport",),
    }

    target: str
    hardware: tuple[Fingerprint, ...]  # any of these runs it, the best first; one for each level of native kernels
    compiled: CompiledEngine | None = None  # None: the graph itself is what runs
