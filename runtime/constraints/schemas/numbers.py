"""Numbers as llguidance can hold them: in double precision, and bounds as integers of 64 bits, too.

Others it rounds or refuses, or overflows the stack. So a bound beyond :data:`SAFE` is moved inwards to the next number
that it holds, and one beyond 64 bits to the last of these. Every response still meets the schema; only numbers at the
bound, and beyond 64 bits, cannot be written. A constant that it would round is refused, and so is a bound that leaves
no number.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from runtime.constraints.schemas.keywords import with_subschemas
from runtime.constraints.schemas.refusal import refusal

SAFE = (1 << 53) - 1  # integers up to this one, and the next, are exact
END = 1 << 63  # of integers; as an upper bound of integers it stands for the one before
STEP = 1_024_000  # its multiples in 64 bits are doubles, and so are the decimals that these are written as
ONE_SIDED = 10**18  # a bound from here on needs one on the other side


def held(schema: Any) -> Any:
    """The schema with numbers that llguidance holds. :class:`RequestError` where there are none.

    >>> held({"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 1 << 53})
    {'type': 'number', 'minimum': -9223372036853760000, 'maximum': 9007199254740991}
    >>> held({"type": "integer", "maximum": (1 << 63) - 1, "enum": [10**20]})
    {'type': 'integer', 'enum': [1e+20], 'maximum': 9223372036854775808}
    """
    if not isinstance(schema, dict):
        return schema
    found = with_subschemas(schema, held)
    for keyword in {"const", "enum"} & found.keys():
        found[keyword] = _constant(keyword, found[keyword])
    if found.get("multipleOf", 0) > SAFE:
        raise refusal("multipleOf", f"of {_short(found['multipleOf'])} (more than {SAFE})")
    whole = found.get("type") == "integer"
    _hold_bounds(found, 1, whole=whole)
    _hold_bounds(found, -1, whole=whole)
    if found.get("minimum", 0) >= ONE_SIDED:
        found.setdefault("maximum", _last(-1, whole=whole))
    if found.get("maximum", 0) <= -ONE_SIDED:
        found.setdefault("minimum", _last(1, whole=whole))
    return found


def _hold_bounds(schema: dict[str, Any], sign: int, *, whole: bool) -> None:
    """``sign``: 1 for lower bounds, -1 for upper ones, which are lower bounds of the negated number."""
    inclusive, exclusive = ("minimum", "exclusiveMinimum") if sign > 0 else ("maximum", "exclusiveMaximum")
    for keyword in (inclusive, exclusive):
        if abs(schema.get(keyword, 0)) <= SAFE:
            continue
        bound = schema.pop(keyword)
        moved = _moved(sign * bound, sign, exclusive=keyword == exclusive, whole=whole)
        if moved is None or sign * moved > sign * _last(-sign, whole=whole):
            raise refusal(keyword, f"of {_short(bound)} (no integer of 64 bits is there)")
        others = [schema[inclusive]] if inclusive in schema else []
        schema[inclusive] = sign * max(sign * one for one in (moved, *others))


def _moved(low: float, sign: int, *, exclusive: bool, whole: bool) -> int | None:
    """The bound in place of a lower bound ``low`` of the number times ``sign``; None where there is none."""
    low = min(max(low, -END), END)
    least = math.floor(low) + 1 if exclusive else math.ceil(low)
    if least <= 1 - END:
        return _last(sign, whole=whole)
    if least >= END:
        return None
    return sign * (_next_double(least) if whole else _next_multiple(least))


def _last(sign: int, *, whole: bool) -> int:
    """The lowest bound, or, where ``sign`` is -1, the highest one."""
    if not whole:
        return -sign * (END // STEP * STEP)
    return END if sign < 0 else int(math.nextafter(-END, 0))


def _next_double(number: int) -> int:
    nearest = float(number)
    return int(nearest if nearest >= number else math.nextafter(nearest, math.inf))


def _next_multiple(number: int) -> int:
    multiple = -(-number // STEP) * STEP
    return min(multiple, -SAFE) if number < 0 else multiple


def _constant(keyword: str, value: Any) -> Any:
    match value:
        case list():
            return [_constant(keyword, inner) for inner in value]
        case dict():
            return {name: _constant(keyword, inner) for name, inner in value.items()}
        case bool():
            return value
        case float() if math.isfinite(value):
            return value or 0  # it would write -0
        case int() if abs(value) <= SAFE or value == END - 1 or (abs(value) < END and float(value) == value):
            return value
        case int() if abs(value) >= END and Decimal(repr(float(value))) == value:
            return float(value)  # written by its shortest digits, where a smaller one is written as the double it is
        case int() | float():
            raise refusal(keyword, f"of {_short(value)} (double precision does not hold it)")
        case _:
            return value


def _short(number: float) -> str:
    if math.isinf(number):
        return "a number beyond double precision"
    text = str(number)
    return text if len(text) <= 25 else f"{text[:20]}… ({len(text)} digits)"
