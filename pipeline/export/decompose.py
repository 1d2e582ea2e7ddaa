"""Leave out the exporter's second trace of a model, where the first one already holds operators that ONNX has.

After the capture, ``torch.onnx.export`` traces the whole program again to decompose operators that it cannot
translate. Of the models in tests/families.py, nine in ten hold none but casts, and casts need no trace: without it an
export of 30 layers takes two thirds of its time (docs/models.md says what exports).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_CASTS = frozenset({torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device})


_LONG_IN_ONNX = frozenset({torch.ops.aten.flatten.using_ints})  # several operators, where decomposed one


@contextmanager
def decomposed_where_needed() -> Generator[None]:
    """Within it, ``torch.onnx.export`` decomposes only programs that hold operators it cannot translate."""
    from torch.onnx._internal.exporter import _fx_passes

    decompose: Any = _fx_passes.decompose_with_registry

    def quick(program: Any, registry: Any) -> Any:
        known = {choices[0].fx_target for choices in registry.functions.values()} - _LONG_IN_ONNX
        return program if _without_casts(program.graph_module, known) else decompose(program, registry)

    _fx_passes.decompose_with_registry = quick
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = decompose


def _without_casts(module: torch.fx.GraphModule, known: set[Any]) -> bool:
    """Write casts as operators in ``known`` or leave them out; False, with nothing written, if others are unknown."""
    graph = module.graph
    graph.eliminate_dead_code()
    others = [node for node in graph.nodes if node.op not in ("placeholder", "output") and not _is_assertion(node)]
    if any(node.op != "call_function" or node.target not in known | _CASTS for node in others):
        return False
    for node in others:
        if node.target in _CASTS:
            _rewrite_cast(graph, node)
    module.recompile()
    return True


def _rewrite_cast(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    source: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if dtype == source.meta["val"].dtype:
        node.replace_all_uses_with(source)
    else:
        with graph.inserting_before(node):
            cast = graph.call_function(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
    graph.erase_node(node)


def _is_assertion(node: torch.fx.Node) -> bool:
    """The exporter drops these itself."""
    return node.target in (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)
