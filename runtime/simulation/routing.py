"""How a simulated fleet chooses an engine: a protocol, since others are compared with ours, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.gateway.routing.choice import EngineOption
from runtime.gateway.routing.router import FleetRouter
from runtime.simulation.engine import BLOCK_TOKENS, SimulatedEngine
from runtime.wire.messages import GenerateRequest, StepReport


class RoutingPolicy(Protocol):
    def choose(self, request: GenerateRequest, session: str) -> int:
        """The number of an engine, to which the request is sent now."""
        ...

    def heard(self, engine: int, report: StepReport) -> None: ...

    def ended(self, engine: int) -> None:
        """A request of it."""
        ...

    def hand_over(self, request: GenerateRequest, engine: int) -> int | None:
        """The engine on which a request goes on that has its first token from this one, which is for prompts."""
        ...


Clock = Callable[[], float]  # virtual seconds
PolicyMaker = Callable[[Sequence[SimulatedEngine], int, Clock], RoutingPolicy]  # from the engines, a seed and a clock


class ExactRouting:
    """The router of the gateway, fed by the engines' reports."""

    def __init__(self, engines: Sequence[SimulatedEngine], seed: int, clock: Clock) -> None:
        self.router = FleetRouter(clock)
        self._numbers = {f"engine-{number}": number for number in range(len(engines))}
        self._names = [*self._numbers]
        pools = {name: engine.engine_pool for name, engine in zip(self._names, engines, strict=True)}
        self._first = [name for name in self._names if pools[name] != "decode"]
        self._later = [name for name in self._names if pools[name] != "prefill"]
        for number, engine in enumerate(engines):
            engine.watcher.begin(self.router.join(self._names[number], BLOCK_TOKENS, "alike"))
            self.heard(number, engine.report())

    def choose(self, request: GenerateRequest, session: str) -> int:
        return self._sent(self.router.choose(request, self._first, session)[0])

    def hand_over(self, request: GenerateRequest, engine: int) -> int | None:
        best, here = self.router.choose(request, self._later)[0], self._names[engine]
        return self._sent(best) if self.router.hand_over_pays(request, here, best.engine) else None

    def _sent(self, best: EngineOption) -> int:
        self.router.sent(best)
        return self._numbers[best.engine]

    def heard(self, engine: int, report: StepReport) -> None:
        assert self.router.heard(self._names[engine], report) is None, "a report was lost, but nothing loses any here"

    def ended(self, engine: int) -> None:
        return  # its report says so
