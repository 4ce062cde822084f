"""A bounded run of tests/fuzz_api.py over a scripted engine; the long one is run by hand against a real server."""

from __future__ import annotations

import asyncio
from collections import Counter

from http_harness import House, says

from fuzz_api import fuzz
from ropeway.protocol import TokenLogprobs


def logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, 1, [token] * min(1, count), [-1.0] * min(1, count))


def test_no_generated_request_breaks_the_server() -> None:
    async def run() -> dict[str, Counter[int]]:
        async with House(says(logprobs=logprobs)).serving() as url:
            return await asyncio.to_thread(fuzz, url, 250)

    statuses = asyncio.run(run())
    assert sum(counter.total() for counter in statuses.values()) >= 150
    for operation in ("POST /v1/chat/completions", "POST /v1/responses", "POST /v1/completions"):
        assert statuses[operation][200], operation
        assert statuses[operation][400], operation
