"""llama.cpp through llama-cpp-python's low-level interface, built from source for this processor.

``Q4_1-original`` is the file that the float reference was dequantized from. The others are requantized from the float
weights: llama.cpp first dequantizes that file to float32, which is exactly what our export did.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, serve

PROMPT_BATCH = 2048  # tokens given to one llama_decode; it cuts them into micro-batches of 512 by itself
MODEL = "model.gguf"


class LlamaCpp:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        if source.suffix != ".gguf":
            raise ValueError(f"{source} is not a GGUF file; llama.cpp's rows are made from the model's own GGUF file")
        target = folder / MODEL
        if variant == "Q4_1-original":
            target.symlink_to(source.resolve())
            return
        import llama_cpp as llama

        llama.llama_backend_init()
        parameters = llama.llama_model_quantize_default_params()
        parameters.nthread = 2
        parameters.allow_requantize = True
        parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{variant}")
        code = llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
        if code:
            raise RuntimeError(f"llama_model_quantize ended with {code}")

    def load(self, folder: Path, variant: str, threads: int, rows: int, max_tokens: int) -> dict[str, Any]:
        import llama_cpp as llama

        self._llama: Any = llama
        self._threads = threads
        llama.llama_backend_init()
        path = folder / MODEL
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        return {"file_bytes": path.stat().st_size, "system": llama.llama_print_system_info().decode()}

    def _context(self, rows: int, tokens: int) -> Any:
        """A context whose KV cache holds ``rows`` sequences of ``tokens``; made anew, outside of every clock."""
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = rows * (-(-tokens // 256) * 256)
        parameters.n_batch = PROMPT_BATCH
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context = self._llama.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"no llama.cpp context of {rows} rows of {tokens} tokens")
        return context

    def _feed(self, context: Any, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run one batch of (token, position, sequence, wants logits)."""
        batch = self._llama.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, sequence, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wanted
            code = self._llama.llama_decode(context, batch)
        finally:
            self._llama.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")

    def _rows(self, context: Any, count: int) -> NDArray[np.float32]:
        """The last batch's logits ``[count, V]``; a view that the next batch overwrites."""
        pointer = self._llama.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, shape=(count, self._vocabulary))

    def _read(self, context: Any, tokens: Sequence[int], sequence: int) -> int:
        """Prefill one sequence and choose its first new token."""
        for start in range(0, len(tokens), PROMPT_BATCH):
            part = tokens[start : start + PROMPT_BATCH]
            self._feed(
                context,
                [(token, start + i, sequence, start + i == len(tokens) - 1) for i, token in enumerate(part)],
            )
        return int(self._rows(context, 1)[0].argmax())

    def prefill(self, tokens: Sequence[int]) -> float:
        context = self._context(1, len(tokens) + 1)
        start = time.perf_counter()
        self._read(context, tokens, 0)
        seconds = time.perf_counter() - start
        self._llama.llama_free(context)
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        context = self._context(len(prompts), max(map(len, prompts)) + new_tokens + 1)
        chosen = [self._read(context, prompt, row) for row, prompt in enumerate(prompts)]
        history = [[token] for token in chosen]
        start = time.perf_counter()
        for step in range(new_tokens):
            self._feed(
                context,
                [(token, len(prompts[row]) + step, row, True) for row, token in enumerate(chosen)],
            )
            chosen = self._rows(context, len(prompts)).argmax(axis=1).tolist()
            for row, token in zip(history, chosen, strict=True):
                row.append(token)
        seconds = time.perf_counter() - start
        self._llama.llama_free(context)
        return Decoded(seconds, new_tokens, history)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        context = self._context(1, len(tokens) + 1)
        self._feed(context, [(token, i, 0, True) for i, token in enumerate(tokens)])
        rows = self._rows(context, len(tokens)).copy()
        self._llama.llama_free(context)
        return rows


if __name__ == "__main__":
    serve(LlamaCpp())
