"""``tapeout fleet release`` and ``rollback``: another bundle for every engine of a fleet, one after the other.

The command tells an engine over its own connection to open the bundle, and writes beside the list of engines, or into a
database, which bundles get requests and which share (:mod:`runtime.gateway.fleet.release`). What gateways answer at
``/fleet`` says how many engines are ready and how the candidate does. All state is in the plan and in the engines, so a
command that was interrupted goes on where it was when it is run again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from evals.check import Outcome
from evals.kinds.online import EXIT_CODES
from evals.kinds.online.canary import CanaryBounds, CanaryVerdict, judge_canary
from evals.kinds.online.measure import judge
from pipeline.cli.fleet_members import Gateways, ReleaseError, reopen
from pipeline.cli.gateway import find_engines
from pipeline.registry.access import Version, VersionReference, version_of
from pipeline.registry.judged import CANDIDATE
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.fleet.plan import LOCAL
from runtime.gateway.fleet.plan_places import find_plans
from runtime.gateway.fleet.release import ReleasePlan
from runtime.wire.address import read_key
from runtime.wire.messages import EngineInfo
from tapeout.errors import ExitCode, TapeoutError, one_line
from tapeout.observations import read_observations
from tapeout.observations import read_plan as read_shadow_plan

LOOK_SECONDS = 0.5  # between two looks at the gateways

log = logging.getLogger("tapeout.release")


@dataclass(frozen=True)
class ReleaseOptions:
    """``share``: of the conversations that the canary gets. ``least_ready``: engines that stay ready, None: all but
    one. ``canary_seconds``: until an undecided canary ends the command. ``drain_seconds``: that an engine has to end
    its requests, before they go on elsewhere; ``open_seconds``: to open a bundle and to get requests. ``shadow``:
    folder of a test of both bundles. ``api_key``: that the gateways take.
    """

    share: float = 0.05
    least_ready: int | None = None
    canary_seconds: float = 3600.0
    drain_seconds: float = 30.0
    open_seconds: float = 600.0
    shadow: Path | None = None
    api_key: str = ""
    bounds: CanaryBounds = field(default_factory=CanaryBounds)


class FleetRelease:
    """A change of one fleet. ``fleet``: the file with its engines, or with what `tapeout fleet` starts.

    Engines that `tapeout fleet` starts come and go as the load does, and one that is started anew gets the stable
    bundle: the plan says from where.
    """

    def __init__(self, fleet: Path, gateways: Sequence[str], options: ReleaseOptions) -> None:
        self._options, self._gateways = options, Gateways(gateways, options.api_key)
        file = FleetFile.read(fleet)
        self._plans = find_plans(fleet, file)
        self._known: ReleasePlan | None = None  # as it was read or written last
        self._started = file.up is not None
        if file.up is not None and file.up.ray != LOCAL and file.releases is None:
            raise ReleaseError(
                f"{fleet} does not say where the engines of a cluster find the plan of a release",
                expected="a database: `releases: postgresql+psycopg://USER@HOST/DATABASE`",
                remedy="add that to the file, then `tapeout fleet down` and `up`",
            )
        self._key = read_key(file.key)
        self._named = () if self._started else find_engines(fleet, file).read().engines
        engines = len(self._listed())
        if not 0 <= self._least() < engines:
            raise ReleaseError(
                f"{self._least()} of {engines} engines are to stay ready",
                expected=f"at most {engines - 1}: each of them opens the bundle in its turn",
                remedy="start another engine, or lower --least-ready",
            )

    def release(self, source: str) -> CanaryVerdict:
        """Give all engines the bundle, unless the canary's users show that it is worse: then none of them.

        ``source``: of the bundle, as each engine is to open it.
        """
        source, plan = self._as_opened(source), self._begun()
        if not plan.candidate:
            plan = self._first(plan, source)
        elif len(self._with(plan.stable)) == len(self._listed()):  # the canary's engine was started anew
            self._moved(plan, self._with(plan.stable)[-1], source, plan.candidate)
        verdict = self._judged(plan)
        log.info("canary: %s: %s", verdict.outcome.value, verdict.reason)
        if verdict.outcome is Outcome.FAIL:
            self.rollback()
        if verdict.outcome is not Outcome.PASS:
            return verdict
        for address in self._left(plan.stable, plan.candidate):
            plan = plan.model_copy(update={"phase": "rolling"})
            self._moved(plan, address, source, plan.candidate)
            share = len(self._with(plan.candidate)) / len(self._listed())
            plan = self._written(plan, share=max(plan.share, share), moving="")
        sources = {digest: plan.sources[digest] for digest in plan.digests if digest in plan.sources}
        done: dict[str, Any] = {"stable": plan.candidate, "previous": plan.stable, "candidate": "", "phase": "done"}
        self._written(plan, share=0.0, sources=sources, moving="", **done)
        log.info("all engines have bundle %s", plan.candidate[:12])
        return verdict

    def rollback(self, source: str = "") -> None:
        """Give all engines the stable bundle again, or after a release that is done the one before.

        New conversations get it at once. ``source``: of the bundle; empty: each engine knows what it had before.
        """
        plan = self._known = self._plans.read()
        if plan is None or not (plan.candidate or plan.previous):
            raise ReleaseError(
                "there is no release to reverse", expected=f"one in {self._plans}", remedy="`tapeout fleet release`"
            )
        if plan.candidate:
            good, bad = plan.stable, plan.candidate
        else:
            good, bad = plan.previous, plan.stable
        plan = self._written(plan, stable=good, candidate=bad, previous="", share=0.0, phase="rolling back")
        source = self._as_opened(source) if source else plan.sources.get(good, "")
        for address in self._back(bad, plan.moving):
            self._moved(plan, address, source, good)
        self._written(plan, candidate="", phase="rolled back", moving="")
        log.info("all engines that are ready have bundle %s again", good[:12])

    def has(self, digest: str) -> bool:
        """All engines have this bundle, or the last release gave it to them."""
        plan = self._plans.read()
        if plan is None:
            return {*self._gateways.ready().values()} == {digest}
        return plan.stable == digest and not plan.candidate

    def give_way(self, digest: str) -> None:
        """Reverse a release that is under way, unless it is of this bundle."""
        plan = self._plans.read()
        if plan is not None and plan.candidate and (plan.candidate != digest or plan.phase == "rolling back"):
            self.rollback()

    def _begun(self) -> ReleasePlan:
        """The plan to go on with: a release that is under way, or none that has begun."""
        plan = self._known = self._plans.read()
        if plan is not None and plan.phase == "rolling back":
            raise ReleaseError("a rollback is under way", expected="none", remedy="end it: `tapeout fleet rollback`")
        if plan is not None:
            return plan
        ready = self._gateways.ready()
        counted = Counter(ready.values())
        if len(counted) != 1:
            raise ReleaseError(
                f"{len(counted)} bundles are ready",
                expected="engines of one bundle",
                remedy="look at the engines of the gateways: `curl GATEWAY/fleet`",
            )
        (stable,) = counted
        plan = ReleasePlan(stable=stable, phase="done", least_ready=self._least())
        if not self._started:
            return plan
        source = self._gateways.source(stable)
        return plan.model_copy(update={"sources": {stable: source}, "started_with": source})

    def _first(self, plan: ReleasePlan, source: str) -> ReleasePlan:
        """The canary: one engine with the bundle, which gets its share. It is the one that a command before this one
        has told so, if that was interrupted then.
        """
        self._until(
            lambda: plan.moving in self._listed() or bool(self._with(plan.stable)),
            lambda: ReleaseError(
                f"no engine is ready with bundle {plan.stable[:12]}",
                expected="the engines of the fleet",
                remedy="look at them in the gateways: `curl GATEWAY/fleet`",
            ),
        )
        address = plan.moving if plan.moving in self._listed() else self._with(plan.stable)[-1]
        info = self._reopened(plan, address, source)
        if info.digest == plan.stable:
            self._written(plan, moving="")
            raise self._unchanged(address, info, "it was told to open that, which all engines have already")
        sources = {**plan.sources, info.digest: source} if self._started else {}
        canary: dict[str, Any] = {"candidate": info.digest, "previous": "", "phase": "canary", "moving": ""}
        plan = self._written(plan, share=self._options.share, sources=sources, **canary)
        self._wait_ready(address, info.digest)
        return plan

    def _judged(self, plan: ReleasePlan) -> CanaryVerdict:
        """Once it is decided, or the time is over."""
        if plan.phase == "rolling":
            return CanaryVerdict(Outcome.PASS, "it was decided before")
        options, until = self._options, time.monotonic() + self._options.canary_seconds
        while True:
            found = judge_canary(
                self._gateways.figures(plan.stable), self._gateways.figures(plan.candidate), options.bounds
            )
            if options.shadow is not None and found.outcome is not Outcome.FAIL:
                found = min(found, self._disagreement(options.shadow, plan), key=_worst)
            if found.outcome is not Outcome.INCONCLUSIVE or time.monotonic() > until:
                return found
            time.sleep(LOOK_SECONDS)

    def _disagreement(self, folder: Path, plan: ReleasePlan) -> CanaryVerdict:
        test = read_shadow_plan(folder)
        if (test.champion, test.challenger) != (plan.stable, plan.candidate):
            raise ReleaseError(
                f"{folder} has a test of {test.challenger[:12]} beside {test.champion[:12]}",
                expected=f"{plan.candidate[:12]} beside {plan.stable[:12]}",
                remedy="name the folder of the right test, or leave --shadow-log out",
            )
        found = judge(test, read_observations(folder))
        return CanaryVerdict(found.outcome, found.reason)

    def _moved(self, plan: ReleasePlan, address: str, source: str, digest: str) -> None:
        info = self._reopened(plan, address, source)
        self._written(plan, moving="")
        if info.digest != digest:
            raise self._unchanged(address, info)
        self._wait_ready(address, digest)

    def _reopened(self, plan: ReleasePlan, address: str, source: str) -> EngineInfo:
        """Once enough others are ready."""
        self._until(
            lambda: len(self._gateways.ready().keys() - {address}) >= self._least(),
            lambda: ReleaseError(
                f"{len(self._gateways.ready().keys() - {address})} engines besides {address} are ready",
                expected=f"at least {self._least()}",
                remedy="look at the engines of the gateways, then run this again",
            ),
        )
        self._written(plan, moving=address, least_ready=self._least())
        log.info("the engine at %s opens %s", address, source or "the bundle that it had before")
        return asyncio.run(reopen(address, self._key, source, self._options.drain_seconds, self._options.open_seconds))

    def _wait_ready(self, address: str, digest: str) -> None:
        self._until(
            lambda: self._gateways.ready().get(address) == digest,
            lambda: ReleaseError(
                f"not all gateways see the engine at {address} ready with bundle {digest[:12]}",
                expected="all of them, with the same list of engines and the same plan",
                remedy="look at their logs, then run this again",
            ),
        )

    def _until(self, holds: Callable[[], bool], error: Callable[[], ReleaseError]) -> None:
        until = time.monotonic() + self._options.open_seconds
        while not holds():
            if time.monotonic() > until:
                raise error()
            time.sleep(LOOK_SECONDS)

    def _listed(self) -> tuple[str, ...]:
        """Addresses of all engines, ready or not."""
        return self._gateways.addresses() if self._started else self._named

    def _least(self) -> int:
        """Engines that stay ready at any time."""
        given = self._options.least_ready
        return len(self._listed()) - 1 if given is None else given

    def _as_opened(self, source: str) -> str:
        """As each engine is to open it, also one that is started later by `tapeout fleet`."""
        if source.startswith("models:"):  # an alias may move while engines open it one after the other
            return str(version_of(source).reference) if VersionReference.parse(source).alias else source
        return str(Path(source).absolute()) if self._started else source

    def _with(self, digest: str) -> list[str]:
        """Addresses of the engines that have this bundle, in the order of the list."""
        ready = self._gateways.ready()
        return [address for address in self._listed() if ready.get(address) == digest]

    def _left(self, digest: str, wanted: str) -> Iterator[str]:
        """Engines with one bundle, one after another, until all have the wanted one. Who is away is waited for."""

        def missing() -> set[str]:
            return {*self._listed()} - {*self._with(wanted)}

        while missing():
            self._until(
                lambda: bool(self._with(digest)) or not missing(),
                lambda: ReleaseError(
                    f"not ready with bundle {wanted[:12]}: {', '.join(sorted(missing()))}",
                    expected="all engines of the list",
                    remedy="start them, or take them off the list, then run this again",
                ),
            )
            yield from self._with(digest)[:1]

    def _back(self, digest: str, moving: str) -> Iterator[str]:
        """Engines with one bundle, one after another. ``moving``: one that may be about to open it, for a command that
        was interrupted; it is waited for.
        """
        while True:
            while found := self._with(digest):
                yield found[0]
            if moving not in self._listed() or moving in self._gateways.ready():
                return
            self._until(
                lambda: moving in self._gateways.ready(),
                lambda: ReleaseError(
                    f"the engine at {moving} opens a bundle, and is not ready",
                    expected="that it is, so that it can be given the other one",
                    remedy="look at its log, start it again or take it off the list, then run this again",
                ),
            )

    def _written(self, plan: ReleasePlan, **changed: Any) -> ReleasePlan:
        plan = plan.model_copy(update=changed)
        self._plans.write(plan, self._known)
        self._known = plan
        return plan

    def _unchanged(self, address: str, info: EngineInfo, why: str = "it was told to open that") -> ReleaseError:
        return ReleaseError(
            f"the engine at {address} has bundle {info.digest[:12]}: {info.notice or why}",
            expected="the bundle of this release",
            remedy="correct it there and run this again, or `tapeout fleet rollback`",
        )


def _worst(verdict: CanaryVerdict) -> int:
    return (Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS).index(verdict.outcome)


def run(fleet: Path, source: str, gateways: Sequence[str], options: ReleaseOptions) -> tuple[CanaryVerdict, ExitCode]:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    verdict = FleetRelease(fleet, gateways, options).release(source)
    return verdict, EXIT_CODES[verdict.outcome]


def follow(fleet: Path, source: str, gateways: Sequence[str], options: ReleaseOptions, seconds: float) -> NoReturn:
    """Release the version that an alias is of, and the next one whenever the alias has moved, until the process is
    ended. Whatever goes wrong is logged and tried again; a version that failed is not, unless the alias has moved.

    What the registry says is a hint: each engine checks by itself what it opens.
    """
    if not (source.startswith("models:") and VersionReference.parse(source).alias):
        raise ReleaseError(f"{source} does not move", expected="an alias, such as models:/NAME@champion")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    done = reason = ""
    while True:
        try:
            version = version_of(source)
            if str(version.reference) != done:
                change, digest, done = FleetRelease(fleet, gateways, options), _digest_of(version), ""
                change.give_way(digest)
                if change.has(digest) or change.release(str(version.reference)).outcome is not Outcome.INCONCLUSIVE:
                    done = str(version.reference)
            reason = ""
        except TapeoutError as error:
            if reason != (reason := one_line(error)):
                log.error("it is tried again: %s", reason)
        time.sleep(seconds)


def _digest_of(version: Version) -> str:
    if digest := version.tags.get(CANDIDATE):
        return digest
    raise ReleaseError(
        f"{version.reference} does not say which bundle it is", expected=f"a version with the tag {CANDIDATE}"
    )


def run_rollback(fleet: Path, source: str, gateways: Sequence[str], options: ReleaseOptions) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    FleetRelease(fleet, gateways, options).rollback(source)
