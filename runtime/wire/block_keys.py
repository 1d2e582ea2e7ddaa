"""Keys of blocks of tokens: what a cache finds state by, and what a fleet is routed by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from struct import Struct


def block_keys(
    tokens: Sequence[int], block_tokens: int, cache_salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """A key for each full block of ``tokens``: the sha256 of the key before it and of its own tokens.

    So a key stands for all tokens up to the end of its block, and for the salt: sequences of
    different salts never share a block. ``known``: keys of the first blocks, which are not computed again.

    >>> first, second = block_keys([1, 2, 3, 4, 5], 2)
    >>> block_keys([1, 2, 9, 9], 2)[0] == first, block_keys([9, 9, 3, 4], 2)[1] == second
    (True, False)
    """
    keys = list(known)
    previous = keys[-1] if keys else hashlib.sha256(cache_salt).digest()
    pack, sha256 = Struct(f"{block_tokens}q").pack, hashlib.sha256
    for start in range(len(keys) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        previous = sha256(previous + pack(*tokens[start : start + block_tokens])).digest()
        keys.append(previous)
    return keys
