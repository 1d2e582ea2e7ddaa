"""Checks constraints in a process of its own, which a hostile one may exhaust or crash without harm.

The process is started with the first constraint, and again after one that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.constraints.size import check_size
from runtime.wire.messages import Constraint
from tapeout.errors import RequestError, TapeoutError

if TYPE_CHECKING:
    from runtime.constraints.compiler import ConstraintCompiler

# Of processor time for one constraint: to compile it, for which a step may wait where it is compiled again, and then to
# follow some responses.
COMPILE_SECONDS, PROBE_SECONDS = 0.2, 0.5
MOST_MEMORY_BYTES = 4 << 30
STACK_BYTES = 4 << 20  # less than where constraints are compiled for use, so what passes has room there
REMEMBERED = 256  # constraints that passed or failed


class ConstraintChecker:
    """For a server. ``tokenizer``: the path of ``tokenizer.json``. Calls from several threads wait in turn."""

    def __init__(self, tokenizer: Path, vocab_size: int, stop_tokens: Iterable[int]) -> None:
        self._command = [sys.executable, "-P", "-m", __name__, str(tokenizer), str(vocab_size)]
        self._command += map(str, sorted(stop_tokens))
        self._process: subprocess.Popen[str] | None = None
        self._known: OrderedDict[Constraint, tuple[RequestError | None]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, constraint: Constraint) -> None:
        """:class:`RequestError` for a constraint that is invalid, unsupported or too complex; :class:`TapeoutError`
        where the process cannot check any.

        Takes some 20 milliseconds, and at most the seconds above and the start of a process (half a second): call it in
        a thread.
        """
        check_size(constraint)  # all else takes time that a hostile text can stretch
        known = self._known.get(constraint)  # those that are known need not wait for others
        if known is None:
            with self._lock:
                known = self._known.get(constraint) or (self._ask(constraint),)
                self._known[constraint] = known
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        (error,) = known
        if error is not None:
            raise RequestError(error.found, expected=error.expected, remedy=error.remedy)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, constraint: Constraint) -> RequestError | None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([constraint.kind, constraint.text]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            ended = self._process.wait()
            self._end()
            return _ended(constraint, ended)
        found, expected, remedy = json.loads(line)
        return RequestError(found, expected=expected, remedy=remedy) if found else None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _ended(constraint: Constraint, code: int) -> RequestError:
    """Why a constraint has ended the process. :class:`TapeoutError` where it was not the constraint."""
    if code >= 0:
        raise TapeoutError(
            f"the process that checks constraints ended with exit code {code}",
            expected="one that reads the model's tokenizer.json",
            remedy="the server's log has its error",
        )
    if code == -signal.SIGPROF:
        return RequestError(
            f"a {constraint.kind} constraint that takes too long to compile",
            expected=f"at most {COMPILE_SECONDS + PROBE_SECONDS} seconds of processor time",
            remedy="simplify it",
        )
    return RequestError(
        f"a {constraint.kind} constraint that ends the compiler ({signal.Signals(-code).name})",
        expected=f"one that takes at most {STACK_BYTES >> 20} MiB of stack and {MOST_MEMORY_BYTES >> 30} GiB of memory",
        remedy="simplify it: it is nested too deeply, or too large",
    )


def main() -> None:
    """One line of JSON in for each constraint, one out: what was found, expected and to do; empty if it passes."""
    import resource

    from runtime.constraints.compiler import ConstraintCompiler  # numpy is for this process, not for the server's

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server ends this process
    # A crash or an exhausted limit ends this process at once, without a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    tokenizer, vocab_size, *stop_tokens = sys.argv[1:]
    text = Path(tokenizer).read_text(encoding="utf-8")
    compiler = ConstraintCompiler(text, int(vocab_size), map(int, stop_tokens))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer, args=[compiler])
    thread.start()
    thread.join()


def _answer(compiler: ConstraintCompiler) -> None:
    from runtime.constraints.compiler import cannot_be_compiled

    for line in sys.stdin:
        kind, text = json.loads(line)
        answer = ("", "", "")
        try:
            compiler.load()
            signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # its signal ends the process
            compiler.check(Constraint(kind, text), compiled=lambda: signal.setitimer(signal.ITIMER_PROF, PROBE_SECONDS))
        except RequestError as error:
            answer = (error.found, error.expected, error.remedy)
        except BaseException as error:  # a panic of the library is not an Exception
            refused = cannot_be_compiled(f"{type(error).__name__}: {error}")
            answer = (refused.found, refused.expected, refused.remedy)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
