"""``tapeout serve --shadow`` and ``tapeout shadow-verdict``: a challenger on live traffic, and what that shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.bundle import EngineBundle
from evals.kinds.online import Online, frozen_plan
from evals.kinds.online.measure import fold
from evals.kinds.online.sequential import AnytimeTest
from pipeline.cli.serve_options import ServeOptions
from runtime.gateway.http.listen import ServeError
from runtime.gateway.operations.shadow import ShadowMirror
from runtime.wire.start import EngineSettings
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.observations import Observation, ObservationLog, ShadowPlan

TOKENIZER = "tokenizer.json"

log = logging.getLogger("tapeout.server")


class Mirrored(Collector):
    """The challenger of a server: its hook, its side of the work, and its metrics. The test goes on where it was."""

    def __init__(self, folder: Path, plan: ShadowPlan, challenger: Path, settings: EngineSettings) -> None:
        self._challenger, self._settings = challenger, settings
        written = ObservationLog(folder, plan)
        self._test = fold(plan, written.made)
        self._failed = sum(observation.failed for observation in written.made)
        self._shadow = ShadowMirror(written, plan, folder, observed=self._observe)

    @property
    def hook(self) -> ShadowMirror:
        return self._shadow

    @property
    def test(self) -> AnytimeTest:
        return self._test

    async def run(self) -> None:
        await self._shadow.run(str(self._challenger), self._settings)

    def _observe(self, observation: Observation) -> None:
        before, self._test = self._test, self._test.after(observation.disagreement)
        self._failed += observation.failed
        if self._test.outcome is not before.outcome:
            log.info("shadow: %s after %d conversations", self._test.outcome.value, self._test.units)

    def collect(self) -> Iterator[Metric]:
        shadow, test = self._shadow, self._test
        shown = {
            "ready": ("1 if the challenger takes answers.", float(shadow.ready)),
            "waiting": ("Answers that wait for the challenger.", shadow.waiting),
            "missed": ("Conversations without room to wait, since the server started.", shadow.missed),
            "conversations": ("Conversations observed, in all.", test.units),
            "failed": ("Of those, answers that the challenger failed on.", self._failed),
            "disagreement": ("Mean over conversations of the share of tokens that disagree.", test.mean or 0.0),
            "below": (
                "Log capital bet on a mean below the bound, over what a PASS needs.",
                test.log_below / test.needed,
            ),
            "above": (
                "Log capital bet on a mean above the bound, over what a FAIL needs.",
                test.most_above / test.needed,
            ),
        }
        for name, (text, value) in shown.items():
            yield GaugeMetricFamily(f"tapeout:shadow_{name}", text, value=value)


def mirror(
    options: ServeOptions, online: Online, champion: Path, challenger: Path, level: str, public_key: Path | None
) -> Mirrored:
    """Freeze the plan, or go on with the one that there is. :class:`ServeError` for engines that cannot be compared."""
    bundles = [artifact.load_record(folder, EngineBundle) for folder in (champion, challenger)]
    first, second = bundles
    if first.digest == second.digest:
        raise ServeError(
            f"{challenger} holds the champion itself", expected="another engine", remedy="name a challenger's bundle"
        )
    if _text(first) != _text(second):
        raise ServeError(
            f"{champion} and {challenger} do not have the same tokens",
            expected=f"the same {TOKENIZER} and vocabulary",
            remedy="shadow an engine that was built from the same model",
        )
    share = online.share if options.share is None else options.share
    if not 0 < share <= 1:
        raise ServeError(f"the share of mirrored calls is {share:g}", expected="more than 0 and at most 1")
    plan = frozen_plan(online, first.digest, second.digest, share)
    settings = EngineSettings(options.shadow_threads, 1, public_key=public_key and str(public_key), level=level)
    return Mirrored(options.shadow_log, plan, challenger, settings)


def _text(bundle: Artifact[EngineBundle]) -> tuple[object, ...]:
    tokenizer = bundle.files.get(TOKENIZER)
    return bundle.record.io.vocab_size, tokenizer and tokenizer.sha256
