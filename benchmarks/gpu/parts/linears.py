"""Linears of the large shape: right at its sizes, then how long they take beside those of others.

M  tokens     N  output channels     K  input channels
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu import triton_linear
from benchmarks.gpu.driver import Launch
from benchmarks.gpu.llama import Shape
from benchmarks.gpu.place import Call, Place, Record, milliseconds, peers
from engines.kernels.cuda.packing import by_row_pair, chunks_of, packed, tiles_of
from engines.kernels.cuda.parameters import LINEAR_PLACES, LINEAR_SUMS, BlockLinear, Weight
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme

TOKENS = (1, 8, 16, 32, 64, 128, 512, 2048)
CACHE_BYTES = 256 << 20  # weights that take turns are together larger than any cache
CHECKED = 1024  # output channels whose weights are packed here for the check: blocks of many tokens for half of a GPU
ROUNDING = 2e-3  # relative to the largest output: activations have 11 bits
GROUP = 64


class Linear:
    """Ours, on tensors of PyTorch. ``copies``: of the weight, in turns."""

    def __init__(self, place: Place, weights: list[tuple[Any, Any]], outputs: int, columns: int, bits: int) -> None:
        import torch

        self._place, self._library = place, ctypes.CDLL(str(place.library))
        self._sums = torch.empty(LINEAR_SUMS, device=place.torch_device)
        self._ended = torch.zeros(LINEAR_PLACES, dtype=torch.int32, device=place.torch_device)
        shift = GROUP.bit_length() - 1
        self._held = weights
        self._weights = [
            Weight(codes.data_ptr(), scales.data_ptr(), None, outputs, columns, bits, shift, 1)
            for codes, scales in weights
        ]

    def calls(self, x: Any, y: Any) -> list[Call]:
        return [partial(self._run, weight, x, y) for weight in self._weights]

    def _run(self, weight: Weight, x: Any, y: Any) -> None:
        scratch = (self._sums.data_ptr(), self._ended.data_ptr())
        parameters, launch = BlockLinear(weight, x.data_ptr(), None, None, y.data_ptr(), *scratch, len(x)), Launch()
        many = max(self._place.driver.multiprocessors * 3 // 4, 1)
        self._library.tapeout_cuda_block_linear(ctypes.byref(parameters), ctypes.c_uint32(many), ctypes.byref(launch))
        self._place.driver.launch(launch, self._place.stream())


def run(place: Place, record: Record) -> None:
    shape = place.large
    for name, (outputs, columns) in {**shape.linears, "lm_head": (shape.vocabulary, shape.hidden)}.items():
        _check(place, record, name, min(outputs, CHECKED), columns, 8 if name == "lm_head" else shape.bits)
    for name, (outputs, columns) in shape.linears.items():
        _time(place, record, shape, name, outputs, columns)


def _check(place: Place, record: Record, name: str, outputs: int, columns: int, bits: int) -> None:
    """Fresh weights and activations, against float64; outputs start as NaNs."""
    import torch

    rng, device = np.random.default_rng(), place.torch_device
    scheme = Scheme(bits=bits, group_size=GROUP, symmetric=True)
    weight = round_to_nearest(rng.standard_normal((outputs, columns)).astype(np.float32), scheme)
    codes = torch.from_numpy(packed(weight.codes, bits)).to(device)
    scales = torch.from_numpy(by_row_pair(weight.scales.astype(np.float16))).to(device)
    linear = Linear(place, [(codes, scales)], outputs, columns, bits)
    matrix = torch.from_numpy(weight.dequantize()).to(device, torch.float64)
    worst = 0.0
    for tokens in (1, 9, 40) if place.rehearsal else TOKENS:
        x = torch.randn(tokens, columns, device=device, dtype=torch.float16)
        y = torch.full((tokens, outputs), float("nan"), device=device)
        linear.calls(x, y)[0]()
        place.driver.call("cuStreamSynchronize", ctypes.c_void_p(place.stream()))
        exact = x.double() @ matrix.T
        worst = max(worst, float((y - exact).abs().max() / exact.abs().max()))  # NaN where one was not written
        if not bool(torch.isfinite(y).all()):
            worst = float("inf")
    record("linear against float64", linear=name, bits=bits, N=outputs, K=columns, holds=worst < ROUNDING, worst=worst)


def _time(place: Place, record: Record, shape: Shape, name: str, outputs: int, columns: int) -> None:
    import torch

    device, bits = place.torch_device, shape.bits
    code_bytes = tiles_of(outputs) * chunks_of(columns) * 128 * bits
    copies = 1 if place.rehearsal else -(-CACHE_BYTES // code_bytes)
    weights = [
        (
            torch.randint(0, 255, (code_bytes,), dtype=torch.uint8, device=device),
            torch.full((tiles_of(outputs) * columns // GROUP * 16,), 0.01, dtype=torch.float16, device=device),
        )
        for _ in range(copies)
    ]
    ours = Linear(place, weights, outputs, columns, bits)
    others = _Others(place, outputs, columns)
    for tokens in (1, 9) if place.rehearsal else TOKENS:
        x = torch.randn(tokens, columns, device=device, dtype=torch.float16)
        y = torch.empty(tokens, outputs, device=device)
        ms = milliseconds(place, ours.calls(x, y))
        sizes: dict[str, Any] = {"linear": name, "M": tokens, "N": outputs, "K": columns}
        record("linear", ours=f"w{bits}", ms=ms, bytes_per_s=(code_bytes + 2 * len(weights[0][1])) / ms * 1e3, **sizes)
        peers(record, "linear", others.at(tokens), **sizes)


class _Others:
    """Made once for a shape; each time is of calls over weights that take turns."""

    def __init__(self, place: Place, outputs: int, columns: int) -> None:
        self._place, self._outputs, self._columns = place, outputs, columns
        self._made: dict[str, Callable[[Any], list[Call]]] = {}
        self._reasons: dict[str, Exception] = {}
        kinds = {"torch bf16": self._bf16, "_weight_int4pack_mm": self._int4, "_scaled_mm": self._fp8,
                 "triton": self._triton}  # fmt: skip
        for name, make in kinds.items():
            try:
                self._made[name] = make()
            except Exception as error:  # kept: it is recorded at each size
                self._reasons[name] = error

    def at(self, tokens: int) -> dict[str, Callable[[], float]]:
        return {name: partial(self._ms, name, tokens) for name in (*self._made, *self._reasons)}

    def _ms(self, name: str, tokens: int) -> float:
        import torch

        if name in self._reasons:
            raise self._reasons[name]
        x = torch.randn(tokens, self._columns, device=self._place.torch_device, dtype=torch.bfloat16)
        return milliseconds(self._place, self._made[name](x))

    def _copies(self, weight_bytes: float) -> range:
        return range(1 if self._place.rehearsal else int(-(-CACHE_BYTES // weight_bytes)))

    def _bf16(self) -> Callable[[Any], list[Call]]:
        import torch

        n, k, device = self._outputs, self._columns, self._place.torch_device
        weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in self._copies(2 * n * k)]
        return lambda x: [partial(torch.nn.functional.linear, x, weight) for weight in weights]

    def _int4(self) -> Callable[[Any], list[Call]]:
        """Groups of 64, as ours."""
        import torch

        n, k, device, aten = self._outputs, self._columns, self._place.torch_device, torch.ops.aten
        scales = torch.rand(k // GROUP, n, 2, device=device, dtype=torch.bfloat16)
        if device == "cpu":  # its own layout, of whole codes
            whole = torch.randint(0, 15, (n, k), dtype=torch.int32)
            weights = [aten._convert_weight_to_int4pack_for_cpu(whole, 1)]
            return lambda x: [partial(aten._weight_int4pack_mm_for_cpu, x, one, GROUP, scales) for one in weights]
        codes = [torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device=device) for _ in self._copies(n * k / 2)]
        weights = [aten._convert_weight_to_int4pack(one, 8) for one in codes]
        return lambda x: [partial(aten._weight_int4pack_mm, x, one, GROUP, scales) for one in weights]

    def _fp8(self) -> Callable[[Any], list[Call]]:
        """A scale for each token and output channel; activations are quantized before the time begins."""
        import torch

        n, k, device, fp8 = self._outputs, self._columns, self._place.torch_device, torch.float8_e4m3fn
        weights = [torch.randn(n, k, device=device).to(fp8).t() for _ in self._copies(n * k)]
        per_output = torch.rand(1, n, device=device)

        def calls(x: Any) -> list[Call]:
            rows = -(-len(x) // 16) * 16  # as the function needs them
            padded = torch.zeros(rows, k, device=device)
            padded[: len(x)] = x
            quantized, per_token = padded.to(fp8), torch.rand(rows, 1, device=device)
            multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16)  # type: ignore[attr-defined]
            return [partial(multiply, quantized, w, scale_a=per_token, scale_b=per_output) for w in weights]

        return calls

    def _triton(self) -> Callable[[Any], list[Call]]:
        n, k = self._outputs, self._columns
        return triton_linear.linear(n, k, GROUP, self._place.torch_device, len(self._copies(n * k / 2)))
