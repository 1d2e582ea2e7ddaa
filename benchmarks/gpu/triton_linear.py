"""A linear of 4-bit codes in Triton, as one would write it: what our kernels are compared with. It is not shipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

# A kernel finds the language by this name, which is set when Triton is imported: only a machine with a GPU has it.
tl: Any = None


@cache
def _kernel() -> Any:
    global tl
    import triton  # type: ignore[import-not-found]
    import triton.language as language  # type: ignore[import-not-found]

    tl = language

    @triton.autotune(  # pyright: ignore[reportUntypedFunctionDecorator]
        configs=[
            triton.Config({"BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)
            for bn, bk, warps, stages in ((32, 128, 4, 4), (64, 64, 4, 4))  # each is compiled for three numbers of rows
        ],
        key=["BM", "N", "K"],
    )
    @triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
    def kernel(x, codes, scales, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(1) * BM + tl.arange(0, BM)
        outputs = tl.program_id(0) * BN + tl.arange(0, BN)
        halves = tl.arange(0, BK // 2)
        low = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(0, K, BK):
            # Byte i of a row has channels i (low four bits) and i + BK / 2 of its piece.
            at = codes + outputs[None, :] * (K // 2) + first // 2 + halves[:, None]
            byte = tl.load(at, mask=outputs[None, :] < N, other=0)
            for part in tl.static_range(2):
                channels = first + part * (BK // 2) + halves
                code = ((byte >> (4 * part)) & 15).to(tl.float32) - 8.0
                group = scales + outputs[None, :] * (K // G) + channels[:, None] // G
                weight = code * tl.load(group, mask=outputs[None, :] < N, other=0).to(tl.float32)
                at_x = x + rows[:, None] * K + channels[None, :]
                activations = tl.load(at_x, mask=rows[:, None] < M, other=0)
                low += tl.dot(activations, weight.to(tl.bfloat16))
        inside = (rows[:, None] < M) & (outputs[None, :] < N)
        tl.store(y + rows[:, None] * N + outputs[None, :], low, mask=inside)

    return triton, kernel


def linear(N: int, K: int, group: int, device: str, copies: int) -> Callable[[Any], list[Callable[[], object]]]:
    """Calls for activations ``[M, K]`` in bfloat16, one for each copy of a random weight."""
    import torch

    triton, kernel = _kernel()
    weights = [torch.randint(0, 255, (N, K // 2), dtype=torch.uint8, device=device) for _ in range(copies)]
    scales = torch.rand(N, K // group, dtype=torch.bfloat16, device=device)

    def run(x: Any, codes: Any, y: Any) -> None:
        rows = min(max(16, triton.next_power_of_2(len(x))), 64)
        grid = lambda chosen: (triton.cdiv(N, chosen["BN"]), triton.cdiv(len(x), rows))  # noqa: E731
        kernel[grid](x, codes, scales, y, len(x), N, K, BM=rows, G=group)

    def calls(x: Any) -> list[Callable[[], object]]:
        y = torch.empty(len(x), N, device=device)
        return [partial(run, x, codes, y) for codes in weights]

    return calls
