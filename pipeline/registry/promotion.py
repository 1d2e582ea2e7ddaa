"""Move the ``champion`` alias by compare-and-set, and back again.

What a registry says can be edited, so every move is decided anew from logged evidence (pipeline/registry/judged.py): of
the version that becomes champion and of the one that it replaces, and from the bytes of both bundles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evals.kinds.online.measure import load_judged
from pipeline.recipe import Recipe
from pipeline.registry.access import VersionReference
from pipeline.registry.bundle_store import store_folder
from pipeline.registry.judged import (
    JudgedVersion,
    examine,
    require_bundle,
    require_pass,
    require_policy,
    require_signed,
)
from pipeline.registry.online import log_online, require_online
from pipeline.registry.pull import Requirements, pull
from pipeline.registry.signatures import public_key
from pipeline.registry.tracking import connect
from pipeline.registry.versions import (
    CHALLENGER,
    CHAMPION,
    NO_CHAMPION,
    ROLLBACK,
    UnknownVersionError,
    aliases,
    dangling,
    get_model,
)
from tapeout.errors import RegistryError, TapeoutError

if TYPE_CHECKING:
    from mlflow import MlflowClient

PENDING = "tapeout.pending_move"
Aliases = Mapping[str, int | None]
Change = Literal["promote", "rollback"]


@dataclass(frozen=True)
class Move:
    """The result of a promotion or rollback. ``changed`` is False when there was nothing to do."""

    model_name: str
    champion: int
    rollback: int | None
    changed: bool
    message: str


def promote(
    recipe: Recipe,
    *,
    version: int | None = None,
    expect_champion: str | None = None,
    bundle: Path | None = None,
    online: Path | None = None,
) -> Move:
    """Make ``version`` (default: the challenger) champion; the former champion becomes ``rollback``.

    Compare-and-set: refused with :class:`RegistryError` unless the version's logged evidence gives a PASS by the policy
    of ``recipe``, its bundle is the one that was judged, and the champion is still the engine the gate compared with
    (none, if that was the float engine), itself with a PASS and a whole bundle. With a public key, the verdict must be
    signed. ``expect_champion`` adds a condition: the digest of the present champion, or ``"none"``. A bundle that is
    not on this machine is pulled, unless ``bundle`` is its folder. ``online``: an OnlineVerdict, which the recipe can
    demand (``online.required``) of a version that replaces a champion.

    MLflow sets aliases one call at a time. So the move is first recorded as a tag of the registered model, then done,
    then the tag is removed: after a crash between the calls, the next command decides that move again, and finishes it
    first. On one machine with SQLite, a lock file makes a second promotion wait. A server has no lock: the champion is
    read just before it is moved and again afterwards, and a promotion that finds another's result there fails. Two
    promotions that interleave within those few milliseconds can end with the later one's champion although it was
    compared with the earlier one's predecessor, so let one CI job at a time promote.
    """
    name = recipe.register_.model_name
    with connect(write=True) as client:
        finished = _finish_pending(client, recipe, bundle, online)
        before = aliases(client, name)
        number = version if version is not None else before.get(CHALLENGER)
        if number is None:
            raise RegistryError(f"{name} has no version with the alias {CHALLENGER}", remedy="run `dvc repro register`")
        challenger = _approved(client, recipe, number, bundle)
        if before.get(CHAMPION) == number:
            note = f"an interrupted {finished} was finished" if finished else "nothing changed"
            message = f"version {number} of {name} is champion already; {note}"
            return Move(name, number, before.get(ROLLBACK), finished is not None, message)
        after = _promoted(client, recipe, challenger, before, expect_champion, online)
        if online is not None:
            log_online(client, name, number, load_judged(online))
        _move(client, name, "promote", before, after)
        former = before.get(CHAMPION)
        then = "; it is the first" if former is None else f"; version {after[ROLLBACK]} is now {ROLLBACK}"
        return Move(name, number, after[ROLLBACK], True, f"version {number} of {name} is champion{then}")


def rollback(recipe: Recipe) -> Move:
    """Swap ``champion`` and ``rollback``; a second rollback undoes the first.

    Refused with :class:`RegistryError` when there is nothing to go back to, and unless the version to go back to has a
    PASS by the policy of ``recipe``, a whole bundle, and was compared with the present champion, or that with it. The
    version that is left may be damaged: that is what a rollback is for. A rollback that was interrupted is finished,
    not undone.
    """
    name = recipe.register_.model_name
    with connect(write=True) as client:
        finished = _finish_pending(client, recipe, None)
        before = aliases(client, name)
        now, back = before.get(CHAMPION), before.get(ROLLBACK)
        if finished == "rollback" and now is not None:
            return Move(name, now, back, True, f"the interrupted rollback to version {now} was finished")
        after = _rolled_back(client, recipe, before)
        _move(client, name, "rollback", before, after)
        message = f"version {back} of {name} is champion again; version {now} is now {ROLLBACK}"
        return Move(name, after[CHAMPION] or 0, now, True, message)


def _approved(client: MlflowClient, recipe: Recipe, number: int, bundle: Path | None = None) -> JudgedVersion:
    """The version, if it may be champion: a PASS by the policy in force, signed if asked, and a whole bundle."""
    name = recipe.register_.model_name
    found = examine(client, name, number)
    require_pass(found)
    require_policy(found, recipe)
    folder = bundle or _bundle(name, found)
    require_bundle(folder, found.verdict.candidate, number)
    if (key := public_key(recipe)) is not None:
        require_signed(found, name, folder, key)
    return found


def _promoted(
    client: MlflowClient,
    recipe: Recipe,
    challenger: JudgedVersion,
    before: Aliases,
    wanted: str | None = None,
    online: Path | None = None,
) -> dict[str, int | None]:
    """Aliases once an approved version is champion, if it was compared with the champion that there is."""
    name, former = recipe.register_.model_name, before.get(CHAMPION)
    champion = None if former is None else _in_service(client, name, former)
    now = NO_CHAMPION if champion is None else champion.verdict.candidate
    _require_champion(name, now, wanted, "you expect")
    kept = before.get(ROLLBACK)
    if now == challenger.verdict.candidate:  # the same engine, judged again: compared with its predecessor
        predecessor = NO_CHAMPION if kept is None else _in_service(client, name, kept).verdict.candidate
        _require_champion(
            name, predecessor, challenger.compared_with, f"the gate of version {challenger.number} compared with"
        )
        return {CHAMPION: challenger.number, ROLLBACK: kept}
    _require_champion(name, now, challenger.compared_with, f"the gate of version {challenger.number} compared with")
    if champion is not None:
        require_online(recipe.online, online, now, challenger.verdict.candidate)
    return {CHAMPION: challenger.number, ROLLBACK: kept if former is None else former}


def _rolled_back(client: MlflowClient, recipe: Recipe, before: Aliases) -> dict[str, int | None]:
    """Aliases after a rollback, if there is a version to go back to that may be champion."""
    name, now, back = recipe.register_.model_name, before.get(CHAMPION), before.get(ROLLBACK)
    if now is None or back is None or now == back:
        raise RegistryError(
            f"{name} has no former champion to go back to",
            expected=f"different versions with the aliases {CHAMPION} and {ROLLBACK}",
            remedy="promote a second version first",
        )
    try:
        target = _approved(client, recipe, back)
    except UnknownVersionError as error:
        raise dangling(name, ROLLBACK, error) from error
    try:
        champion = examine(client, name, now)
        require_pass(champion)
    except UnknownVersionError as error:  # it cannot get the alias rollback
        raise dangling(name, CHAMPION, error) from error
    except RegistryError:  # what is left may be damaged: it is not what must be trusted
        champion = None
    if (
        champion
        and target.verdict.candidate != champion.compared_with
        and (champion.verdict.candidate != target.compared_with)
    ):
        raise RegistryError(
            f"version {back} was never champion before or after version {now}: neither was compared with the other",
            expected=f"the alias {ROLLBACK} at the champion that version {now} replaced",
            remedy="the alias was set by hand: set it back, or promote the version that you want",
        )
    return {CHAMPION: back, ROLLBACK: now}


def _in_service(client: MlflowClient, name: str, number: int) -> JudgedVersion:
    """A version that is, or was, champion. It was approved by the policy of its time, so that is not asked again."""
    try:
        found = examine(client, name, number)
        require_pass(found)
        require_bundle(_bundle(name, found), found.verdict.candidate, number)
    except UnknownVersionError as error:
        raise dangling(name, CHAMPION, error) from error
    except RegistryError as error:
        raise RegistryError(
            f"the champion of {name} cannot be relied on, nor gone back to: {error.found}",
            expected=f"a PASS verdict and a whole bundle of version {number}",
            remedy=f"`tapeout rollback`, put its bundle back, or delete the alias {CHAMPION} and run `dvc repro`",
        ) from error
    return found


def _bundle(name: str, version: JudgedVersion) -> Path:
    """Its folder. What was registered on another machine is pulled: it must be what a server would get."""
    if version.location.is_dir():
        return version.location
    return pull(VersionReference(name, number=version.number), store_folder(), Requirements(unsafe=True)).folder


def _require_champion(name: str, now: str, expected: str | None, who: str) -> None:
    if expected is not None and now != expected:
        raise RegistryError(
            f"the champion of {name} is {_engine(now)}",
            expected=f"{_engine(expected)}, which {who}",
            remedy="the champion changed since: run `dvc repro` to compare with the present one, then promote",
        )


def _engine(digest: str) -> str:
    return "none yet" if digest == NO_CHAMPION else f"bundle {digest[:12]}"


def _move(client: MlflowClient, name: str, kind: Change, before: Aliases, after: Aliases) -> None:
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


def _finish_pending(
    client: MlflowClient, recipe: Recipe, bundle: Path | None, online: Path | None = None
) -> Change | None:
    """Complete a move that was interrupted, and say which kind it was; None when there was none.

    The tag only says that a move was begun. Whether it may be made is decided again, as if it had been asked for now.
    One that is refused, that no longer fits because somebody has moved the aliases since, or that no command would have
    recorded is dropped, not forced, with an error.
    """
    name = recipe.register_.model_name
    model = get_model(client, name)
    if PENDING not in model.tags:
        return None
    try:
        kind, before, after = _read_plan(model.tags[PENDING])
        now = aliases(client, name)
        if any(now.get(alias) not in (before[alias], after[alias]) for alias in after):
            raise RegistryError(
                "the aliases have been moved since it began",
                expected=f"{CHAMPION} at {_label(before[CHAMPION])} or {_label(after[CHAMPION])}",
            )
        if kind == "promote":
            challenger = _approved(client, recipe, after[CHAMPION] or 0, bundle)
            decided = _promoted(client, recipe, challenger, before, online=online)
        else:
            decided = _rolled_back(client, recipe, before)
        if decided != after:
            raise RegistryError("it names other versions than a move would", expected=_label(decided[CHAMPION]))
    except TapeoutError as error:
        client.delete_registered_model_tag(name, PENDING)
        raise RegistryError(
            f"an unfinished move of {name} was dropped: {error.found}",
            expected=error.expected,
            remedy="look at the registry; run this again to act on what it says now",
        ) from error
    _apply(client, name, after)
    return kind


def _read_plan(tag: str) -> tuple[Change, dict[str, int | None], dict[str, int | None]]:
    """:class:`RegistryError` for a tag that :func:`_move` has not written."""
    try:
        plan: Any = json.loads(tag)
        kind, before, after = plan["kind"], plan["before"], plan["after"]
        numbers = [*before.values(), *after.values()]
        known = kind in ("promote", "rollback") and before.keys() == after.keys() == {CHAMPION, ROLLBACK}
        if known and after[CHAMPION] is not None and all(n is None or type(n) is int for n in numbers):
            return kind, before, after
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise RegistryError(f"tag {PENDING} holds {tag[:80]!r}", expected="a move that tapeout began")


def _label(number: int | None) -> str:
    return "no version" if number is None else f"version {number}"
