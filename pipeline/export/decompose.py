"""Leave out the exporter's second trace of a model, where the first one already holds operators that ONNX has.

After the capture, ``torch.onnx.export`` traces the whole program again to decompose operators that it cannot
translate. Most models of docs/models.md hold none but casts, and casts need no trace. Without it, exporting two
layers takes half the time, and the export stage of the default model 41 seconds instead of 50.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_CASTS = frozenset({torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device})
# Translated as it is, it becomes several operators of ONNX; decomposed first, one.
_LONG_IN_ONNX = frozenset({torch.ops.aten.flatten.using_ints})


@contextmanager
def decomposed_where_needed() -> Generator[None]:
    """Within it, ``torch.onnx.export`` decomposes only programs that hold operators it cannot translate."""
    from torch.onnx._internal.exporter import _fx_passes

    decompose: Any = _fx_passes.decompose_with_registry

    def quick(program: Any, registry: Any) -> Any:
        known = {choices[0].fx_target for choices in registry.functions.values()} - _LONG_IN_ONNX
        return program if _made_translatable(program.graph_module, known) else decompose(program, registry)

    _fx_passes.decompose_with_registry = quick
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = decompose


def _made_translatable(module: torch.fx.GraphModule, known: set[Any]) -> bool:
    """Replace casts by operators of ``known``, or leave out those that change nothing.

    False, with all casts as they were, if an operator is unknown or an output is a cast, which the program's signature
    names. Unused nodes are removed in any case.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    others = [node for node in graph.nodes if node.op not in ("placeholder", "output") and not _is_assertion(node)]
    casts = [node for node in others if node.target in _CASTS]
    if any(node.op != "call_function" or node.target not in known for node in others if node not in casts):
        return False
    if any(user.op == "output" for cast in casts for user in cast.users):
        return False
    for cast in casts:
        _rewrite_cast(graph, cast)
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
