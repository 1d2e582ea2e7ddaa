"""``tapeout costs``: what every scheme costs on this machine, for the linears and the attention of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.stages.cost_table import CHOSEN, cost_table, timed_target
from quantization.cost_table import CostTable, shape_of
from quantization.units import HEAD, kind_of
from tapeout import artifact
from tapeout.errors import RecipeError
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe


def parse_tokens(text: str) -> tuple[int, ...]:
    """Numbers of tokens as written, ``1,8,128``. :class:`RecipeError` if they are not.

    >>> parse_tokens("128, 1")
    (1, 128)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise RecipeError(f"--tokens {text}", expected="numbers of tokens of a step, such as 1,8,128")
    return tuple(sorted({int(part) for part in parts}))


def run(artifacts: Path, recipe: BaseRecipe, tokens: Sequence[int]) -> tuple[dict[str, Any], RenderableType]:
    """The cost table, for a script (seconds and bytes) and for people (microseconds). Times are measured once."""
    graph = artifact.load(artifacts / "graph", PortableGraph).record
    every = CHOSEN | {"goal": "workload", "workload": {count: 1 / len(tokens) for count in tokens}}
    asked = recipe.model_copy(update={"plan": recipe.plan.model_copy(update=every)})
    timed_target(asked)
    table = cost_table(asked, graph, measure=True)
    return _record(table, tokens), _shown(table, graph, tokens)


def _record(table: CostTable, tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "target": table.target,
        "threads": table.threads,
        "tokens": list(tokens),
        "linears": [
            {
                "columns": columns,
                "outputs": outputs,
                "schemes": {
                    name: {"bytes": size, "seconds": _at(tokens, table.seconds[columns, outputs][name])}
                    for name, size in sizes.items()
                },
            }
            for (columns, outputs), sizes in table.bytes.items()
        ],
        "attention": {
            "context": table.context,
            "schemes": {name: {"seconds": _at(tokens, seconds)} for name, seconds in table.attention.items()},
        },
    }


def _at(tokens: Sequence[int], seconds: Mapping[int, float]) -> dict[int, float]:
    """Of the numbers of tokens that were asked for; lm_head is also timed at one."""
    return {count: seconds[count] for count in tokens}


def _shown(table: CostTable, graph: PortableGraph, tokens: Sequence[int]) -> RenderableType:
    kinds: dict[tuple[int, int], dict[str, int]] = {}
    for group in graph.groups:
        count = kinds.setdefault(shape_of(group), {})
        kind = "head" if group.name == HEAD else kind_of(group)
        count[kind] = count.get(kind, 0) + 1
    found: list[RenderableType] = []
    for (columns, outputs), sizes in table.bytes.items():
        users = ", ".join(f"{count} {kind}" for kind, count in kinds[columns, outputs].items())
        seconds = table.seconds[columns, outputs]
        found += (_title(f"{columns} x {outputs}: {users}"), _table(sizes, seconds, tokens))
    phases = f"up to {table.slots} tokens are of sequences that decode, more are of a prompt"
    found.append(_title(f"attention of a layer over a context of {table.context}; {phases}"))
    return Group(*found, _table({}, table.attention, tokens))


def _title(text: str) -> Text:
    """Above a table: as its own title it would be folded to its width."""
    return Text(text, style="bold")


def _table(sizes: Mapping[str, int], seconds: Mapping[str, Mapping[int, float]], tokens: Sequence[int]) -> Table:
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("scheme")
    for column in ("MB", *(f"{count} tokens" if count > 1 else "1 token, µs" for count in tokens)):
        found.add_column(column, justify="right")
    for name, by_tokens in seconds.items():
        size = f"{sizes[name] / 1e6:.2f}" if name in sizes else ""
        found.add_row(name, size, *(f"{by_tokens[count] * 1e6:,.1f}" for count in tokens))
    return found
