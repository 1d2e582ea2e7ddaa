"""Compare an exported graph with transformers: prefill, decoding with a cache, and a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def largest_error(model: Any, path: Path, *, seed: int = 0, steps: int = 4) -> float:
    """Largest relative logit error of the graph on ONNX Runtime against transformers' own attention.

    Runs a prefill and ``steps`` decode steps over the cache for a batch of three prompts of different lengths with left
    padding. Relative to the largest absolute reference logit of the position.
    """
    import onnxruntime as ort

    config = model.config.get_text_config()
    generator = np.random.default_rng(seed)
    lengths = (9, 14, 21)
    limit = min(int(config.max_position_embeddings), 64)
    lengths = tuple(min(n, limit - steps) for n in lengths)
    prompts = [generator.integers(1, config.vocab_size, size=n + steps).tolist() for n in lengths]
    reference = [_reference_logits(model, tokens) for tokens in prompts]

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    width = max(lengths)
    ids = np.ones((len(prompts), width), np.int64)
    mask = np.zeros((len(prompts), width), np.int64)
    for entry, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[entry, width - length :] = tokens[:length]
        mask[entry, width - length :] = 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    past: dict[str, NDArray[Any]] = {
        i.name: np.zeros((len(prompts), i.shape[1], 0, i.shape[3]), np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past_key_values.")
    }
    names = [o.name for o in session.get_outputs()]
    worst = 0.0
    for step in range(steps + 1):
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        known = {i.name for i in session.get_inputs()}
        outputs = dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in known}), strict=True))
        logits = np.asarray(outputs["logits"])
        for entry, length in enumerate(lengths):
            first = 0 if step == 0 else length + step - 1
            expected = reference[entry][first : length + step]
            actual = logits[entry, logits.shape[1] - len(expected) :]
            worst = max(worst, _relative_error(actual, expected))
        past = {
            f"past_key_values.{n.removeprefix('present.')}": np.asarray(v) for n, v in outputs.items() if n != "logits"
        }
        if step < steps:
            ids = np.array([[p[length + step]] for p, length in zip(prompts, lengths, strict=True)], np.int64)
            mask = np.concatenate([mask, np.ones((len(prompts), 1), np.int64)], axis=1)
            positions = np.array([[length + step] for length in lengths], np.int64)
    return worst


def _reference_logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def _relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    return float((np.abs(actual - expected) / np.maximum(scale, 1e-6)).max())
