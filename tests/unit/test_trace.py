"""What cannot be traced is refused by name, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from pipeline.export.trace import trace
from tapeout.errors import ExportError
from tests.families import VOCAB_SIZE, random_model


def test_a_module_that_cannot_be_traced_is_named() -> None:
    import torch

    class Gated(torch.nn.Module):
        """Takes another branch for other data, as early-exit and sparse blocks do."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.abs().mean() > 0.5 else x

    model = random_model("llama")
    model.model.layers[1].mlp = Gated(model.model.layers[1].mlp)
    previous = model.config._attn_implementation
    with pytest.raises(ExportError) as caught:
        trace(model)
    assert "model.layers.1.mlp (Gated)" in caught.value.found
    assert caught.value.expected and caught.value.remedy
    assert model.config._attn_implementation == previous
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", ["bloom", "gptj"])
def test_attention_outside_the_interface_is_refused(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    rotary = {"rotary_dim": 8} if model_type == "gptj" else {}
    config: Any = AutoConfig.for_model(
        model_type, hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2, **rotary
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ExportError, match="called the attention interface 0 times"):
        trace(model)


def test_a_trace_inside_another_leaves_it_alone() -> None:
    """Of two families, so that a mixture would be another graph."""

    def nodes(graph: ir.Model) -> list[str]:
        return [node.op_type for node in graph.graph]

    inner: list[ir.Model] = []

    def once(step: str) -> None:
        if not inner:
            inner.append(trace(random_model("gemma2")))

    outer = trace(random_model("llama"), once)
    assert nodes(outer) == nodes(trace(random_model("llama")))
    assert nodes(inner[0]) == nodes(trace(random_model("gemma2"))) != nodes(outer)
