"""``tapeout keys new``: a key for a client, and the entry that lets it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from runtime.gateway.accounts.key_file import ApiKey, new_key
from tapeout.errors import RequestError


def run(action: str, name: str, tenant: str, limits: Mapping[str, int | None]) -> tuple[dict[str, Any], str]:
    """The key and its entry: for a script, and for a reader."""
    if action != "new":
        raise RequestError(f"{action!r} is no action", expected="new", remedy="`tapeout keys new NAME`")
    secret, digest = new_key()
    asked = {"tenant": tenant or None, **limits}
    entry: dict[str, Any] = {"name": name, "hash": digest} | {k: v for k, v in asked.items() if v is not None}
    try:
        ApiKey.model_validate(entry)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise RequestError(
            f"{wrong['loc'][0]} is {wrong['input']!r}",
            expected="a name of at most 64 letters, digits, '_', '.', '@' and '-'; limits above 0",
        ) from None
    shown = yaml.safe_dump([entry], sort_keys=False).rstrip()
    return {"key": secret, "entry": entry}, f"The key, shown only now: {secret}\n\nIts entry under `keys:`\n{shown}"
