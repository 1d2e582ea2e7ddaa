"""Memory of KV caches, and arrays that are bound to ONNX Runtime by address.

Input buffers are reused and rebound only when a shape changes: after a step, Python's code and data are out of the
processor's caches, and a line of it costs ten times as much.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.state_buffers import numpy_element
from tapeout.errors import ResourceError
from tapeout.resources import available_memory
from tapeout.state import StateBuffer

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, which Python has no name for


@dataclass
class Bound:
    """A binding, and the bound arrays by name besides the KV cache. ``written``: by name, what was written last.

    Decode steps often read what the step before read, and to compare a list takes less time than to write an array.
    """

    binding: ort.IOBinding
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    written: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """The array that the next run reads an input from."""
        return self._array(self.binding.bind_input, name, shape, dtype)

    def write(self, name: str, values: list[int], dtype: Any = np.int64) -> None:
        """An input of ``len(values)`` elements."""
        if self.written.get(name) != values:
            self.written.pop(name, None)
            self.input(name, (len(values),), dtype)[:] = values
            self.written[name] = values

    def write_rows(self, name: str, rows: list[Sequence[int]], columns: int, dtype: Any) -> bool:
        """An input ``[len(rows), columns]``, and whether it has changed. What lies behind a row's end is never read."""
        if self.written.get(name) == rows:
            return False
        self.written.pop(name, None)
        array = self.input(name, (len(rows), columns), dtype)
        for number, row in enumerate(rows):
            array[number, : len(row)] = row
        self.written[name] = [list(row) for row in rows]  # a caller may extend its own
        return True

    def output(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """The array that the next run writes an output to."""
        return self._array(self.binding.bind_output, name, shape, dtype)

    def _array(self, bind: Callable[..., None], name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array = self.arrays.get(name)
        if array is None or array.shape != shape:
            array = self.arrays[name] = np.empty(shape, dtype)
            bind(name, "cpu", 0, dtype, shape, array.ctypes.data)
        return array


class BlockMemory:
    """The caches of a pool of blocks: arrays ``[blocks, …]`` of zeros by name. A page takes memory once it is written.
    ``bytes``: of each array.

    The first write to a page holds up its writer (1.6 µs on a virtual machine). Where 16 sequences of the default model
    began a block in the same step, that step wrote 2,880 pages and took 4.5 ms longer than the 6 to 8 of others. So
    pages of the blocks that come next are made ready ahead of time, a few between two steps (:meth:`make_ready`).
    """

    def __init__(self, buffers: Sequence[StateBuffer]) -> None:
        self._memory = [_pages(shape, element) for _, shape, element in buffers]
        self.arrays = {
            name: np.frombuffer(pages, element).reshape(shape)
            for (name, shape, element), pages in zip(buffers, self._memory, strict=True)
        }
        self.bytes = [memoryview(pages) for pages in self._memory]
        self.blocks = min((buffer.shape[0] for buffer in buffers), default=0)
        self.ready = 0  # blocks below this number have their pages, or have been written

    def clear(self) -> None:
        """Give all pages back, once nothing is bound to them."""
        self.arrays.clear()
        self.bytes.clear()
        self._memory.clear()

    def make_ready(self, most: int, end: int) -> bool:
        """Up to ``most`` more blocks, below the block ``end``, get their pages. What blocks hold is not changed.

        True if another call would do more.
        """
        end = min(end, self.blocks)
        first, last = self.ready, min(self.ready + most, end)
        if first >= last:
            return False
        for pages in self._memory:
            each = len(pages) // self.blocks
            start = first * each // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                pages.madvise(POPULATE_WRITE, start, last * each - start)
            except (OSError, AttributeError):  # a kernel before 5.14, or another system: the first write does it
                last = self.blocks
                break
        self.ready = last
        return last < end


def require_slots(slots: int, slot_bytes: int) -> None:
    """:class:`ResourceError` where memory has less than so many slots of recurrent state: prefixes fill all of them."""
    available = available_memory()
    if slots * slot_bytes > available:
        raise ResourceError(
            f"{slots} slots of recurrent state take {slots * slot_bytes / 1e9:.1f} GB",
            expected=f"at most {available / 1e9:.1f} GB, which is available",
            remedy="open the engine for fewer sequences or snapshots: --slots, --snapshots or --kv-bytes",
        )


def zeros(shape: tuple[int, ...], element: str) -> NDArray[Any]:
    """An array in memory of :func:`_pages`."""
    dtype = numpy_element(element)
    return np.frombuffer(_pages(shape, dtype), dtype).reshape(shape)


def _pages(shape: tuple[int, ...], dtype: Any) -> mmap.mmap:
    """Memory of zeros for an array, taken page by page as it is written.

    ``numpy.zeros`` asks the operating system for huge pages, and a sequence's first token then takes 2 MB in every
    layer: for 32 sequences of 192 tokens the default model held 900 MB with them, and holds 370 without, as fast.
    :class:`ResourceError` where the system has no room for it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        pages = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"the system has no room for {size / 1e9:.1f} GB of state: {error}",
            expected="memory for the state of all sequences that the engine is opened for",
            remedy="open it for fewer: --slots or --kv-bytes",
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages
