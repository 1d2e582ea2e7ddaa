"""What all endpoints share: the engine, the text side of the bundle that it serves, names, limits and hooks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from runtime.gateway.engines.client import EngineClient, OpenEngine
from runtime.gateway.http.requests import ServerLimits
from runtime.gateway.protocol.bodies import Body
from runtime.gateway.protocol.calls import CALLER, REQUEST_ID, Call, Caller, Hook
from runtime.gateway.protocol.errors import ApiError, draining, shortened
from runtime.gateway.text.model import TextModel
from runtime.wire.messages import EngineInfo
from runtime.wire.start import EngineSettings

LEVEL = "x-engine-level"


@dataclass
class Service:
    """``names``: that requests may call the model by; the first is the one that responses have."""

    client: EngineClient
    models: dict[str, TextModel]  # by digest of their bundle
    names: tuple[str, ...]
    limits: ServerLimits = field(default_factory=ServerLimits)
    hooks: Sequence[Hook] = ()
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def text(self) -> TextModel:
        """Of the bundle that new requests run on, or most of them."""
        return self.models[self.client.info.digest]

    def require_model(self, name: str | None) -> None:
        """:class:`ApiError` 404 unless this is one of our names; no name means the model that there is."""
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"no model {shortened(name)!r}; expected: {self.names[0]}", param="model", code="model_not_found"
            )

    def require_open(self) -> None:
        if self.draining:
            raise draining()

    async def encoded(
        self, opening: bytes, encode: Callable[[TextModel, EngineInfo], Awaitable[Any]]
    ) -> tuple[TextModel, EngineInfo, Any]:
        """What ``encode`` makes of a text, for the bundle that a conversation with this opening gets afterwards, too.

        With the text model of that bundle, and the info of its engines.
        """
        while True:
            info = self.client.info_for(opening)
            model = self.models[info.digest]
            prompts = await encode(model, info)
            if (info := self.client.info_for(opening)).digest == model.digest:
                return model, info, prompts

    def call(
        self, request: Request, prefix: str, model: TextModel, prompts: Sequence[Sequence[int]], **values: Any
    ) -> Call:
        state = request.scope["state"]
        name = self.names[0]
        return Call(
            id=f"{prefix}-{uuid.uuid4().hex}",
            request_id=state[REQUEST_ID],
            endpoint=request.scope["path"],
            model=name,
            digest=model.digest,
            caller=state.get(CALLER, Caller()),
            prompts=prompts,
            idempotency_key=request.headers.get("idempotency-key", ""),
            **values,
        )

    async def opened(self, engine: OpenEngine) -> None:
        """Load the text side of the bundle that an engine has opened."""
        info = engine.info
        if info.digest not in self.models:
            self.models[info.digest] = await asyncio.to_thread(TextModel.load, await engine.files(), info)
        self._keep(info.digest, *self.client.bundles)

    async def swap(self, bundle: str, settings: EngineSettings | None = None) -> None:
        """Serve another bundle: requests that run now end on the old one. See :meth:`EngineClient.swap`."""
        try:
            await self.client.swap(bundle, settings)
        finally:
            self._keep(*self.client.bundles)

    def _keep(self, *digests: str) -> None:
        for digest in self.models.keys() - digests:
            self.models.pop(digest).close()


def headers(call: Call, *bodies: Body) -> dict[str, str]:
    """The fields of a body that were ignored, and the level of the engine, which is known with the first token."""
    ignored = [name for body in bodies for name in body.ignored]
    shown = ",".join(name for name in ignored[:32] if name.isascii() and name.isprintable())[:1024]
    found = {"x-ignored-parameters": shown, LEVEL: call.level}
    return {name: value for name, value in found.items() if value}


def usage(call: Call) -> dict[str, Any]:
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "total_tokens": call.prompt_tokens + call.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }
