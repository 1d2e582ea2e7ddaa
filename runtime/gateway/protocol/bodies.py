"""Bodies of requests: OpenAI's fields, and the fields that vLLM adds to them.

Types are strict: ``"max_tokens": "16"`` is an error. A field that is null counts as absent. Fields that nobody here
knows are accepted and named in the response header ``x-ignored-parameters``; fields that we know, cannot do, and that
would change the meaning of the response are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.gateway.protocol.errors import invalid

SESSION_CHARACTERS = 128

Token = Annotated[int, Field(ge=0)]
SessionId = Annotated[str, Field(max_length=SESSION_CHARACTERS)]
BodyType = TypeVar("BodyType", bound="Body")

# Accepted without effect: they change neither the response nor its form.
WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("verbosity", "reasoning_effort", "prompt_cache_retention", "spaces_between_special_tokens", "request_id"),
    }
)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @property
    def ignored(self) -> list[str]:
        """Fields that are not known here."""
        return sorted((self.model_extra or {}).keys() - WITHOUT_EFFECT)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``; one field is given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: SessionId | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known, and refused where they ask for anything.
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[Any] | None = None
    prompt_embeds: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def refuse_unsupported(self) -> None:
        """:class:`ApiError` for a field that would change the response and that this server does not support."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed with stream: true", "stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of other than n is not supported", "best_of")
        for name in ("use_beam_search", "allowed_token_ids", "bad_words", "logits_processors", "prompt_embeds"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported", name)
        if self.length_penalty not in (None, 1.0):
            raise invalid("length_penalty is not supported", "length_penalty")


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[Token] | list[list[Token]] | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise invalid("suffix is not supported", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens is 0; expected: at least 1, or echo: true", "max_tokens")


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    """``arguments``: JSON text as a rule, but what a model has written can be anything."""

    name: str
    arguments: Any = None


class CalledTool(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,256}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    messages: list[Message]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special_tokens: bool | None = None
    # Known, and refused where they ask for anything.
    echo: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: list[Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in ("echo", "continue_final_message", "chat_template", "documents", "audio", "web_search_options"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported", name)
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported; expected: tools and tool_choice", name)
        if self.modalities not in (None, ["text"]):
            raise invalid('modalities other than ["text"] are not supported', "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if self.max_tokens == 0:
            raise invalid("max_tokens is 0; expected: at least 1", "max_tokens")


class TokenizeBody(Body):
    """A text (``prompt``), or a conversation (``messages``)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special_tokens: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Token]


def parse(kind: type[BodyType], content: bytes) -> BodyType:
    """A body of this kind. :class:`ApiError` 400 names the field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        _refuse(error)


def _refuse(error: ValidationError) -> NoReturn:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        raise invalid(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from error
    if not first["loc"]:
        raise invalid("the body is not a JSON object") from error
    param = str(first["loc"][0])
    # A field with several types has a problem for each of them.
    messages = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:1] == (param,))
    where = ".".join(str(part) for part in first["loc"]) if len(messages) == 1 else param
    raise invalid(f"{where}: {' or: '.join(list(messages)[:6])}", param) from error
