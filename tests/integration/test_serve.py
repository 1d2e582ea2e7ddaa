"""``tapeout serve`` as a process on a tiny bundle, and what its clients get: openai, lm-eval, and raw sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from tokenizers import Tokenizer

import tapeout
from benchmarks.peers.environments import python_of
from engines.load import load
from engines.sequences import Sequences
from evals.kinds.tasks.harness import EngineLM
from pipeline.cli.main import main
from pipeline.stages.answering import CoreAnswerer
from runtime.wire.limits import Limits
from tests import command, web
from tests.command import COMMAND, ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.native import own_cache
from tests.registries import empty_registry

MODEL = "tiny"
TALK: Any = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny llama on the target of the default recipe, in two precisions: two engines of one model."""
    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        made = [build_float(tiny_graph(), folder / name, slots).folder for name, slots in (("first", 8), ("second", 6))]
    return made[0], made[1]


@dataclass
class Served(Running):
    openai: openai.OpenAI

    def post(self, path: str, body: Any) -> httpx2.Response:
        return web.post(f"{self.url}{path}", json=body, timeout=30)


@contextmanager
def served(*options: str, open_files: int = 0) -> Iterator[Served]:
    with (
        command.served(*options, "--served-model-name", MODEL, open_files=open_files) as running,
        web.openai_client(running.url, "x", timeout=60) as client,
    ):
        yield Served(running.process, running.url, running.log, client)


@pytest.fixture(scope="module")
def server(bundles: tuple[Path, Path]) -> Iterator[Served]:
    with served(str(bundles[0]), "--unsafe") as running:
        yield running
        assert running.process.poll() is None
        assert running.stop() == 0


