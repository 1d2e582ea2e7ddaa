"""What stages of quantization take of disk and memory, from the shapes that a graph's record holds.

K  input channels of a group
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quantization.calibration import EXPERT_BLOCK_CHANNELS, gram_blocks
from quantization.units import HEAD, Schemes, Unit, by_layer
from tapeout import resources
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.resources import Needs

TORCH_BYTES, NUMPY_BYTES = 700 << 20, 300 << 20  # of a process with its libraries
SEARCH_BYTES = 3 << 30  # what searches of several groups may take together; one alone may take more


def calibration_needs(graph: PortableGraph, tokens: int) -> Needs:
    """``tokens``: of all samples. Disk: packed Gram matrices, and hidden states before and after a layer.

    Memory: a layer's weights and one Gram matrix per group in float32, and those of the fit samples packed.
    """
    layers = [groups for name, groups in by_layer(graph) if name.startswith("layers.")]
    packed = sum(2 * _gram_elements(group) for group in graph.groups)
    largest = max(4 * _weights(groups) + sum(5 * _gram_elements(group) for group in groups) for groups in layers)
    return Needs(disk_bytes=packed + 8 * tokens * graph.hidden_size, memory_bytes=TORCH_BYTES + largest)


def quantization_needs(graph: PortableGraph, schemes: Schemes) -> Needs:
    """Disk: the quantized weights. Memory: searches, or the embedding as floats and codes."""
    bits = {group.name: schemes[group.name].bits_per_weight(group.in_features) for group in graph.groups}
    linears = sum(bits[group.name] / 8 * _weights([group]) for group in graph.groups if group.name != HEAD)
    embedding = graph.vocab_size * graph.hidden_size
    disk = linears + embedding * (1 if graph.tied_embeddings else 2)  # a byte for each code of an embedding
    search = max([SEARCH_BYTES, *map(search_bytes, graph.groups)])
    return Needs(disk_bytes=round(disk), memory_bytes=NUMPY_BYTES + max(min(search, _all(graph)), 8 * embedding))


def simulation_needs(graph: PortableGraph, units: Sequence[Unit], tokens: int, positions: int, *, plans: bool) -> Needs:
    """Of a :class:`Simulation` and what rounds one of ``units`` after the other.

    ``tokens``: of all samples, which are computed together; ``positions``: that are compared.
    Memory: a unit's weights and statistics, searches for two of its groups, the embedding decoded, activations, the
    hidden states before each unit, and logits three times. ``plans``: the codes of all units lie on the disk, their
    scales in memory.
    """
    held = max(sum(map(_prepared_bytes, unit.groups)) + 2 * max(map(search_bytes, unit.groups)) for unit in units)
    embedding = 14 * graph.vocab_size * graph.hidden_size  # in its search; measured at 263 million weights
    linears = [group for group in graph.groups if group.name != HEAD]
    widest = max(max(1, group.chosen) * (sum(group.out_features) + group.in_features) for group in linears)
    activations = 4 * tokens * (3 * widest + graph.hidden_size * len(units))
    codes = _weights(linears) if plans else 0
    scales = codes // 8  # four bytes for a group of 32, the smallest
    logits = 12 * positions * graph.vocab_size
    return Needs(codes, TORCH_BYTES + max(held, embedding) + activations + scales + logits)


def _prepared_bytes(group: LinearGroup) -> int:
    """Of a group while its schemes are tried. Experts are read one by one; their codes, scales and floats are held."""
    return 7 * group.weights if group.experts else 5 * group.weights + 12 * _gram_elements(group)


def decoded_bytes() -> int:
    """Of float32 linears that a :class:`QuantizedReference` holds; others are decoded at each call.

    An eighth of the available memory, within 0.5 and 2 GiB: with 2 GiB, 1.24 billion parameters took more than 4 GB.
    """
    return min(max(resources.available_memory() // 8, 1 << 29), 2 << 30)


def reference_needs(model: Any) -> Needs:
    """Of a :class:`QuantizedReference`: the embedding, linears, and the largest of them while it is decoded.

    ``model``: without its weights.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    kept = model.get_input_embeddings().weight.numel()
    held = 4 * kept + min(4 * (sum(sizes) - kept), decoded_bytes())
    return Needs(disk_bytes=0, memory_bytes=TORCH_BYTES + held + 5 * max(sizes))


def search_bytes(group: LinearGroup) -> int:
    """About what the search for a group takes: Gram matrices and factors in float32 and float64, and the weights.

    Experts are searched for one by one; their codes and scales are kept.
    """
    weights = 0 if group.name == HEAD else 16 * _weights([group])
    one = 28 * _gram_elements(group) + weights
    return one // group.experts + 2 * _weights([group]) if group.experts else one


def _gram_elements(group: LinearGroup) -> int:
    """Of all experts, where it has some."""
    if group.experts:
        return group.experts * group.in_features**2 // gram_blocks(group.in_features, EXPERT_BLOCK_CHANNELS)
    return group.in_features**2 // gram_blocks(group.in_features)


def _all(graph: PortableGraph) -> int:
    return sum(map(search_bytes, graph.groups))


def _weights(groups: Iterable[LinearGroup]) -> int:
    return sum(group.weights for group in groups)
