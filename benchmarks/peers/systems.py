"""The engines that are compared. Each is one line of the results table."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "tapeout"
READERS_OF_GGUF = ("llamacpp", "ik_llama")  # adapters


@dataclass(frozen=True)
class System:
    """``weight_bits``: bits per weight. A peer's come from its format, ours from the size of the bundle.

    ``unclassed``: measured and compared like the others, but in no class (llama.cpp on the file that our float
    reference came from). ``by_format``: it gives no logits, so its class follows from its bits per weight. ``mxfp4``:
    for models that are published with experts in MXFP4, which nobody rounds again, and for no others.
    """

    name: str
    adapter: str  # module under benchmarks/peers/adapters
    environment: str  # virtual environment and requirements-ENVIRONMENT.txt; OURS is the current environment
    variant: str  # of the peer's weights; of ours the level of native kernels, empty for the best
    weight_bits: float
    ours: bool = False
    unclassed: bool = False
    by_format: bool = False
    mxfp4: bool = False


PEERS = (
    System("onnxruntime-genai int4", "ort_genai", "onnxruntime-genai", "int4", 4),
    System("openvino-genai int4", "ov_genai", "openvino", "int4", 4),
    System("openvino-genai int8", "ov_genai", "openvino", "int8", 8),
    System("llama.cpp Q4_1, original file", "llamacpp", "llama-cpp", "Q4_1-original", 4, unclassed=True),
    System("llama.cpp Q4_K_M", "llamacpp", "llama-cpp", "Q4_K_M", 4),
    System("llama.cpp Q6_K", "llamacpp", "llama-cpp", "Q6_K", 6.6),
    System("llama.cpp Q8_0", "llamacpp", "llama-cpp", "Q8_0", 8),
    System("ik_llama.cpp Q4_K_M", "ik_llama", "ik-llama", "q4_K_M", 4, by_format=True),
    System("ik_llama.cpp Q6_K", "ik_llama", "ik-llama", "q6_K", 6.6, by_format=True),
    System("ik_llama.cpp Q8_0", "ik_llama", "ik-llama", "q8_0", 8, by_format=True),
    System("llama.cpp MXFP4", "llamacpp", "llama-cpp", "MXFP4", 4.25, mxfp4=True),
    System("ik_llama.cpp MXFP4", "ik_llama", "ik-llama", "MXFP4", 4.25, by_format=True, mxfp4=True),
    System("vllm-cpu bf16", "vllm_cpu", "vllm", "bf16", 16),
    System("transformers bf16", "hf_transformers", "transformers", "bf16", 16),
    System("transformers fp32", "hf_transformers", "transformers", "fp32", 32),
)
