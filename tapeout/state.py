"""What a layer keeps of the tokens before: kinds of state, as data.

A layer has none, one or several of them. Attention keeps keys and values of every token: paged state, in blocks that
sequences of one prefix share. A convolution or a recurrence keeps one value for all tokens so far: recurrent state, in
one slot a sequence, which can be resumed only where a copy of it was kept.

    [blocks, ..., block_tokens, columns]  a buffer of paged state: positions come before the last dimension of a token
    [slots, ...]                          a buffer of recurrent state
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import Field

from tapeout.artifact import Frozen

NO_SLOT = -1  # of a sequence without recurrent state
SEQUENCE_SLOTS = 2  # that are there for a sequence: its own, and one for a snapshot
ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4, "fp8": 8}
IN_BYTES = ("int4", "fp8")  # numpy has no such types


class StateBuffer(NamedTuple):
    """``name``: ``LAYER.TENSOR``, as in the graph's inputs. ``element``: numpy's name; bfloat16 has none there."""

    name: str
    shape: tuple[int, ...]
    element: str


class StateTensor(Frozen):
    """``shape``: of one token where the state is paged, of one sequence where it is recurrent.

    ``int4``: two in a byte. Element 2i of the last dimension is in the low half of byte i, 2i + 1 in the high half,
    each as its code + 8. ``fp8``: a byte of E4M3 (``tapeout/e4m3.py``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def element(self) -> str:
        return "uint8" if self.dtype in IN_BYTES else self.dtype

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in elements of a buffer."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "int4" else self.shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BITS[self.dtype] // 8


class Paged(Frozen):
    """``window``: tokens that attention sees, itself included; 0 for all."""

    kind: Literal["paged"] = "paged"
    layer: int
    tensors: tuple[StateTensor, ...]
    window: int = 0


class Recurrent(Frozen):
    """``snapshot_tokens``: a copy is kept each so many tokens, for others to resume at; 0: only where a prompt ends."""

    kind: Literal["recurrent"] = "recurrent"
    layer: int
    tensors: tuple[StateTensor, ...]
    snapshot_tokens: int = 0

    def kept_in(self, dtype: str) -> Recurrent:
        """The same, of elements of another type."""
        tensors = tuple(tensor.model_copy(update={"dtype": dtype}) for tensor in self.tensors)
        return self.model_copy(update={"tensors": tensors})


LayerState: TypeAlias = Annotated[Paged | Recurrent, Field(discriminator="kind")]


def token_bytes(state: Iterable[Paged | Recurrent]) -> int:
    """Bytes that one more token takes, in all layers."""
    return sum(tensor.nbytes for one in state if isinstance(one, Paged) for tensor in one.tensors)


def slot_bytes(state: Iterable[Paged | Recurrent]) -> int:
    """Bytes of the recurrent state of one sequence, in all layers."""
    return sum(tensor.nbytes for one in state if isinstance(one, Recurrent) for tensor in one.tensors)


def paged_buffers(state: Iterable[Paged | Recurrent], blocks: int, block_tokens: int) -> Iterator[StateBuffer]:
    """
    >>> key = StateTensor(name="key", shape=(3, 64), dtype="int4")
    >>> list(paged_buffers([Paged(layer=7, tensors=(key,))], 100, 16))
    [StateBuffer(name='7.key', shape=(100, 3, 16, 32), element='uint8')]
    """
    for one in state:
        for tensor in one.tensors if isinstance(one, Paged) else ():
            *outer, columns = tensor.stored
            yield StateBuffer(f"{one.layer}.{tensor.name}", (blocks, *outer, block_tokens, columns), tensor.element)


def recurrent_buffers(state: Iterable[Paged | Recurrent], slots: int) -> Iterator[StateBuffer]:
    """
    >>> conv = StateTensor(name="conv", shape=(1024, 2), dtype="float32")
    >>> list(recurrent_buffers([Recurrent(layer=0, tensors=(conv,))], 9))
    [StateBuffer(name='0.conv', shape=(9, 1024, 2), element='float32')]
    """
    for one in state:
        for tensor in one.tensors if isinstance(one, Recurrent) else ():
            yield StateBuffer(f"{one.layer}.{tensor.name}", (slots, *tensor.stored), tensor.element)