def test_a_chat_is_what_the_bundle_says_without_a_server(server: Served, bundles: tuple[Path, Path]) -> None:
    with tapeout.load(bundles[0], threads=1) as engine:
        expected = tapeout.generate(engine, TALK[0]["content"], max_new_tokens=24)
    answer = server.openai.chat.completions.create(model=MODEL, messages=TALK, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == expected
    chunks = server.openai.chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == expected and usage is not None and answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_choices_stops_and_logprobs(server: Served) -> None:
    ask: Any = {"model": MODEL, "prompt": "The list", "max_tokens": 16}
    several = server.openai.completions.create(**ask, n=3, temperature=1, seed=5, logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1
    for choice in several.choices:
        assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.token_logprobs
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) <= 16
    again = server.openai.completions.create(**ask, n=3, temperature=1, seed=5, logprobs=2)
    assert [choice.text for choice in again.choices] == [choice.text for choice in several.choices]
    greedy = server.openai.completions.create(**ask, temperature=0).choices[0].text
    stop = greedy[5:8]
    ended = server.openai.completions.create(**ask, temperature=0, stop=stop).choices[0]
    assert ended.text == greedy[: greedy.index(stop)] and ended.finish_reason == "stop"


def test_formats_and_calls_of_tools(server: Served) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    formatted = server.openai.chat.completions.create(
        model=MODEL,
        messages=TALK,
        temperature=1,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}},
    )
    trip = json.loads(formatted.choices[0].message.content or "")
    assert trip["city"] in ("Rome", "Oslo") and 1 <= trip["days"] <= 9
    tools: Any = [{"type": "function", "function": {"name": "travel", "parameters": schema}}]
    for choice in ("required", {"type": "function", "function": {"name": "travel"}}):
        answer = server.openai.chat.completions.create(
            model=MODEL,
            messages=TALK,
            temperature=1,
            seed=2,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "travel"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    picked = server.post(
        "/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
    )
    assert picked.json()["choices"][0]["text"] in ("yes", "no")


def instance(kind: str, arguments: tuple[Any, ...]) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_lm_eval_scores_over_http_as_in_process(
    server: Served, bundles: tuple[Path, Path], tiny_checkpoint: Path, tiny_texts: Callable[[int, int], list[str]]
) -> None:
    """The very same numbers, up to the rounding of float32 sums in another order."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    texts = [text.split(" ") for text in tiny_texts(12, 4)]
    pairs = [(" ".join(words[:20]), " " + " ".join(words[20:26])) for words in texts]
    requests = [instance("loglikelihood", pair) for pair in pairs]
    bundle = bundles[0]
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    engine = Sequences(load(bundle, threads=1, slots=1))
    own = EngineLM(
        engine,
        tokenizer,
        stop_tokens=[tokenizer.token_to_id("<|im_end|>")],
        bos_token=None,
        answerer=lambda engine: CoreAnswerer(engine, Limits()),
    )
    expected = own.loglikelihood(requests)
    until = [instance("generate_until", (pair[0], {"until": ["\n"], "max_gen_toks": 12})) for pair in pairs[:4]]
    expected_texts = own.generate_until(until)
    engine.close()
    settings: dict[str, Any] = {"base_url": f"{server.url}/v1/completions", "model": MODEL, "max_length": 512}
    for batch_size, concurrent in ((1, 4), (4, 1)):
        remote = LocalCompletionsAPI(
            **settings, tokenizer=str(tiny_checkpoint), tokenizer_backend="huggingface", batch_size=batch_size,
            num_concurrent=concurrent,
        )  # fmt: skip
        found = remote.loglikelihood(requests)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert remote.generate_until(until) == expected_texts
    by_server = LocalCompletionsAPI(**settings, tokenizer_backend="auto", batch_size=1)
    assert by_server.tokenizer_backend == "remote"
    assert [score for score, _ in by_server.loglikelihood(requests[:3])] == pytest.approx(
        [score for score, _ in expected[:3]], abs=1e-4
    )


@pytest.mark.skipif(not python_of("vllm").is_file(), reason="vLLM is not installed for the benchmarks")
def test_vllm_bench_serve_measures_this_server(server: Served, tiny_checkpoint: Path, tmp_path: Path) -> None:
    count, tokens = 6, 8
    # What the command runs: the command itself asks for metadata that the CPU package lacks.
    code = "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    code += "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    words = [
        str(python_of("vllm")),
        "-c",
        code,
        "--backend",
        "openai",
        "--base-url",
        server.url,
        "--model",
        MODEL,
        "--tokenizer",
        str(tiny_checkpoint),
        "--ignore-eos",
    ]
    words += ["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", str(tokens)]
    words += ["--num-prompts", str(count), "--save-result", "--result-dir", str(tmp_path), "--result-filename", "found"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (count, count * tokens)


HOSTILE: list[Any] = [
    {"prompt": "x", "logit_bias": {"1024": 5}},
    {"prompt": "x", "logit_bias": {str(10**9): -100}},
    {"prompt": "x", "stop_token_ids": [1024]},
    {"prompt": "x", "stop_token_ids": [-(2**63)]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [1024]},
    {"prompt": [2**63]},
    {"prompt": "x", "prompt_logprobs": -1},
    {"prompt": "x", "prompt_logprobs": 2**40},
    {"prompt": "x", "logprobs": 2**40},
    {"prompt": "x" * 4000, "max_tokens": 1},
    {"prompt": "x", "n": 10**6},
    {"prompt": ["x"] * 5000},
    {"prompt": "x", "max_tokens": 2**62},
    {"prompt": "x", "structured_outputs": {"json": "{"}},
    {"prompt": "x", "structured_outputs": {"json": {"type": "nonsense"}}},
    {"prompt": "x", "structured_outputs": {"json": {"$ref": "#/nowhere"}}},
    {"prompt": "x", "structured_outputs": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"prompt": "x", "structured_outputs": {"grammar": "start: ("}},
    {"prompt": "x", "guided_json": "[" * 20_000},
    {"prompt": "x", "temperature": 1e308, "top_p": 1e-320, "seed": -(2**80)},
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: json.dumps(body)[:60])
def test_a_hostile_request_is_refused_and_harms_nobody(server: Served, body: Any) -> None:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    good = server.openai.completions.create(model=MODEL, prompt="The", max_tokens=2, temperature=0)
    assert good.usage is not None and good.usage.completion_tokens == 2


def test_an_expression_that_may_become_too_complex(server: Served) -> None:
    """It compiles; whether it exceeds the limits depends on what is drawn. Then it is the client's mistake."""
    body = {"prompt": "x", "structured_outputs": {"regex": "(a{1,5000}){1,5000}" * 10}}
    answers = [server.post("/v1/completions", body | {"seed": seed}).status_code for seed in range(4)]
    assert set(answers) <= {200, 400}
    assert server.post("/v1/completions", {"prompt": "The", "max_tokens": 2}).status_code == 200


def test_echo_without_new_tokens_scores(server: Served) -> None:
    answer = server.post("/v1/completions", {"prompt": "The list is", "echo": True, "max_tokens": 0, "logprobs": 1})
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "The list is" and choice["logprobs"]["token_logprobs"][0] is None
    assert all(score <= 0 for score in choice["logprobs"]["token_logprobs"][1:])


def test_a_burst_with_clients_that_go_away(server: Served) -> None:
    """Every second client leaves in the midst of its stream; the others get what they get alone."""
    alone = (
        server.openai.completions.create(model=MODEL, prompt="A class", max_tokens=40, temperature=0).choices[0].text
    )

    async def one(client: httpx2.AsyncClient, leaves: bool) -> str:
        body = {"prompt": "A class", "max_tokens": 40, "temperature": 0, "stream": True}
        text = ""
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if leaves and len(text) > 20:
                        return ""
        return text

    async def burst() -> list[str]:
        async with web.async_client(timeout=60) as client:
            return await asyncio.gather(*[one(client, number % 2 == 1) for number in range(24)])

    texts = asyncio.run(burst())
    assert texts[::2] == [alone] * 12


def refusal(*options: str) -> str:
    words, variables = [*COMMAND, "serve", *options], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_an_idle_connection_stays_open(server: Served) -> None:
    """Load balancers send requests through connections that were idle for up to a minute; uvicorn closes after 5 s."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    for pause in (0, 6):
        time.sleep(pause)
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        assert response.status == 200


def test_what_cannot_be_served_is_refused(
    bundles: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refusal(str(bundles[0]), "--unsafe", "--port", str(taken.getsockname()[1]))
    assert "cannot listen" in said and "--port" in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(tmp_path))
    for source, words in (
        (str(bundles[0]), "has no verdict"),
        (str(tmp_path), "record.json"),
        ("models:/x", "models:/NAME@champion"),
        ("models:/x@champion", "no model 'x' in the registry"),
    ):
        assert main(["serve", source, "--port", "0"]) == 2
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said


@pytest.mark.parametrize("seconds", [30, 1])
def test_sigterm_drains(bundles: tuple[Path, Path], seconds: int) -> None:
    """The running request ends well if it has the time, a new one is refused, and the process exits with 0."""
    with served(str(bundles[0]), "--unsafe", "--drain-seconds", str(seconds)) as running:
        engines = psutil.Process(running.process.pid).children(recursive=True)
        assert engines
        tokens = 160 if seconds == 30 else 480  # of 64 answers: a second or more, and more than three seconds
        body = {"prompt": ["x"] * 8, "n": 8, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        with web.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            refused = running.post("/v1/completions", {"prompt": "x"})
            rest = [line for line in lines if line.startswith("data: ")]
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert rest[-1] == "data: [DONE]"
        errors = [json.loads(line[6:])["error"] for line in rest[:-1] if '"error"' in line[:20]]
        reasons = [line for line in rest if '"finish_reason":"length"' in line]
        if seconds == 30:
            assert not errors and len(reasons) == 64
        else:
            assert [error["code"] for error in errors] == ["draining"] and len(reasons) < 64
        assert running.process.wait(60) == 0
        assert not [engine for engine in engines if engine.is_running()]


def test_a_second_signal_ends_the_server_at_once(bundles: tuple[Path, Path]) -> None:
    with served(str(bundles[0]), "--unsafe", "--drain-seconds", "600") as running:
        body = {"prompt": ["x"] * 8, "n": 16, "max_tokens": 480, "stream": True, "ignore_eos": True}
        with web.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert running.process.poll() is None
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(20) == 0


def test_an_engine_that_is_killed_is_started_again(bundles: tuple[Path, Path]) -> None:
    with served(str(bundles[0]), "--unsafe") as running:
        body = {"prompt": ["x"] * 8, "n": 8, "max_tokens": 480, "stream": True, "ignore_eos": True}
        with web.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            for engine in psutil.Process(running.process.pid).children():
                engine.kill()
            rest = [line for line in lines if line.startswith("data: ")]
        assert json.loads(rest[-2][6:])["error"]["code"] == "engine_down" and rest[-1] == "data: [DONE]"
        until = time.monotonic() + 60
        while (answer := running.post("/v1/completions", {"prompt": "x", "max_tokens": 2})).status_code == 503:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert answer.status_code == 200
