"""What an engine launches in a step.

Operations run in order. An operation has parameters of ``source/parameters.h``: pointers to values, which lie in the
arena of the engine, or to tensors of the bundle, and numbers. ``planner.py`` makes a plan of a lowered graph.
"""

from __future__ import annotations

from tapeout.artifact import Frozen

VERSION = 5  # raised where a plan or the interface of a bundle's library changes. 5: steps say which tokens are finite
LINEAR_SUMS = "linear.sums"  # scratch of linears that are split
ENDED, LINEAR_ENDED = "attention.ended", "linear.ended"  # counts of blocks, which are zeros between launches
RANKING = "ranking"  # the value that has the likeliest tokens
PLAIN_SHIFT = 6  # of groups of 64 and more: scales of plain weights are of a whole chunk
PLAN_FILE, CONSTANTS_FILE, WEIGHTS_FILE = "plan.json", "constants.bin", "weights.bin"


class PlacedTensor(Frozen):
    """Where a tensor lies in the bundle."""

    file: str
    offset: int
    nbytes: int


class PlanValue(Frozen):
    """A matrix in the arena, with a row for each token of a step, or for each with results."""

    wanted: bool
    row_bytes: int


class PlanOperation(Frozen):
    """``pointers``: field to the name of a value or a tensor. ``writes``: the fields that it writes."""

    kind: str
    name: str
    pointers: dict[str, str]
    numbers: dict[str, int | float]
    writes: tuple[str, ...]
    wanted: bool = False


class LaunchPlan(Frozen):
    """``heads``, ``head_size``: of queries, the most that a layer has. ``version``: with which it was written."""

    version: int
    operations: tuple[PlanOperation, ...]
    values: dict[str, PlanValue]
    tensors: dict[str, PlacedTensor]
    heads: int
    head_size: int
    vocabulary: int
    logits: str  # the value

    @property
    def selected(self) -> tuple[str, ...]:
        """Instances of kernels that the plan launches, as sources call them; the others need not be compiled."""
        found = set[str]()
        for one in self.operations:
            if one.kind == "gather":
                found.add(f"GATHER_{one.numbers['weight.bits']}")
            elif one.kind == "linear":
                kind = "E4M3" if one.numbers["weight.e4m3"] else "F16"
                bits, shift = one.numbers["weight.bits"], one.numbers["weight.group_shift"]
                has_rows = kind != "E4M3" and bits != 16
                plain = has_rows and one.numbers["weight.half_scales"] and "weight.zero_points" not in one.pointers
                found.add(f"LINEAR_{kind}_{bits}_{'plain' if plain and shift >= PLAIN_SHIFT else 'any'}")
            elif one.kind == "attention":
                codes = "Fp8" if one.numbers["fp8"] else "Int8"
                cache = codes if "key_scales" in one.pointers else "Half"
                found |= {f"CACHE_{cache}", f"ATTENTION_{cache}_{one.numbers['D']}"}
        return tuple(sorted(found))

    @property
    def behind_attention(self) -> dict[str, str]:
        """Of each linear that reads what attention gives, rounded to E4M3 or not: its result to that of attention."""
        source, behind = dict[str, str](), dict[str, str]()
        for one in self.operations:
            if one.kind == "attention":
                source[one.pointers["y"]] = one.pointers["y"]
            elif one.kind == "quantize" and one.pointers["x"] in source:
                source[one.pointers["y"]] = source[one.pointers["x"]]
            elif one.kind == "linear" and one.pointers["x"] in source:
                behind[one.pointers["y"]] = source[one.pointers["x"]]
        return behind
