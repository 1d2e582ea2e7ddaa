"""Move the ``champion`` alias by compare-and-set, and back again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evals.verdict import Outcome, Verdict
from pipeline.registry.tracking import connect
from pipeline.registry.versions import (
    CHALLENGER,
    CHAMPION,
    NO_CHAMPION,
    ROLLBACK,
    aliases,
    digest_of,
    evidence_digest,
    get_model,
    get_version,
    tag_of,
)
from tapeout.artifact import RECORD, Artifact, load, read_payload, sha256_file
from tapeout.errors import ArtifactError, RegistryError

if TYPE_CHECKING:
    from mlflow import MlflowClient

PENDING = "tapeout.pending_move"
Aliases = Mapping[str, int | None]
Kind = Literal["promote", "rollback"]


@dataclass(frozen=True)
class Move:
    """The result of a promotion or rollback. ``changed`` is False when there was nothing to do."""

    model_name: str
    champion: int
    rollback: int | None
    changed: bool
    message: str


def promote(
    model_name: str,
    *,
    version: int | None = None,
    expect_champion: str | None = None,
    bundle: Path | None = None,
) -> Move:
    """Make ``version`` (default: the challenger) champion; the former champion becomes ``rollback``.

    Compare-and-set: refused with :class:`RegistryError` unless the verdict in the version's run is intact, says PASS,
    agrees with the version's tags, the bundle still has the judged digest, and the champion is still the engine
    the gate compared with (none, if that was the float engine). ``expect_champion`` adds a condition: the digest of the
    present champion, or ``"none"``. ``bundle`` is the bundle's folder on this machine, if it is not where it was
    registered from.

    MLflow sets aliases one call at a time. So the move is first recorded as a tag of the registered model, then done,
    then the tag is removed: after a crash between the calls, the next command finishes the move first. On one machine
    with SQLite, a lock file makes a second promotion wait. A server has no lock: the champion is read just before it is
    moved and again afterwards, and a promotion that finds another's result there fails. Two promotions that interleave
    within those few milliseconds can end with the later one's champion although it was compared with the earlier one's
    predecessor, so let one CI job at a time promote.
    """
    with connect(write=True) as client:
        finished = _finish_pending(client, model_name)
        before = aliases(client, model_name)
        number = version if version is not None else before.get(CHALLENGER)
        if number is None:
            raise RegistryError(
                f"{model_name} has no version with the alias {CHALLENGER}", remedy="run `dvc repro register`"
            )
        if before.get(CHAMPION) == number:
            note = f"an interrupted {finished} was finished" if finished else "nothing changed"
            message = f"version {number} of {model_name} is champion already; {note}"
            return Move(model_name, number, before.get(ROLLBACK), finished is not None, message)
        tags = get_version(client, model_name, number).tags
        _require_pass(_logged_verdict(client, model_name, number), tags, number)
        _require_champion(client, model_name, before.get(CHAMPION), tags, number, expect_champion)
        _require_bundle(bundle or Path(tag_of(tags, "location", number)), tag_of(tags, "candidate", number), number)
        former = before.get(CHAMPION)
        after = {CHAMPION: number, ROLLBACK: before.get(ROLLBACK) if former is None else former}
        _move(client, model_name, "promote", before, after)
        then = f"; version {former} is now {ROLLBACK}" if former is not None else "; it is the first"
        return Move(model_name, number, after[ROLLBACK], True, f"version {number} of {model_name} is champion{then}")


def rollback(model_name: str) -> Move:
    """Swap ``champion`` and ``rollback``; a second rollback undoes the first.

    Nothing is judged again: the version was champion before, and a rollback must not depend on old evidence.
    :class:`RegistryError` when there is nothing to go back to. A rollback that was interrupted is finished, not undone.
    """
    with connect(write=True) as client:
        finished = _finish_pending(client, model_name)
        before = aliases(client, model_name)
        now, back = before.get(CHAMPION), before.get(ROLLBACK)
        if finished == "rollback" and now is not None:
            return Move(model_name, now, back, True, f"the interrupted rollback to version {now} was finished")
        if now is None or back is None or now == back:
            raise RegistryError(
                f"{model_name} has no former champion to go back to",
                expected=f"different versions with the aliases {CHAMPION} and {ROLLBACK}",
                remedy="promote a second version first",
            )
        _move(client, model_name, "rollback", before, {CHAMPION: back, ROLLBACK: now})
        message = f"version {back} of {model_name} is champion again; version {now} is now {ROLLBACK}"
        return Move(model_name, back, now, True, message)


def _logged_verdict(client: MlflowClient, name: str, number: int) -> Artifact[Verdict]:
    """The verdict in the version's run, checked against its own digest and file hashes."""
    version = get_version(client, name, number)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            verdict = load(Path(client.download_artifacts(version.run_id or "", "verdict", scratch)), Verdict)
            verdict.verify()
        except (ArtifactError, OSError) as error:
            found = error.found if isinstance(error, ArtifactError) else str(error)
            raise RegistryError(
                f"the verdict logged with version {number} is not intact: {found}",
                expected="the evidence as it was registered",
                remedy="run `dvc repro register` again and promote that version",
            ) from error
    return verdict


