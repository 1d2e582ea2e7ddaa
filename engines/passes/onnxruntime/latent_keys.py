"""Keys that are put together from several linears are copied together, and turned by attention.

    query = Concat(part, RotaryEmbedding(rest))                 ->   the first channels of a head are those that turn
    key = Concat(part of kv_b, RotaryEmbedding(part of kv_a) of every head)   ->   Concat of parts of both, likewise

So does multi-head latent attention (DeepSeek-V2, 2.1): a key of a head has channels of its own, made of a latent, and
channels that all heads share and that turn. Models write this down in many ways. So where each channel comes from is
found by running what only moves numbers, over numbers that say where they come from. What remains is one Split of each
linear and one Concat each of queries, keys and values: copies, whose bits depend on nothing. Where nothing turns, as
in Kimi Linear, the same holds of a key's two parts.

Attention turns the first channels of a head. Those that turn therefore come first in queries and in keys, which
changes no score; scales of a quantized cache are put in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, attribute, dimension, new_value, producer_of, remove_dead, sizes
from tapeout.operators import layer_of_node
from tapeout.operators.attention import AttentionNode, is_attention

NOT_COPIED = "keys are not copied from linears alone; keys are put together by ONNX Runtime"
OVERLAPPING = "parts of keys and values overlap; keys are put together by ONNX Runtime"
BATCH, TOKENS = 2, 3  # of the numbers that are moved
# Operators that move numbers, and which of their inputs they move; None: all.
MOVES: dict[str, tuple[int, ...] | None] = {
    "Concat": None,
    "ConstantOfShape": (),
    "Expand": (0,),
    "Reshape": (0,),
    "ScatterND": (0, 2),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
}


@dataclass(frozen=True)
class _Channel:
    """Where a channel of a head comes from: a column of ``source``, which is ``[B, S, N]`` or ``[B, 1, S, N]``.

    ``place``: among those that a rotary embedding turns; None where it is not turned.
    """

    source: ir.Value
    column: int
    place: int | None = None


Heads = list[list[_Channel]]
Run = tuple[ir.Value, int, int]  # a source, the first column of a run of it, and the one after the last
Runs = list[Run]


@dataclass(frozen=True)
class Parts:
    """``runs``: of queries, keys and values, in their new order."""

    runs: list[Runs]
    order: list[int]  # of the channels of a head: those that turn, as the kernel pairs them, and the others
    turned: int
    rotary: ir.Node | None = None
    interleaved: bool = False


def run(lowering: Lowering) -> PassResult:
    nodes = [node for node in lowering.model.graph if is_attention(node)]
    declined = list[str]()
    matched = 0
    for node in nodes:
        found = parts_of(lowering.model, node)
        if isinstance(found, str):
            declined += [f"layer {layer_of_node(node)}: {found}"] if found else []
            continue
        _lower(lowering, node, found)
        matched += 1
    return PassResult(matched, tuple(declined) if matched or declined else ("no keys are put together from parts",))


def parts_of(model: ir.Model, node: ir.Node) -> Parts | str:
    """What is found of a layer; else why its keys stay as they are, empty where all is of one linear."""
    query, key, value = node.inputs[:3]
    turning = [rotaries(each) for each in (query, key)]
    if not any(turning):
        return _unturned(model, node)
    if any(len(each) != 1 for each in turning):
        return ""
    (of_query,), (of_key,) = turning
    if len({*_sources(key), *_sources(of_key.inputs[0])} - {*of_key.outputs}) < 2:
        return ""
    if _way(of_query) != _way(of_key) or attribute(of_key, "rotary_embedding_dim", 0):
        return "queries and keys are turned in different ways; keys are put together by ONNX Runtime"
    found = [_channels(model, each) for each in (query, key, value)]
    if any(heads is None for heads in found):
        return NOT_COPIED
    heads = [each for each in found if each is not None]
    places = {tuple(channel.place for channel in head) for each in heads[:2] for head in each}
    if len(places) > 1 or any(channel.place is not None for head in heads[2] for channel in head):
        return "heads are turned in different ways; keys are put together by ONNX Runtime"
    (head,) = places
    turned = dimension(of_key.inputs[0], 3)
    if sorted(place for place in head if place is not None) != [*range(turned)]:
        return "channels are turned and left out; keys are put together by ONNX Runtime"
    order = [head.index(place) for place in range(turned)]
    interleaved = bool(attribute(of_key, "interleaved", 0))
    neighbours = [heads[1][0][order[place]].column for place in (0, turned // 2)]
    if not interleaved and neighbours[1] - neighbours[0] == 1:  # halves that were neighbours before
        order = [channel for pair in zip(order[: turned // 2], order[turned // 2 :], strict=True) for channel in pair]
        interleaved = True
    order += [channel for channel, place in enumerate(head) if place is None]
    orders = order, order, range(len(heads[2][0]))
    runs = [_runs(each[c] for each in one for c in channels) for one, channels in zip(heads, orders, strict=True)]
    if _overlap({run for each in runs for run in each}):
        return OVERLAPPING
    return Parts(runs, order, turned, of_key, interleaved)


def _unturned(model: ir.Model, node: ir.Node) -> Parts | str:
    """The same of a layer whose queries and keys have no positions."""
    if len(_sources(node.inputs[1])) < 2:
        return ""
    heads = [found for each in node.inputs[:3] if (found := _channels(model, each)) is not None]
    if len(heads) < 3:
        return NOT_COPIED
    runs = [_runs(channel for head in each for channel in head) for each in heads]
    if _overlap({run for each in runs for run in each}):
        return OVERLAPPING
    return Parts(runs, [*range(len(heads[1][0]))], 0)


def _is_whole(runs: Runs) -> bool:
    """Whether a value is all of a linear's output as it is, such as queries whose channels keep their order."""
    ((source, begin, end), *others) = runs
    return not others and begin == 0 and end == dimension(source, -1)


