"""Structured output: whatever the logits, a response matches its constraint; and hostile constraints harm nobody."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.constraints import check as check_module
from runtime.constraints import compiler as constraints
from runtime.constraints import limits as constraint_limits
from runtime.constraints.check import ConstraintChecker
from runtime.constraints.compiler import ConstraintCompiler, Matcher
from runtime.constraints.size import MOST_BYTES
from runtime.engine.sampling import BatchSampler, SampledToken
from runtime.wire.messages import Constraint, GenerateRequest, SamplingSettings
from tapeout.errors import RequestError, TapeoutError

END, OTHER_END, V = 0, 1, 600
TEXTS = [
    json.dumps({"name": f"person {i}", "age": i, "tags": ["a", "b"], "ok": True, "none": None}, indent=i % 3)
    for i in range(200)
]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, with merges across JSON's punctuation, such as ``": "``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    return bpe


@cache
def compiler() -> ConstraintCompiler:
    """``V`` is more than the tokenizer has, as in models with a padded embedding."""
    return ConstraintCompiler(tokenizer().to_str(), V, [END])


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer().to_str())
    made = ConstraintChecker(path, V, [END])
    yield made
    made.close()


def request(constraint: Constraint, **fields: Any) -> GenerateRequest:
    known: dict[str, Any] = {"max_new_tokens": 500, "stop_tokens": frozenset({END}), "constraint": constraint}
    return GenerateRequest("a", (2, 3), **(known | fields))


def respond(constraint: Constraint, seed: int, bias: float = 0.0, **fields: Any) -> tuple[str, bool]:
    """A response to random logits: its text, and whether it has ended by itself.

    ``bias``: how much likelier closing characters and the stop token are.
    """
    sampler = BatchSampler(V, compiler())
    asked = request(constraint, sampling=SamplingSettings(temperature=1.0, seed=seed), **fields)
    sampler.add(asked)
    generator, said = np.random.default_rng(seed), list[int]()
    closing = [END, *(tokenizer().token_to_id(letter) for letter in '"}]')]
    for _ in range(asked.max_new_tokens):
        assert sampler.needs("a") == "logits"
        logits = generator.normal(0, 3, (1, V)).astype(np.float32)
        logits[0, closing] += bias
        (choice,) = sampler.choose(["a"], logits)
        assert choice.error is None, choice.error
        if choice.token in asked.stop_tokens:
            return tokenizer().decode(said), True
        said.append(choice.token)
    return tokenizer().decode(said, skip_special_tokens=False), False


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None, 3]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_a_response_to_random_logits_validates(seed: int) -> None:
    text, ended = respond(Constraint("json_schema", json.dumps(PERSON)), seed, bias=3.0)
    assert ended, text
    jsonschema.validate(json.loads(text), PERSON)


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 40}),
        st.integers(0, 8).map(lambda most: {"type": "string", "maxLength": most}),
        st.lists(st.text(max_size=5) | st.integers(-9, 9) | st.none(), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
        st.sampled_from(["^a+b?$", "^[0-9]{2}:[0-9]{2}$", "^(x|yy|zzz)$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 9}
        ),
        st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    )


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3)
    return st.tuples(properties, st.booleans()).map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "required": list(made[0])[: len(made[0]) // 2 + made[1]],
            "additionalProperties": False,
        }
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    return st.recursive(
        scalars(),
        lambda inner: st.one_of(
            objects(inner),
            st.tuples(inner, st.integers(0, 3)).map(
                lambda made: {"type": "array", "items": made[0], "maxItems": made[1]}
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices}),
        ),
        max_leaves=6,
    )


@given(schema=schemas(), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_responses_validate_against_random_schemas(schema: dict[str, Any], seed: int) -> None:
    text, ended = respond(Constraint("json_schema", json.dumps(schema)), seed, bias=4.0)
    if ended:
        jsonschema.validate(json.loads(text), schema)


def test_a_json_object_is_one() -> None:
    for seed in range(8):
        text, ended = respond(Constraint("json_object"), seed, bias=6.0)
        if ended:
            assert isinstance(json.loads(text), dict)
        assert text.startswith("{")


def test_regular_expressions_choices_and_grammars_are_matched_whole() -> None:
    pattern = r"[A-Z][a-z]{2,5} [0-9]{1,3}(\.[0-9])?"
    choices = ["yes", "no", "a.b|c*", "ä€🙂", 'q"\\']
    grammar = 'start: expr\nexpr: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,2}/'
    for seed in range(8):
        assert re.fullmatch(pattern, respond(Constraint("regex", pattern), seed)[0])
        assert respond(Constraint("choice", json.dumps(choices)), seed)[0] in choices
        text, ended = respond(Constraint("grammar", grammar), seed, bias=2.0)
        assert ended and re.fullmatch(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){1,3}", text)
    said = {respond(Constraint("choice", '["b","ba","bab"]'), seed)[0] for seed in range(40)}
    assert said == {"b", "ba", "bab"}  # it may end where it may also go on


def mask_of(text: str, constraint: Constraint, stops: set[int]) -> set[int]:
    matcher = compiler().compile(constraint)
    for token in tokenizer().encode(text).ids:
        matcher.advance(token)
    mask = matcher.mask(stops)
    assert matcher.error is None and mask.shape == (-(-V // 32),)
    return {token for token in range(32 * len(mask)) if mask[token >> 5] >> (token & 31) & 1}


def test_a_stop_token_may_come_exactly_where_the_grammar_may_end() -> None:
    number = Constraint("regex", "[0-9]{2,3}")
    assert END not in mask_of("1", number, {END})
    assert END in mask_of("12", number, {END}) and len(mask_of("12", number, {END})) > 1
    assert mask_of("123", number, {END}) == {END}
    assert mask_of("123", number, {OTHER_END}) == {OTHER_END}  # a request may have stop tokens of its own
    digit = tokenizer().token_to_id("7")
    assert mask_of("1", number, {END, digit}).isdisjoint({digit, END})
    assert all(token < tokenizer().get_vocab_size() for token in mask_of("", Constraint("regex", "(?s:.)*"), {END}))


def test_a_completed_grammar_ends_the_response_whatever_the_minimum() -> None:
    yes = Constraint("choice", '["yes"]')
    assert respond(yes, 1, min_new_tokens=50) == ("yes", True)
    number = Constraint("regex", "[0-9]{1,40}")
    text, ended = respond(number, 1, bias=20.0, min_new_tokens=12)
    assert ended and len(tokenizer().encode(text).ids) >= 1
    assert len(respond(number, 1, bias=20.0)[0]) < 5 <= len(text)  # but else the minimum holds


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json_schema", "{"), "is not JSON"),
        (Constraint("json_schema", "[1]"), "of type list"),
        (Constraint("json_schema", '{"type": NaN}'), "NaN is not JSON"),
        (Constraint("json_schema", '{"type":"object"}},{"lark_grammar":"start: /x/"'), "is not JSON"),
        (Constraint("json_schema", '{"minimum":1e999}'), "`minimum` of a number beyond double precision"),
        (Constraint("json_schema", '{"type":"number","minimum":1e20}'), r"`minimum` of 1e\+20 \(no integer of 64 bits"),
        (Constraint("json_schema", '{"exclusiveMinimum":9223372036854775807}'), "`exclusiveMinimum` of 922337203685"),
        (Constraint("json_schema", '{"maximum":-9223372036854775808}'), "`maximum` of -9223372036854775808"),
        (Constraint("json_schema", '{"const":18446744073709551615}'), "`const` of 18446744073709551615"),
        (Constraint("json_schema", '{"enum":[1,{"a":[9007199254740993]}]}'), "`enum` of 9007199254740993"),
        (Constraint("json_schema", '{"const":-9223372036854775807}'), "`const` of -9223372036854775807"),
        (Constraint("json_schema", f'{{"const":{"9" * 5000}}}'), "`const` of a number beyond"),
        (Constraint("json_schema", f'{{"enum":[{"9" * 40}]}}'), r"`enum` of 9{20}… \(40 digits\)"),
        (Constraint("json_schema", '{"multipleOf":18446744073709551616}'), "`multipleOf` of 18446744073709551616"),
        (Constraint("json_schema", '{"type":"nothing"}'), "Invalid type"),
        (Constraint("json_schema", '{"type":"array","uniqueItems":true}'), "uniqueItems"),
        (
            Constraint("json_schema", '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}'),
            "uniqueItems",
        ),
        (Constraint("json_schema", '{"items":{"$ref":"#/$defs/a"},"$defs":{"b":{}}}'), "does not hold"),
        (Constraint("json_schema", '{"items":{"$ref":"#/a"},"a":3}'), "is no schema"),
        (Constraint("json_schema", '{"items":{"$ref":3}}'), "a \\$ref of type int"),
        (Constraint("json_schema", '{"not":{}}'), "schema is false"),
        (Constraint("json_schema", "false"), "schema is false"),
        (Constraint("json_schema", '{"$ref":"#"}'), "cannot be compiled"),
        (Constraint("json_schema", '{"$ref":"http://127.0.0.1:1/x.json"}'), "does not hold"),
        (Constraint("json_schema", '{"$ref":"file:///etc/passwd"}'), "does not hold"),
        (Constraint("json_schema", '{"const":"\\ud800"}'), "cannot be read"),
        (Constraint("json_schema", '{"type":"number","minimum":5,"maximum":4}'), "cannot be compiled"),
        (Constraint("regex", "(("), "unclosed group"),
        (Constraint("regex", r"(a)\1"), "backreference"),
        (Constraint("regex", "(?=a)b"), "look-around"),
        (Constraint("regex", r"[^\s\S]"), "cannot be compiled"),
        (Constraint("regex", "\ud800"), "surrogate"),
        (Constraint("choice", "[]"), "choices"),
        (Constraint("choice", '["a", 1]'), "choices"),
        (Constraint("choice", '["a", ""]'), "choices"),
        (Constraint("choice", '"abc"'), "choices"),
        (Constraint("grammar", "start: ("), "cannot be compiled"),
        (Constraint("grammar", ""), "cannot be compiled"),
        (Constraint("grammar", "start: other"), "cannot be compiled"),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, Constraint) else "",
)
def test_bad_constraints_are_refused_with_the_reason(constraint: Constraint, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        compiler().check(constraint)
    assert caught.value.expected and "\n" not in caught.value.found


def nested(levels: int) -> Constraint:
    return Constraint("json_schema", '{"type":"array","items":' * levels + "true" + "}" * levels)


def chain(levels: int) -> Constraint:
    """Each definition refers to the next: compiled by recursion, 1,300 of them overflow 8 MiB of stack."""
    links = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(levels)}
    schema = {"$defs": links | {f"{levels}": {}}, "$ref": "#/$defs/0"}
    return Constraint("json_schema", json.dumps(schema, separators=(",", ":")))


def rules(levels: int) -> Constraint:
    """Seconds to minutes to compile."""
    text = "\n".join(f'R{i}: R{i + 1} "a"?' for i in range(levels))
    return Constraint("grammar", f'{text}\nR{levels}: "x"\nstart: R0')


HOSTILE = {
    "one megabyte": Constraint("json_schema", json.dumps({"enum": [f"value {i}" for i in range(80_000)]})),
    "nesting": nested(500),
    "more nesting": nested(2500),
    "brackets": Constraint("json_schema", "[" * 60_000),
    "a chain of references": chain(1_600),
    "a chain of rules": rules(1_000),
    "rules without end": Constraint("grammar", "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + "\nstart: r0"),
    "many properties": Constraint(
        "json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1900)}})
    ),
    "exponential allOf": Constraint(
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]}),
    ),
    "many optionals": Constraint("regex", "(a|b)?" * 8000),
    "groups": Constraint("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "ambiguity": Constraint("grammar", "start: " + " ".join("r?" for _ in range(9000)) + '\nr: "x"'),
}


@pytest.mark.parametrize("constraint", HOSTILE.values(), ids=HOSTILE)
def test_hostile_constraints_are_refused_in_bounded_time(constraint: Constraint, checker: ConstraintChecker) -> None:
    for _ in range(2):  # what was refused is remembered
        with pytest.raises(RequestError):
            checker.check(constraint)
    checker.check(Constraint("choice", '["still here"]'))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a chain of rules", "takes too long to compile"),
        ("a chain of references", r"ends the compiler \(SIG(SEGV|BUS)\)"),
    ],
)
def test_how_a_constraint_ended_the_process_is_said(name: str, message: str, checker: ConstraintChecker) -> None:
    with pytest.raises(RequestError, match=message):
        checker.check(HOSTILE[name])


def test_an_exception_of_the_compiler_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException): ...

    def check(constraint: Constraint, compiled: Any) -> None:
        if constraint.text == "(":
            raise PanicException("index out of bounds")

    asked = "".join(json.dumps(["regex", text]) + "\n" for text in ("(", "a"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    own: Any = SimpleNamespace(load=lambda: None, check=check)
    check_module._answer(own)  # pyright: ignore[reportPrivateUsage]
    panicked, good = map(json.loads, capsys.readouterr().out.splitlines())
    assert panicked[0] == "the constraint cannot be compiled: PanicException: index out of bounds" and panicked[2]
    assert good == ["", "", ""]


def test_a_checker_that_cannot_start_blames_no_constraint(tmp_path: Path) -> None:
    """It is no mistake of the client, and not remembered as one."""
    own = ConstraintChecker(tmp_path / "tokenizer.json", V, [END])
    try:
        with pytest.raises(TapeoutError, match="exit code 1") as caught:
            own.check(Constraint("regex", "a"))
        assert not isinstance(caught.value, RequestError)
        (tmp_path / "tokenizer.json").write_text(tokenizer().to_str())
        own.check(Constraint("regex", "a"))
    finally:
        own.close()


@pytest.mark.parametrize("pattern", ["((((a{99}){99}){99}){99}){99}", "a{60000}", "(.*a.{9}b){9}", "(a|b|ab)*c"])
def test_large_regular_expressions_are_refused_or_served(pattern: str) -> None:
    """With tokens of many letters most of them are refused; at each step the work has a limit."""
    sampler = BatchSampler(V, compiler())
    sampler.add(request(Constraint("regex", pattern)))
    for _ in range(30):
        choice = choose(sampler)
        if choice.error or choice.token == END:
            break


def test_without_the_process_of_its_own_a_chain_would_end_the_server() -> None:
    """The danger is real: the same compilation here would end this process; so it runs in another."""
    code = (
        "from tests.unit.test_constraints import chain, compiler\n"
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "compiler().compile(chain(1600))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode < 0, done.stderr


def test_a_constraint_that_only_the_empty_response_meets_is_valid() -> None:
    assert respond(Constraint("regex", ""), 1) == ("", True)


LATE = "^.*[a-m].{300}[b-z]"  # it is simple until a letter has come


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
        {"type": "string", "pattern": LATE},
        {  # after some ten tokens
            "properties": {"first": {"type": "string"}, "then": {"type": "string", "pattern": LATE}},
            "required": ["first", "then"],
            "type": "object",
            "additionalProperties": False,
        },
    ],
    ids=["properties", "pattern", "pattern after a text"],
)
def test_what_becomes_too_complex_later_is_refused_before_the_response(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 600 tokens a mask needs less work than of a real model's.
    monkeypatch.setattr(constraint_limits, "STEP_EXPRESSIONS", 6000)
    compiler().check(Constraint("json_schema", json.dumps(PERSON)))
    constraint = Constraint("json_schema", json.dumps(schema))
    compiler().compile(constraint)  # nothing is wrong with it at the first token
    with pytest.raises(RequestError, match=r"items|expressions"):
        compiler().check(constraint)


def ended(constraint: Constraint, text: str) -> str | None:
    """Why a response of this text ended, if it did."""
    matcher = compiler().compile(constraint)
    for token in tokenizer().encode(text).ids:
        mask = matcher.mask([END])
        assert matcher.error or mask[token >> 5] >> (token & 31) & 1
        matcher.advance(token)
        if matcher.error:
            return matcher.error
    return None


def test_a_bounded_text_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of a text with a bound is a state of the lexer: room for them is made by the bound."""
    text = json.dumps("she said, and went on " * 180)

    def bounded(length: int) -> Constraint:
        return Constraint(
            "json_schema", json.dumps({"items": {"maxLength": 20}, "type": "string", "maxLength": length})
        )

    monkeypatch.setattr(constraint_limits, "STATES", 1000)
    assert ended(bounded(len(text)), text) is None
    monkeypatch.setattr(constraint_limits, "STATES_PER_CHARACTER", 0)
    assert "too many states" in (ended(bounded(len(text) + 1), text) or "")


