"""Through the official client to a real engine process and back: answers, streams, disconnects, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import openai
import pytest
from e2e_server import ENDLESS, MODEL, Server
from prometheus_client.parser import text_string_to_metric_families

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


def test_probes_and_models(server: Server) -> None:
    for path in ("/live", "/ready", "/health", "/version", "/v1/models"):
        assert server.get(path)[0] == 200, path
    (model,) = server.client().models.list().data
    assert model.id == MODEL
    assert server.client().models.retrieve(MODEL).id == MODEL


def test_chat_streamed_equals_chat_whole(server: Server) -> None:
    create = server.client().chat.completions.create
    whole = create(model=MODEL, messages=MESSAGES, max_tokens=40, **ENDLESS)
    stream = create(
        model=MODEL, messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}, **ENDLESS
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices]) > 10, "not streamed"
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_of_ids_and_text(server: Server) -> None:
    create = server.client().completions.create
    text = create(model=MODEL, prompt="abc", max_tokens=7, **ENDLESS)
    ids = server.post("/tokenize", {"model": MODEL, "prompt": "abc"})[2]["tokens"]
    again = create(model=MODEL, prompt=ids, max_tokens=7, **ENDLESS)
    assert again.choices[0].text == text.choices[0].text
    assert text.usage is not None
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 7)


def test_24_at_once_give_what_each_gives_alone(server: Server) -> None:
    """More than may run at once, of different lengths, streamed and not."""
    prompts = ["x" * (1 + 37 * i % 200) + chr(65 + i) for i in range(24)]

    async def one(client: openai.AsyncOpenAI, i: int, streamed: bool) -> str:
        options: dict[str, Any] = {"model": MODEL, "prompt": prompts[i], "max_tokens": 5 + 3 * i, **ENDLESS}
        if not streamed:
            response = await client.completions.create(**options)
            assert response.usage is not None
            assert response.usage.completion_tokens == 5 + 3 * i
            return response.choices[0].text
        stream = await client.completions.create(stream=True, **options)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def test() -> None:
        async with server.async_client() as client:
            together = await asyncio.gather(*(one(client, i, i % 2 == 0) for i in range(24)))
            alone = [await one(client, i, i % 2 == 1) for i in range(24)]
            assert together == alone

    asyncio.run(test())
    server.wait_at_base()


def test_a_bad_request_is_refused_before_the_first_byte(server: Server) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            server.client().completions.create(model=MODEL, prompt="a", max_tokens=1, temperature=-1, stream=stream)
        with pytest.raises(openai.NotFoundError):
            server.client().completions.create(model="other", prompt="a", max_tokens=1, stream=stream)


def test_client_that_leaves_in_mid_stream(server: Server) -> None:
    stream = server.client().completions.create(model=MODEL, prompt="go", max_tokens=8000, stream=True, **ENDLESS)
    for _ in range(5):
        next(stream)
    assert server.metrics()["vllm:num_requests_running"] == 1
    stream.close()
    server.wait_at_base()


def test_client_that_leaves_a_request_that_is_not_streamed(server: Server) -> None:
    with contextlib.closing(server.connect()) as connection:
        send(connection, {"prompt": "go", "max_tokens": 8000})
        server.wait_metrics(lambda m: m["vllm:num_requests_running"] == 1, "a running request")
    server.wait_at_base()


def test_clients_that_leave_while_queued(server: Server) -> None:
    """Only the waiting ones first; then all, at the same moment."""
    with contextlib.ExitStack() as runners, contextlib.ExitStack() as waiters:
        for _ in range(4):
            send(runners.enter_context(contextlib.closing(server.connect())), {"prompt": "run", "max_tokens": 8000})
        server.wait_metrics(lambda m: m["vllm:num_requests_running"] == 4, "4 running")
        for _ in range(6):
            send(waiters.enter_context(contextlib.closing(server.connect())), {"prompt": "wait", "max_tokens": 8000})
        server.wait_metrics(lambda m: m["vllm:num_requests_waiting"] == 6, "6 waiting")
        waiters.close()
        server.wait_metrics(lambda m: m["vllm:num_requests_waiting"] == 0, "nobody waiting")
        assert server.metrics()["vllm:num_requests_running"] == 4
    server.wait_at_base()


def test_client_that_leaves_during_its_prefill(server: Server) -> None:
    generated = server.metrics()["vllm:generation_tokens_total"]
    with contextlib.closing(server.connect()) as connection:
        send(connection, {"prompt": "y" * 15000, "max_tokens": 10})  # 235 steps
        server.wait_metrics(lambda m: m["vllm:kv_cache_usage_perc"] > 0, "blocks in use")
    server.wait_at_base()
    assert server.metrics()["vllm:generation_tokens_total"] == generated, "the prefill came to its end"


def send(connection: Any, body: dict[str, Any]) -> None:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **body}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})


def test_metrics_are_a_valid_page_with_true_values(server: Server) -> None:
    server.wait_at_base()
    before = server.metrics()
    server.client().completions.create(model=MODEL, prompt="q" * 100, max_tokens=9, **ENDLESS)
    server.wait_metrics(
        lambda m: m["vllm:request_success_total"] == before["vllm:request_success_total"] + 1, "one more request"
    )
    after = server.metrics()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 9
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 100
    names: set[str] = set()
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        assert family.name not in names, "a family is declared twice"
        names.add(family.name)
        assert family.documentation
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == MODEL
            if sample.name.endswith("_total"):
                assert sample.value >= 0
    assert all(after.get(name, 0) >= value for name, value in before.items() if name.endswith(("_total", "_count")))
    assert {"vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:cache_config_info"} <= {
        name.removesuffix("_info") if name == "vllm:cache_config" else name for name in names
    } | {"vllm:cache_config_info"}


@pytest.mark.real_model
def test_the_demo_model_knows_the_capital_of_france(demo: Server) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    stream = demo.client().chat.completions.create(
        model=demo.client().models.list().data[0].id, messages=messages, max_tokens=40, temperature=0, stream=True
    )
    chunks = list(stream)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
