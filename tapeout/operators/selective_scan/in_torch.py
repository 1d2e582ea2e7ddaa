"""Mamba2's scan of stock transformers models: emitted as nodes, or with tokens before, no code per architecture.

B  batch      S  new tokens      H  heads      P  channels of a head      G  groups of heads      N  channels of a state

Time steps are bounded as the function for several tokens says. transformers leaves the bounds out where it computes one
token over a cache; a graph has one rule.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tapeout.errors import ExportError
from tapeout.operators import selective_scan
from tapeout.operators.hub_functions import functions_replaced, hub_functions
from tapeout.operators.operator import StateBefore, StateKept, StateLeft, TracedState, Tracer

FUNCTION = "mamba_chunk_scan_combined"  # the one for several tokens, which models without a cache call


def scan_traced(model: Any, tracer: Tracer) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.traced`."""

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        **options: Any,
    ) -> Tensor:
        """``x [B, S, H, P]``, ``dt [B, S, H]``, ``A``, ``D`` and ``dt_bias [H]``, ``B`` and ``C [B, S, G, N]``."""
        if given := [name for name, value in options.items() if value is not None and name in CHANGING]:
            raise ExportError(
                f"a selective scan with {', '.join(given)}",
                expected="one sequence, from its beginning, whose output is not gated by the scan",
                remedy="report the model; its graph was not kept",
            )
        if dt_bias is not None:
            dt = dt + dt_bias
        if dt_softplus:
            dt = torch.nn.functional.softplus(dt)
        least, most = dt_limit
        if least > 0 or not dt_softplus or most < math.inf:
            dt = torch.clamp(dt, least, None if most == math.inf else most)
        heads, channels = (int(size) for size in x.shape[2:])
        kept = TracedState(tracer.unique(selective_scan.STATE), (heads, int(B.shape[3]), channels))
        inputs = [x * dt.unsqueeze(-1), C, B, A * dt, *([tracer.mask] if tracer.emits else [])]
        y = tracer.node(selective_scan.OPERATOR, inputs, {}, [kept], x.shape[1])
        return y if D is None else y + D.unsqueeze(-1) * x

    return functions_replaced(model, {FUNCTION: scan})


def scan_resumed(model: Any, before: StateBefore) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.resumed`."""
    calls = count()
    places = hub_functions(model).get(FUNCTION, [])
    scans = [vars(module)[name] for module, name in places]

    def scan(x: Tensor, *arguments: Any, **options: Any) -> Any:
        state = before(f"{selective_scan.STATE}{next(calls) or ''}").transpose(2, 3)
        return scans[0](x, *arguments, **{**options, "initial_states": state.expand(x.shape[0], -1, -1, -1)})

    return functions_replaced(model, {FUNCTION: scan})


def scan_leaving(model: Any, left: StateLeft) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.leaving`."""
    scans = [vars(module)[name] for module, name in hub_functions(model).get(FUNCTION, [])]

    def scan(*arguments: Any, **options: Any) -> Any:
        output, state = scans[0](*arguments, **{**options, "return_final_states": True})
        left(selective_scan.STATE, state.transpose(2, 3))
        return (output, state) if options.get("return_final_states") else output

    return functions_replaced(model, {FUNCTION: scan})


def scan_by_token(model: Any, kept: StateKept) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.by_token`."""
    scans = [vars(module)[name] for module, name in hub_functions(model).get(FUNCTION, [])]

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any) -> Any:
        final = options.get("return_final_states")
        options |= {"initial_states": None, "return_final_states": True}
        parts = list[Tensor]()
        for token in range(x.shape[1]):
            x1, dt1, b1, c1 = (part[:, token : token + 1] for part in (x, dt, B, C))
            output, state = scans[0](x1, dt1, A, b1, c1, 1, **options)
            options["initial_states"] = kept(state)
            parts.append(output)
        y = torch.cat(parts, 1)
        return (y, options["initial_states"]) if final else y

    return functions_replaced(model, {FUNCTION: scan})


# Options of the packages' functions that change what they compute: several sequences in a row, a gate, a state at hand.
CHANGING = frozenset({"seq_idx", "cu_seqlens", "initial_states", "z"})
