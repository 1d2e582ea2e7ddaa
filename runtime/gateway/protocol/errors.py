"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

import logging
import math
from typing import Any

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.unread import SlowReaderError
from runtime.wire.limits import QueueFullError
from tapeout.errors import RequestError, one_line

log = logging.getLogger("tapeout.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
SHOWN_CHARACTERS = 120
MESSAGE_CHARACTERS = 1800
SLOW_READER = "slow_reader"  # a code
RETRY_SECONDS = 1  # where nothing is known of when there will be room


class ApiError(Exception):
    """A refusal with an HTTP status. ``param``: the field of the request that is wrong; ``code``: for programs.

    ``headers`` are added to the response, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shortened(text: str) -> str:
    """What a client has sent, short enough for a message.

    >>> len(shortened("x" * 1000))
    121
    """
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong, and the same request will be refused again."""
    return ApiError(400, message, param=param, code=code)


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": str(RETRY_SECONDS)})


def from_exception(error: BaseException) -> ApiError:
    """Any exception of the engine or of our own code as a response; what nobody expected is logged with its traceback.

    >>> from_exception(RequestError("top_p is 2", expected="at most 1")).body["error"]["message"]
    'top_p is 2; expected: at most 1'
    """
    match error:
        case ApiError():
            return error
        case QueueFullError():
            seconds = RETRY_SECONDS if error.retry_after is None else max(RETRY_SECONDS, math.ceil(error.retry_after))
            headers = {"retry-after": str(seconds)}
            return ApiError(429, one_line(error, MESSAGE_CHARACTERS), code="queue_full", headers=headers)
        case EngineDownError():
            return ApiError(
                503,
                one_line(error, MESSAGE_CHARACTERS),
                code="engine_down",
                headers={"retry-after": str(RETRY_SECONDS)},
            )
        case SlowReaderError():
            return invalid(one_line(error, MESSAGE_CHARACTERS), code=SLOW_READER)
        case RequestError():
            return invalid(one_line(error, MESSAGE_CHARACTERS))
        case _:
            log.error("a request failed unexpectedly", exc_info=error)
            return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")
