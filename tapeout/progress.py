"""Progress of long work: a bar on a terminal, and a line every ten seconds in a log.

Both say what is done, at what rate, and what is left. Work that ends sooner writes nothing to a log. Of what cannot be
counted, such as a library's own work, :class:`Steps` says what it is and how long it has taken.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

LOG_SECONDS = 10.0  # between two lines of a log, and before the first
_LOG_LINE = "{desc}: {percentage:.0f}% ({n_fmt} of {total_fmt}), {rate_fmt}, {elapsed} gone, {remaining} left"
_LOG_LINE_OF_UNKNOWN = "{desc}: {n_fmt}, {rate_fmt}, {elapsed} gone"

_open: set[int] = set()  # bars that are shown
_closed_at = [0.0]  # when the last of them ended

if TYPE_CHECKING:
    Base = tqdm[Any]
else:
    Base = tqdm


class ProgressBar(Base):
    """Progress through ``items``, or through ``total`` units that :meth:`update` counts, ``done`` of them before.

    ``unit``: of the rate, such as ``token``; ``B`` counts bytes in kB, MB and GB. ``hidden``: shows nothing.
    """

    def __init__(
        self,
        items: Iterable[Any] | None = None,
        *,
        title: str,
        unit: str,
        total: int | None = None,
        done: int = 0,
        hidden: bool = False,
    ) -> None:
        self._closed = threading.Event()
        if not hidden:
            _open.add(id(self))
        self._in_log = not hidden and not sys.stderr.isatty()
        super().__init__(
            items,
            desc=title,
            total=total,
            unit="B" if unit == "B" else f" {unit}",
            initial=done,
            unit_scale=unit == "B",
            file=StringIO() if self._in_log else sys.stderr,  # what moves a terminal's cursor does not belong in a log
            smoothing=0.1,
            disable=hidden,
            dynamic_ncols=True,
        )
        self._writer: threading.Thread | None = None
        if self._in_log:
            self._writer = threading.Thread(target=self._write_log, args=(sys.stderr,), daemon=True)
            self._writer.start()

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def show(self, done: int, total: int | None) -> None:
        """For work that says where it is, not how far it went."""
        self.total = total
        self.update(done - self.n)

    def close(self) -> None:
        self._closed.set()
        if id(self) in _open:
            _open.discard(id(self))
            _closed_at[0] = time.monotonic()
        if self._writer is not None:
            self._writer.join()  # no line after what is printed next
            self._writer = None
        super().close()

    def _write_log(self, log: Any) -> None:
        """A line every ten seconds, also where one unit takes longer."""
        while not self._closed.wait(LOG_SECONDS):
            shown: dict[str, Any] = {**self.format_dict, "ncols": None}
            shown["bar_format"] = _LOG_LINE if self.total else _LOG_LINE_OF_UNKNOWN
            line = self.format_meter(**shown)
            # tqdm pads its numbers, and writes slow rates as "9.60s/ layer"
            log.write(f"  {' '.join(line.split()).replace('s/ ', ' s/')}\n")
            log.flush()


class Steps:
    """Whatever takes long within, by the name of its step: a line each ten seconds in which no bar is shown.

    ``title``: of all of it, said while no step has been named.
    """

    def __init__(self, title: str) -> None:
        self._title, self._step = title, ""
        self._ended = threading.Event()
        self._began = self._wrote_at = time.monotonic()
        self._writer = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Steps:
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._writer.join()  # no line after what is printed next

    def begin(self, step: str) -> None:
        if step != self._step:
            self._step = step
            self._began = self._wrote_at = time.monotonic()

    def _write(self) -> None:
        while not self._ended.wait(LOG_SECONDS / 10):
            now = time.monotonic()
            if _open or now - max(self._wrote_at, _closed_at[0]) < LOG_SECONDS:
                continue
            self._wrote_at = now
            named = f"{self._title}: {self._step}" if self._step else self._title
            sys.stderr.write(f"  {named}, {tqdm.format_interval(now - self._began)} gone\n")
            sys.stderr.flush()
