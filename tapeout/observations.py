"""What a server observes of a challenger beside its champion: a plan, and one observation for each conversation.

The folder of a test holds ``plan.json``, written before the first conversation and never changed, and
``observations.jsonl``. A line of it says that a conversation was picked, or what came of it: picked conversations
without an observation were missed. No text, token or name is written; conversations are known by salted hashes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError, one_line
from tapeout.whole_lines import append_line

PLAN_FILE, OBSERVATIONS_FILE = "plan.json", "observations.jsonl"
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Key = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ShadowPlan(Frozen):
    """What is tested, frozen beforehand. ``share``: of all calls, drawn by their ids, that are mirrored.

    ``max_disagreement``: bound of the mean over conversations of the share of tokens that disagree. ``max_missed``: of
    the conversations that were picked.
    """

    champion: Digest
    challenger: Digest
    share: Share
    max_disagreement: Annotated[float, Field(gt=0, lt=1)]
    confidence: Annotated[float, Field(gt=0.5, lt=1)]
    min_conversations: Count
    max_missed: Share


class Picked(Frozen):
    """A conversation that will be observed."""

    picked: Key


class Observation(Frozen):
    """One answer of the champion, scored by the challenger.

    ``agree``: of its ``tokens``, those at whose place both engines find the same token likeliest. ``failed``: the
    challenger could not score it, so it disagrees everywhere.
    """

    conversation: Key
    prompt_tokens: Count
    tokens: Annotated[int, Field(ge=1)]
    agree: Count
    failed: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Observation:
        if self.agree > (0 if self.failed else self.tokens):
            raise ValueError(f"{self.agree} of {self.tokens} tokens agree")
        return self

    @property
    def disagreement(self) -> float:
        return 1 - self.agree / self.tokens


_LINE: TypeAdapter[Picked | Observation] = TypeAdapter(Picked | Observation)


@dataclass(frozen=True)
class Observations:
    """Of one test, in the order in which they were made."""

    picked: tuple[str, ...]
    made: tuple[Observation, ...]

    @property
    def missed(self) -> int:
        return len(self.picked) - len(self.made)


def read_plan(folder: Path) -> ShadowPlan:
    path = folder / PLAN_FILE
    try:
        return ShadowPlan.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise EvidenceError(
            f"no {PLAN_FILE} in {folder}",
            expected="the folder of a test that `tapeout serve --shadow` made",
            remedy="serve with --shadow first, or name its folder",
        ) from error
    except (OSError, ValidationError) as error:
        raise EvidenceError(
            f"{path} is not a plan: {one_line(error)}", remedy="start a test in another folder"
        ) from error


def read_observations(folder: Path) -> Observations:
    """:class:`EvidenceError` for lines that are not of this log.

    A last line without an end was cut off, and is left out. A conversation counts once: each must have been picked, and
    be observed at most once.
    """
    path = folder / OBSERVATIONS_FILE
    text = path.read_bytes() if path.is_file() else b""
    picked: dict[str, None] = {}
    made: dict[str, Observation] = {}
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            entry = _LINE.validate_json(line)
        except ValidationError as error:
            raise _broken(path, number, one_line(error)) from error
        match entry:
            case Picked():
                if entry.picked in picked:
                    raise _broken(path, number, "the conversation was picked before")
                picked[entry.picked] = None
            case Observation():
                if entry.conversation not in picked or entry.conversation in made:
                    raise _broken(path, number, "the conversation was not picked, or observed before")
                made[entry.conversation] = entry
    return Observations(tuple(picked), tuple(made.values()))


def _broken(path: Path, number: int, why: str) -> EvidenceError:
    return EvidenceError(
        f"line {number} of {path} is no observation: {why}",
        expected="lines as `tapeout serve --shadow` writes them",
        remedy="put the file back, or start a test in another folder",
    )


class ObservationLog:
    """Appends to the file of one test. One process writes it at a time.

    :class:`EvidenceError` if the folder has another plan: bounds are not changed once there are observations.
    """

    def __init__(self, folder: Path, plan: ShadowPlan) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(folder / OBSERVATIONS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise EvidenceError(f"{folder} cannot be written: {error.strerror}", expected="a folder") from error
        try:
            self._lock(folder)
            if not (folder / PLAN_FILE).exists():
                _write_whole(folder / PLAN_FILE, plan.model_dump_json(indent=1) + "\n")
            if differences := "; ".join(_changed(read_plan(folder), plan)):
                raise EvidenceError(
                    f"{folder} holds a test of another plan: {differences}",
                    expected="the plan that it was begun with",
                    remedy="change the recipe back, or start a test in another folder (--shadow-log)",
                )
            found = read_observations(folder)
            self._trim(folder / OBSERVATIONS_FILE)
        except BaseException:
            os.close(self._file)
            raise
        self.picked, self.made = set(found.picked), found.made

    def pick(self, conversation: str) -> bool:
        """False if it was picked before."""
        if conversation in self.picked:
            return False
        self._append(Picked(picked=conversation))
        self.picked.add(conversation)
        return True

    def add(self, observation: Observation) -> None:
        self._append(observation)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, entry: Frozen) -> None:
        append_line(self._file, json.dumps(entry.model_dump()).encode())

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EvidenceError(
                f"another server writes to {folder}",
                expected="one server for each folder",
                remedy="name another folder with --shadow-log",
            ) from error

    def _trim(self, path: Path) -> None:
        """Remove a last line that was cut off."""
        text = path.read_bytes()
        os.ftruncate(self._file, text.rfind(b"\n") + 1)


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.write_text(text)
    unfinished.rename(path)


def _changed(found: ShadowPlan, asked: ShadowPlan) -> Iterator[str]:
    for name in ShadowPlan.model_fields:
        if (one := getattr(found, name)) != (other := getattr(asked, name)):
            yield f"{name} is {str(one)[:12]} there, and {str(other)[:12]} now"
