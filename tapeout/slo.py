"""Service level objectives: what share of a service's events must be good. A section of a YAML file::

    slo:
      availability: 0.999                   # of requests, those that do not fail by a fault of the service
      ttft: {seconds: 0.5, share: 0.99}     # of requests, those whose first token comes in time
      itl: {seconds: 0.05, share: 0.99}     # of the gaps between tokens, those that are short enough

An error budget, the share that may be bad, is for 30 days. The words are those of Google's SRE workbook, chapters 2 and
5 (https://sre.google/workbook/alerting-on-slos).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tapeout.errors import TapeoutError
from tapeout.file_errors import file_problem

WINDOW_DAYS = 30  # of an error budget; the burn rates of deploy/slo.yaml are for this window

Share = Annotated[float, Field(gt=0, lt=1)]


class SloError(TapeoutError):
    """A file with objectives cannot be read."""


class LatencyObjective(BaseModel):
    """``share`` of the events take at most ``seconds``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    share: Share = 0.99


class ServiceLevelObjectives(BaseModel):
    """At least one. What is None has no objective."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    availability: Share | None = None
    ttft: LatencyObjective | None = None
    itl: LatencyObjective | None = None

    @model_validator(mode="after")
    def _some(self) -> ServiceLevelObjectives:
        if not self.shares:
            raise ValueError("slo names no objective; expected: availability, ttft or itl")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """By objective: what share of its events must be good.

        >>> ServiceLevelObjectives(availability=0.999, itl=LatencyObjective(seconds=0.05)).shares
        {'availability': 0.999, 'itl': 0.99}
        """
        latencies = {name: goal.share for name, goal in (("ttft", self.ttft), ("itl", self.itl)) if goal is not None}
        return ({} if self.availability is None else {"availability": self.availability}) | latencies


def read_objectives(path: Path) -> ServiceLevelObjectives:
    """The section ``slo`` of a YAML file that may have others. :class:`SloError` if it has none, or a wrong one."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        section = content.get("slo") if isinstance(content, Mapping) else None
        return ServiceLevelObjectives.model_validate({} if section is None else section)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise SloError(
            f"{path} has no objectives that can be read: {file_problem(error)}",
            expected="YAML with a section `slo`: availability, ttft or itl (docs/capacity.md)",
        ) from error