def _way(rotary: ir.Node) -> tuple[Sequence[ir.Value | None], int, int]:
    """How a rotary embedding turns: its tables and positions, which channels are pairs, and how many turn."""
    interleaved, turned = (attribute(rotary, name, 0) for name in ("interleaved", "rotary_embedding_dim"))
    return rotary.inputs[1:], interleaved, turned


def _lower(lowering: Lowering, node: ir.Node, parts: Parts) -> None:
    model, layer = lowering.model, layer_of_node(node)
    fixed, created = AttentionNode.of(node), list[ir.Node]()
    apart = [place for place, runs in enumerate(parts.runs) if not _is_whole(runs)]
    pieces = _pieces(model, {run for place in apart for run in parts.runs[place]}, created)
    replaced = [node.inputs[place] for place in apart]
    for place, like in zip(apart, replaced, strict=True):
        each = parts.runs[place]
        joined = [pieces[run] for run in each]
        flat = joined[0] if len(joined) == 1 else _made(created, ir.node("Concat", joined, attributes={"axis": -1}))
        heads, size = dimension(like, 1), fixed.head_size if place < 2 else fixed.value_size
        flat.type, flat.shape = like.type if like is not None else None, ir.Shape([None, None, heads * size])
        rows = _made(created, ir.node("Reshape", [flat, sizes(model, 0, 0, heads, size)]))
        rows.type, rows.shape = flat.type, ir.Shape([None, None, heads, size])
        value = _made(created, ir.node("Transpose", [rows], attributes={"perm": [0, 2, 1, 3]}))
        value.type, value.shape = flat.type, ir.Shape([None, heads, None, size])
        if place < 2 and parts.rotary is not None:
            value = _turned(model, value, parts, parts.rotary, created)
        node.replace_input_with(place, value)
    model.graph.insert_before(node, created)
    remove_dead(model, [producer for value in replaced if value is not None and (producer := value.producer())])
    name = f"layers.{layer}.k_scale"
    if name in lowering.kv_scales:
        lowering.kv_scales = {**lowering.kv_scales, name: lowering.kv_scales[name][..., parts.order]}


