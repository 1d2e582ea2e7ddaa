"""The operators that Tapeout's own kernels compute, each declared once.

M  tokens of a step            K, N  input and output channels         B  sequences           P  tokens with logits
H, KV  heads of queries, keys  D  channels of a head, E of a value, C of a state   T  tokens of a block
[..]  one axis or more

A set of kernels (``kernel_set.py``) has some of them. Passes write them into graphs in ``DOMAIN``; how a set lays out
the codes, scales and zero points of a weight is its own. Graphs are checked against this table after each pass, the
CPU's compiler makes of it what ONNX Runtime is told (``cpu/declarations.py``), and a test compares the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DOMAIN = "tapeout.kernels"


@dataclass(frozen=True)
class Argument:
    """An input or output. ``types``: numpy's names; a node has one of them."""

    name: str
    types: tuple[str, ...] = ("float32",)
    optional: bool = False


@dataclass(frozen=True)
class KernelOperator:
    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    source: str  # of a set of kernels in C: the file of its implementation, by its stem


_CODES = Argument("codes", ("uint8",))
_SCALES = Argument("scales", ("float16", "float32", "uint8"))  # bytes are exponents, of codes that are 4-bit floats
_ZERO_POINTS = Argument("zero_points", ("uint8",), optional=True)
_TABLE = (_CODES, _SCALES, _ZERO_POINTS)  # a weight [N, K] in blocks of codes
_WEIGHT = (*_TABLE, Argument("bias", optional=True))  # bias [N]
_Y = Argument("y")
_CACHE = ("float16", "float32", "float8_e4m3fn", "int8", "uint8")
_SEQUENCES = (  # of a step, as those of attention
    Argument("offsets", ("int32",)),  # [B + 1]
    Argument("starts", ("int32",)),  # [B]
    Argument("slots", ("int32",)),  # [B]
)


def _linear(name: str, *before: Argument, also: tuple[Argument, ...] = ()) -> KernelOperator:
    return KernelOperator(name, (*before, *_WEIGHT), (_Y, *also), "block_linear")


def _of(name: str) -> tuple[Argument, ...]:
    """A weight of experts."""
    return tuple(replace(each, name=f"{name}_{each.name}") for each in _TABLE)


def _recurrence(name: str, *after: Argument, also: tuple[Argument, ...] = ()) -> KernelOperator:
    inputs = (
        Argument("value"),  # [.., M, W], of which H·V columns, as the others
        Argument("query"),  # G·K columns, as keys
        Argument("key"),
        Argument("decay"),  # H
        *after,
        Argument("state", ("float32", "bfloat16")),  # [slots, H, K, V]; written in place
        *_SEQUENCES,
        Argument("rate", optional=True),  # [H], where decay is what a time step is made of
        Argument("bias", optional=True),  # [H] of a time step
        *also,
    )
    return KernelOperator(name, inputs, (_Y,), "recurrence")  # [.., M, H·V]


