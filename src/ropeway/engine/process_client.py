"""The engine clients: one that owns and supervises an engine process, and one over a thread, for tests.

Owns: the table of live requests, the split of step messages into per-request deltas, the restart of a dead engine.
Must not know: text, HTTP, torch, what the engine does inside. Called by: cli (the process client), tests.

Everything runs in the event loop except the two threads of a transport. They meet the loop in one place each:
`call_soon_threadsafe` once per step on the way up, a queue that never blocks on the way down.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import pickle
import queue
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from ropeway.config import Config
from ropeway.engine.client import EngineHealth, EngineState, StatsListener, TokenDelta
from ropeway.engine.process import PROCESS_NAME, ExecutorFactory, Inbox, run_engine, serve_core
from ropeway.errors import ConfigError, EngineDeadError
from ropeway.protocol import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineReady,
    EngineStats,
    FinishReason,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
)

logger = logging.getLogger("ropeway.engine")

CLOSE_SECONDS = 5.0  # a healthy engine leaves within a step
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 10.0
STABLE_SECONDS = 30.0  # an engine that lived so long earns an immediate restart


class _Transport(Protocol):
    """One engine and the way to it. The constructor starts it; messages come from a thread of the transport through
    ``deliver``, and ``ended(how)`` is the last thing it calls."""

    def __init__(
        self,
        config: Config,
        executor_factory: ExecutorFactory,
        deliver: Callable[[EngineOutput], None],
        ended: Callable[[str], None],
    ) -> None: ...

    def send(self, message: EngineInput) -> None:
        """Never blocks; to an engine that is gone it does nothing."""
        ...

    def stop(self, timeout: float) -> None:
        """Blocks until engine, threads and pipe are gone; kills after ``timeout`` seconds. Idempotent."""
        ...


class _EngineProcess:
    """A spawned engine process. The reader thread alone reaps it, so its exit code is read once."""

    def __init__(
        self,
        config: Config,
        executor_factory: ExecutorFactory,
        deliver: Callable[[EngineOutput], None],
        ended: Callable[[str], None],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe(duplex=True)
        # Not daemonic: an engine may have rank processes of its own. It leaves with us by the closing of the pipe.
        self.process = context.Process(
            target=run_engine, args=(theirs, config, executor_factory), name=PROCESS_NAME, daemon=False
        )
        # The child inherits the mask, so a Ctrl-C before it reaches run_engine does not end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self.process.start()
        except BaseException:
            self._conn.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        atexit.register(self.process.kill)  # before multiprocessing's own hook, which would wait for it for ever
        self.pid = self.process.pid
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._outbox: queue.SimpleQueue[EngineInput | None] = queue.SimpleQueue()
        self._deliver, self._ended = deliver, ended
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: EngineInput) -> None:
        self._outbox.put(message)

    def stop(self, timeout: float) -> None:
        with self._stop_lock:
            if self._stopped:
                return
            self._stopped = True
            if timeout > 0:
                self.send(Shutdown())
                self._reader.join(timeout)
            if self._reader.is_alive():
                self.process.kill()
                self._reader.join()
            self._outbox.put(None)
            self._writer.join()
            atexit.unregister(self.process.kill)
            self._conn.close()
            self.process.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the engine is gone; the reader notices
            while (message := self._outbox.get()) is not None:
                self._conn.send_bytes(pickle.dumps(message, protocol=5))

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._deliver(pickle.loads(self._conn.recv_bytes()))
        self.process.join()
        code = self.process.exitcode or 0
        self._ended(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")


class _EngineThread:
    """The same engine in a thread of this process. It cannot be killed, so `stop` always waits for its step."""

    def __init__(
        self,
        config: Config,
        executor_factory: ExecutorFactory,
        deliver: Callable[[EngineOutput], None],
        ended: Callable[[str], None],
    ) -> None:
        self._inbox: Inbox = queue.SimpleQueue()

        def run() -> None:
            clean = serve_core(config, executor_factory, self._inbox, deliver)
            ended("left" if clean else "failed")

        self._thread = threading.Thread(target=run, name=PROCESS_NAME, daemon=True)
        self._thread.start()

    def send(self, message: EngineInput) -> None:
        self._inbox.put(message)

    def stop(self, timeout: float) -> None:
        self._inbox.put(Shutdown())
        self._thread.join()


class _LiveRequest:
    """What the API process holds of one request that the engine still owes tokens.

    ``request`` (prompt and parameters) with ``output_token_ids`` (all that the engine has sent) is what resuming it on a
    new engine needs: ``AddRequest.output_token_ids``.

    A delta that nobody has taken when the next one comes is late: its reader is behind the engine, or waits for a slow
    client. The two become one, so a reader that is late catches up at the price of one delta, and the queue stays short
    however slow it is. The first delta is never joined with others, and nothing ever waits to be joined.
    """

    __slots__ = ("_first_is_taken", "_pending", "_waiter", "output_token_ids", "request")

    def __init__(self, request: AddRequest) -> None:
        self.request = request
        self.output_token_ids = list(request.output_token_ids)
        self._pending: list[TokenDelta | EngineDeadError] = []  # at most the first delta, one more, and an error
        self._first_is_taken = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: TokenDelta | EngineDeadError) -> None:
        pending = self._pending
        if len(pending) > (not self._first_is_taken) and isinstance(item, TokenDelta):
            late = pending[-1]
            assert isinstance(late, TokenDelta), "an engine that is dead says nothing more"
            _join(late, item)
            return
        pending.append(item)
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def arrival(self) -> asyncio.Future[None] | None:
        """To be awaited before `take`, if there is nothing to take yet. For one task at a time."""
        if self._pending:
            return None
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take(self) -> TokenDelta:
        self._first_is_taken = True
        item = self._pending.pop(0)
        if isinstance(item, EngineDeadError):
            raise item
        return item


def _join(late: TokenDelta, delta: TokenDelta) -> None:
    """Add to ``late`` what came after it."""
    late.token_ids += delta.token_ids
    if delta.logprobs is not None:
        late.logprobs = [*(late.logprobs or ()), *delta.logprobs]
    late.finish_reason, late.stop_reason, late.error = delta.finish_reason, delta.stop_reason, delta.error


def _detailed(outputs: StepOutputs, request_id: int, token_ids: list[int]) -> TokenDelta:
    return TokenDelta(
        token_ids,
        outputs.finished.get(request_id),
        outputs.stop_reasons.get(request_id),
        outputs.logprobs.get(request_id),
        outputs.cached_tokens.get(request_id),
        outputs.first_scheduled.get(request_id),
        outputs.errors.get(request_id),
        outputs.prompt_logprobs.get(request_id),
        outputs.embeddings.get(request_id),
    )


class _SupervisedClient:
    """An EngineClient over any transport. All methods but the constructor belong to one event loop."""

    _transport_type: type[_Transport]

    def __init__(self, config: Config, executor_factory: ExecutorFactory, on_step: StatsListener | None = None) -> None:
        self._config = config
        self._executor_factory = executor_factory
        self._on_step = on_step
        # A request is in here exactly as long as the engine has it, as far as this process knows. Whoever takes it out
        # before its finish arrived owes the engine an abort; so each request is aborted at most once.
        self._live: dict[int, _LiveRequest] = {}
        self._transport: _Transport | None = None
        self._generation = 0  # of the transport; messages of older ones are ignored
        self._started: asyncio.Future[EngineReady] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._state = EngineState.STARTING
        self._reason = ""
        self._last_words: EngineFailed | None = None
        self._num_blocks = 0
        self._num_restarts = 0
        self._step_counter = 0
        self._last_report = 0.0
        self._alive_since = 0.0
        self._next_delay = 0.0
        self._closed = False

    async def start(self) -> EngineReady:
        """Returns when the engine can serve. Raises ConfigError if it cannot as configured, EngineDeadError if it
        died otherwise. A start that is cancelled leaves nothing behind."""
        return await self._launch()

    def generate(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        """See EngineClient. Raises EngineDeadError at once, before the first delta is asked for, if no engine runs.

        The request is sent when the first delta is asked for, so an iterator that is dropped unused costs nothing.
        """
        self._check_alive()
        return self._stream(request)

    async def _stream(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        self._check_alive()
        request_id = request.request_id
        if request_id in self._live:
            raise ValueError(f"request id {request_id} is in use")
        if not self._live:
            self._last_report = time.monotonic()  # the engine was idle until now
        live = self._live[request_id] = _LiveRequest(request)
        self._send(request)
        try:
            while True:
                if (arrival := live.arrival()) is not None:
                    await arrival
                delta = live.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if self._live.get(request_id) is live:
                del self._live[request_id]
                self._send(AbortRequests([request_id]))

    async def abort(self, request_id: int) -> None:
        # Ended here and now, not when the engine confirms: that also works while the engine is stuck.
        if (live := self._live.pop(request_id, None)) is not None:
            self._send(AbortRequests([request_id]))
            live.put(TokenDelta([], finish_reason=FinishReason.ABORT))

    async def abort_all(self) -> None:
        """Ends every live request with FinishReason.ABORT; for the end of a drain."""
        for request_id in list(self._live):
            await self.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        self._check_alive()
        self._send(ResetPrefixCache())

    @property
    def health(self) -> EngineHealth:
        busy = self._state is EngineState.ALIVE and bool(self._live)
        return EngineHealth(
            state=self._state,
            step_counter=self._step_counter,
            heartbeat_age=time.monotonic() - self._last_report if busy else 0.0,
            num_restarts=self._num_restarts,
            reason=self._reason,
        )

    async def close(self) -> None:
        """Ends the engine and every live iterator. Idempotent; after it, nothing restarts."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        # Only an engine in its step loop reads a farewell; one that loads would let us wait.
        patience = CLOSE_SECONDS if self._state is EngineState.ALIVE else 0.0
        self._bury("the engine client was closed")
        if self._transport is not None:
            await asyncio.shield(asyncio.to_thread(self._transport.stop, patience))

    def _check_alive(self) -> None:
        if self._state is not EngineState.ALIVE:
            raise EngineDeadError(self._reason or "the engine is starting")

    def _send(self, message: EngineInput) -> None:
        if self._transport is not None:
            self._transport.send(message)

    async def _launch(self) -> EngineReady:
        if self._closed:
            raise EngineDeadError("the engine client was closed")
        loop = asyncio.get_running_loop()
        self._generation += 1
        generation = self._generation
        self._state, self._last_words = EngineState.STARTING, None
        started: asyncio.Future[EngineReady] = loop.create_future()
        self._started = started

        def post(callback: Callable[..., None], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(callback, generation, *args)

        transport = self._transport = self._transport_type(
            self._config,
            self._executor_factory,
            lambda message: post(self._on_message, message),
            lambda how: post(self._on_end, how),
        )
        try:
            return await started
        except BaseException as error:
            self._bury(str(error) or "the start was cancelled")
            await asyncio.shield(asyncio.to_thread(transport.stop, 0.0))
            raise

    def _on_message(self, generation: int, message: EngineOutput) -> None:
        if generation != self._generation:
            return
        if isinstance(message, StepOutputs):
            self._dispatch(message)
        elif isinstance(message, EngineReady):
            self._state, self._reason = EngineState.ALIVE, ""
            self._num_blocks, self._alive_since = message.num_blocks, time.monotonic()
            if self._started is not None and not self._started.done():
                self._started.set_result(message)
        else:
            self._last_words = message

    def _dispatch(self, outputs: StepOutputs) -> None:
        """One step's columns to the queues of their requests."""
        self._step_counter += 1
        self._last_report = time.monotonic()
        requests, flat = self._live, outputs.token_ids
        # Most rows are a token and nothing else: only these requests have an entry in one of the sparse columns.
        told = outputs.finished.keys() | outputs.logprobs.keys() | outputs.cached_tokens.keys()
        told |= outputs.first_scheduled.keys()
        end = 0
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            start, end = end, end + count
            live = requests.get(request_id)
            if live is None:  # aborted here; the engine had not heard of it yet
                continue
            token_ids = flat[start:end]
            live.output_token_ids += token_ids
            if told and request_id in told:
                delta = _detailed(outputs, request_id, token_ids)
                if delta.finish_reason is not None:
                    del requests[request_id]
            else:
                delta = TokenDelta(token_ids)
            live.put(delta)
        if self._on_step is not None:
            self._on_step(outputs)

    def _on_end(self, generation: int, how: str) -> None:
        """The engine is gone and nobody asked it to go."""
        if generation != self._generation:
            return
        failure = self._last_words or EngineFailed(f"the engine {how}")
        if self._started is not None and not self._started.done():
            error = ConfigError(failure.message) if failure.config else EngineDeadError(failure.message)
            self._started.set_exception(error)  # _launch goes on from here
            return
        logger.error("%s; requests in flight that fail: %d; restarting", failure.message, len(self._live))
        if time.monotonic() - self._alive_since >= STABLE_SECONDS:
            self._next_delay = 0.0
        self._bury(failure.message)
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    def _bury(self, reason: str) -> None:
        """No engine from here on: its messages are ignored, its requests fail, its gauges return to zero."""
        self._generation += 1
        self._state, self._reason = EngineState.DEAD, reason
        live, self._live = self._live, {}
        for request in live.values():
            request.put(EngineDeadError(reason))
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDeadError(reason))
        if self._on_step is not None and self._num_blocks:
            self._on_step(StepOutputs(stats=EngineStats(num_blocks=self._num_blocks)))

    async def _restart(self) -> None:
        """Immediately once, then after growing pauses, for ever. But a configuration that no longer works (the model's
        folder is gone, say) will not mend itself: there it stays dead and says why."""
        assert self._transport is not None
        await asyncio.to_thread(self._transport.stop, 0.0)
        while True:
            delay = self._next_delay
            self._next_delay = min(max(2 * delay, FIRST_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
            await asyncio.sleep(delay)
            try:
                await self._launch()
            except ConfigError as error:
                logger.error("the engine cannot be restarted: %s", error)
                return
            except Exception as error:
                logger.error("restart of the engine failed: %s; next try in %.1f s", error, self._next_delay)
            else:
                self._num_restarts += 1
                logger.warning("the engine was restarted (restart %d)", self._num_restarts)
                return


class ProcessEngineClient(_SupervisedClient):
    """The engine in a process of its own. ``executor_factory`` is picklable and runs there."""

    _transport_type = _EngineProcess

    @property
    def engine_pid(self) -> int | None:
        """Of the newest engine process, dead or alive; None before the start."""
        return self._transport.pid if isinstance(self._transport, _EngineProcess) else None


class InProcessEngineClient(_SupervisedClient):
    """The engine in a thread of this process, for tests: no pickle, no spawn, and it can be looked into."""

    _transport_type = _EngineThread
