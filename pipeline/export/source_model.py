"""The model of a checkpoint as it came, for comparing engines with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.export.adapter import merge_adapter
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.needs import model_needs
from pipeline.export.rotary import fix_rotary
from tapeout.resources import require

LOGIT_BYTES = 256 << 20  # of texts that are computed together, or of a part of a long one


class CheckpointModel:
    """See :class:`evals.kind.SourceModel`. Nothing of what was exported is used.

    ``adapter``: folder of the adapter that is merged. ``positions``: of the longest sequence, which decides between
    factors of rotary scaling (:mod:`pipeline.export.rotary`). ``scratch``: an empty folder for weights of GGUF files,
    and for those that are quantized or merged; what is written there may be removed at once. :class:`ResourceError`
    where disk or memory does not suffice.
    """

    def __init__(self, folder: Path, entry: str, scratch: Path, *, adapter: Path | None, positions: int) -> None:
        require("the checkpoint's model", model_needs(folder, entry, adapter), scratch)
        self._model: Any = load_checkpoint(folder, entry, scratch / "model").model
        if adapter is not None:
            merge_adapter(self._model, adapter, scratch / "adapter")
        fix_rotary(self._model, positions)
        configured = self._model.generation_config.eos_token_id
        stops = configured if isinstance(configured, list) else [configured]
        self.stop_tokens: tuple[int, ...] = tuple(int(token) for token in stops if token is not None)

    def parts(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        from transformers import DynamicCache

        rows = max(1, LOGIT_BYTES // self._logit_bytes(1))
        cache: Any = DynamicCache(config=self._model.config) if len(tokens) > rows else None
        for begin in range(0, len(tokens), rows):
            yield self._continued(tokens[begin : begin + rows], cache)

    def _continued(self, tokens: Sequence[int], cache: Any) -> NDArray[np.float32]:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
        return output.logits[0].float().numpy()

    def batch(self, texts: Sequence[Sequence[int]], last: Sequence[int]) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = []
        while len(found) < len(texts):
            begin, end = len(found), len(found) + 1
            while end < len(texts) and self._fit(texts[begin : end + 1], last[begin : end + 1]):
                end += 1
            found += self._together(texts[begin:end], last[begin:end])
        return found

    def _together(self, texts: Sequence[Sequence[int]], last: Sequence[int]) -> list[NDArray[np.float32]]:
        longest, kept = max(map(len, texts)), _kept(texts, last)
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])  # no token sees those behind it
        with torch.inference_mode():
            output = self._model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(kept))
        logits = output.logits.float().numpy()
        if len(texts) == 1:
            return [logits[0]]
        firsts = [kept.index(len(text) - count) for text, count in zip(texts, last, strict=True)]
        # Copies, which do not keep the rows that nobody wants.
        return [rows[first : first + count].copy() for rows, first, count in zip(logits, firsts, last, strict=True)]

    def _fit(self, texts: Sequence[Sequence[int]], last: Sequence[int]) -> bool:
        return self._logit_bytes(len(texts) * len(_kept(texts, last))) <= LOGIT_BYTES

    def _logit_bytes(self, positions: int) -> int:
        return 4 * positions * self._model.config.get_text_config().vocab_size

    def embedding(self) -> NDArray[np.float32]:
        return self._model.get_input_embeddings().weight.detach().float().numpy()


def _kept(texts: Sequence[Sequence[int]], last: Sequence[int]) -> list[int]:
    """Positions of which some text's logits are wanted. transformers computes these of every text."""
    wanted = {
        position for text, count in zip(texts, last, strict=True) for position in range(len(text) - count, len(text))
    }
    return sorted(wanted)
