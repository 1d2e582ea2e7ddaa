"""Structured output: a response that must match a JSON schema, a regular expression, choices or a Lark grammar.

llguidance turns a constraint into masks: which tokens may come next. A hostile constraint can take minutes to compile,
or overflow the stack and end the process. So a server first asks :class:`runtime.constraints.check.ConstraintChecker`,
which compiles in a process of its own, and answers 400 for what fails there. Only constraints that passed reach the
engine's process, which compiles them again: typically 1 ms, in a thread, while the engine computes the prompt.

The limits of :mod:`runtime.constraints.limits` bound each mask too: microseconds for common schemas, 10 ms at most.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.constraints.limits import CHECKED, SERVED, Effort, bounded_characters, probe
from runtime.constraints.schemas.enforce import enforceable
from runtime.constraints.size import TOO_COMPLEX, check_size
from runtime.wire.messages import Constraint
from tapeout.cores import keep_to, usable
from tapeout.errors import RequestError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
MaskArray = NDArray[np.uint32]  # one bit of a word for each token

CACHED = 64  # compiled constraints
MOST_DIGITS = 300  # of an integer that double precision can come near to
FULL = "too many states"  # in the error of a lexer without room
RENEWED_TOKENS = 64  # that a response has at least with each lexer
STACK_BYTES = 64 << 20  # of the thread that compiles; its pages are only touched where needed


class ConstraintCompiler:
    """Of one model. ``tokenizer``: the text of its ``tokenizer.json``; ``stop_tokens``: any of them ends a response.

    Calls may come from any thread. The tokenizer is read when the first constraint comes, in about half a second, or by
    :meth:`load`.
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_tokens: Iterable[int]) -> None:
        self._text, self._vocab_size = tokenizer, vocab_size
        self._stop_tokens = sorted(token for token in stop_tokens if 0 <= token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._cores = usable()  # the thread that starts a compilation may have left one of them to the server

    def load(self) -> None:
        """:class:`RequestError` if this model cannot have constraints."""
        with self._lock:
            self._loaded()

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at the start of a response. :class:`RequestError` for a constraint that cannot be met."""
        check_size(constraint)
        key = _key_of(constraint)
        with self._lock:
            compiled = self._cache.pop(key, None) or self._compile(grammar_of(constraint))
            self._cache[key] = compiled
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
            again = partial(self._again, constraint, compiled)
            return Matcher(compiled.deep_copy(), self._vocab_size, self._stop_tokens, again)

    def _again(self, constraint: Constraint, spent: LLMatcher) -> LLMatcher:
        """For one response alone, since the lexer of ``spent``, which others share, has no room for more states."""
        with self._lock:
            if self._cache.get(_key_of(constraint)) is spent:
                del self._cache[_key_of(constraint)]
        return self._in_thread(lambda: self._compile(grammar_of(constraint))).result()

    def start(self, constraint: Constraint) -> Future[Matcher]:
        """The same in a thread, so that the caller can go on."""
        return self._in_thread(lambda: self.compile(constraint))

    def _in_thread(self, work: Callable[[], T]) -> Future[T]:
        """In one with a large stack."""
        future: Future[T] = Future()

        def run() -> None:
            keep_to(self._cores)
            try:
                future.set_result(work())
            except RequestError as error:
                future.set_exception(error)
            except BaseException as error:  # a panic of the library is not an Exception, and somebody waits
                future.set_exception(cannot_be_compiled(f"{type(error).__name__}: {error}"))

        with _THREAD_LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=run, name="compile constraint", daemon=True).start()
            finally:
                threading.stack_size(before)
        return future

    def check(self, constraint: Constraint, *, compiled: Callable[[], object] = lambda: None) -> None:
        """:class:`RequestError` for what :meth:`compile` refuses, and for what may become too complex later.

        ``compiled``: is called in between.
        """
        check_size(constraint)
        matcher = self._compile(grammar_of(constraint), CHECKED)
        compiled()
        reason = probe(matcher, self._loaded(), self._stop_tokens)
        if reason is not None:
            raise cannot_be_compiled(reason)

    def _compile(self, grammar: Grammar, effort: Effort = SERVED) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._loaded(), grammar.text, log_level=0, limits=effort.limits(grammar.characters))
        if matcher.is_error():
            raise cannot_be_compiled(matcher.get_error())
        return matcher

    def _loaded(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise RequestError(
                    "the package llguidance is not installed",
                    expected="it, for structured output",
                    remedy='pip install ".[serve]"',
                ) from error
            try:
                self._tokenizer = LLTokenizer(self._text, n_vocab=self._vocab_size, eos_token=self._stop_tokens)
            except ValueError as error:
                raise RequestError(
                    f"this model's tokenizer cannot be constrained: {one_line(error, 300)}",
                    expected="a byte-level or byte-fallback tokenizer and at least one stop token",
                ) from error
        return self._tokenizer


class Matcher:
    """How far one response has got. Not for several threads at once.

    All responses of a compiled constraint share its lexer, which keeps the states that they have needed: what one has
    computed is there for the next. Where the lexer has no room for more, ``again`` compiles another one, and the
    response goes on there.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, stop_tokens: Iterable[int], again: Callable[[], LLMatcher]
    ) -> None:
        self._matcher, self._words, self._stop_tokens = matcher, -(-vocab_size // 32), stop_tokens
        self._again = again
        self._tokens: list[int] = []
        self._renewed_at = -RENEWED_TOKENS

    @property
    def complete(self) -> bool:
        """The response can only end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the response cannot go on, if so."""
        if not self._matcher.is_error():
            return None
        return f"{TOO_COMPLEX}: {one_line(ValueError(self._matcher.get_error()), 300)}"

    def mask(self, stops: Iterable[int]) -> MaskArray:
        """A bit for each token, ``[ceil(V / 32)]``: set if it may come next.

        ``stops``: the tokens that end this response; they may come exactly where the constraint is met.
        """
        bits = self._matcher.compute_bitmask()
        if self._is_full() and self._renew():
            bits = self._matcher.compute_bitmask()
        mask = np.frombuffer(bits, np.uint32)[: self._words].copy()
        for token in (*self._stop_tokens, *stops):
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not self._matcher.is_error() and self._matcher.is_accepting():
            for token in stops:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask

    def advance(self, token: int) -> None:
        """A token of the response, other than one that ended it; one that the mask excludes leaves an error."""
        self._tokens.append(token)
        self._matcher.consume_token(token)
        if self._is_full():
            self._renew()

    def _is_full(self) -> bool:
        return self._matcher.is_error() and FULL in self._matcher.get_error()

    def _renew(self) -> bool:
        """Follow the response so far with another lexer. Not again and again, where that is soon full, too."""
        if len(self._tokens) - self._renewed_at < RENEWED_TOKENS:
            return False
        self._renewed_at = len(self._tokens)
        try:
            self._matcher = self._again()
        except RequestError:
            return False  # the error of the one before it stays
        for token in self._tokens:
            self._matcher.consume_token(token)
        return not self._matcher.is_error()


class Grammar(NamedTuple):
    """What llguidance compiles. ``characters``: of texts whose length it bounds."""

    text: str
    characters: int = 0


def grammar_of(constraint: Constraint) -> Grammar:
    """:class:`RequestError` for a text that is not of its kind, or cannot be enforced."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RequestError(
            "the package llguidance is not installed",
            expected="it, for structured output",
            remedy='pip install ".[serve]"',
        ) from error
    match constraint.kind:
        case "json_schema":
            return _json_grammar(_parse(constraint))
        case "json_object":
            return _json_grammar({"type": "object"})
        case "regex":
            return Grammar(LLMatcher.grammar_from_regex(constraint.text))
        case "choice":
            return Grammar(LLMatcher.grammar_from_regex("|".join(map(_literal, _choices(constraint)))))
        case "grammar":
            return Grammar(LLMatcher.grammar_from_lark(constraint.text))


def _key_of(constraint: Constraint) -> bytes:
    return hashlib.sha256(f"{constraint.kind} {constraint.text}".encode()).digest()


_THREAD_LOCK = threading.Lock()  # the stack size of new threads is a setting of the process


def cannot_be_compiled(reason: str) -> RequestError:
    return RequestError(
        f"the constraint cannot be compiled: {one_line(ValueError(reason), 300)}",
        expected="a valid constraint that some response can match",
        remedy="simplify it, and leave out keywords that are not supported",
    )


def _json_grammar(schema: Any) -> Grammar:
    from llguidance import LLMatcher

    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema of type {type(schema).__name__}", expected="an object")
    try:
        # Keywords that llguidance does not know are refused, since the response might not validate. Runs of white space
        # are bounded, since a model may get lost in them.
        known = enforceable(schema)
        text = LLMatcher.grammar_from_json_schema(
            known, overrides={"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"[ \n\r\t]{1,64}"}
        )
        return Grammar(text, bounded_characters(known))
    except ValueError as error:
        raise RequestError(f"a JSON schema that cannot be read: {one_line(error, 200)}", expected="JSON") from error


def _parse(constraint: Constraint) -> Any:
    def constant(name: str) -> float:
        if name == "NaN":
            raise ValueError("NaN is not JSON")
        return float(name)  # as a number such as 1e400 is written again once the body of a request was read

    def whole(text: str) -> float:
        beyond = -math.inf if text.startswith("-") else math.inf
        return int(text) if len(text) <= MOST_DIGITS else beyond

    try:
        return json.loads(constraint.text, parse_constant=constant, parse_int=whole)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"a {constraint.kind} constraint that is not JSON: {one_line(error, 200)}", expected="JSON"
        ) from error


def _choices(constraint: Constraint) -> list[str]:
    choices = _parse(constraint)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise RequestError("choices of another kind", expected="a JSON list of at least one string, none of them empty")
    return choices


def _literal(text: str) -> str:
    """A regular expression that matches just this text.

    >>> _literal("a.b")
    'a\\\\x{2e}b'
    """
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)
