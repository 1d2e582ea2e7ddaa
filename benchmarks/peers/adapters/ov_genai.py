"""OpenVINO GenAI with continuous batching, converted with optimum-intel and compressed with NNCF.

Speed is that of ``ContinuousBatchingPipeline``. It gives no logits of a prompt, so the logits come from the OpenVINO
runtime on the same model file with the same properties: same weights and matmuls, another attention operator.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, file_bytes, serve, timed_steps

# 576 and 1,536 input channels are multiples of 64, but not both of the default group size 128.
WEIGHTS = {
    "int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"),
    "int8": ("--weight-format", "int8"),
}
CACHE_GB = 1


class OpenVino:
    def __init__(self) -> None:
        self._request: Any = None
        self._requests = 0

    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        export = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
        task = ["--task", "text-generation-with-past"]
        subprocess.run([*export, *task, *WEIGHTS[variant], str(folder)], check=True, stdout=2, cwd=folder)

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        import openvino as ov
        import openvino_genai as genai

        self._ov, self._genai, self._folder = ov, genai, folder
        self._properties = {"INFERENCE_NUM_THREADS": threads}
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = max(max_batch, 1)
        scheduler.max_num_batched_tokens = max(max_batch * max_tokens, 256)  # the first step prefills every prompt
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", self._properties)
        return {"file_bytes": file_bytes(folder, "openvino_model.bin")}

    def _add(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Any]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.ignore_eos = True
        handles: list[Any] = []
        for prompt in prompts:
            ids = self._ov.Tensor(np.asarray([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        return handles

    def prefill(self, tokens: Sequence[int]) -> float:
        handles = self._add([tokens], 1)
        start = time.perf_counter()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - start
        for handle in handles:
            handle.read_all()
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        handles = self._add(prompts, new_tokens + 1)
        tokens: list[list[int]] = [[] for _ in prompts]

        def step() -> list[int]:
            self._pipeline.step()
            for generated, handle in zip(tokens, handles, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        generated.extend(output.generated_ids)
            return [len(generated) for generated in tokens]

        seconds, steps = timed_steps(step, len(prompts), new_tokens)
        return Decoded(seconds, steps, tokens)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        if self._request is None:
            core = self._ov.Core()
            model = core.compile_model(str(self._folder / "openvino_model.xml"), "CPU", self._properties)
            self._request = model.create_infer_request()
            self._input_names = {name for port in model.inputs for name in port.get_names()}
        self._request.reset_state()
        ids = np.asarray([tokens], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        results = self._request.infer({name: value for name, value in inputs.items() if name in self._input_names})
        return np.asarray(results["logits"], np.float32)[0]


if __name__ == "__main__":
    serve(OpenVino())
