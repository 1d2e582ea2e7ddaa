"""vLLM's CPU build in bfloat16, with its engine running in this process.

Logits are exact. A request for prompt log-probabilities makes vLLM compute the logits of every position, and this
adapter captures them there.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, file_bytes, serve, timed_steps


class VllmCpu:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        for path in checkpoint.iterdir():
            if path.suffix in (".json", ".jinja", ".safetensors") and path.name != "record.json":
                (folder / path.name).symlink_to(path.resolve())

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._sampling: Any = SamplingParams
        self._requests = 0
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                dtype={"bf16": "bfloat16"}[variant],
                max_model_len=max_tokens,
                max_num_seqs=max_batch,
                max_num_batched_tokens=max_batch * max_tokens,  # the first step prefills every prompt
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        return {"file_bytes": file_bytes(folder, "model.safetensors") // 2}

    def _add(self, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[str]:
        sampling = self._sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **options)
        names: list[str] = []
        for prompt in prompts:
            names.append(f"r{self._requests}")
            self._engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, sampling)
            self._requests += 1
        return names

    def prefill(self, tokens: Sequence[int]) -> float:
        self._add([tokens], 1)
        start = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        tokens: dict[str, list[int]] = {name: [] for name in self._add(prompts, new_tokens + 1)}

        def step() -> list[int]:
            for output in self._engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            return [len(generated) for generated in tokens.values()]

        seconds, steps = timed_steps(step, len(prompts), new_tokens)
        return Decoded(seconds, steps, list(tokens.values()))

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        captured: list[NDArray[np.float32]] = []
        model = self._engine.model_executor.driver_worker.worker.model_runner.model
        compute = model.compute_logits

        def capture(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            captured.append(result.float().numpy().copy())
            return result

        model.compute_logits = capture
        try:
            self._add([tokens], 1, prompt_logprobs=1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
        finally:
            model.compute_logits = compute
        logits = np.concatenate(captured)
        # vLLM computes the S - 1 predictions within the prompt and the prediction of the first new token separately.
        longest = max(captured, key=len)
        last = next(part for part in captured if part is not longest)[-1:]
        if len(longest) != len(tokens) - 1:
            raise RuntimeError(
                f"vLLM computed logits of {[len(part) for part in captured]} positions for {len(tokens)} tokens"
            )
        return np.concatenate([longest, last]) if len(logits) >= len(tokens) else logits


if __name__ == "__main__":
    serve(VllmCpu())
