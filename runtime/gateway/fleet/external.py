"""An engine of another kind: any server with OpenAI's `/v1/completions` that takes and gives token ids, such as vLLM.

The gateway keeps text, keys, limits and the choice; only token ids pass. A greedy answer goes on on another such server
by sending its tokens with the prompt. What such a server cannot do as our engines do is refused before it is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.unread import DeltaStream
from runtime.gateway.fleet.connection import FleetConnection
from runtime.wire.limits import QueueFullError
from runtime.wire.messages import (
    Cancel,
    Command,
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FinishReason,
    GenerateRequest,
    KeyChanges,
    RefusedRequest,
    RoutingReport,
    SamplingSettings,
    StepReport,
)
from tapeout.errors import ArtifactError, RequestError, TapeoutError, one_line
from tapeout.file_hashes import sha256_file

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

HEALTH_SECONDS = 0.4  # between two looks at the server
BLOCK_TOKENS = 16  # it says nothing of its blocks
TEXT = (".jinja", ".json")
MEASURED = 0.2  # weight of the last measurement


class ExternalServer(NamedTuple):
    """``url``: up to `/v1`. ``model``: as the server calls it. ``text``: a folder with the model's `tokenizer.json`,
    `generation_config.json` and chat template. ``api_key``: of the server. ``most_running``: requests at once.
    """

    url: str
    model: str
    text: Path
    api_key: str = ""
    most_running: int = 64


class ExternalConnection(FleetConnection):
    """The look at the server's health stands for reports. A prompt's seconds are those until the first token."""

    def __init__(self, server: ExternalServer) -> None:
        super().__init__(f"the server at {server.url}", server.url)
        self._server = server
        self._http: AsyncClient | None = None
        self._looking: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._generated_tokens = 0
        self._waiting: dict[str, int] = {}  # prompt tokens of requests without a token
        self._prompt_seconds = self._decode_seconds = 0.0
        self._turn = self._number = self._received = 0

    def resumes(self, request: GenerateRequest) -> bool:
        """Of greedy answers alone: draws count from the start of a response, and so do penalties."""
        sampling = replace(request.sampling, seed=None, logit_bias={})
        return sampling == SamplingSettings()

    async def connect(self) -> None:
        import httpx2

        server = self._server
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._http = httpx2.AsyncClient(base_url=f"{server.url.rstrip('/')}/", headers=headers, timeout=10.0)
        models = await self._asked("models")
        known = {one["id"]: one for one in models.get("data", [])}
        if server.model not in known:
            raise ArtifactError(
                f"{self.name} has no model {server.model!r}", expected=", ".join(known) or "the model of this fleet"
            )
        info = await asyncio.to_thread(_info, server, known[server.model].get("max_model_len"))
        assert self._opened is not None, "open() calls this"
        self._opened.set_result(info)
        self._looking = asyncio.create_task(self._look())

    async def files(self) -> Path:
        return self._server.text

    async def close(self) -> None:
        self._closing = True
        self.fail("was left")
        tasks = [*self._running.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    def add(self, request: GenerateRequest, age: float = 0.0, source: str = "") -> DeltaStream:
        self._require_possible(request)
        if not self.serves:
            raise EngineDownError(f"{self.name} is not open", remedy=self.remedy)
        stream = self._streams[request.id] = self._stream(request.id)
        self.idle.clear()
        self._received += 1
        task = self._running[request.id] = asyncio.create_task(self._answer_to(request, age))
        task.add_done_callback(partial(self._forget, request.id))
        return stream

    def send(self, command: Command) -> None:
        """Only requests can be told anything: that nobody waits for them."""
        if isinstance(command, Cancel) and (task := self._running.get(command.id)) is not None:
            task.cancel()

    def watch(self, turn: int, heard: Callable[[StepReport], int | None]) -> None:
        self._heard, self._turn, self._number = heard, turn, 0

    def _require_possible(self, request: GenerateRequest) -> None:
        cannot = {
            "structured output and required tools": request.constraint is not None,
            "log-probabilities": request.logprobs is not None or request.prompt_logprobs is not None,
            "an answer without tokens": request.max_new_tokens < 1,
        }
        for name, asked in cannot.items():
            if asked:
                raise RequestError(
                    f"{name} from a server that is not tapeout's",
                    expected="a request without that",
                    remedy="ask a model that engines of tapeout serve",
                )

    async def _look(self) -> None:
        """It is heard of as long as it answers here, whatever it computes."""
        while True:
            try:
                await self._asked("models")
            except TapeoutError as error:
                self.fail(f"does not answer: {error.found}")
                return
            self._heard_at = self._reported_at = monotonic()
            self._tell()
            await asyncio.sleep(HEALTH_SECONDS)

    async def _answer_to(self, request: GenerateRequest, age: float) -> None:
        tokens = len(request.prompt) + len(request.answered)
        self._waiting[request.id] = tokens
        started, last, count = monotonic(), 0.0, 0
        arrival = asyncio.get_running_loop().time() - age
        first_timeouts = [request.queue_timeout, request.first_token_timeout, request.timeout]
        first = min([seconds for seconds in first_timeouts if seconds is not None], default=None)
        try:
            async with asyncio.timeout(None if first is None else max(0.0, first - age)) as limit:
                async for new, ended in self._streamed(request):
                    now = monotonic()
                    if new and not count:
                        self._waiting.pop(request.id, None)
                        self._prompt_seconds = _mean(self._prompt_seconds, (now - started) / tokens)
                        self._prompt_tokens += tokens
                        whole = request.timeout
                        limit.reschedule(None if whole is None else arrival + whole)
                    elif new:
                        self._decode_seconds = _mean(self._decode_seconds, (now - last) / len(new))
                    last, count = now, count + len(new)
                    self._generated_tokens += len(new)
                    if new and not ended:
                        self._tell(Delta(request.id, new))
                    elif ended:
                        self._finish(Delta(request.id, new, finish_reason=ended))
                        return
            raise EngineDownError(f"{self.name} ended an answer without a reason", remedy=self.remedy)
        except TimeoutError:
            self._finish(Delta(request.id, finish_reason="timeout"))
        except asyncio.CancelledError:
            self._finish(Delta(request.id, finish_reason="cancelled"))
            raise
        except EngineDownError as error:
            self._lose(request.id, error)
        except RequestError as error:
            self._tell(refusal=RefusedRequest(request.id, error))
        except Exception as error:  # of any kind: what it answers must not end the gateway
            self._lose(request.id, EngineDownError(f"{self.name} answers nonsense: {one_line(error, 200)}"))

    async def _streamed(self, request: GenerateRequest) -> AsyncIterator[tuple[tuple[int, ...], FinishReason | None]]:
        """New tokens and the finish reason, which comes last."""
        import httpx2

        assert self._http is not None, "connect() comes first"
        try:
            async with self._http.stream("POST", "completions", json=self._body(request), timeout=None) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(self.name, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    found = json.loads(line.removeprefix("data: "))
                    if "error" in found:
                        raise EngineDownError(f"{self.name} failed: {str(found['error'])[:200]}", remedy=self.remedy)
                    for choice in found.get("choices", []):
                        if (ids := choice.get("token_ids")) is None:
                            raise ArtifactError(
                                f"{self.name} gives no token ids", expected="a server that knows return_token_ids"
                            )
                        yield tuple(ids), choice.get("finish_reason")
        except httpx2.HTTPError as error:
            raise EngineDownError(f"{self.name} broke off: {one_line(error)}", remedy=self.remedy) from error

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        sampling, done = request.sampling, len(request.answered)
        body: dict[str, Any] = {
            "model": self._server.model,
            "prompt": [*request.prompt, *request.answered],
            "max_tokens": request.max_new_tokens - done,
            "min_tokens": max(0, request.min_new_tokens - done),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "stop_token_ids": sorted(request.stop_tokens),
            "ignore_eos": True,  # the stop tokens say all
            "stream": True,
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % (1 << 63)  # vLLM takes signed numbers
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt.hex()
        return body

    async def _asked(self, path: str) -> Any:
        import httpx2

        assert self._http is not None, "connect() comes first"
        try:
            response = await self._http.get(path)
            response.raise_for_status()
            return response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise EngineDownError(
                f"nothing useful comes from {self._server.url}: {one_line(error)}",
                expected="an OpenAI-compatible server",
                remedy="start it there, or correct `external` in the list of engines",
            ) from error

    def _finish(self, delta: Delta) -> None:
        self._finished[str(delta.finish_reason)] += 1
        self._tell(delta)

    def _lose(self, id: str, error: EngineDownError) -> None:
        stream = self._streams.pop(id, None)
        if stream is not None:
            stream.fail(error)
        if not self._streams:
            self.idle.set()

    def _forget(self, id: str, _: asyncio.Task[None]) -> None:
        self._running.pop(id, None)
        self._waiting.pop(id, None)

    def _tell(self, delta: Delta | None = None, refusal: RefusedRequest | None = None) -> None:
        """A report, as an engine would send it."""
        running, waiting = len(self._running), sum(self._waiting.values())
        stats = EngineStats(
            running=running,
            waiting_tokens=waiting,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=dict(self._finished),
        )
        routing = None
        if self._heard is not None:
            load = EngineLoad(
                backlog_tokens=waiting,
                decodes=running - len(self._waiting),
                running=running,
                most_running=self._server.most_running,
                prompt_seconds=self._prompt_seconds,
                decode_seconds=self._decode_seconds,
            )
            none, number = KeyChanges(), self._number
            routing = RoutingReport(self._turn, number, not number, 0, none, none, self._received, load)
            self._number += 1
        deltas, refusals = () if delta is None else (delta,), () if refusal is None else (refusal,)
        self._report(StepReport(deltas, stats, refusals, routing))


def _info(server: ExternalServer, most_tokens: Any) -> EngineInfo:
    """:class:`ArtifactError` where the folder does not say what is needed, or the server does not."""
    from tokenizers import Tokenizer

    files = sorted(path for path in server.text.iterdir() if path.suffix in TEXT) if server.text.is_dir() else []
    hashes = {path.name: sha256_file(path) for path in files}
    try:
        vocabulary = Tokenizer.from_file(str(server.text / "tokenizer.json")).get_vocab_size()
        settings = json.loads((server.text / "generation_config.json").read_text(encoding="utf-8"))
        ends = settings["eos_token_id"]
    except Exception as error:  # tokenizers raises its own
        raise ArtifactError(
            f"{server.text} does not have the text side of a model: {one_line(error)}",
            expected="tokenizer.json, and generation_config.json with eos_token_id",
        ) from error
    if not isinstance(most_tokens, int):
        raise ArtifactError(
            f"{server.url} does not say how many tokens it takes", expected="max_model_len of its model"
        )
    # Not the digest of a bundle: its floats are those of another engine.
    digest = hashlib.sha256(json.dumps(["external", server.model, hashes]).encode()).hexdigest()
    return EngineInfo(
        digest=digest,
        name=server.model,
        max_tokens=most_tokens,
        vocab_size=vocabulary,
        block_tokens=BLOCK_TOKENS,
        blocks=-(-most_tokens // BLOCK_TOKENS) * server.most_running,
        block_bytes=0,
        weight_bytes=0,
        stop_tokens=frozenset(ends if isinstance(ends, list) else [ends]),
        files=hashes,
    )


def _refusal(name: str, response: Response) -> TapeoutError:
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = response.text
    found = f"{name} says {response.status_code}: {text[:300]}"
    if response.status_code == 429:
        return QueueFullError(found, expected="room in its queue", retry_after=None)
    if 400 <= response.status_code < 500:
        return RequestError(found, expected="what it takes")
    return EngineDownError(found)


def _mean(before: float, now: float) -> float:
    return before + MEASURED * (now - before) if before else now
