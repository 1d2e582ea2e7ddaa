"""How errors travel: by the name of their class, out of a closed set, and their three parts."""

from __future__ import annotations

from typing import NamedTuple

from runtime.wire.limits import DisplacedError, QueueFullError
from runtime.wire.messages import Seconds
from tapeout import errors
from tapeout.errors import TapeoutError

_QUEUE = (QueueFullError, DisplacedError)
_CLASSES: dict[str, type[TapeoutError]] = {
    kind.__name__: kind
    for kind in (*vars(errors).values(), *_QUEUE)
    if isinstance(kind, type) and issubclass(kind, TapeoutError)
}


class Failure(NamedTuple):
    """``kind``: the error's class, or the nearest one above it that both ends know. ``retry_after``: of a full queue.

    >>> Failure.of(errors.ArtifactError("no record.json", expected="a bundle")).error()
    ArtifactError('no record.json\\n  expected: a bundle')
    """

    kind: str
    found: str
    expected: str
    remedy: str
    retry_after: Seconds | None = None

    @classmethod
    def of(cls, error: TapeoutError) -> Failure:
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES)
        after = error.retry_after if isinstance(error, QueueFullError) else None
        return cls(kind, error.found, error.expected, error.remedy, after)

    def error(self) -> TapeoutError:
        """:class:`ValueError` for a class that is not in the set."""
        kind = _CLASSES.get(self.kind)
        if kind is None:
            raise ValueError(f"no error is called {self.kind!r}")
        if issubclass(kind, QueueFullError):
            return kind(self.found, expected=self.expected, retry_after=self.retry_after)
        return kind(self.found, expected=self.expected, remedy=self.remedy)
