"""A process that admits and ends requests of one key until it is killed, and notes what it has promised.

    python -m tests.lease_holder DATABASE NOTES SEED BUDGET

Notes: ``A TOKENS`` for a request that was admitted, ``E TOKENS USED`` for one that ends, ``R`` where one was refused
since the budget is used up, ``W`` for another reason.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from runtime.gateway.accounts.key_file import ApiKey
from runtime.gateway.accounts.quotas import Grant
from runtime.gateway.accounts.shared_quotas import SharedQuotas
from runtime.gateway.protocol.errors import ApiError


async def run(url: str, notes: str, seed: str, budget: str) -> None:
    draw, file = random.Random(seed), os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    quota = SharedQuotas(url).quota(ApiKey(name="k", hash="0" * 64, token_budget=int(budget)), 0)
    open_grants: list[tuple[int, Grant]] = []
    while True:
        tokens = draw.randint(1, 99)
        await quota.prepare(tokens)
        try:
            grant = quota.admit(tokens)
        except ApiError as error:
            os.write(file, b"R\n" if error.code == "insufficient_quota" else b"W\n")
            await asyncio.sleep(0.05)
        else:
            os.write(file, f"A {tokens}\n".encode())
            open_grants.append((tokens, grant))
        if len(open_grants) > 4:
            reserved, grant = open_grants.pop(draw.randrange(4))
            used = draw.randint(0, reserved)
            os.write(file, f"E {reserved} {used}\n".encode())
            grant.settle(used)
        await asyncio.sleep(0.002)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
