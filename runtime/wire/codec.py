"""Messages to bytes and back: a byte that says which message it is, then its fields in msgpack.

Decoding is strict: a message comes out whole and of the declared types, or :class:`WireError` is raised.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.wire.failures import Failure
from runtime.wire.messages import (
    Add,
    Cancel,
    Close,
    Command,
    EngineInfo,
    FetchAhead,
    FetchState,
    FilePart,
    FindState,
    Heartbeat,
    Leaving,
    ReadFile,
    Reopen,
    StateKeys,
    StatePart,
    StepReport,
    WarmUp,
    WatchBlocks,
)
from tapeout.errors import RequestError, TapeoutError, one_line


class WireError(TapeoutError):
    """What came is not what this protocol sends, so nothing that follows can be trusted: close the connection."""


class Hello(msgspec.Struct, frozen=True):
    """Of each side, ahead of all else. Versions may add fields and never remove one, so that each can read another's.

    ``nonce``: random bytes of this connection.
    """

    protocol: str
    version: int
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """That the sender has the shared key: an HMAC over what both sides have said."""

    hmac: bytes


Message = (
    Hello | Proof | Failure | EngineInfo | StepReport | FilePart | Heartbeat | Leaving | StateKeys | StatePart | Command
)
# The byte that stands for a message is its place here.
_MESSAGES = (
    *(Hello, Proof, Failure, EngineInfo, StepReport, FilePart, Add, Cancel, Close, ReadFile, WatchBlocks),
    *(Heartbeat, Leaving, Reopen, FetchState, StatePart, FetchAhead, WarmUp, FindState, StateKeys),
)


def _plain(value: Any) -> Any:
    if isinstance(value, TapeoutError):
        return Failure.of(value)
    raise TypeError(f"no message holds a {type(value).__name__}")


def _error(_: type, value: Any) -> Any:
    return msgspec.convert(value, Failure).error()  # msgspec compares its class with the declared one


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoders = tuple(msgspec.msgpack.Decoder(kind, dec_hook=_error) for kind in _MESSAGES)
_bytes = {kind: bytes([place]) for place, kind in enumerate(_MESSAGES)}
# By msgspec, by classes that check their values, and by hooks.
_NOT_DECODED = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError, TapeoutError)


def encode(message: Message) -> bytes:
    return _bytes[type(message)] + _encoder.encode(message)


def encode_checked(message: Message) -> bytes:
    """For values that nobody has checked: :class:`RequestError` for what the other side would refuse."""
    try:
        data = encode(message)
        return encode(_decoders[data[0]].decode(data[1:]))  # whole numbers become fractions where the field is one
    except _NOT_DECODED as error:
        raise RequestError(f"the request cannot be sent: {one_line(error)}", expected="values of its types") from error


def decode(data: bytes) -> Any:
    """The :data:`Message`; :class:`WireError` for anything that :func:`encode` does not write."""
    place = data[0] if data else len(_MESSAGES)
    if place >= len(_MESSAGES):
        raise WireError("a message of unknown kind", expected=f"one of {len(_MESSAGES)}")
    name = _MESSAGES[place].__name__
    try:
        message = _decoders[place].decode(memoryview(data)[1:])
        # Where fields are missing or left over, defaults come in and the rest is dropped. Encoding once more shows it.
        whole = place == 0 or len(_encoder.encode(message)) == len(data) - 1
        if isinstance(message, Failure):
            message.error()  # whoever gets it raises that, and expects no other error than ours
    except _NOT_DECODED as error:
        raise WireError(f"a damaged {name}: {one_line(error)}", expected=f"the fields of {name}") from error
    if not whole:
        raise WireError(f"a {name} with missing or additional fields", expected=f"the fields of {name}")
    return message
