"""Transformers on torch, in eager mode with SDPA attention: one forward pass per token, as ``generate`` does."""
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, file_bytes, serve


class Transformers:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            (folder / name).symlink_to((checkpoint / name).resolve())

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        import torch
        from transformers.models.auto.modeling_auto import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[variant]
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")
        self._model.eval()
        return {"file_bytes": file_bytes(folder, "model.safetensors") // (1 if variant == "fp32" else 2)}

    def prefill(self, tokens: Sequence[int]) -> float:
        ids = self._torch.tensor([tokens])
        with self._torch.inference_mode():
            start = time.perf_counter()
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax()
            return time.perf_counter() - start

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            chosen = output.logits[:, -1].argmax(-1, keepdim=True)
            history = [chosen]
            start = time.perf_counter()
            for _ in range(new_tokens):
                output = self._model(chosen, past_key_values=output.past_key_values, use_cache=True)
                chosen = output.logits[:, -1].argmax(-1, keepdim=True)
                history.append(chosen)
            seconds = time.perf_counter() - start
        return Decoded(seconds, new_tokens, self._torch.cat(history, 1).tolist())

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([tokens])).logits[0].float().numpy()


if __name__ == "__main__":
    serve(Transformers())