WIDE = Constraint("regex", "(.*[ab]){6}.{20}x")  # other texts need other states


def random_letters(matcher: Matcher, count: int, seed: int) -> list[int]:
    """So many more tokens of a response."""
    random, found = np.random.default_rng(seed), list[int]()
    for _ in range(count):
        token = tokenizer().token_to_id("abc"[random.integers(3)])
        mask = matcher.mask([END])
        assert matcher.error is None and mask[token >> 5] >> (token & 31) & 1
        matcher.advance(token)
        assert matcher.error is None
        found.append(token)
    return found


def test_responses_do_not_use_up_the_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All responses of a constraint share the states of its lexer; once they were full, each later one ended."""
    monkeypatch.setattr(constraint_limits, "STATES", 4000)
    own = ConstraintCompiler(tokenizer().to_str(), V, [END])
    first, calm = own.compile(WIDE), compiler().compile(WIDE)
    said = random_letters(first, 60, seed=0)
    for seed in range(1, 15):
        random_letters(own.compile(WIDE), 60, seed)
    said += random_letters(first, 60, seed=20)  # it goes on where it was
    for token in said:
        calm.advance(token)
    assert first.mask([END]).tolist() == calm.mask([END]).tolist() and calm.error is None


def test_responses_have_more_room_than_the_check() -> None:
    """What only just passed the check has two and a half times as much work for each mask."""
    assert constraint_limits.CHECKED.share <= 0.4
    checked, served = (effort.limits(100) for effort in (constraint_limits.CHECKED, constraint_limits.SERVED))
    assert served.step_lexer_fuel >= 2.5 * checked.step_lexer_fuel
    assert served.step_max_items >= 2.5 * checked.step_max_items
    assert served.max_lexer_states == checked.max_lexer_states > constraint_limits.STATES


def test_the_size_limit_counts_bytes() -> None:
    fits = Constraint("json_schema", json.dumps({"description": "x" * (MOST_BYTES - 60), "type": "null"}))
    compiler().compile(fits)
    with pytest.raises(RequestError, match="bytes"):
        compiler().compile(Constraint("regex", "ä" * (MOST_BYTES // 2 + 1)))


def test_a_checker_passes_good_constraints_and_repeats_reasons(checker: ConstraintChecker) -> None:
    for _ in range(2):
        checker.check(Constraint("json_schema", json.dumps(PERSON)))
        with pytest.raises(RequestError, match="unclosed group") as caught:
            checker.check(Constraint("regex", "(("))
        assert caught.value.expected == "a valid constraint that some response can match"


def test_compiled_constraints_are_kept_and_do_not_share_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ConstraintCompiler(tokenizer().to_str(), V, [END])
    first = own.compile(Constraint("choice", '["yes"]'))
    monkeypatch.setattr(own, "_compile", lambda grammar: pytest.fail("compiled again"))
    before = first.mask([END]).tolist()
    first.advance(tokenizer().encode("y").ids[0])
    assert own.compile(Constraint("choice", '["yes"]')).mask([END]).tolist() == before
    assert first.mask([END]).tolist() != before
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        own.compile(Constraint("choice", '["no"]'))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "CACHED", 2)
    own = ConstraintCompiler(tokenizer().to_str(), V, [END])
    for text in "abcab":
        own.compile(Constraint("regex", text))
    kept = own._cache  # pyright: ignore[reportPrivateUsage]
    assert len(kept) == 2


def choose(sampler: BatchSampler) -> SampledToken:
    return sampler.choose(["a"], np.zeros((1, V), np.float32))[0]


def test_a_constraint_that_does_not_compile_fails_its_request_alone() -> None:
    sampler = BatchSampler(V, compiler())
    sampler.add(request(Constraint("regex", "((")))
    sampler.add(GenerateRequest("b", (2,), 5))
    bad, good = sampler.choose(["a", "b"], np.zeros((2, V), np.float32))
    assert "unclosed group" in (bad.error or "") and good.error is None


def test_a_panic_while_compiling_fails_the_request_and_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException): ...

    def panic(constraint: Constraint) -> Any:
        raise PanicException("index out of bounds")

    own = ConstraintCompiler(tokenizer().to_str(), V, [END])
    monkeypatch.setattr(own, "compile", panic)
    sampler = BatchSampler(V, own)
    sampler.add(request(Constraint("json_object")))
    assert "PanicException: index out of bounds" in (choose(sampler).error or "")


def test_a_model_that_cannot_be_constrained_says_so() -> None:
    for text, stops in (("{", [END]), (tokenizer().to_str(), []), (tokenizer().to_str(), [V])):
        with pytest.raises(RequestError, match="cannot be constrained"):
            ConstraintCompiler(text, V, stops).load()


def test_adding_does_not_wait_for_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    own, gate = ConstraintCompiler(tokenizer().to_str(), V, [END]), threading.Event()
    compile_ = own.compile

    def slowly(constraint: Constraint) -> Any:
        assert gate.wait(30)
        return compile_(constraint)

    monkeypatch.setattr(own, "compile", slowly)
    sampler = BatchSampler(V, own)
    sampler.add(request(Constraint("choice", '["yes"]')))
    gate.set()
    assert tokenizer().decode([choose(sampler).token])[0] == "y"


def test_a_request_needs_a_tokenizer_and_a_stop_token() -> None:
    for sampler, fields in (
        (BatchSampler(V), {}),
        (BatchSampler(V, compiler()), {"stop_tokens": frozenset[int]()}),
    ):
        with pytest.raises(RequestError, match="with a constraint"):
            sampler.add(request(Constraint("json_object"), **fields))


def test_a_response_that_gets_too_complex_fails_alone() -> None:
    matcher = compiler().compile(Constraint("regex", "ab"))
    matcher.advance(tokenizer().token_to_id("x"))
    assert "became too complex" in (matcher.error or "") and not matcher.complete
    assert not (matcher.mask([END])[END] & 1)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_do_not_change_a_constrained_response(seed: int) -> None:
    """The grammar moves on by accepted tokens only."""
    constraint = Constraint("json_schema", json.dumps(PERSON))
    asked = request(constraint, sampling=SamplingSettings(temperature=1.0, seed=seed))
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 3, (400, V)).astype(np.float32)  # of each position

    def said(drafted: bool, known: list[int]) -> list[int]:
        sampler, tokens = BatchSampler(V, compiler()), list[int]()
        sampler.add(asked)
        while not tokens or tokens[-1] != END:
            at = len(tokens)
            drafts = known[at : at + 3] if drafted else []
            if drafts and generator.random() < 0.5:
                drafts[int(generator.integers(len(drafts)))] = int(generator.integers(2, V))  # may break the grammar
            (choices,) = sampler.choose_drafted({"a": drafts}, {"a": logits[at : at + 1 + len(drafts)]}).values()
            assert all(choice.error is None for choice in choices)
            tokens += [choice.token for choice in choices]
        return tokens

    plain = said(False, [])
    assert said(True, plain) == plain
