"""The engine process: the step loop, and the two threads that keep a slow pipe away from it.

Owns: the life of one engine, from building its core to its last words. Must not know: HTTP, text, torch (only the
executor factory brings that in). Called by: engine.process_client, which spawns `run_engine` or runs `serve_core` in a
thread.

The boundary is an inherited pipe with pickle of columnar dataclasses; nothing from off the host is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from ropeway.config import Config
from ropeway.engine.core import GrammarReady, build_core
from ropeway.engine.step import Executor
from ropeway.errors import ConfigError
from ropeway.protocol import EngineFailed, EngineInput, EngineOutput, EngineReady, EngineStats, Shutdown

logger = logging.getLogger("ropeway.engine")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PROCESS_NAME = "ropeway-engine"  # the kernel keeps 15 bytes
EXIT_FLUSH_SECONDS = 5.0  # how long last words may take to leave through a full pipe
MAX_DIRECT_BYTES = 4096  # of a message that the step loop writes itself
PR_SET_NAME = 15

ExecutorFactory = Callable[[], Executor]
"""Builds the executor inside the engine process; picklable, because it travels there."""

Inbox = queue.SimpleQueue[EngineInput | GrammarReady]


def serve_core(
    config: Config, executor_factory: ExecutorFactory, inbox: Inbox, send: Callable[[EngineOutput], None]
) -> bool:
    """Builds the core, announces it with EngineReady, and steps until a Shutdown message.

    ``send`` must not block. Returns true after a clean end; otherwise EngineFailed has been sent. Nothing escapes.
    """
    try:
        executor = executor_factory()
        try:
            core, ready = build_core(config, executor, time.monotonic, post=inbox.put)
        except BaseException:
            with contextlib.suppress(Exception):
                executor.close()
            raise
    except ConfigError as error:
        send(EngineFailed(str(error), config=True))
        return False
    except Exception as error:
        # No request has been seen yet, so the text of the error cannot hold any of a prompt.
        logger.exception("the engine could not start")
        send(EngineFailed(f"the engine could not start: {type(error).__name__}: {error}"))
        return False

    stats = EngineStats()
    try:
        send(ready)
        while True:
            message = inbox.get() if core.idle else _poll(inbox)
            while message is not None:
                if isinstance(message, Shutdown):
                    return True
                core.handle(message)
                message = _poll(inbox)
            if not core.idle and (outputs := core.step()) is not None:
                stats = outputs.stats
                send(outputs)
    except Exception as error:
        # Places and counts only: the text of an error in a step may quote what a user wrote.
        counts = f"after step {stats.step_id} with {stats.num_running} running and {stats.num_waiting} waiting requests"
        logger.error(
            "the engine crashed %s: %s\n%s",
            counts,
            type(error).__name__,
            "".join(traceback.format_tb(error.__traceback__)),
        )
        send(EngineFailed(f"the engine crashed {counts}: {type(error).__name__} in {_place(error)}"))
        return False
    finally:
        with contextlib.suppress(Exception):
            core.close()


def run_engine(conn: Connection, config: Config, executor_factory: ExecutorFactory) -> None:
    """Main of the spawned process. Leaves with exit code 0 after Shutdown, 1 after EngineFailed, and at once, without
    a word, when the other end of ``conn`` is gone."""
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group. Only the API process may act on them, or there
    # would be nobody left to drain; it ends this process by a message or by SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    # What is imported and built before the engine is ready stays until the end: hundreds of thousands of objects with
    # torch. Searching them for cycles costs a tenth of the start, and later would stop a step for a tenth of a second.
    gc.disable()
    faulthandler.enable()
    logging.basicConfig(level=config.server.log_level.upper(), format=LOG_FORMAT)
    _name_process()

    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(conn, inbox), name="inbox", daemon=True).start()
    outbox = _Outbox(conn)

    def send(message: EngineOutput) -> None:
        if isinstance(message, EngineReady):
            gc.freeze()
            gc.enable()
        # Pickled here and not in the outbox thread, so that the core may go on changing what it sent (10 us for 256
        # rows).
        outbox.send(pickle.dumps(message, protocol=5))

    clean = serve_core(config, executor_factory, inbox, send)
    outbox.close(EXIT_FLUSH_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    # The core is closed. The interpreter's own tidying up takes half a second with torch, and may hang on a crashed
    # device.
    os._exit(0 if clean else 1)


def _receive(conn: Connection, inbox: Inbox) -> None:
    """Inbox thread. It blocks in the pipe from the first moment on, so a parent that dies is noticed while the model
    loads, too: no orphan holds the device's memory."""
    try:
        while True:
            inbox.put(pickle.loads(conn.recv_bytes()))
    except (EOFError, OSError):
        os._exit(1)


class _Outbox:
    """What the step loop sends. A slow reader fills a queue, which a thread empties, and never stalls the loop.

    As a rule the pipe is empty. Then a message is written at once: handed to the thread, it would leave only when the
    next step lets go of the interpreter, and on its way take a core from the model.
    """

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._room = select.poll()
        self._room.register(conn, select.POLLOUT)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_queued = 0  # written by the step loop alone
        self._num_sent = 0  # of those; written by the thread alone
        self._thread = threading.Thread(target=self._transmit, name="outbox", daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        """From the step loop only. Never blocks."""
        # A socket with room has it for far more than this.
        if len(data) <= MAX_DIRECT_BYTES and self._num_queued == self._num_sent and self._room.poll(0):
            self._write(data)
        else:
            self._num_queued += 1
            self._queue.put(data)

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _transmit(self) -> None:
        while (data := self._queue.get()) is not None:
            self._write(data)
            self._num_sent += 1

    def _write(self, data: bytes) -> None:
        try:
            self._conn.send_bytes(data)
        except OSError:
            os._exit(1)


def _poll(inbox: Inbox) -> EngineInput | GrammarReady | None:
    return None if inbox.empty() else inbox.get_nowait()  # this thread is the only one that takes


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else "?"


def _name_process() -> None:
    """For ps and top."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
