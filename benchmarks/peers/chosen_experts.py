"""How many different experts decode steps choose, by the float model: what a step must read of a mixture of experts.

All engines have the same weights up to rounding, so the float model's router says for any of them which experts the
tokens that it decoded need. Streams of a batch choose the more experts in common the more alike their texts are.

B  streams      T  tokens of a stream      K  experts that a token chooses
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch


def chosen_experts(checkpoint: Path, streams: Sequence[Sequence[int]], first: int) -> list[torch.Tensor]:
    """By layer, the experts ``[B, T - first, K]`` that tokens from number ``first`` of each stream choose.

    Streams have equal lengths. ``checkpoint``: folder with a model of transformers with experts; it is held in memory.
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    calls: list[torch.Tensor] = []
    inner = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def noting(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        calls.append(index.view(len(streams), -1, index.shape[-1])[:, first:].clone())
        return inner(module, hidden, index, weights)

    ALL_EXPERTS_FUNCTIONS.register("noting", noting)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", experts_implementation="noting")
    with torch.inference_mode():
        model.model(torch.tensor([list(stream) for stream in streams]), use_cache=False)
    return calls


def distinct(layers: Iterable[torch.Tensor]) -> float:
    """The mean number of different experts that the streams of a step choose, over steps and layers.

    >>> one, other = torch.tensor([[[0, 1]], [[1, 2]]]), torch.tensor([[[0, 1]], [[0, 1]]])
    >>> distinct([one, other])
    2.5
    """
    counts = [len(torch.unique(step)) for layer in layers for step in layer.unbind(1)]
    return sum(counts) / len(counts)
