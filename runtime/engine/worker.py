"""The engine's own process: it takes commands from servers, steps, and sends a report after each step.

Started by a server it ends with it, when it is told to, and when its engine is broken. Listening at an address it stays
while servers come and go. It neither spins nor steps while there is nothing to do. What later steps would wait for
(:meth:`EngineCore.prepare`) it does once a report was sent, while the server passes tokens on, and while it is idle.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from runtime.constraints.compiler import ConstraintCompiler
from runtime.engine.connections import BEAT_SECONDS, Connections
from runtime.engine.core import EngineCore
from runtime.engine.moving.moves import BlockMoves
from runtime.engine.opening import Opened, Opener, open_bundle
from runtime.engine.sampling import BatchSampler
from runtime.engine.shared_cores import SharedCores
from runtime.wire.failures import Failure
from runtime.wire.messages import Reopen
from runtime.wire.start import Start
from tapeout.cores import keep_to
from tapeout.errors import RequestError, TapeoutError

IDLE_MS = 500  # between two reports of an idle engine
FETCHING_MS = 50  # between two looks at a fetch that brings nothing
EXIT_ORPHANED = 3
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(opener: Opener = open_bundle) -> None:
    """Of ``python -m runtime.engine.worker DESCRIPTOR START``: the inherited end of a socket, and a :class:`Start`."""
    descriptor, start = int(sys.argv[1]), Start.decode(sys.argv[2])
    # Ctrl-C and service managers signal all processes of a server; this one ends when its parent has drained it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    end = socket.socket(fileno=descriptor)
    try:
        keep_to(start.cores)
        if start.settings.background:
            _give_way()
        opened = opener(Path(start.bundle), start.settings)
    except TapeoutError as error:
        connections = Connections(Failure.of(error), ends=(end,))
        while not (connections.answered or connections.ended):
            connections.receive(IDLE_MS)
        return
    cores = SharedCores(opened.threads)
    opened = opened._replace(info=replace(opened.info, server_cores=cores.servers))
    _run(opened, start, cores, Connections(opened.info, opened.folder, ends=(end,)))


def listen(
    start: Start, listener: socket.socket, key: bytes, opener: Opener = open_bundle, *, notice: str = ""
) -> Reopen | None:
    """Open a bundle and serve whoever connects and has the same key, until SIGTERM or SIGINT.

    Or until a server asks for another bundle, which is returned. ``notice``: see :class:`EngineInfo`.
    :class:`TapeoutError` if it cannot be opened.
    """
    settings = start.settings
    opened = opener(Path(start.bundle), settings)
    opened = opened._replace(info=replace(opened.info, notice=notice, pool=settings.pool, source=settings.source))
    connections = Connections(opened.info, opened.folder, listener=listener, key=key)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(connections, ended), name="heartbeat", daemon=True).start()
    try:
        _run(opened, start, SharedCores(threads=0), connections, key)
    except KeyboardInterrupt:
        return None
    finally:
        ended.set()
        gc.unfreeze()  # what is left of the engine can be collected before another one opens
    return connections.reopen


def _run(opened: Opened, start: Start, cores: SharedCores, connections: Connections, key: bytes = b"") -> None:
    info, compiler = opened.info, None
    if opened.tokenizer is not None:
        compiler = ConstraintCompiler(opened.tokenizer, info.vocab_size, info.stop_tokens)
    sampler = BatchSampler(info.vocab_size, compiler, opened.kernel)
    core = EngineCore(opened.engine, start.limits, sampler, opened.clippings)
    gc.freeze()  # what was imported and opened stays: the collector need not look at it again
    moves = BlockMoves(core, info, key)
    connections.offer(core.blocks, moves)
    try:
        serve(connections, core, compiler, cores, moves)
    finally:
        connections.close()
        moves.close()
        core.close()


def serve(
    connections: Connections,
    core: EngineCore,
    compiler: ConstraintCompiler | None,
    cores: SharedCores,
    moves: BlockMoves,
) -> None:
    """While there are connections. ``compiler``: is loaded once nobody has asked for anything for a while.

    An engine that is asked to open another bundle first ends its requests, as long as it was given for that.
    """
    loaded, leave_at, reported = compiler is None, math.inf, 0.0
    while not connections.ended:
        if connections.reopen is not None:
            leave_at = min(leave_at, time.monotonic() + connections.reopen.drain_seconds)
            if time.monotonic() >= leave_at or (connections.quiet and not (core.busy or moves.waiting)):
                return  # quiet: what servers had sent before they heard of it has come
        # It keeps Python's lock, which the threads that copy blocks need.
        while not (core.busy or moves.waiting or connections.waiting()) and core.prepare():
            pass
        patience = FETCHING_MS if moves.waiting else IDLE_MS
        commands = connections.receive(0 if core.busy or connections.behind else patience)
        for command in commands:
            moves.take(command)
        moving = moves.work(connections.senders)
        if moving and not (core.busy or commands or moves.arrived) and time.monotonic() < reported + IDLE_MS / 2000:
            continue  # nobody needs a report for each part of a fetch
        if compiler is not None and connections.quiet and not (loaded or core.busy or moving or moves.waiting):
            # Else the first request with a constraint would wait for it, and everybody else with it.
            with suppress(RequestError):  # requests with constraints will be told
                compiler.load()
            loaded = True
        if core.busy:
            report = core.step(now := time.monotonic())
            cores.stepped(now)
            for command in connections.receive(0):  # so that the report counts what came during the step
                moves.take(command)
        else:
            report = core.report()
        connections.send(report, core.routing)
        reported = time.monotonic()
        if core.busy:
            core.prepare()


def _beat(connections: Connections, ended: threading.Event) -> None:
    """Steps and constraints are computed outside the interpreter's lock, so this goes on however long they take."""
    while not ended.wait(BEAT_SECONDS):
        connections.beat()


def _give_way() -> None:
    """Run only while no other process wants the processor. Be killed with the parent: while stopped, it is not seen."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # threads that are started from now on have it too


def _end_with_parent(descriptor: int) -> None:
    """End this process at once when the other end of the socket is closed, even in the midst of a step."""
    closed = select.poll()
    closed.register(descriptor, select.POLLHUP)
    closed.poll()
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    main()
