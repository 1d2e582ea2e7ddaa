"""How a schema is refused that cannot be enforced."""

from __future__ import annotations

from tapeout.errors import RequestError


def refusal(keyword: str, what: str) -> RequestError:
    return RequestError(
        f"a JSON schema with `{keyword}` {what}, which cannot be enforced",
        expected="keywords as docs/serving.md lists them",
        remedy="leave it out, or write it in another way",
    )
