"""The gated delta rule of stock transformers models: emitted as nodes, or computed token by token.

B  batch      S  new tokens      Hk, Hv  heads of keys, of values      Dk, Dv  their channels

transformers has each rule twice. Without a cache, models call the form in chunks of 64 tokens, whose logits differ by
5e-5 with where a prompt is cut, because it sums in another order. The form token by token is the definition, and what
graphs compute, so the check of an export has transformers compute that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tapeout.errors import ExportError
from tapeout.operators import gated_delta
from tapeout.operators.hub_functions import functions_replaced, hub_functions
from tapeout.operators.operator import StateBefore, StateKept, StateLeft, TracedState, Tracer

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def delta_traced(model: Any, tracer: Tracer) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.traced`."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        given = [name for name, value in options.items() if value is not None and name in CHANGING]
        if given or not use_qk_l2norm_in_kernel:
            raise ExportError(
                f"a gated delta rule with {', '.join(given) or 'queries and keys as they are'}",
                expected="one sequence, with normalized queries and keys",
                remedy="report the model; its graph was not kept",
            )
        heads, value_size = (int(size) for size in value.shape[2:])
        kept = TracedState(tracer.unique(gated_delta.STATE), (heads, int(key.shape[3]), value_size))
        inputs = [value, query, key, g, beta, *([tracer.mask] if tracer.emits else [])]
        return tracer.node(gated_delta.OPERATOR, inputs, {}, [kept], value.shape[1]), None

    return functions_replaced(model, dict.fromkeys(gated_delta.FORMS, rule))


def delta_by_token(model: Any, kept: StateKept | None) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.by_token`."""
    if kept is None:
        return _by_token(model, lambda: None)

    def in_steps(by_token: Rule) -> Rule:
        def rule(
            query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
        ) -> tuple[Tensor, Tensor | None]:
            options |= {"initial_state": None, "output_final_state": True}
            parts = list[Tensor]()
            for token in range(query.shape[1]):
                one = (part[:, token : token + 1] for part in (query, key, value, g, beta))
                output, state = by_token(*one, **options)
                assert state is not None
                options["initial_state"] = kept(state)
                parts.append(output)
            return torch.cat(parts, 1), options["initial_state"]

        return rule

    return _by_token_replaced(model, in_steps)


def delta_resumed(model: Any, before: StateBefore) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.resumed`."""
    calls = count()
    return _by_token(model, lambda: before(f"{gated_delta.STATE}{next(calls) or ''}"))


def delta_leaving(model: Any, left: StateLeft) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.leaving`."""

    def handing_over(in_chunks: Rule) -> Rule:
        def rule(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            output, state = in_chunks(*arguments, **{**options, "output_final_state": True})
            assert state is not None
            left(gated_delta.STATE, state)
            return output, state

        return rule

    return functions_replaced(model, {name: handing_over(rule) for name, rule in _rules(model, gated_delta.FORMS)})


def _by_token(model: Any, initial: Callable[[], Tensor | None]) -> AbstractContextManager[None]:
    """transformers' own form token by token, in place of both, from an initial state ``[B, Hv, Dk, Dv]``."""

    def started(by_token: Rule) -> Rule:
        def rule(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            return by_token(*arguments, **{**options, "initial_state": initial()})

        return rule

    return _by_token_replaced(model, started)


def _by_token_replaced(model: Any, changed: Callable[[Rule], Rule]) -> AbstractContextManager[None]:
    """What ``changed`` makes of transformers' form token by token, in place of both forms."""
    in_chunks = {by_token: name for name, by_token in gated_delta.FORMS.items()}
    rules = {name: changed(rule) for name, rule in _rules(model, in_chunks)}
    return functions_replaced(model, rules | {in_chunks[name]: rule for name, rule in rules.items()})


def _rules(model: Any, names: Iterable[str]) -> list[tuple[str, Rule]]:
    """The model's own functions of these names."""
    found = hub_functions(model)
    return [(name, vars(module)[attribute]) for name in names for module, attribute in found.get(name, [])[:1]]


# Options of the packages' functions that change what they compute: several sequences in a row, another scale, or a
# decay that is made from the one given.
CHANGING = frozenset({"cu_seqlens", "initial_state", "scale", "A_log", "dt_bias", "lower_bound"})
