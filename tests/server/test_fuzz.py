"""A bounded run of tests/fuzz_api.py over a scripted engine; the long one is run by hand against a real server."""

from __future__ import annotations

import asyncio

from http_harness import House, in_loop, says

from fuzz_api import fuzz


@in_loop
async def test_no_generated_request_breaks_the_server() -> None:
    house = House(says())
    async with house.serving() as url:
        statuses = await asyncio.to_thread(fuzz, url, 150)
    assert sum(counter.total() for counter in statuses.values()) >= 100
    assert any(counter[200] for counter in statuses.values())
    assert statuses["POST /v1/chat/completions"][400]
