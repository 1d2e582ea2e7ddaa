"""The table of operators in C: what the library tells ONNX Runtime of each, and which file implements it."""

from __future__ import annotations

from collections import Counter

from engines.kernels.operators import OPERATORS, Argument

FILE = "declarations.c"
TYPES = {
    "bool": "BOOL",
    "float16": "HALF",
    "float32": "FLOAT",
    "int32": "INT32",
    "int64": "INT64",
    "int8": "INT8",
    "uint8": "UINT8",
}


def text() -> str:
    """A source file beside ``source/``: of operators that share an implementation each has a variant, from 0 on."""
    variants, rows = Counter[str](), list[str]()
    for operator in OPERATORS.values():
        inputs = ", ".join(
            f"{{{_type(each)}, {'OPTIONAL' if each.optional else 'REQUIRED'}}}" for each in operator.inputs
        )
        outputs = ", ".join(map(_type, operator.outputs))
        rows.append(
            f'  {{"{operator.name}", &{operator.source}, {variants[operator.source]}, {len(operator.inputs)}, '
            f"{len(operator.outputs)}, {{{inputs}}}, {{{outputs}}}}},"
        )
        variants[operator.source] += 1
    return "\n".join(
        (
            '#include "ort.h"',
            f"extern const Implementation {', '.join(variants)};",
            "const Declaration declarations[] = {",
            *rows,
            "};",
            "const size_t operator_count = sizeof declarations / sizeof *declarations;",
            "",
        )
    )


def _type(argument: Argument) -> str:
    """ONNX Runtime is told of one type; where there are several, the kernel checks."""
    return TYPES[argument.types[0]] if len(argument.types) == 1 else "ANY"
