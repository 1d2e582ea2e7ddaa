"""The application over an engine of this process, behind a real socket, for tests of what clients see."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
import openai
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.gateway.http.app import create_app
from runtime.gateway.http.http_connection import ConnectionLimits, http_config
from runtime.gateway.http.requests import ServerLimits
from runtime.gateway.http.service import Service
from runtime.gateway.protocol.calls import Hook
from runtime.gateway.text.chat_template import ChatTemplate
from runtime.gateway.text.model import TextModel
from runtime.wire.limits import Limits
from tests import web
from tests.serving_client import LocalClient, SlowEngine

END, START, CALLS = "<|end|>", "<|start|>", "[TOOL_CALLS]"
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}<tool_call>{% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MODEL = "tiny"


@cache
def byte_tokenizer() -> Tokenizer:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, START, CALLS)])
    return tokenizer


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False).ids


END_TOKEN = byte_tokenizer().token_to_id(END)
VOCAB = byte_tokenizer().get_vocab_size()


@dataclass
class Served:
    url: str
    app: FastAPI
    service: Service
    client: LocalClient
    engine: SlowEngine
    openai: openai.OpenAI
    http: httpx2.Client

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body, headers=headers)

    def settled(self) -> bool:
        """The engine has nothing left to do, within seconds."""
        until = time.monotonic() + 10
        while self.client.core.busy:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        self.client.core.scheduler.check()
        return True

    def cancelled(self) -> int:
        """Requests that were cancelled so far."""
        return self.client.core.stats().finished.get("cancelled", 0)


@contextmanager
def listening(app: Any, limits: ConnectionLimits | None = None, malformed: Any = None) -> Generator[str]:
    """The address of a server in a thread."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    config = http_config(app, limits or ConnectionLimits(), malformed, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{found.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        found.close()


@contextmanager
def serving(
    engine: SlowEngine,
    *,
    template: str = TEMPLATE,
    limits: ServerLimits | None = None,
    core: Limits | None = None,
    hooks: Sequence[Hook] = (),
    **model: Any,
) -> Generator[Served]:
    client = LocalClient(engine, stop_tokens=frozenset({END_TOKEN}), limits=core)
    text = TextModel(
        engine.digest, byte_tokenizer(), ChatTemplate(template, {}), special_texts={"eos_token": END}, **model
    )
    service = Service(client, {engine.digest: text}, (MODEL, "alias"), limits or ServerLimits(), hooks)
    app = create_app(service)
    with (
        listening(app) as url,
        web.openai_client(url, timeout=20) as api,
        web.client(base_url=url, timeout=20) as http,
    ):
        yield Served(url, app, service, client, engine, api, http)
