"""The engine's own process: it takes commands from a socket, steps, and sends a report after each step.

It ends when its parent does, when it is told to, and when its engine is broken. It neither spins nor steps while there
is nothing to do. What later steps would wait for (:meth:`EngineCore.prepare`) it does once a report was sent, while
the server passes tokens on, and while it is idle.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic

from runtime.constraints.compiler import ConstraintCompiler
from runtime.engine.core import EngineCore
from runtime.engine.opening import Start
from runtime.engine.sampling import BatchSampler
from runtime.engine.shared_cores import SharedCores
from runtime.wire.messages import Add, Cancel, Close, Command
from tapeout.cores import keep_to
from tapeout.errors import RequestError, TapeoutError

IDLE_MS = 500  # between two reports of an idle engine
EXIT_ORPHANED = 3


def main(descriptor: int) -> None:
    """Serve the other end of a socket: a :class:`Start` comes first, :class:`EngineInfo` or an error is the answer."""
    # Ctrl-C and service managers signal all processes of a server; this one ends when its parent has drained it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            start: Start = connection.recv()
            keep_to(start.cores)
            opened = start.open(start.folder)
        except TapeoutError as error:
            connection.send(error)
            return
        info, compiler = opened.info, None
        if opened.tokenizer is not None:
            compiler = ConstraintCompiler(opened.tokenizer, info.vocab_size, info.stop_tokens)
        sampler = BatchSampler(info.vocab_size, compiler, opened.kernel)
        core = EngineCore(opened.engine, start.limits, sampler, opened.clippings)
        cores = SharedCores(opened.threads)
        info = replace(info, server_cores=cores.servers)
        gc.freeze()  # what was imported and opened stays: the collector need not look at it again
        try:
            connection.send(info)
            serve(connection, core, compiler, cores)
        except (EOFError, ConnectionError):
            os._exit(EXIT_ORPHANED)  # the parent is gone
        finally:
            core.close()


def serve(connection: Connection, core: EngineCore, compiler: ConstraintCompiler | None, cores: SharedCores) -> None:
    """Until a :class:`Close` comes. ``compiler``: is loaded once nobody has asked for anything for a while."""
    arrived = select.poll()
    arrived.register(connection.fileno(), select.POLLIN)
    loaded = compiler is None
    while True:
        while not core.busy and not arrived.poll(0) and core.prepare():
            pass
        commands = arrived.poll(0 if core.busy else IDLE_MS)
        paused = not core.busy and not commands
        while commands:
            command: Command = pickle.loads(connection.recv_bytes())
            match command:
                case Add():
                    core.add(command.request, command.arrival)
                case Cancel():
                    core.cancel(command.id)
                case Close():
                    return
            commands = arrived.poll(0)
        if paused and not loaded and compiler is not None:
            # Else the first request with a constraint would wait for it, and everybody else with it.
            with suppress(RequestError):  # requests with constraints will be told
                compiler.load()
            loaded = True
        if core.busy:
            report = core.step(now := monotonic())
            cores.stepped(now)
        else:
            report = core.report()
        connection.send_bytes(report.encode())
        if core.busy:
            core.prepare()


def _end_with_parent(descriptor: int) -> None:
    """End this process at once when the other end of the socket is closed, even in the midst of a step."""
    closed = select.poll()
    closed.register(descriptor, select.POLLHUP)
    closed.poll()
    os._exit(EXIT_ORPHANED)
