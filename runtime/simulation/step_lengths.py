"""How long a step of an engine takes, from what was measured of it."""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapeout.errors import RequestError
from tapeout.file_errors import file_problem


@dataclass(frozen=True)
class StepLengths:
    """Seconds of a step, as measured on one bundle. ``decodes``: by the number of decodes in it, ascending.

    ``token``: of each prompt token beside them. A step without decodes is at least as long as one with the fewest,
    since it reads the same weights. Between measured numbers of decodes, and beyond the most, a line is drawn through
    the two nearest.
    """

    decodes: tuple[tuple[int, float], ...]
    token: float

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """
        >>> lengths = StepLengths(((1, 0.002), (9, 0.006)), 0.001)
        >>> [round(lengths.seconds(*step), 4) for step in ((1, 0), (3, 0), (17, 0), (3, 5), (0, 1), (0, 50))]
        [0.002, 0.003, 0.01, 0.008, 0.002, 0.05]
        >>> StepLengths(((4, 0.002),), 0.001).seconds(16, 0)
        0.002
        """
        shortest = self.decodes[0][1]
        if not decodes:
            return max(shortest, prompt_tokens * self.token)
        if len(self.decodes) == 1:
            return shortest + prompt_tokens * self.token
        place = min(max(1, bisect(self.decodes, (decodes, 0.0))), len(self.decodes) - 1)
        (low, least), (high, most) = self.decodes[place - 1], self.decodes[place]
        slope = max(0.0, (most - least) / (high - low))  # noise must not make larger steps shorter
        return max(shortest, least + slope * (decodes - low)) + prompt_tokens * self.token

    def as_json(self) -> dict[str, object]:
        """What :func:`read_step_lengths` reads."""
        return {"decode_seconds": {str(count): seconds for count, seconds in self.decodes}, "token_seconds": self.token}


class _StepsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_seconds: Annotated[dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]], Field(min_length=1)]
    token_seconds: Annotated[float, Field(gt=0)]


def step_lengths(decode_seconds: Mapping[int, float], token_seconds: float) -> StepLengths:
    return StepLengths(tuple(sorted(decode_seconds.items())), token_seconds)


def read_step_lengths(path: Path) -> StepLengths:
    """From a JSON file of seconds: ``{"decode_seconds": {"1": 0.0026, "8": 0.0051}, "token_seconds": 0.0002}``."""
    try:
        found = _StepsFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValueError, ValidationError) as error:
        raise RequestError(
            f"{path} has no lengths of steps: {file_problem(error)}",
            expected='JSON such as {"decode_seconds": {"1": 0.0026, "8": 0.0051}, "token_seconds": 0.0002}',
        ) from error
    return step_lengths(found.decode_seconds, found.token_seconds)
