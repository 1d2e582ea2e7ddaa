"""Clients of HTTP servers that a test starts. None of them uses TLS, or checks a certificate.

A client that checks certificates first reads those of all authorities: 40 ms of processor time, which a test that polls
a server takes again and again.
"""

from __future__ import annotations

from functools import partial

import httpx2
import openai

get = partial(httpx2.get, verify=False)
post = partial(httpx2.post, verify=False)
put = partial(httpx2.put, verify=False)
stream = partial(httpx2.stream, verify=False)
client = partial(httpx2.Client, verify=False)
async_client = partial(httpx2.AsyncClient, verify=False)


def openai_client(url: str, key: str = "none", timeout: float = 60) -> openai.OpenAI:
    """It asks once. ``url``: of the server, without ``/v1``. ``timeout``: seconds."""
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=timeout, http_client=http)
