"""The application: its routes, its errors, and the ids of its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tapeout
from runtime.gateway.http.chat import chat
from runtime.gateway.http.completions import completions
from runtime.gateway.http.connection import DisconnectedError, read_body
from runtime.gateway.http.requests import context_tokens
from runtime.gateway.http.responses import responses
from runtime.gateway.http.service import Service
from runtime.gateway.http.sse import SEND, JsonResponse
from runtime.gateway.protocol.bodies import DetokenizeBody, TokenizeBody, parse
from runtime.gateway.protocol.calls import REQUEST_ID, request_id
from runtime.gateway.protocol.errors import ApiError, from_exception, invalid, shortened
from runtime.gateway.text.conversations import encode_chat, opening_of
from runtime.gateway.text.model import TextModel
from runtime.wire.messages import EngineInfo
from tapeout.errors import TapeoutError

CLIENT_GONE = 499  # nobody reads this response
Endpoint = Callable[[Service, Request], Awaitable[Response]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(
    service: Service,
    *,
    routers: Sequence[APIRouter] = (),
    middleware: Sequence[Middleware] = (),
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """``middleware``: ASGI classes, the outermost first; all see the request's id in ``scope["state"]``.

    One that authenticates puts a :class:`runtime.gateway.protocol.calls.Caller` there, under ``CALLER``. ``routers``
    come before the routes of this application. Hooks are part of the ``service``.
    """
    app = FastAPI(
        title="Tapeout",
        version=tapeout.__version__,
        lifespan=lifespan,
        middleware=[Middleware(RequestIds), Middleware(TrailingSlashes), *middleware],
        redirect_slashes=False,  # a client would have to send its body again
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.service = service
    for router in routers:  # FastAPI's include_router would hide them from HttpMetrics
        app.router.routes.extend(router.routes)
    routes: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/responses", responses),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", model),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
        ("GET", "/tokenizer_info", tokenizer_info),
        ("GET", "/version", version),
    ]
    for method, path, endpoint in routes:
        app.add_route(path, _bound(service, endpoint), methods=[method], include_in_schema=False)
    for kind in (ApiError, TapeoutError):
        app.add_exception_handler(kind, _api_error)
    app.add_exception_handler(DisconnectedError, _client_gone)
    app.add_exception_handler(HTTPException, _http_error)
    return app


class RequestIds:
    """Gives each request its id, its own response header, and a JSON body if the server fails."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        own = request_id(None if given is None else given.decode("latin-1"))
        scope.setdefault("state", {}).update({REQUEST_ID: own, SEND: send})
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)[REQUEST_ID] = own
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if begun:
                raise
            await _error_response(from_exception(error))(scope, receive, send_with_id)


class TrailingSlashes:
    """A path means the same with a slash at its end, for every layer below."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def _bound(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        return await endpoint(service, request)

    return call


def _error_response(error: ApiError) -> Response:
    return JsonResponse(error.body, status_code=error.status, headers=error.headers)


async def _api_error(_: Request, error: Exception) -> Response:
    return _error_response(from_exception(error))


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shortened(request.scope["path"])
    messages = {404: f"no such path: {path}", 405: f"{path} does not take {request.method}"}
    found = ApiError(
        error.status_code, messages.get(error.status_code, error.detail), headers=dict(error.headers or {})
    )
    return _error_response(found)


async def models(service: Service, _: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(service: Service, request: Request) -> Response:
    name: str = request.path_params["name"]
    service.require_model(name)
    return JsonResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "tapeout",
        "root": service.names[0],
        "parent": None,
        "max_model_len": context_tokens(info),
        "digest": info.digest,
        "digests": list(service.client.bundles),
    }


async def tokenize(service: Service, request: Request) -> Response:
    body = parse(TokenizeBody, await read_body(request, service.limits.body_bytes, service.limits.body_seconds))
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("expected: either prompt or messages", "prompt")

    most = service.limits.tokenize_tokens

    async def encode(model: TextModel, _: EngineInfo) -> list[int]:
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            (tokens,) = await model.encode([body.prompt], add_special_tokens=special, most_tokens=most)
            return tokens
        return await encode_chat(
            model,
            body.messages or [],
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
            parse_special=bool(body.parse_special_tokens),
            most_tokens=most,
        )

    opening = opening_of(body.messages) if body.messages else orjson.dumps(body.prompt)
    model, info, tokens = await service.encoded(opening, encode)
    found = {"count": len(tokens), "max_model_len": context_tokens(info), "tokens": tokens}
    found["token_strs"] = [model.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
    return JsonResponse(found)


async def detokenize(service: Service, request: Request) -> Response:
    body = parse(DetokenizeBody, await read_body(request, service.limits.body_bytes, service.limits.body_seconds))
    service.require_model(body.model)
    size = service.client.info.vocab_size
    if any(token >= size for token in body.tokens):
        raise invalid(f"expected: ids below {size}", "tokens")
    return JsonResponse({"prompt": service.text.decode(body.tokens)})


async def tokenizer_info(service: Service, _: Request) -> Response:
    model = service.text
    return JsonResponse(
        {
            **model.special_texts,
            "tokenizer_class": type(model.tokenizer).__name__,
            "vocab_size": service.client.info.vocab_size,
            "max_model_len": context_tokens(service.client.info),
            "chat_template": model.template.source if model.template else None,
        }
    )


async def version(service: Service, _: Request) -> Response:
    return JsonResponse({"version": tapeout.__version__, "engine": service.client.info.name})
