"""Complex products that are written out in real numbers."""

from __future__ import annotations

import pytest
import torch

from pipeline.export.complex_products import WrittenOut

GENERATOR = torch.Generator().manual_seed(0)


def turned(x: torch.Tensor, angle: torch.Tensor, scaling: float) -> torch.Tensor:
    """As DeepSeek-V2 turns queries ``[B, H, S, D]`` by angles ``[B, S, D/2]``."""
    by = (torch.polar(torch.ones_like(angle), angle) * scaling).unsqueeze(1)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * by.to(pairs.device)).flatten(3)


def test_queries_are_turned_as_by_complex_numbers() -> None:
    x, angle = torch.randn(2, 3, 5, 8, generator=GENERATOR), torch.randn(2, 5, 4, generator=GENERATOR)
    expected = turned(x, angle, 1.3)
    with WrittenOut():
        torch.testing.assert_close(turned(x, angle, 1.3), expected, rtol=1e-6, atol=1e-6)


def test_a_program_has_no_complex_numbers() -> None:
    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
            return turned(x, angle, 1.3)

    with WrittenOut():
        program = torch.export.export(Turn(), (torch.randn(1, 2, 3, 4), torch.randn(1, 3, 2)))
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    assert values and not any(value.is_complex() for value in values if isinstance(value, torch.Tensor))
    assert {"aten.mul.Tensor", "aten.sub.Tensor"} <= {str(node.target) for node in program.graph.nodes}


def test_what_else_is_done_with_complex_numbers_is_refused() -> None:
    with WrittenOut(), pytest.raises(TypeError):
        torch.abs(torch.polar(torch.ones(2), torch.ones(2)))
