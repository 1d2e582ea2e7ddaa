"""A gateway's connection to one engine of its fleet, of whatever kind that is."""

from __future__ import annotations

from runtime.gateway.engines.connection import EngineConnection
from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.engines.unread import DeltaStream
from runtime.wire.messages import EngineStats, GenerateRequest, StepReport
from tapeout.errors import TapeoutError


class FleetConnection(EngineConnection):
    """``first``: counters of the engine's first report here. Whoever watches it says in the log why it has ended."""

    remedy = "retry in a few seconds"

    def __init__(self, name: str, bundle: str, key: bytes = b"") -> None:
        super().__init__(name, bundle, key)
        self.first: EngineStats | None = None
        self._ended = ""
        self._closing = True

    def resumes(self, request: GenerateRequest) -> bool:
        """Another engine of its bundle can go on with an answer that this one has begun."""
        return True

    def require_serving(self) -> None:
        if self.down:
            raise self._down(self._ended)

    def fail(self, why: str) -> None:
        self._ended = self._ended or why
        super().fail(why)

    def give_up(self, stream: DeltaStream, error: TapeoutError) -> None:
        """Cancel a request that goes on elsewhere; what has come of it can still be read, then the error."""
        self._cancel(stream)
        if self._streams.pop(stream.id, None) is stream:
            stream.fail(error)
        if not self._streams:
            self.idle.set()

    def _report(self, report: StepReport) -> None:
        if self.first is None:
            self.first = report.stats
        super()._report(report)


class ReplicaConnection(RemoteEngine, FleetConnection):
    """To an engine of ours, see :class:`RemoteEngine`."""

    remedy = FleetConnection.remedy