_ALL = (
    _linear("BlockLinear", Argument("x")),  # [.., K] to [.., N]
    _linear("GatedLinear", Argument("x")),  # of silu(first half) * second half of [.., 2K]
    _linear("NormLinear", Argument("x"), Argument("weight")),  # of the RMSNorm of x with weight [K]
    # Of the norm of a + b, which is its second output.
    _linear("ResidualNormLinear", Argument("a"), Argument("b"), Argument("weight"), also=(Argument("sum"),)),
    # Logits [M, N], or where ``greedy`` is true the index of each token's largest.
    _linear("HeadLinear", Argument("x"), Argument("greedy", ("bool",)), also=(Argument("next_tokens", ("int64",)),)),
    KernelOperator("BlockGather", (Argument("ids", ("int64",)), *_TABLE), (_Y,), "block_gather"),  # [..] to [.., K]
    KernelOperator(
        "CachedAttention",
        (
            Argument("query"),  # [.., .., H·D], or each followed by others; or with keys and values behind them
            Argument("key", optional=True),
            Argument("value", optional=True),
            Argument("key_cache", _CACHE),  # [blocks, KV, T, D], or D / 2 bytes of 4-bit codes; written in place
            Argument("value_cache", _CACHE),  # [blocks, KV, T, E], likewise
            Argument("offsets", ("int32",)),  # [B + 1] of the first token of each sequence
            Argument("starts", ("int32",)),  # [B] positions of these tokens
            Argument("block_table", ("int32",)),  # [B, blocks of a sequence]
            Argument("cosines", optional=True),  # [positions, R / 2] of RoPE
            Argument("sines", optional=True),
            Argument("key_scales", optional=True),  # [KV, D] of a cache of codes
            Argument("value_scales", optional=True),  # [KV, E]
            Argument("query_norm", optional=True),  # [D] of an RMSNorm of each head
            Argument("key_norm", optional=True),
            Argument("sinks", optional=True),  # [H]: one more score of each softmax, without a value
        ),
        (_Y,),
        "cached_attention",
    ),
    KernelOperator(
        "CausalConv",
        (
            Argument("x"),  # [.., M, W], of which C columns
            Argument("weight"),  # [taps, C]
            Argument("bias", optional=True),  # [C]
            Argument("state"),  # [slots, taps - 1, C] of the tokens before; written in place
            *_SEQUENCES,
        ),
        (_Y,),  # [.., M, C]
        "causal_conv",
    ),
    _recurrence("GatedDelta", Argument("beta")),  # H columns
    _recurrence("SelectiveScan", also=(Argument("skip", optional=True),)),  # [H]
    KernelOperator(
        "GatedNorm",  # x times SiLU or the sigmoid of a gate, normalized before or after, or not
        (
            Argument("x"),  # [.., M, X], of which C columns
            Argument("gate"),  # [.., M, W], likewise
            Argument("weight", optional=True),  # [C], or that of a group
        ),
        (_Y,),  # [.., M, C]
        "gated_norm",
    ),
    KernelOperator(  # by 1 or [C] factors; what is added is like x
        "Scale", (Argument("x"), Argument("factors"), Argument("added", optional=True)), (_Y,), "gated_norm"
    ),
    KernelOperator(
        "Experts",
        (
            Argument("x"),  # [.., M, H]
            Argument("index", ("int64",)),  # [M, k]: the experts of a token
            Argument("weight"),  # [M, k]
            Argument("up"),  # [E, U, H, 16]: E experts, U tiles of 16 gates, then of 16 ups
            Argument("down"),  # [E, D, I, 16]: D tiles of 16 outputs
            Argument("up_bias", optional=True),  # [E, U, 16]
            Argument("down_bias", optional=True),  # [E, D, 16]
        ),
        (_Y,),
        "experts",
    ),
    KernelOperator(
        "BlockExperts",
        (
            Argument("x"),  # [.., M, H]
            Argument("index", ("int64",)),  # [M, k]: the experts of a token
            Argument("weight"),  # [M, k]
            *_of("up"),  # of E weights [U, H]: 16 gates, then 16 ups, and so on
            *_of("down"),  # of E weights [H, I]
            Argument("up_bias", optional=True),  # [E, tiles, 16]
            Argument("down_bias", optional=True),
            # [E + 1], where experts differ in bits: the first byte of the codes of each, and the end of all
            Argument("up_begins", ("int64",), optional=True),
            Argument("down_begins", ("int64",), optional=True),
        ),
        (_Y,),
        "block_experts",
    ),
    KernelOperator(
        "FloatLinear",
        (Argument("x"), Argument("weight"), Argument("bias", optional=True)),  # weight [tiles, K, 16], bias [N]
        (_Y,),
        "float_linear",
    ),
    KernelOperator(
        "ChooseExperts",
        (Argument("logits"), Argument("bias", optional=True)),  # [.., M, E], [E]
        (Argument("index", ("int64",)), Argument("weight")),  # [M, k]
        "choose_experts",
    ),
    KernelOperator(
        "NormRows",
        (Argument("x"), Argument("residual", optional=True), Argument("weight"), Argument("rows", ("int64",))),
        (_Y,),  # [P, K]
        "norm_rows",
    ),
    KernelOperator(
        "Norm",
        (
            Argument("x"),  # [.., W], W >= K + L
            Argument("weight"),  # [K] of the first channels
            Argument("next_weight", optional=True),  # [L] of those behind them, normalized by themselves
        ),
        (_Y,),  # as x, of which what is left is copied
        "norm_rows",
    ),
    KernelOperator(  # of a + b
        "ResidualNorm", (Argument("a"), Argument("b"), Argument("weight")), (_Y, Argument("sum")), "norm_rows"
    ),
    KernelOperator(
        "QuantizeActivations", (Argument("x"), Argument("scale")), (Argument("y", ("uint8",)),), "quantize_activations"
    ),
)
OPERATORS = {operator.name: operator for operator in _ALL}
EXPERTS = frozenset({"Experts", "BlockExperts"})  # a step reads the experts that its tokens choose
