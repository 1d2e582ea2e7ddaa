"""One end of a connection between a server and an engine, without its socket: bytes in, messages out.

A frame is

    length of the payload (4 bytes) | CRC-32 of length and frame number (4) | MAC of the payload (16) | payload

with numbers in network byte order. Each direction counts its frames from 0, so a frame that is lost, repeated or cut is
noticed, as is every changed bit. A message is only decoded once its MAC has been verified.

Each side sends :class:`Hello` with a nonce. Then the server proves that it has the shared key, by an HMAC over both
nonces, and the engine does the same. What follows is authenticated with keys that are derived from both: one who reads
or changes the connection cannot write a frame. Nothing is encrypted: use a network that you trust, or a tunnel.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Literal
from zlib import crc32

from runtime.wire.codec import Hello, Message, Proof, WireError, decode, encode
from runtime.wire.failures import Failure
from tapeout.errors import SignatureError

PROTOCOL, VERSION = "tapeout-engine", 8
NONCE_BYTES, MAC_BYTES = 32, 16
GREETING_BYTES = 4096  # of a frame before the other side is known
MOST_BYTES = 1 << 28  # of a frame after that
KEY_BYTES = 32  # least length of a shared key

Side = Literal["server", "engine"]
_HEAD, _NUMBERED = struct.Struct("!II16s"), struct.Struct("!IQ")


class Session:
    """``side``: of this end. ``key``: shared by both; empty where whoever can connect is trusted.

    ``outgoing``: bytes for the other end, which the caller sends and clears. ``established``: both have the same key.
    """

    def __init__(self, side: Side, key: bytes = b"") -> None:
        self._side: Side = side
        self._other: Side = "engine" if side == "server" else "server"
        self._key = key
        self._incoming = bytearray()
        self._sent = self._received = 0  # frames
        self._send_key = self._receive_key = b""  # MACs are mere checksums until both sides are known
        self._hello: Hello | None = None  # of the other side
        self._nonce = token_bytes(NONCE_BYTES)
        self.established = False
        self.outgoing = bytearray(self.frame(Hello(PROTOCOL, VERSION, self._nonce)))

    def frame(self, message: Message) -> bytes:
        return self.seal(encode(message))

    def seal(self, payload: bytes) -> bytes:
        """The next frame, of an encoded message."""
        number, self._sent = self._sent, self._sent + 1
        if len(payload) > MOST_BYTES:
            raise WireError(f"a message of {len(payload)} bytes", expected=f"at most {MOST_BYTES}")
        head = len(payload), crc32(_NUMBERED.pack(len(payload), number)), _mac(self._send_key, number, payload)
        return _HEAD.pack(*head) + payload

    def receive(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now. :class:`WireError` for anything else; nothing may follow it.

        :class:`SignatureError` if the other side has another key.
        """
        self._incoming += data
        while (payload := self._next()) is not None:
            message = decode(payload)
            if self.established:
                yield message
            elif self._hello is None:
                self._greet(message)
            else:
                self._verify(message)

    def _next(self) -> bytes | None:
        if len(self._incoming) < _HEAD.size:
            return None
        length, check, mac = _HEAD.unpack_from(self._incoming)
        if check != crc32(_NUMBERED.pack(length, self._received)):
            raise WireError("bytes that are no frame, or a frame that is not the next one", expected=_expected())
        if length > (most := MOST_BYTES if self.established else GREETING_BYTES):
            raise WireError(f"a frame of {length} bytes", expected=f"at most {most}")
        end = _HEAD.size + length
        if len(self._incoming) < end:
            return None
        payload = bytes(memoryview(self._incoming)[_HEAD.size : end])
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, payload)):
            raise WireError("a frame whose content was changed", expected=_expected())
        del self._incoming[:end]
        self._received += 1
        return payload

    def _greet(self, message: object) -> None:
        if not isinstance(message, Hello):
            raise WireError(f"{type(message).__name__} as the first message", expected=_expected())
        if (message.protocol, message.version) != (PROTOCOL, VERSION):
            raise WireError(
                f"the {self._other} speaks {message.protocol[:40]} {message.version}",
                expected=_expected(),
                remedy="run the same version of tapeout on both machines",
            )
        if len(message.nonce) != NONCE_BYTES:
            raise WireError(f"a nonce of {len(message.nonce)} bytes", expected=f"{NONCE_BYTES} bytes")
        self._hello = message
        if self._side == "server":
            self._prove()

    def _verify(self, message: object) -> None:
        if isinstance(message, Failure):
            raise message.error()
        if not isinstance(message, Proof):
            raise WireError(f"{type(message).__name__} before the keys were compared", expected="Proof")
        if not hmac.compare_digest(message.hmac, self._derived("proof", self._other)):
            error = SignatureError(
                f"the {self._other} has another key",
                expected="the same shared key on both machines",
                remedy="copy the key file of the engine to the server",
            )
            self.outgoing += self.frame(Failure.of(error))
            raise error
        if self._side == "engine":
            self._prove()
        self._send_key, self._receive_key = self._derived("frames", self._side), self._derived("frames", self._other)
        self.established = True

    def _prove(self) -> None:
        self.outgoing += self.frame(Proof(self._derived("proof", self._side)))

    def _derived(self, use: str, side: Side) -> bytes:
        assert self._hello is not None
        nonces = {self._side: self._nonce, self._other: self._hello.nonce}
        content = f"{PROTOCOL} {VERSION} {use} {side}".encode() + nonces["server"] + nonces["engine"]
        return hmac.digest(self._key, content, "sha256")


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return blake2b(payload, key=key, salt=number.to_bytes(blake2b.SALT_SIZE), digest_size=MAC_BYTES).digest()


def _expected() -> str:
    return f"{PROTOCOL} {VERSION}"
