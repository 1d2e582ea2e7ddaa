"""llama.cpp through the low-level interface of llama-cpp-python, built from source for this processor.

``Q4_1-original`` is the file that the float reference was dequantized from. The other variants are quantized again from
float weights: llama.cpp first dequantizes that file to float32, exactly as our export does.
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

PROMPT_BATCH = 2048  # tokens of one llama_decode call, which splits them into micro-batches of 512 itself
MODEL = "model.gguf"


class LlamaCpp:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        if source.suffix != ".gguf":
            raise ValueError(
                f"{source} is not a GGUF file; the llama.cpp variants are made from the model's own GGUF file"
            )
        target = folder / MODEL
        if variant == "Q4_1-original" or source.stem.endswith(f"-{variant}"):  # it is of this format
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

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        import llama_cpp as llama

        self._llama: Any = llama
        self._threads = threads
        llama.llama_backend_init()
        path = folder / MODEL
        parameters = llama.llama_model_default_params()
        # Matmuls of its AMX backend end with a segmentation fault in this version (ggml_backend_amx_mul_mat).
        parameters.use_extra_bufts = " amx_tile" not in Path("/proc/cpuinfo").read_text()
        self._model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        system = llama.llama_print_system_info().decode()
        return {"file_bytes": path.stat().st_size, "system": system, "avx512": "AVX512 = 1" in system}

    def _context(self, batch: int, tokens: int) -> Any:
        """A new context whose KV cache holds ``batch`` sequences of ``tokens``. Its creation is never timed."""
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = batch * (-(-tokens // 256) * 256)
        parameters.n_batch = PROMPT_BATCH
        parameters.n_seq_max = batch
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context = self._llama.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"no llama.cpp context for {batch} sequences of {tokens} tokens")
        return context

    def _run(self, context: Any, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run one batch of entries (token, position, sequence, whether logits are wanted)."""
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

    def _logits(self, context: Any, count: int) -> NDArray[np.float32]:
        """Logits ``[count, V]`` of the last batch; a view that the next batch overwrites."""
        pointer = self._llama.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, shape=(count, self._vocabulary))

    def _prefill(self, context: Any, tokens: Sequence[int], sequence: int) -> int:
        """Prefill one sequence and choose its first new token."""
        for start in range(0, len(tokens), PROMPT_BATCH):
            chunk = tokens[start : start + PROMPT_BATCH]
            self._run(
                context,
                [(token, start + i, sequence, start + i == len(tokens) - 1) for i, token in enumerate(chunk)],
            )
        return int(self._logits(context, 1)[0].argmax())

    def prefill(self, tokens: Sequence[int]) -> float:
        context = self._context(1, len(tokens) + 1)
        start = time.perf_counter()
        self._prefill(context, tokens, 0)
        seconds = time.perf_counter() - start
        self._llama.llama_free(context)
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        context = self._context(len(prompts), max(map(len, prompts)) + new_tokens + 1)
        chosen = [self._prefill(context, prompt, sequence) for sequence, prompt in enumerate(prompts)]
        history = [[token] for token in chosen]
        start = time.perf_counter()
        for step in range(new_tokens):
            self._run(
                context,
                [(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(chosen)],
            )
            chosen = self._logits(context, len(prompts)).argmax(axis=1).tolist()
            for tokens, token in zip(history, chosen, strict=True):
                tokens.append(token)
        seconds = time.perf_counter() - start
        self._llama.llama_free(context)
        return Decoded(seconds, new_tokens, history)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        context = self._context(1, len(tokens) + 1)
        self._run(context, [(token, i, 0, True) for i, token in enumerate(tokens)])
        logits = self._logits(context, len(tokens)).copy()
        self._llama.llama_free(context)
        return logits


if __name__ == "__main__":
    serve(LlamaCpp())