def _require_pass(verdict: Artifact[Verdict], tags: Mapping[str, str], number: int) -> None:
    record = verdict.record
    if record.outcome is not Outcome.PASS:
        reasons = [f"{c.outcome.value} {c.title}: {c.reason}" for c in record.checks if c.outcome is not Outcome.PASS]
        raise RegistryError(
            f"version {number} was judged {record.outcome.value}: " + "; ".join(reasons or ["no check was made"]),
            expected="a PASS verdict",
            remedy="change the recipe or gather the missing evidence, then run `dvc repro`",
        )
    says = {
        "verdict": verdict.digest,
        "outcome": record.outcome.value,
        "candidate": record.candidate,
        "evidence": evidence_digest(record),
        "compared_with": record.champion or NO_CHAMPION,
        "champion_is_baseline": str(record.champion_is_baseline).lower(),
    }
    for name, expected in says.items():
        if (found := tag_of(tags, name, number)) != expected:
            raise RegistryError(
                f"tag tapeout.{name} of version {number} is {found[:12]}",
                expected=f"{expected[:12]}, as its verdict says",
                remedy="a tag was edited by hand: register the bundle again",
            )


def _require_champion(
    client: MlflowClient, name: str, number: int | None, tags: Mapping[str, str], challenger: int, wanted: str | None
) -> None:
    now = NO_CHAMPION if number is None else tag_of(get_version(client, name, number).tags, "candidate", number)
    judged = (
        NO_CHAMPION
        if tag_of(tags, "champion_is_baseline", challenger) == "true"
        else tag_of(tags, "compared_with", challenger)
    )
    for expected, who in ((judged, f"the gate of version {challenger} compared with"), (wanted, "you expect")):
        if expected is not None and now != expected:
            raise RegistryError(
                f"the champion of {name} is {_engine(now)}",
                expected=f"{_engine(expected)}, which {who}",
                remedy="the champion changed since: run `dvc repro` to compare with the present one, then promote",
            )


def _engine(digest: str) -> str:
    return "none yet" if digest == NO_CHAMPION else f"bundle {digest[:12]}"


def _require_bundle(folder: Path, digest: str, number: int) -> None:
    """Hash the whole bundle again: the promoted bundle must be the judged one."""
    remedy = "run `dvc repro build-candidate`, or say where the bundle lies on this machine"
    try:
        body = read_payload(folder)
        changed = [
            name
            for name, entry in body["files"].items()
            if not (folder / name).is_file() or sha256_file(folder / name) != entry["sha256"]
        ]
    except ArtifactError as error:
        raise RegistryError(
            f"the bundle of version {number} is missing: {error.found}", expected=f"bundle {digest[:12]}", remedy=remedy
        ) from error
    recorded = body.pop("digest")
    if changed or recorded != digest or digest_of(body) != digest:
        what = f"{changed[0]} differs" if changed else f"{RECORD} says {str(recorded)[:12]}"
        raise RegistryError(
            f"the bundle in {folder} is not the one that was judged: {what}",
            expected=f"bundle {digest[:12]}, as registered with version {number}",
            remedy=remedy,
        )


def _move(client: MlflowClient, name: str, kind: Kind, before: Aliases, after: Aliases) -> None:
    """Record the move, do it, remove the record. Safe to stop anywhere: :func:`_finish_pending` does the rest."""
    plan = {"kind": kind, "before": {alias: before.get(alias) for alias in after}, "after": dict(after)}
    client.set_registered_model_tag(name, PENDING, json.dumps(plan, sort_keys=True))
    now = aliases(client, name)
    _require_unmoved(name, now, {alias: before.get(alias) for alias in after})
    _apply(client, name, after)


def _apply(client: MlflowClient, name: str, after: Aliases) -> None:
    now = aliases(client, name)
    # The rollback alias first: a new champion always has one.
    for alias in (ROLLBACK, CHAMPION):
        target = after[alias]
        if target is not None and now.get(alias) != target:
            client.set_registered_model_alias(name, alias, str(target))
    _require_unmoved(name, aliases(client, name), after)
    client.delete_registered_model_tag(name, PENDING)


def _require_unmoved(name: str, found: Aliases, expected: Aliases) -> None:
    if any(found.get(alias) != number for alias, number in expected.items()):
        raise RegistryError(
            f"another promotion of {name} is running: {CHAMPION} is {_label(found.get(CHAMPION))}",
            expected=_label(expected[CHAMPION]),
            remedy="look at the registry, then run this again",
        )


def _finish_pending(client: MlflowClient, name: str) -> Kind | None:
    """Complete a move that was interrupted, and say which kind it was; None when there was none.

    A plan that no longer fits, because somebody has moved the aliases since, is dropped, not forced, with an error.
    """
    model = get_model(client, name)
    if PENDING not in model.tags:
        return None
    plan = json.loads(model.tags[PENDING])
    now = aliases(client, name)
    if any(now.get(alias) not in (plan["before"][alias], plan["after"][alias]) for alias in plan["after"]):
        client.delete_registered_model_tag(name, PENDING)
        raise RegistryError(
            f"an unfinished {plan['kind']} of {name} was dropped: the aliases have been moved since it began",
            expected=f"{CHAMPION} at {_label(plan['before'][CHAMPION])} or {_label(plan['after'][CHAMPION])}",
            remedy="look at the registry; run this again to act on what it says now",
        )
    _apply(client, name, plan["after"])
    return plan["kind"]


def _label(number: int | None) -> str:
    return "no version" if number is None else f"version {number}"
