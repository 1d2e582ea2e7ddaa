"""Requests of every kind that an engine answers, and what an engine's core says of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.core import EngineCore
from runtime.wire.messages import Constraint, Delta, GenerateRequest, SamplingSettings, TokenLogprobs

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}'
PENALTIES = SamplingSettings(
    temperature=1.0,
    top_k=40,
    top_p=0.95,
    min_p=0.001,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias={5: 3.0},
    seed=4,
)
DRAWN = SamplingSettings(temperature=1.0, seed=3)
# By name: fields of a request. A draw has a seed, as a gateway gives it one.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": DRAWN},
    "penalties": {"sampling": PENALTIES},
    "greedy with penalties": {"sampling": SamplingSettings(frequency_penalty=1.0, repetition_penalty=1.3)},
    "logprobs": {"sampling": DRAWN, "logprobs": 3},
    "greedy with logprobs": {"logprobs": 0},
    "scored prompt": {"prompt_logprobs": 2, "logprobs": 1},
    "least tokens": {"min_new_tokens": 9, "sampling": SamplingSettings(temperature=2.0, seed=5)},
    "JSON schema": {"constraint": Constraint("json_schema", SCHEMA), "sampling": DRAWN},
    "any JSON": {"constraint": Constraint("json_object"), "sampling": DRAWN},
    "regex": {"constraint": Constraint("regex", "[a-f]{3,12}-[0-9]+"), "sampling": DRAWN, "logprobs": 2},
    "greedy regex": {"constraint": Constraint("regex", "(ab|cd)+ [x-z]{8}")},
    "choice": {"constraint": Constraint("choice", '["yes, of course", "no, never", "maybe"]'), "sampling": DRAWN},
    "grammar": {
        "constraint": Constraint("grammar", 'start: item ("," item)*\nitem: /[a-z]{1,4}/ | "(" start ")"'),
        "sampling": PENALTIES,
    },
    "least tokens of a schema": {
        "constraint": Constraint("json_schema", SCHEMA),
        "sampling": PENALTIES,
        "min_new_tokens": 12,
        "logprobs": 1,
    },
}


@dataclass(frozen=True)
class Whole:
    """All that the deltas of one request say; how many there are depends on chance."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: str | None
    error: str | None = None

    def after(self, count: int) -> Whole:
        return Whole(self.tokens[count:], self.logprobs[count:], self.reason, self.error)


def whole(deltas: Sequence[Delta]) -> Whole:
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Whole(
        tokens, tuple(one for d in deltas for one in d.logprobs or ()), deltas[-1].finish_reason, deltas[-1].error
    )


def served(core: EngineCore, *requests: GenerateRequest) -> list[Whole]:
    """The answers to requests that come at once."""
    for request in requests:
        core.add(request, core.clock())
    deltas: dict[str, list[Delta]] = {request.id: [] for request in requests}
    while core.busy:
        report = core.step(core.clock())
        for refusal in report.refusals:
            raise refusal.error
        for delta in report.deltas:
            deltas[delta.id].append(delta)
    core.scheduler.check()
    return [whole(found) for found in deltas.values()]
