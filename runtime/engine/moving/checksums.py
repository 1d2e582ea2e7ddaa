"""What is sent with each block, so that the engine that gets it sees whether it is whole.

Apart from the keys of blocks: whoever only runs an engine needs those, and not this library.
"""

from __future__ import annotations

from xxhash import xxh3_128


def checksum(key: bytes, digest: str, level: str, content: bytes | memoryview) -> bytes:
    """Of what state of this key an engine of this bundle and processor level has sent: another one does not fit.

    XXH3 of 128 bits: 0.03 ms for 737 KB, CRC-32 0.2, blake2b 0.7. Between machines each frame has a keyed MAC as well.
    """
    found = xxh3_128(key + f"{digest} {level}".encode())
    found.update(content)
    return found.digest()
