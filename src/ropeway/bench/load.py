"""When requests are sent: arrival times, and the loop that keeps to them under a bound on how many run at once.

Owns: the schedule of one run. Must not know: HTTP, what a request holds. Called by: bench.serve.
The clock and the sleep are injected, so that tests run it on a virtual clock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

import numpy as np

from ropeway.bench.report import RequestOutcome


def arrival_times(count: int, request_rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds after the start, one for each request.

    request_rate: per second; infinite sends all of them at once. Gaps follow a gamma distribution whose shape is
    burstiness (1: a Poisson process; less: bursts; more: even), scaled so that the last request comes at
    count / request_rate and the rate is what was asked for.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, 1 / (burstiness * request_rate), count))
    if times[-1] > 0:
        times *= count / request_rate / times[-1]
    return [float(moment) for moment in times]


async def run_load(
    send: Callable[[int], Awaitable[RequestOutcome]],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[RequestOutcome], None] = lambda outcome: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[list[RequestOutcome], float]:
    """Calls ``send(index)`` at each arrival; returns the outcomes by index and the seconds until the last was there.

    arrivals: ascending, seconds after the start. A request that finds max_concurrency others running waits, and is
    sent, and timed, from when it may go.
    """
    permits = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def one(index: int) -> RequestOutcome:
        async with permits:
            outcome = await send(index)
        on_done(outcome)
        return outcome

    start = clock()
    async with asyncio.TaskGroup() as tasks:
        running = []
        for index, arrival in enumerate(arrivals):
            wait = start + arrival - clock()
            if wait > 0:
                await sleep(wait)
            running.append(tasks.create_task(one(index)))
    return [task.result() for task in running], clock() - start