def _turned(model: ir.Model, value: ir.Value, parts: Parts, rotary: ir.Node, created: list[ir.Node]) -> ir.Value:
    """The first channels of ``[B, H, S, D]`` turned."""
    size, axis, one = dimension(value, 3), sizes(model, 3), sizes(model, 1)
    first, rest = (
        _made(created, ir.node("Slice", [value, sizes(model, begin), sizes(model, end), axis, one]))
        for begin, end in ((0, parts.turned), (parts.turned, size))
    )
    for part, width in ((first, parts.turned), (rest, size - parts.turned)):
        part.type, part.shape = value.type, ir.Shape([*list(value.shape or ())[:3], width])
    node = ir.node("RotaryEmbedding", [first, *rotary.inputs[1:]], attributes={"interleaved": int(parts.interleaved)})
    turned = _made(created, node)
    turned.type, turned.shape = first.type, first.shape
    joined = _made(created, ir.node("Concat", [turned, rest], attributes={"axis": -1}))
    joined.type, joined.shape = value.type, value.shape
    return joined


def _made(created: list[ir.Node], node: ir.Node) -> ir.Value:
    created.append(node)
    return node.outputs[0]


def rotaries(value: ir.Value | None) -> list[ir.Node]:
    """The rotary embeddings among what a value is put together from."""
    return [node for source in _sources(value) if (node := producer_of(source, "RotaryEmbedding")) is not None]


def _sources(value: ir.Value | None) -> list[ir.Value]:
    """What a value is put together from, if numbers are only moved."""
    found, stack, seen = list[ir.Value](), [value], set[int]()
    while stack:
        current = stack.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        node = current.producer()
        if node is None or node.domain or node.op_type not in MOVES:
            found.append(current)
            continue
        moved = MOVES[node.op_type]
        stack.extend(node.inputs if moved is None else [node.inputs[place] for place in moved])
    return found


def _channels(model: ir.Model, value: ir.Value | None) -> Heads | None:
    """Where each channel of ``[B, H, S, D]`` comes from; None where a number is moved to another token, or is new."""
    if value is None:
        return None
    columns = list[_Channel]()
    feeds = dict[str, NDArray[np.float32]]()
    sources = _sources(value)
    for source in sources:
        shape = [size if isinstance(size, int) else None for size in source.shape or ()]
        rank, rotary = len(shape), producer_of(source, "RotaryEmbedding")
        heads, width = shape[1] if rank == 4 else 1, shape[-1] if rank in (3, 4) else None
        if source.name is None or heads is None or width is None or (rotary is None and heads > 1):
            return None
        before = _channels(model, rotary.inputs[0]) if rotary is not None else None
        if rotary is not None and (before is None or any(c.place is not None for head in before for c in head)):
            return None
        first = len(columns)
        if before is None:
            columns += [_Channel(source, column) for column in range(heads * width)]
        else:
            columns += [_Channel(c.source, c.column, place) for head in before for place, c in enumerate(head)]
        numbers = np.arange(first, len(columns)).reshape(1, heads, 1, width) * (BATCH * TOKENS)
        tokens = np.arange(BATCH * TOKENS).reshape(BATCH, 1, TOKENS, 1)
        coded = (1 + numbers + tokens).astype(np.float32)  # exact up to 2^24
        feeds[source.name] = coded if rank == 4 else np.ascontiguousarray(coded[:, 0])
    if len(columns) * BATCH * TOKENS >= 1 << 24:
        return None
    moved = _run(model, value, sources, feeds)
    if moved is None or (moved.shape[0], moved.shape[2]) != (BATCH, TOKENS) or moved.min() < 1:
        return None
    number, token = np.divmod(moved.astype(np.int64) - 1, BATCH * TOKENS)
    if (token != np.arange(BATCH * TOKENS).reshape(BATCH, 1, TOKENS, 1)).any() or (number != number[:1, :, :1]).any():
        return None
    return [[columns[channel] for channel in head] for head in number[0, :, 0].tolist()]


