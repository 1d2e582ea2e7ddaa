"""A change from one bundle to another while a fleet answers: which bundle a conversation gets.

A conversation stays with the bundle that it began on while an engine serves that. A new one goes to the candidate where
the hash of its opening falls into the candidate's share: the same in every gateway, and a share that grows only adds
conversations. The plan is a file beside the list of engines, or in a database where gateways do not see one folder
(:mod:`runtime.gateway.fleet.release_table`). `tapeout fleet release` writes it, and gateways read it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapeout.errors import TapeoutError
from tapeout.file_errors import file_problem

KEPT_CONVERSATIONS = 1 << 16  # of which a gateway remembers the bundle
KEY_BYTES = 8
Digest = Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]
Phase = Literal["canary", "rolling", "done", "rolling back", "rolled back"]


class ReleasePlanError(TapeoutError):
    """A release plan cannot be read or written."""


class PlanAwayError(ReleasePlanError):
    """The place of a release plan does not answer now."""


class PlanRefusedError(PlanAwayError):
    """It answers, but not to this user: it does not help to wait."""


class ReleasePlan(BaseModel):
    """``stable`` and ``candidate``: digests; engines of others get nothing. ``share``: of the conversations that the
    candidate gets. ``moving``: address of the engine that opens another bundle now. ``least_ready``: engines at any
    time. Where there is no change, the candidate is empty, and ``previous`` is what a rollback of a done one goes to.

    For engines that ``tapeout fleet`` starts, ``sources``: of bundles, by digest; ``started_with``: what the file of
    the fleet said when its engines were started.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stable: Digest
    candidate: Digest | Literal[""] = ""
    previous: Digest | Literal[""] = ""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    phase: Phase
    moving: str = ""
    least_ready: Annotated[int, Field(ge=0)] = 0
    sources: Mapping[Digest, str] = {}
    started_with: str = ""

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the bundles that take requests, the stable one first."""
        return (self.stable, self.candidate) if self.candidate else (self.stable,)

    def drawn(self, key: bytes) -> str:
        """
        >>> plan = ReleasePlan(stable="a" * 8, candidate="b" * 8, share=0.25, phase="canary")
        >>> sum(plan.drawn(conversation_key(bytes([n]))) == plan.candidate for n in range(256))
        68
        """
        return self.candidate if int.from_bytes(key) < self.share * 256**KEY_BYTES else self.stable


class PlanStore(Protocol):
    """Where a plan lies. Methods raise :class:`ReleasePlanError`."""

    def read(self) -> ReleasePlan | None:
        """None where there is none."""
        ...

    def write(self, plan: ReleasePlan | None, before: ReleasePlan | None) -> None:
        """In one step: a gateway may read it at any time. None removes it. ``before``: what the writer knows to be
        there; it is an error where something else is there by now, since two commands would change one fleet.
        """
        ...


class PlanFile:
    """A :class:`PlanStore`. ``str`` of it says where it is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> ReleasePlan | None:
        try:
            return ReleasePlan.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ReleasePlanError(
                f"{self._path} is no release plan: {file_problem(error, ReleasePlan)}",
                expected="a file that `tapeout fleet release` has written",
                remedy="remove it, and release again",
            ) from error

    def write(self, plan: ReleasePlan | None, before: ReleasePlan | None) -> None:
        # Two that write at the same moment may both get through here; then one of them fails at its next step.
        if self.read() != before:
            raise changed_meanwhile(self)
        self.put(plan)

    def put(self, plan: ReleasePlan | None) -> None:
        """Whatever was there before; without a plan there is no file. ``OSError`` where it cannot be written."""
        if plan is None:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")  # another gateway may keep one, too
        part.write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(self._path)


def changed_meanwhile(plans: PlanStore) -> ReleasePlanError:
    return ReleasePlanError(
        f"another command has written {plans} while this one ran",
        expected="one `tapeout fleet release` or `rollback` of a fleet at a time",
        remedy="let the other one end, then run this again if it is still needed",
    )


def plan_path(fleet: Path) -> Path:
    """Of the plan of a list of engines.

    >>> str(plan_path(Path("fleet.yaml")))
    'fleet.release.json'
    """
    return fleet.with_suffix(".release.json")


def conversation_key(opening: bytes) -> bytes:
    return blake2b(opening, digest_size=KEY_BYTES).digest()


class BundleChoice:
    """Which bundle each conversation gets, and remembers the latest :data:`KEPT_CONVERSATIONS`."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, str] = OrderedDict()

    def choose(
        self, opening: bytes, plan: ReleasePlan | None, default: str, ready: Collection[str], listed: Collection[str]
    ) -> str:
        """A digest. ``default``: without a plan. ``ready``: of engines that take requests; ``listed``: of all.

        One that is listed and not ready may be back soon: then another one answers, and the conversation stays.
        """
        key = conversation_key(opening)
        kept = self._kept.get(key)
        if kept is not None and (kept in ready or (kept in listed and not ready)):
            self._kept.move_to_end(key)
            return kept
        order = plan.digests if plan is not None else (default,)
        found = plan.drawn(key) if plan is not None else default
        if ready and found not in ready:
            found = next((digest for digest in order if digest in ready), found)
        if kept not in listed:
            self._kept[key] = found
            if len(self._kept) > KEPT_CONVERSATIONS:
                self._kept.popitem(last=False)
        return found
