"""What a user sees must not depend on who else is served: preempted, seeded, and beside clients that come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_server import MODEL, Server, running

ALPHABET = "abcdefghijklmnopqrstuvwxyz ,.ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def text_of(length: int, seed: int) -> str:
    """One token per letter in the tiny model."""
    return "".join(random.Random(seed).choices(ALPHABET, k=length))


STEM = text_of(32, 99)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": text_of(31, 1), "temperature": 0},
    {"prompt": STEM + text_of(1, 2), "temperature": 0},
    {"prompt": STEM + text_of(17, 3), "temperature": 1, "seed": 42},
    {"prompt": text_of(47, 4), "temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.5},
    {"prompt": text_of(48, 5), "temperature": 0.8, "seed": 7, "min_tokens": 30, "ignore_eos": False},
    {"prompt": text_of(33, 6), "temperature": 0, "logprobs": 2},
    {"prompt": text_of(49, 7), "temperature": 1.2, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
    {"prompt": text_of(16, 8), "temperature": 1, "seed": 5, "min_p": 0.05, "n": 2},
]


async def complete(client: Any, request: dict[str, Any], stream: bool) -> dict[str, Any]:
    """What the client got: texts, reasons, log-probabilities and usage, streamed or not."""
    known = {key: request[key] for key in request if key in ("prompt", "temperature", "seed", "n", "logprobs", "top_p")}
    known |= {key: request[key] for key in request if key.endswith("_penalty") and key != "repetition_penalty"}
    extra = {"ignore_eos": True} | {key: value for key, value in request.items() if key not in known}
    count = request.get("n", 1)
    answer = {"texts": [""] * count, "reasons": [None] * count, "logprobs": [[] for _ in range(count)]}
    if stream:
        options = {"include_usage": True}
        chunks = await client.completions.create(
            model=MODEL, max_tokens=60, stream=True, stream_options=options, extra_body=extra, **known
        )
        parts = [(chunk.choices, chunk.usage) async for chunk in chunks]
    else:
        whole = await client.completions.create(model=MODEL, max_tokens=60, extra_body=extra, **known)
        parts = [(whole.choices, whole.usage)]
    for choices, usage in parts:
        for choice in choices:
            answer["texts"][choice.index] += choice.text
            answer["reasons"][choice.index] = choice.finish_reason or answer["reasons"][choice.index]
            if choice.logprobs is not None:
                answer["logprobs"][choice.index] += [round(value, 3) for value in choice.logprobs.token_logprobs]
        if usage is not None:
            answer["usage"] = (usage.prompt_tokens, usage.completion_tokens)
    return answer


@pytest.fixture(scope="module")
def scarce(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A KV pool of 12 blocks of 16 tokens: two of the requests above fill it."""
    flags = [str(tiny_model), "--load-format", "dummy", "--served-model-name", MODEL, "--num-threads", "1"]
    with running([*flags, "--num-gpu-blocks-override", "12"], tmp_path_factory.mktemp("scarce")) as server:
        yield server


def test_preemption_changes_nothing_that_a_client_sees(server: Server, scarce: Server) -> None:
    async def alone() -> list[dict[str, Any]]:
        async with server.async_client() as client:
            return [await complete(client, request, stream=False) for request in REQUESTS]

    async def together() -> list[dict[str, Any]]:
        async with scarce.async_client() as client:
            jobs = [complete(client, request, stream=index % 2 == 0) for index, request in enumerate(REQUESTS)]
            return list(await asyncio.gather(*jobs))

    expected, got = asyncio.run(alone()), asyncio.run(together())
    assert scarce.metrics()["vllm:num_preemptions_total"] > 0, "the pool was meant to be too small"
    assert got == expected
    assert all(answer["usage"][1] == 60 * len(answer["texts"]) for i, answer in enumerate(got) if i != 4)
    scarce.wait_at_base()


def test_a_request_larger_than_the_pool_is_refused_at_the_door(scarce: Server) -> None:
    status, _, body = scarce.post("/v1/completions", {"prompt": text_of(150, 1), "max_tokens": 60})
    assert status == 400
    assert "192" in body["error"]["message"]
    status, _, body = scarce.post("/v1/completions", {"prompt": text_of(150, 1), "max_tokens": 42, "ignore_eos": True})
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 42


def test_a_seed_gives_the_same_text_whoever_else_is_there(server: Server) -> None:
    request = {"prompt": "The capital of France is", "temperature": 0.9, "seed": 42}

    async def test() -> None:
        async with server.async_client() as client:
            alone = (await complete(client, request, stream=False))["texts"]
            unseeded = [{"prompt": text_of(9, i), "temperature": 1.5} for i in range(3)]
            for neighbours in (unseeded, [{**request, "seed": i} for i in range(3)], [request, request]):
                jobs = [complete(client, {**request}, stream=False) for request in [request, *neighbours]]
                answers = [answer["texts"] for answer in await asyncio.gather(*jobs)]
                assert answers[0] == alone
                assert (answers[1] == alone) == (neighbours[0] == request)
            first, second = [await complete(client, unseeded[0], stream=False) for _ in range(2)]
            assert first["texts"] != second["texts"]

    asyncio.run(test())


def test_clients_that_come_and_go_disturb_nobody_and_leak_nothing(server: Server) -> None:
    """150 requests whose clients leave after a random time, some exactly at the end, and 12 that stay."""
    source = random.Random(0)
    control = {"prompt": text_of(40, 1), "temperature": 0}

    async def test() -> None:
        async with server.async_client() as client:
            expected = await complete(client, control, stream=False)

            async def leaves(index: int) -> None:
                request = {"prompt": text_of(source.randint(1, 90), index), "temperature": 0, "n": 1 + index % 3}
                job = asyncio.create_task(complete(client, request, stream=index % 2 == 0))
                await asyncio.wait({job}, timeout=source.uniform(0, 0.4))
                job.cancel()
                await asyncio.gather(job, return_exceptions=True)

            async def stays() -> None:
                assert await complete(client, control, stream=False) == expected

            for batch in range(6):
                leaving = [leaves(25 * batch + index) for index in range(25)]
                await asyncio.gather(*leaving, stays(), stays())

    asyncio.run(test())
    server.wait_at_base()
    metrics = server.metrics()
    assert metrics["ropeway_requests_in_flight"] == 0
    assert metrics["ropeway_kv_tokens_live"] == 0
