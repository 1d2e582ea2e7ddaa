"""How long a step of an engine takes, from what was measured of it."""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapeout.errors import RequestError
from tapeout.file_errors import file_problem

EXAMPLE = '{"decode_seconds": {"1": 0.0026, "8": 0.0051}, "prompt_seconds": {"8": 0.005, "256": 0.055}}'


@dataclass(frozen=True)
class StepLengths:
    """Seconds of a step, as measured on one bundle. ``decodes``: by the number of decodes in it, ascending.

    ``prompts``: of a step without decodes, by the number of its prompt tokens, ascending. A step computes decodes and
    prompt tokens together, so a prompt token beside decodes costs what it would as one more prompt token. A step
    without decodes is at least as long as one with the fewest, since it reads the same weights. Between measured
    numbers, and beyond the most, a line is drawn through the two nearest; below the fewest prompt tokens, through 0.
    """

    decodes: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float], ...]

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """
        >>> lengths = StepLengths(((1, 0.002), (9, 0.006)), ((100, 0.1),))
        >>> [round(lengths.seconds(*step), 4) for step in ((1, 0), (3, 0), (17, 0), (3, 5), (0, 1), (0, 50))]
        [0.002, 0.003, 0.01, 0.008, 0.002, 0.05]
        >>> StepLengths(((4, 0.002),), ((1, 0.1),)).seconds(16, 0)
        0.002

        Few tokens cost the reading of the weights, which decodes need as well:

        >>> lengths = StepLengths(((1, 0.002), (9, 0.006)), ((1, 0.002), (21, 0.004), (121, 0.054)))
        >>> [round(lengths.seconds(*step), 4) for step in ((0, 1), (0, 11), (1, 10), (1, 120), (0, 221))]
        [0.002, 0.003, 0.003, 0.054, 0.104]
        """
        shortest = self.decodes[0][1]
        if not decodes:
            return max(shortest, _on_lines(self.prompts, prompt_tokens))
        beside = _on_lines(self.prompts, decodes + prompt_tokens) - _on_lines(self.prompts, decodes)
        if len(self.decodes) == 1:
            return shortest + beside
        return max(shortest, _on_lines(self.decodes, decodes)) + beside

    def as_json(self) -> dict[str, object]:
        """What :func:`read_step_lengths` reads."""
        kinds = {"decode_seconds": self.decodes, "prompt_seconds": self.prompts}
        return {kind: {str(count): seconds for count, seconds in pairs} for kind, pairs in kinds.items()}


def _on_lines(pairs: tuple[tuple[int, float], ...], count: int) -> float:
    """Seconds for so many, on the line through the two nearest pairs; through 0 where there is one, or none below."""
    place = bisect(pairs, (count, math.inf))
    if place == 0 or len(pairs) == 1:
        least, seconds = pairs[0]
        return seconds * count / least
    place = min(place, len(pairs) - 1)
    (low, least), (high, most) = pairs[place - 1], pairs[place]
    slope = max(0.0, (most - least) / (high - low))  # noise must not make larger steps shorter
    return least + slope * (count - low)


_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


class _StepsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_seconds: Annotated[dict[_Count, _Seconds], Field(min_length=1)]
    prompt_seconds: Annotated[dict[_Count, _Seconds], Field(min_length=1)]


def step_lengths(decode_seconds: Mapping[int, float], prompt_seconds: Mapping[int, float]) -> StepLengths:
    """By the number of decodes, and by that of prompt tokens in a step without decodes."""
    return StepLengths(tuple(sorted(decode_seconds.items())), tuple(sorted(prompt_seconds.items())))


def read_step_lengths(path: Path) -> StepLengths:
    """From a JSON file of seconds by counts, such as :data:`EXAMPLE`."""
    try:
        found = _StepsFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValueError, ValidationError) as error:
        raise RequestError(
            f"{path} has no lengths of steps: {file_problem(error)}",
            expected=f"JSON such as {EXAMPLE}",
        ) from error
    return step_lengths(found.decode_seconds, found.prompt_seconds)
