"""Arrival times, and the loop that keeps to them, on a virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

import numpy as np
import pytest

from ropeway.bench.load import arrival_times, run_load
from ropeway.bench.report import RequestOutcome


class VirtualTime:
    """A clock that jumps to the next sleeper when everybody waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now + seconds, self._count, future))
        await future

    async def drive(self) -> None:
        while True:
            for _ in range(50):
                await asyncio.sleep(0)
            if self._sleepers:
                self.now, _, future = heapq.heappop(self._sleepers)
                future.set_result(None)


def simulate(
    arrivals: list[float], service: Callable[[int], float], max_concurrency: int | None = None
) -> tuple[list[float], list[int], float]:
    """When each request was sent (after the start), in which order they ended, and the run's duration."""
    time = VirtualTime()
    ended: list[int] = []

    async def send(index: int) -> RequestOutcome:
        outcome = RequestOutcome(start=time.now - 1000, output_len=index)
        await time.sleep(service(index))
        return outcome

    async def run() -> tuple[list[RequestOutcome], float]:
        driver = asyncio.create_task(time.drive())
        try:
            return await run_load(
                send,
                arrivals,
                max_concurrency=max_concurrency,
                on_done=lambda outcome: ended.append(outcome.output_len),
                clock=time.clock,
                sleep=time.sleep,
            )
        finally:
            driver.cancel()

    outcomes, duration = asyncio.run(run())
    assert [outcome.output_len for outcome in outcomes] == list(range(len(arrivals)))
    return [outcome.start for outcome in outcomes], ended, duration


def test_requests_are_sent_when_they_arrive() -> None:
    starts, ended, duration = simulate([0.0, 0.5, 0.5, 4.0], lambda index: [3.0, 1.0, 0.5, 2.0][index])
    assert starts == [0.0, 0.5, 0.5, 4.0]
    assert ended == [2, 1, 0, 3]
    assert duration == 6.0


def test_those_beyond_the_bound_wait_in_order() -> None:
    starts, _, duration = simulate([0.0] * 5, lambda index: float(index + 1), max_concurrency=2)
    assert starts == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert duration == 9.0


def test_arrivals_go_on_while_requests_wait() -> None:
    starts, _, _ = simulate([0.0, 1.0, 2.0, 9.0], lambda index: 4.0, max_concurrency=1)
    assert starts == [0.0, 4.0, 8.0, 12.0]


def test_an_unlimited_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float) -> None:
    times = arrival_times(4000, 8.0, burstiness, np.random.default_rng(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 8.0)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)  # of a gamma distribution
    assert times == arrival_times(4000, 8.0, burstiness, np.random.default_rng(1))
