"""From a body to the requests that the engine gets: every value is checked here, so that a refusal names its field."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from runtime.gateway.http.generation import ResponseChoice
from runtime.gateway.protocol.bodies import SESSION_CHARACTERS, ChatBody, GenerationBody, StructuredOutputs
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.protocol.errors import MESSAGE_CHARACTERS, invalid
from runtime.gateway.text.model import ResponseText, TextModel
from runtime.wire.messages import Constraint, EngineInfo, GenerateRequest, SamplingSettings
from tapeout.errors import RequestError, one_line

SEEDS = 1 << 64
SESSION_ID = "x-session-id"


@dataclass(frozen=True)
class ServerLimits:
    """Of one HTTP request. ``choices``: prompts times n. Timeouts are seconds; None waits as long as it takes."""

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    tokenize_tokens: int = 1 << 16
    choices: int = 256
    logprobs: int = 20
    stop_strings: int = 16
    stop_characters: int = 1024
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    timeout: float | None = None


def context_tokens(info: EngineInfo) -> int:
    """Most tokens of a prompt and its response together."""
    return min(info.max_tokens, info.blocks * info.block_tokens) if info.blocks else info.max_tokens


def most_tokens(body: GenerationBody, info: EngineInfo) -> int | None:
    """Most tokens that a prompt may have; None where only its last ones are taken."""
    return context_tokens(info) if body.truncate_prompt_tokens is None else None


def truncated(body: GenerationBody, prompt: Sequence[int], info: EngineInfo) -> list[int]:
    """The prompt, or as many of its last tokens as ``truncate_prompt_tokens`` says."""
    match body.truncate_prompt_tokens:
        case None:
            return list(prompt)
        case -1:
            return list(prompt[-context_tokens(info) + 1 :])
        case 0:
            raise invalid("truncate_prompt_tokens is 0; expected: at least 1, or -1", "truncate_prompt_tokens")
        case most:
            return list(prompt[-most:])


def check_prompts(prompts: Sequence[Sequence[int]], info: EngineInfo, param: str) -> None:
    for prompt in prompts:
        if not prompt:
            raise invalid("a prompt has no tokens; expected: at least one", param)
        if (highest := max(prompt)) >= info.vocab_size:
            raise invalid(f"the prompt has token {highest}; expected: ids below {info.vocab_size}", param)


def new_tokens(asked: int | None, default: int | None, prompts: Sequence[Sequence[int]], info: EngineInfo) -> int:
    """Most tokens of a response. Without ``asked`` and ``default``, as many as fit beside the longest prompt."""
    context, longest = context_tokens(info), max(map(len, prompts))
    room = context - longest + 1  # the last token is never fed back, so it needs no position
    wanted = asked if asked is not None else min(default or room - 1, max(room - 1, 1))
    if wanted > room:
        raise invalid(
            f"the prompt has {longest} tokens and {wanted} new ones are asked for; "
            f"expected: at most {context} together",
            "messages" if default is None else "prompt",
            "context_length_exceeded",
        )
    return wanted


def choices_of(
    body: GenerationBody,
    call: Call,
    model: TextModel,
    info: EngineInfo,
    limits: ServerLimits,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
    show_special: bool = False,
) -> list[ResponseChoice]:
    """``n`` choices for each prompt of the call; the index of a choice is its own plus n times that of its prompt."""
    if call.choices > limits.choices:
        raise invalid(f"{call.choices} choices; expected: at most {limits.choices} for all prompts together", "n")
    asked = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    for name, count in ((asked, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and count > limits.logprobs:
            raise invalid(f"{name} is {count}; expected: at most {limits.logprobs}", name)
    minimum = body.min_tokens or 0
    if minimum > call.max_new_tokens:
        raise invalid(f"min_tokens is {minimum}; expected: at most {call.max_new_tokens} new tokens", "min_tokens")
    stop_strings, stop_tokens = _stops(body, info, limits)
    sampling = _sampling(body, model, info)
    if sampling.seed is None and call.idempotency_key:
        sampling = replace(sampling, seed=_seed_of(call.caller.tenant, call.idempotency_key))
    template = GenerateRequest(
        id="",
        prompt=(),
        max_new_tokens=call.max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        min_new_tokens=minimum,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        priority=_priority(body, call.caller),
        tenant=call.caller.tenant,
        cache_salt=_cache_salt(body, call.caller),
        queue_timeout=limits.queue_timeout,
        first_token_timeout=limits.first_token_timeout,
        timeout=limits.timeout,
    )
    unique = uuid.uuid4().hex
    choices: list[ResponseChoice] = []
    for index in range(call.choices):
        place, copy = divmod(index, call.n)
        seeded = sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + copy) % SEEDS)
        request = replace(template, id=f"{unique}-{index}", prompt=call.prompts[place], sampling=seeded)
        text = ResponseText(
            model,
            stop_strings=stop_strings,
            stop_tokens=stop_tokens,
            min_tokens=minimum,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False and not show_special,
        )
        choices.append(ResponseChoice(index, place, request, text))
    return choices


def session_of(body: GenerationBody, headers: Mapping[str, str]) -> str:
    """The conversation that a request belongs to, if its client names it: by the body, else by the header."""
    if body.prompt_cache_key is not None:
        return body.prompt_cache_key
    given = headers.get(SESSION_ID, "")
    if len(given) > SESSION_CHARACTERS:
        raise invalid(f"{SESSION_ID} has {len(given)} characters; expected: at most {SESSION_CHARACTERS}", SESSION_ID)
    return given


def constraint_of(body: GenerationBody) -> Constraint | None:
    """What the response must match; of ``response_format`` and the structured outputs at most one may be given."""
    given = _given_constraints(body)
    if len(given) > 1:
        raise invalid(f"{' and '.join(name for name, _ in given)} are given; expected: one of them", given[1][0])
    return given[0][1] if given else None


async def require_constraint(model: TextModel, body: GenerationBody, constraint: Constraint) -> None:
    """:class:`ApiError` for a constraint that cannot be compiled, with its field: where no other has one, tools do."""
    try:
        await model.require_constraint(constraint)
    except RequestError as error:
        field = next((name for name, _ in _given_constraints(body)), "tools")
        raise invalid(one_line(error, MESSAGE_CHARACTERS), field) from error


def _given_constraints(body: GenerationBody) -> list[tuple[str, Constraint]]:
    """With the names of their fields."""
    found = [
        ("response_format", _response_format(body)),
        ("structured_outputs", None if body.structured_outputs is None else _structured(body.structured_outputs)),
        ("guided_json", None if body.guided_json is None else Constraint("json_schema", _schema(body.guided_json))),
        ("guided_regex", None if body.guided_regex is None else Constraint("regex", body.guided_regex)),
        ("guided_choice", None if body.guided_choice is None else _choice(body.guided_choice, "guided_choice")),
        ("guided_grammar", None if body.guided_grammar is None else Constraint("grammar", body.guided_grammar)),
    ]
    return [(name, constraint) for name, constraint in found if constraint is not None]


def _response_format(body: GenerationBody) -> Constraint | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json_object")
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise invalid("response_format has no json_schema.schema", "response_format")
    return Constraint("json_schema", json.dumps(wanted.json_schema.json_schema))


def _structured(wanted: StructuredOutputs) -> Constraint:
    given: list[Constraint] = []
    if wanted.json_ is not None:
        given.append(Constraint("json_schema", _schema(wanted.json_)))
    if wanted.json_object:
        given.append(Constraint("json_object"))
    if wanted.regex is not None:
        given.append(Constraint("regex", wanted.regex))
    if wanted.choice is not None:
        given.append(_choice(wanted.choice, "structured_outputs"))
    if wanted.grammar is not None:
        given.append(Constraint("grammar", wanted.grammar))
    if len(given) != 1 or wanted.structural_tag is not None:
        raise invalid(
            "structured_outputs; expected: one of json, json_object, regex, choice and grammar", "structured_outputs"
        )
    return given[0]


def _schema(schema: dict[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _choice(choices: Sequence[str], param: str) -> Constraint:
    if not choices:
        raise invalid("there is no choice; expected: at least one string", param)
    return Constraint("choice", json.dumps(list(choices)))


def _seed_of(tenant: str, idempotency_key: str) -> int:
    """The same in every gateway, so that a request that is sent again has the same answer. Of each tenant another one:
    who guesses a key would else see what another tenant's request has drawn.
    """
    text = json.dumps([tenant, idempotency_key])  # which ends and which begins is clear
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _sampling(body: GenerationBody, model: TextModel, info: EngineInfo) -> SamplingSettings:
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    defaults |= model.defaults | {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    values: dict[str, Any] = {
        name: default if getattr(body, name) is None else getattr(body, name) for name, default in defaults.items()
    }
    values["top_k"] = max(int(values["top_k"]), 0) if values["top_k"] == -1 else int(values["top_k"])
    if body.seed is not None:
        if not -(SEEDS // 2) <= body.seed < SEEDS:
            raise invalid(f"seed is {body.seed}; expected: 64 bits", "seed")
        values["seed"] = body.seed % SEEDS
    try:
        return SamplingSettings(logit_bias=_logit_bias(body, info), **values)
    except RequestError as error:
        param = error.found.partition(" ")[0]  # its messages begin with the name of the field
        raise invalid(f"{error.found}; expected: {error.expected}", param) from error


def _logit_bias(body: GenerationBody, info: EngineInfo) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and int(name[:12]) < info.vocab_size and len(name) < 12):
            raise invalid(
                f"logit_bias has token {name[:40]!r}; expected: ids from 0 to {info.vocab_size - 1}", "logit_bias"
            )
        bias[int(name)] = value
    return bias


def _stops(body: GenerationBody, info: EngineInfo, limits: ServerLimits) -> tuple[tuple[str, ...], frozenset[int]]:
    strings = body.stop_strings
    if "" in strings:
        raise invalid("a stop string is empty; expected: at least one character", "stop")
    if len(strings) > limits.stop_strings:
        raise invalid(f"{len(strings)} stop strings; expected: at most {limits.stop_strings}", "stop")
    if any(len(text) > limits.stop_characters for text in strings):
        raise invalid(f"a stop string is longer than {limits.stop_characters} characters", "stop")
    own = body.stop_token_ids or []
    for token in own:
        if not 0 <= token < info.vocab_size:
            raise invalid(
                f"stop_token_ids has token {token}; expected: ids from 0 to {info.vocab_size - 1}", "stop_token_ids"
            )
    return strings, frozenset(own) if body.ignore_eos else info.stop_tokens | frozenset(own)


def _priority(body: GenerationBody, caller: Caller) -> int:
    asked = body.priority or 0
    if abs(asked) > 1_000_000:
        raise invalid(f"priority is {asked}; expected: between -1000000 and 1000000", "priority")
    return asked if caller.priority is None else max(asked, caller.priority)


def _cache_salt(body: GenerationBody, caller: Caller) -> bytes:
    own = (body.cache_salt or "").encode("utf-8", "surrogatepass")
    # With its length, so that no pair of a caller and a request has the salt of another pair.
    return len(caller.cache_salt).to_bytes(4) + caller.cache_salt + own if caller.cache_salt or own else b""
