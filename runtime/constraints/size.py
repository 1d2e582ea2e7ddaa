"""What a server knows of a constraint without compiling it: whether it is too long, and how one failed."""

from __future__ import annotations

from runtime.wire.messages import Constraint
from tapeout.errors import RequestError

MOST_BYTES = 1 << 16  # of a constraint's text
TOO_COMPLEX = "the constraint became too complex"  # how the error of a response begins that ended so


def check_size(constraint: Constraint) -> None:
    """:class:`RequestError` for a text that is too long, or none that can be encoded."""
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"a {constraint.kind} constraint with half a surrogate pair", expected="Unicode text"
        ) from error
    if size > MOST_BYTES:
        raise RequestError(f"a {constraint.kind} constraint of {size} bytes", expected=f"at most {MOST_BYTES} bytes")
