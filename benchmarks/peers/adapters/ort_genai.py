"""ONNX Runtime GenAI, converted with its own model builder: 4-bit weights in blocks of 32, accuracy level 4."""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, file_bytes, serve


class OnnxRuntimeGenAI:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(folder)]
        settings = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
        subprocess.run(
            [*builder, "-p", variant, "-e", "cpu", "-c", str(folder / "cache"), *settings],
            check=True,
            stdout=2,
            cwd=folder,
        )

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        import onnxruntime_genai as genai

        config = genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._genai, self._model = genai, genai.Model(config)
        return {"file_bytes": file_bytes(folder, "*.onnx", "*.onnx.data")}

    def _generator(self, batch: int, tokens: int) -> Any:
        parameters = self._genai.GeneratorParams(self._model)
        # min_length equal to max_length keeps the end-of-text token from ending a sequence early.
        parameters.set_search_options(batch_size=batch, max_length=tokens, min_length=tokens, do_sample=False)
        return self._genai.Generator(self._model, parameters)

    def prefill(self, tokens: Sequence[int]) -> float:
        generator = self._generator(1, len(tokens) + 1)
        start = time.perf_counter()
        generator.append_tokens(np.asarray([tokens], np.int32))
        generator.generate_next_token()
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        prompt_tokens = len(prompts[0])
        generator = self._generator(len(prompts), prompt_tokens + new_tokens + 2)
        generator.append_tokens(np.asarray(prompts, np.int32))
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(new_tokens):
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return Decoded(
            seconds, new_tokens, [generator.get_sequence(i)[prompt_tokens:].tolist() for i in range(len(prompts))]
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        generator = self._generator(1, len(tokens) + 1)
        generator.append_tokens(np.asarray([tokens], np.int32))
        return np.asarray(generator.get_output("logits"), np.float32)[0]


if __name__ == "__main__":
    serve(OnnxRuntimeGenAI())
