"""The engine behind its client: one set of promises for both transports, then what only a process can do."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from stub_executors import Factory, PositionExecutor

from ropeway.config import Config
from ropeway.engine.client import EngineState, TokenDelta
from ropeway.engine.process_client import InProcessEngineClient, ProcessEngineClient
from ropeway.errors import ConfigError, EngineDeadError
from ropeway.protocol import AddRequest, FinishReason, SamplingParams, StepOutputs

Client = InProcessEngineClient | ProcessEngineClient
BOTH = pytest.mark.parametrize("client_type", [InProcessEngineClient, ProcessEngineClient])
DEADLINE = 30.0
CONFIG = Config()
SLOW = Factory(step_seconds=0.002)  # long enough to act in the middle of a request
VERY_LONG = 4000


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


@asynccontextmanager
async def started(
    client_type: type[Client],
    factory: Callable[[], PositionExecutor],
    on_step: Callable[[StepOutputs], None] | None = None,
) -> AsyncIterator[Client]:
    client = client_type(CONFIG, factory, on_step)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        await asyncio.sleep(0.005)


def add(request_id: int, max_tokens: int = 5, prompt: list[int] | None = None) -> AddRequest:
    prompt = [1, 2, 3] if prompt is None else prompt
    return AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=time.monotonic())


async def collect(client: Client, request: AddRequest) -> list[TokenDelta]:
    return [delta async for delta in client.generate(request)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Recorder:
    """Remembers the last stats, and sums what the engine said of each step."""

    def __init__(self) -> None:
        self.last = StepOutputs()
        self.finished: dict[int, FinishReason] = {}
        self.generated = 0

    def __call__(self, outputs: StepOutputs) -> None:
        self.last = outputs
        assert not set(self.finished) & set(outputs.finished), "a request finished twice"
        self.finished.update(outputs.finished)
        self.generated += outputs.stats.num_new_decode_tokens

    def at_base(self) -> bool:
        stats = self.last.stats
        return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


# Both transports


@BOTH
def test_deltas_of_many_requests_are_split_and_complete(client_type: type[Client]) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with started(client_type, Factory(), recorder) as client:
            results = await asyncio.gather(*(collect(client, add(i, i + 1, [7] * (i + 1))) for i in range(40)))
            for i, deltas in enumerate(results):
                assert tokens(deltas) == list(range(i + 1, 2 * i + 2))
                assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
                assert deltas[-1].finish_reason is FinishReason.LENGTH
                assert deltas[0].num_cached_tokens is not None
                assert deltas[0].first_scheduled is not None
                assert all(delta.first_scheduled is None for delta in deltas[1:])
            assert recorder.generated == sum(range(1, 41))
            assert client.health.state is EngineState.ALIVE
            assert client.health.step_counter > 0
            assert client.health.heartbeat_age == 0.0
            assert recorder.at_base()

    run(test)


@BOTH
def test_start_returns_what_the_engine_found(client_type: type[Client]) -> None:
    async def test() -> None:
        client = client_type(CONFIG, Factory())
        assert client.health.state is EngineState.STARTING
        with pytest.raises(EngineDeadError):
            client.generate(add(1))
        ready = await client.start()
        assert (ready.architecture, ready.max_model_len, ready.num_blocks) == ("Stub", 4096, 64)
        await client.close()
        await client.close()
        assert client.health.state is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            client.generate(add(1))

    run(test)


@BOTH
def test_closing_the_iterator_aborts_once(client_type: type[Client]) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with started(client_type, SLOW, recorder) as client:
            stream = client.generate(add(1, 900))
            await anext(stream)
            await stream.aclose()
            await until(lambda: 1 in recorder.finished)
            assert recorder.finished[1] is FinishReason.ABORT
            assert recorder.at_base()
            assert tokens(await collect(client, add(2))) == [3, 4, 5, 6, 7]

    run(test)


@BOTH
def test_cancelling_the_consumer_aborts(client_type: type[Client]) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with started(client_type, SLOW, recorder) as client:
            tasks = [asyncio.create_task(collect(client, add(i, 900))) for i in range(3)]
            await until(lambda: recorder.generated > 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: len(recorder.finished) == 3 and recorder.at_base())
            assert set(recorder.finished.values()) == {FinishReason.ABORT}

    run(test)


@BOTH
def test_abort_ends_the_iterator_and_may_be_repeated(client_type: type[Client]) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with started(client_type, SLOW, recorder) as client:
            task = asyncio.create_task(collect(client, add(1, 900)))
            await until(lambda: recorder.generated > 2)
            await client.abort(1)
            await client.abort(1)
            await client.abort(12345)
            deltas = await task
            assert deltas[-1].finish_reason is FinishReason.ABORT
            assert tokens(deltas) == list(range(3, 3 + len(tokens(deltas))))
            await until(lambda: recorder.finished == {1: FinishReason.ABORT} and recorder.at_base())

    run(test)


def test_random_ends_leave_nothing_behind() -> None:
    """Aborts and closes that cross with finishes, at moments spread over the life of a request."""

    async def test() -> None:
        recorder = Recorder()
        async with started(ProcessEngineClient, Factory(step_seconds=0.0005), recorder) as client:

            async def one(i: int) -> None:
                stream = client.generate(add(i, 1 + i % 20, [7] * (1 + i % 40)))
                seen = 0
                async for delta in stream:
                    seen += 1
                    if delta.finish_reason is not None:
                        assert i % 3 == 1 or delta.finish_reason is FinishReason.LENGTH
                    elif i % 3 == 1 and seen == i % 7:
                        await client.abort(i)
                    elif i % 3 == 2 and seen >= i % 23:
                        break
                await stream.aclose()
                await client.abort(i)

            await asyncio.gather(*(one(i) for i in range(300)))
            await until(lambda: len(recorder.finished) == 300 and recorder.at_base())
            assert client.health.heartbeat_age == 0.0
            assert tokens(await collect(client, add(1000))) == [3, 4, 5, 6, 7]

    run(test)


@BOTH
def test_request_that_fails_alone(client_type: type[Client]) -> None:
    async def test() -> None:
        async with started(client_type, Factory()) as client:
            (delta,) = await collect(client, add(1, 5, [1] * 4096))
            assert delta.finish_reason is FinishReason.ERROR
            assert delta.error
            assert tokens(await collect(client, add(2))) == [3, 4, 5, 6, 7]

    run(test)


@BOTH
def test_a_config_error_at_start_is_one(client_type: type[Client]) -> None:
    async def test() -> None:
        client = client_type(CONFIG, Factory(config_error="no such folder"))
        with pytest.raises(ConfigError, match=r"^no such folder$"):
            await client.start()
        assert client.health.state is EngineState.DEAD
        assert client.health.reason == "no such folder"
        await client.close()

    run(test)


@BOTH
def test_any_other_failure_at_start_is_an_engine_death(client_type: type[Client]) -> None:
    async def test() -> None:
        client = client_type(CONFIG, Factory(crash="out of memory"))
        with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
            await client.start()
        await client.close()

    run(test)


@BOTH
def test_crashed_step_fails_streams_then_restarts(client_type: type[Client]) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with started(client_type, SLOW, recorder) as client:
            bystander = asyncio.create_task(collect(client, add(1, VERY_LONG // 8)))
            await until(lambda: recorder.generated > 0)
            with pytest.raises(EngineDeadError, match="RuntimeError") as caught:
                await collect(client, add(2, 5, [PositionExecutor.CRASH, 4711]))
            assert "4711" not in str(caught.value), "a prompt leaked into the reason"
            assert "running" in str(caught.value)
            with pytest.raises(EngineDeadError):
                await bystander
            assert recorder.at_base(), "gauges must fall to zero with the engine"
            await until(lambda: client.health.state is EngineState.ALIVE)
            assert client.health.num_restarts == 1
            assert client.health.reason == ""
            assert tokens(await collect(client, add(3))) == [3, 4, 5, 6, 7]

    run(test)


@BOTH
def test_dead_engine_refuses_at_once_and_stays_dead_for_a_config_error(
    client_type: type[Client], tmp_path: Path
) -> None:
    async def test() -> None:
        factory = Factory(once=tmp_path / "once", config_error="the folder is gone")
        async with started(client_type, factory) as client:
            with pytest.raises(EngineDeadError):
                await collect(client, add(1, 5, [PositionExecutor.CRASH]))
            with pytest.raises(EngineDeadError):
                client.generate(add(2))
            await until(lambda: client.health.reason == "the folder is gone")
            assert client.health.state is EngineState.DEAD
            assert client.health.num_restarts == 0

    run(test)


def test_heartbeat_ages_only_while_work_is_stuck() -> None:
    async def test() -> None:
        executor = PositionExecutor()
        async with started(InProcessEngineClient, lambda: executor) as client:
            await collect(client, add(1))
            assert client.health.heartbeat_age == 0.0
            task = asyncio.create_task(collect(client, add(2, 5, [PositionExecutor.HANG])))
            await until(lambda: client.health.heartbeat_age > 0.05)
            await client.abort(2)  # ends the iterator though the engine is stuck
            assert (await task)[-1].finish_reason is FinishReason.ABORT
            assert client.health.heartbeat_age == 0.0
            executor.resume.set()
            assert tokens(await collect(client, add(3))) == [3, 4, 5, 6, 7]
        assert executor.closed

    run(test)


def test_idle_engine_makes_no_steps_and_sends_nothing() -> None:
    async def test() -> None:
        executor = PositionExecutor()
        async with started(InProcessEngineClient, lambda: executor) as client:
            await collect(client, add(1, 5))
            assert executor.num_steps == 5
            reports = client.health.step_counter
            await asyncio.sleep(0.1)
            assert (executor.num_steps, client.health.step_counter) == (5, reports)

    run(test)


# What only a process can do


def engine_process(client: ProcessEngineClient) -> psutil.Process:
    assert client.engine_pid is not None
    return psutil.Process(client.engine_pid)


def test_idle_engine_uses_no_processor() -> None:
    async def test() -> None:
        async with started(ProcessEngineClient, Factory()) as client:
            await collect(client, add(1, 5))
            engine = engine_process(client)
            before = sum(engine.cpu_times()[:2])
            await asyncio.sleep(0.4)
            assert sum(engine.cpu_times()[:2]) - before < 0.2  # a spinning loop would have used all of it

    run(test)


@pytest.mark.parametrize("how", ["from outside", "in a step"])
def test_killed_engine_is_replaced(how: str) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with started(ProcessEngineClient, SLOW, recorder) as client:
            first = engine_process(client)
            streams = [asyncio.create_task(collect(client, add(i, VERY_LONG // 8))) for i in range(2)]
            await until(lambda: recorder.generated > 4)
            if how == "from outside":
                first.kill()
            else:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await collect(client, add(9, 5, [PositionExecutor.KILL]))
            for stream in streams:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await stream
            assert client.health.state is not EngineState.ALIVE
            await until(lambda: client.health.state is EngineState.ALIVE)
            assert engine_process(client).pid != first.pid
            assert not first.is_running()
            assert tokens(await collect(client, add(10))) == [3, 4, 5, 6, 7]

    run(test)


def test_engine_that_cannot_come_back_is_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        once, mended = tmp_path / "once", tmp_path / "mended"
        async with started(ProcessEngineClient, FailsUntil(once, mended)) as client:
            first = client.engine_pid
            engine_process(client).kill()
            await until(lambda: client.engine_pid != first and client.health.state is EngineState.DEAD)
            assert "exit code 7" in client.health.reason
            mended.touch()
            await until(lambda: client.health.state is EngineState.ALIVE)
            assert tokens(await collect(client, add(1))) == [3, 4, 5, 6, 7]

    run(test)


class FailsUntil:
    def __init__(self, once: Path, mended: Path) -> None:
        self.once, self.mended = once, mended

    def __call__(self) -> PositionExecutor:
        return Factory(once=self.once, die=not self.mended.exists())()


def test_every_path_leaves_no_process_thread_or_descriptor() -> None:
    process = psutil.Process()

    def census() -> tuple[int, int, set[int]]:
        gc.collect()
        names = [thread for thread in threading.enumerate() if thread.name.startswith("engine-")]
        return process.num_fds(), len(names), {child.pid for child in process.children(recursive=True)}

    async def used_and_closed() -> None:
        async with started(ProcessEngineClient, Factory()) as client:
            await collect(client, add(1))

    async def killed() -> None:
        async with started(ProcessEngineClient, SLOW) as client:
            first = client.engine_pid
            engine_process(client).kill()
            await until(lambda: client.health.state is EngineState.ALIVE and client.engine_pid != first)

    async def closed_while_down() -> None:
        client = ProcessEngineClient(CONFIG, Factory())
        await client.start()
        engine_process(client).kill()
        await until(lambda: client.health.state is not EngineState.ALIVE)
        await client.close()

    async def cancelled() -> None:
        client = ProcessEngineClient(CONFIG, Factory(hang_seconds=60))
        task = asyncio.create_task(client.start())
        await until(lambda: client.engine_pid is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.health.state is EngineState.DEAD

    async def closed_while_starting() -> None:
        client = ProcessEngineClient(CONFIG, Factory(hang_seconds=60))
        task = asyncio.create_task(client.start())
        await until(lambda: client.engine_pid is not None)
        closing = asyncio.create_task(client.close())
        with pytest.raises(EngineDeadError):
            await task
        await closing

    async def refused() -> None:
        client = ProcessEngineClient(CONFIG, Factory(config_error="no"))
        with pytest.raises(ConfigError):
            await client.start()

    run(used_and_closed)  # the first spawn also starts multiprocessing's resource tracker, which stays
    before = census()
    for path in (used_and_closed, killed, closed_while_down, cancelled, closed_while_starting, refused):
        run(path)
        assert census() == before, path.__name__


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from stub_executors import Factory
from ropeway.config import Config
from ropeway.engine.process_client import ProcessEngineClient

async def main():
    client = ProcessEngineClient(Config(), Factory(hang_seconds={hang}))
    task = asyncio.create_task(client.start())
    while client.engine_pid is None:
        await asyncio.sleep(0.01)
    if not {hang}:
        await task
    print(client.engine_pid, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("loading", [False, True])
def test_engine_follows_a_killed_parent(loading: bool, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(path=[str(Path(__file__).parent)], hang=60 if loading else 0))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            engine = psutil.Process(int(parent.stdout.readline()))
            if loading:
                wait_for(lambda: engine.name() == "ropeway-engine")
        finally:
            parent.kill()
    wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_engine_ignores_the_signals_of_its_group() -> None:
    async def test() -> None:
        async with started(ProcessEngineClient, SLOW) as client:
            assert engine_process(client).name() == "ropeway-engine"
            task = asyncio.create_task(collect(client, add(1, 50)))
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(engine_process(client).pid, number)
            assert len(tokens(await task)) == 50
            assert client.health.num_restarts == 0

    run(test)


def test_the_loop_never_waits_for_a_full_pipe() -> None:
    """More bytes than a pipe holds, sent to an engine that is stopped: the event loop goes on."""

    async def test() -> None:
        async with started(ProcessEngineClient, Factory()) as client:
            engine = engine_process(client)
            engine.suspend()
            try:
                tasks = [asyncio.create_task(collect(client, add(i, 1, [50000] * 4000))) for i in range(100)]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert len(client._live) == 100
                assert client.health.state is EngineState.ALIVE
            finally:
                engine.resume()
            results = await asyncio.gather(*tasks)
            assert all(deltas[-1].finish_reason is not None for deltas in results)

    run(test)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)
