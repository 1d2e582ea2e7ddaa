"""What a plan for a target chooses from: apart from costs, on which measuring sensitivities does not depend."""

from __future__ import annotations

from engines.target import Capabilities
from quantization.units import ALL_CACHES, Candidates

FLOAT_CACHE = "float32"  # a KV cache that is not quantized, whatever floats a target has


def target_candidates(capabilities: Capabilities) -> Candidates:
    kept = tuple(cache for cache in ALL_CACHES if cache.dtype in (FLOAT_CACHE, *capabilities.kv_dtypes))
    return Candidates(capabilities.schemes, kept, capabilities.int8_activations, capabilities.recurrent_dtypes)
