"""Bundles that fleets are simulated with."""

from __future__ import annotations

from runtime.simulation.step_lengths import StepLengths

# The first is of docs/benchmarks/serving.md (table "Streams", 135 M weights, 2 cores; the step of one stream without
# drafts), the second of docs/benchmarks/llama-3.2-1b.md ("tapeout default").
BUNDLES = {
    "default": StepLengths(((1, 0.0026), (8, 0.0051), (32, 0.0144), (64, 0.0271)), ((1, 0.000215),)),
    "llama-3.2-1b": StepLengths(((1, 0.0166), (8, 0.0194), (32, 0.0591)), ((1, 0.00140),)),
}
