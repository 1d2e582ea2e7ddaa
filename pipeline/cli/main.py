"""The ``tapeout`` command. It reads options and delegates; heavy modules are imported when a command needs them.

Exit codes: 0 pass, 1 gate failed, 2 something broke, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.core

import tapeout
from pipeline.cli.panels import build, explain, judge, use
from tapeout.errors import ExitCode, TapeoutError

INTERRUPTED = 130
# Errors that the machine's owner can mend, and how.
OF_THE_SYSTEM = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n 65536`, or LimitNOFILE of a systemd unit)",
    errno.ENFILE: "close programs: the system has no more open files for all of them together",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free space of your disk quota",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "correct the permissions of the file, or choose another folder",
}
# Nothing is left to collect when the process ends; looking for it took 55 ms of a command of half a second.
atexit.register(gc.freeze)


class Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run the command. If the reader of its output closed the pipe (``tapeout inspect … | head``), exit with 2.

        By default the framework would exit with 1, which here means that the gate failed. ``ctx.obj``: whether a
        script reads the output, which gets what is wrong with the command, too.
        """
        try:
            try:
                return super().invoke(ctx)
            except Exception as error:
                if ctx.obj and hasattr(error, "format_message"):  # of the framework, which prints it and exits
                    print_error({"found": error.format_message()})  # pyright: ignore[reportAttributeAccessIssue]
                raise
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Buffered output cannot be written any more, and must not fail again when the interpreter exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.BROKEN) from None


app = typer.Typer(
    name="tapeout",
    cls=Commands,
    help="From a trained checkpoint to a compiled, quantized, proven inference engine.\n\n"
    "`make repro` builds and judges an engine; these commands use and explain what it built. "
    "Exit codes: 0 pass, 1 gate failed, 2 something broke, 3 inconclusive.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(asked: bool) -> None:
    if asked:
        print(f"tapeout {tapeout.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass  # main() reads --debug, because it also applies to errors before this function


for panel in (use, judge, explain, build):
    app.add_typer(panel.commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an expected error is one message, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    code: Any = ExitCode.PASS
    try:
        app(words, prog_name="tapeout", obj=as_json)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as finished:
        code = finished.code
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        print(message(error), file=sys.stderr)
        if as_json:
            own = isinstance(error, TapeoutError)
            parts = {"expected": error.expected, "remedy": error.remedy} if own else dict[str, str]()
            print_error({"found": error.found if own else f"{type(error).__name__}: {error}"} | parts)
        code = ExitCode.BROKEN
    if code == INTERRUPTED:
        print("\ninterrupted; nothing half-written was left behind", file=sys.stderr)
    return int(code or ExitCode.PASS)


def print_error(parts: Mapping[str, str]) -> None:
    """For a script, which reads the standard output: an error is JSON as a result is."""
    whole = dict.fromkeys(("found", "expected", "remedy"), "") | dict(parts)
    print(json.dumps({"error": whole}, indent=1), flush=True)


def message(error: Exception) -> str:
    """What the user reads instead of a traceback."""
    if isinstance(error, TapeoutError):
        return f"error: {error}"
    behind: BaseException | None = error
    while behind is not None:  # a library that fails once more while it closes what it opened hides the first error
        if isinstance(behind, OSError) and behind.errno in OF_THE_SYSTEM:
            return f"error: {behind}\n  remedy:   {OF_THE_SYSTEM[behind.errno]}, and run this again"
        behind = behind.__cause__ or behind.__context__
    return (
        f"error: {type(error).__name__}: {error}\n  this is a fault in tapeout, not in what you asked for\n"
        "  remedy:   `tapeout --debug …` shows where; please report it"
    )