def _run(
    model: ir.Model, value: ir.Value, sources: list[ir.Value], feeds: dict[str, NDArray[np.float32]]
) -> NDArray[np.float32] | None:
    """The value, of these sources and of ``BATCH`` sequences of ``TOKENS`` tokens."""
    import onnxruntime as ort

    if value in sources:
        return feeds[value.name or ""]
    of_tokens = [each for each in model.graph.inputs if each.name in ("input_ids", "position_ids")]
    try:
        part = ir.Model(
            ir.convenience.extract(model.graph, [*sources, *of_tokens], [value]), ir_version=min(model.ir_version, 11)
        )
    except ValueError:
        return None
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it runs only once
    ids = {each.name or "": np.zeros((BATCH, TOKENS), np.int64) for each in of_tokens}
    serialized = ir.to_proto(part).SerializeToString()
    try:
        session = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
        wanted = {each.name for each in session.get_inputs()}
        fed = {name: array for name, array in {**feeds, **ids}.items() if name in wanted}
        (found,) = session.run([value.name], fed)
    except Exception:  # ONNX Runtime's errors share no class; a graph that only looks alike may fail
        return None
    return np.asarray(found, np.float32)


def _runs(channels: Iterable[_Channel]) -> Runs:
    """Channels as runs of neighbouring columns."""
    flat = list(channels)
    starts = [0] + [
        number
        for number, (one, other) in enumerate(pairwise(flat), 1)
        if one.source is not other.source or other.column != one.column + 1
    ]
    return [
        (flat[begin].source, flat[begin].column, flat[end - 1].column + 1)
        for begin, end in zip(starts, [*starts[1:], len(flat)], strict=True)
    ]


def _sorted(runs: set[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run[0].name or "", run[1]))


def _overlap(runs: set[Run]) -> bool:
    return any(one[0] is other[0] and other[1] < one[2] for one, other in pairwise(_sorted(runs)))


def _pieces(model: ir.Model, runs: set[Run], created: list[ir.Node]) -> dict[Run, ir.Value]:
    """Each run as a tensor ``[B, S, columns]``: a Split of each source."""
    pieces = dict[Run, ir.Value]()
    for source, group in groupby(_sorted(runs), key=lambda run: run[0]):
        flat, width = _flat(model, source, created)
        found, at, parts = list(group), 0, list[tuple[int, int]]()
        for _, begin, end in found:
            parts += [(at, begin), (begin, end)] if begin > at else [(begin, end)]
            at = end
        parts += [(at, width)] if at < width else []
        split = ir.node(
            "Split",
            [flat, sizes(model, *(end - begin for begin, end in parts))],
            attributes={"axis": -1},
            outputs=[new_value(f"{source.name}.{begin}") for begin, _ in parts],
        )
        created.append(split)
        for part, (begin, end) in zip(split.outputs, parts, strict=True):
            part.type, part.shape = source.type, ir.Shape([None, None, end - begin])
            pieces[source, begin, end] = part
    return pieces


def _flat(model: ir.Model, source: ir.Value, created: list[ir.Node]) -> tuple[ir.Value, int]:
    """A source as ``[B, S, N]``."""
    if len(source.shape or ()) == 3:
        return source, dimension(source, 2)
    width = dimension(source, 3)
    flat = _made(created, ir.node("Reshape", [source, sizes(model, 0, -1, width)]))
    flat.type, flat.shape = source.type, ir.Shape([None, None, width])
    return flat, width
