"""Streams on real sockets: keep-alive comments, clients that leave, slow readers; and the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from http_harness import EOS, HI, TEXT, House, events, ids, in_loop, says, until

from fakes import Script
from ropeway.protocol import AddRequest
from ropeway.server.sse import KEEP_ALIVE, EventStream, TextFrame, Write, event

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@in_loop
async def test_comments_while_nothing_comes() -> None:
    """O-04: headers at once, comments by the clock, the same text in the end; none without streaming."""
    gates = {0: asyncio.Event(), 4: asyncio.Event()}
    house = House(says(waits=gates), keepalive_interval="0.05")
    async with house.serving() as url, httpx.AsyncClient(base_url=url) as http:
        whole = asyncio.create_task(http.post(CHAT, json={"messages": HI}))
        async with http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response:
            assert response.status_code == 200  # the engine has not said a word
            text = ""
            async for chunk in response.aiter_text():
                text += chunk
                if text.count(": keep-alive\n\n") == 2:
                    gates[0].set()
                if "data:" in text and text.endswith(": keep-alive\n\n"):
                    gates[4].set()
        chunks = events(text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == TEXT
        answer = await whole
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert "keep-alive" not in answer.text
    await house.quiet()


@in_loop
async def test_comments_only_after_silence() -> None:
    interval = 0.05
    sent: list[tuple[bytes, float]] = []
    closed = []
    loop = asyncio.get_running_loop()

    async def produce(write: Write) -> None:
        for number in range(30):
            await asyncio.sleep(0.2 if number == 20 else 0.01)
            await write(b"data: x\n\n")

    async def send(message: Any) -> None:
        sent.append((message.get("body", b""), loop.time()))

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = EventStream(produce, keepalive_interval=interval, on_close=lambda: closed.append(1), headers={})
    await response({"type": "http"}, receive, send)
    assert closed == [1]
    comments = [index for index, (body, _) in enumerate(sent) if body == KEEP_ALIVE]
    assert comments
    for index in comments:
        assert sent[index][1] - sent[index - 1][1] >= interval


def endless(request: AddRequest) -> Script:
    """Five tokens, then it waits for ever."""
    return Script(ids(TEXT), waits={5: asyncio.Event()})


@pytest.mark.parametrize("case", ["one", "n", "prompts", "queued"])
@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_client_that_leaves_ends_all_its_sequences(case: str, stream: bool) -> None:
    """O-35, O-37."""
    queued = case == "queued"
    house = House((lambda request: Script(ids(TEXT), waits={0: asyncio.Event()})) if queued else endless)
    prompt: Any = list("abcdefgh") if case == "prompts" else "a"
    body = {"prompt": prompt, "n": 4 if case == "n" else 1, "max_tokens": 150, "ignore_eos": True, "stream": stream}
    count = 8 if case == "prompts" else body["n"]
    async with house.serving() as url, httpx.AsyncClient(base_url=url) as http:
        for round_number in range(3):

            async def read() -> None:
                async with http.stream("POST", COMPLETIONS, json=body) as response:
                    async for _ in response.aiter_bytes():
                        pass

            reading = asyncio.create_task(read())
            await until(lambda: len(house.client.live) == count)
            await asyncio.sleep(0.005)  # a few tokens
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await until(lambda: not house.client.live)
            await house.quiet()
            assert len(house.client.aborted) == len(house.client.added) == (round_number + 1) * count
        assert (await http.get("/load")).json() == {"server_load": 0}


@in_loop
async def test_one_child_had_finished_when_the_client_left() -> None:
    def script(request: AddRequest) -> Script:
        return Script([EOS]) if len(house.client.added) == 0 else endless(request)

    house = House(script)
    async with house.serving() as url, httpx.AsyncClient(base_url=url) as http:
        async with http.stream("POST", COMPLETIONS, json={"prompt": "a", "n": 3, "stream": True}) as response:
            async for _ in response.aiter_bytes():
                if len(house.client.ended) == 1:
                    break
        await until(lambda: not house.client.live)
        assert len(house.client.aborted) == 2
        await house.quiet()


@in_loop
async def test_leaving_at_any_moment() -> None:
    """O-35: also exactly when the last chunk arrives. Nothing is left, and others are not disturbed."""
    house = House()
    async with house.serving() as url, httpx.AsyncClient(base_url=url) as http:

        async def leave(after: int, stream: bool) -> None:
            task = asyncio.create_task(http.post(CHAT, json={"messages": HI, "stream": stream, "n": 2}))
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for after in range(0, 120, 4):
            control = http.post(CHAT, json={"messages": HI})
            results = await asyncio.gather(leave(after, True), leave(after, False), control)
            assert results[2].json()["choices"][0]["message"]["content"] == TEXT
        await until(lambda: house.lifecycle.in_flight == 0)
        await house.quiet()
        assert len(house.client.ended) == len(house.client.added)


@in_loop
async def test_pipelined_requests_on_one_connection() -> None:
    house = House()
    async with house.serving() as url, httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=1)) as http:
        for stream in (True, False, True):
            response = await http.post(CHAT, json={"messages": HI, "stream": stream})
            assert response.status_code == 200
        refused = await http.post(CHAT, json={"messages": HI, "temperature": -1, "stream": True})
        assert refused.status_code == 400
        assert (await http.post(CHAT, json={"messages": HI})).status_code == 200


def test_a_frame_is_what_a_full_event_would_be() -> None:
    def template(text: str) -> dict[str, Any]:
        return {"id": 'a"b', "choices": [{"delta": {"content": text}, "finish_reason": None}], "usage": None}

    frame = TextFrame(template)
    for text in ("", "plain", '"\\\n\t\x00\x1f\u2028😀', "\x00text\x00", "}]"):
        assert frame.render(text) == event(template(text))
        assert json.loads(frame.render(text)[6:]) == template(text)


# The official client


@in_loop
async def test_openai_client_chats() -> None:
    house = House()
    async with house.serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        stream = await client.chat.completions.create(
            model="tiny",
            messages=HI,
            stream=True,
            n=2,
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        )
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [TEXT, TEXT]
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == 2 * (len(ids(TEXT)) + 1)
        async with client.chat.completions.stream(model="tiny", messages=HI) as events_of_text:  # type: ignore[arg-type]
            final = await events_of_text.get_final_completion()
        assert final.choices[0].message.content == TEXT


@in_loop
async def test_openai_client_completes_and_lists() -> None:
    house = House()
    async with house.serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], extra_body={"top_k": 5})
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
        assert [model.id async for model in client.models.list()] == ["tiny", "org/alias"]
        assert (await client.models.retrieve("org/alias")).id == "org/alias"
        assert house.client.added[0].sampling.top_k == 5


@in_loop
async def test_openai_client_raises_the_right_errors() -> None:
    gate = asyncio.Event()
    house = House(says(waits={1: gate}), max_num_queued_reqs=1, api_key=["good"])
    async with (
        house.serving() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="good", max_retries=0) as client,
    ):
        create: Any = client.chat.completions.create
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model="tiny", messages=HI, temperature=-1, stream=stream)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as missing:
                await create(model="nope", messages=HI, stream=stream)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.AuthenticationError):
                await create(model="tiny", messages=HI, stream=stream, extra_headers={"Authorization": "Bearer bad"})
        running = asyncio.create_task(create(model="tiny", messages=HI))
        await until(lambda: len(house.client.live) == 1)
        with pytest.raises(openai.RateLimitError):
            await create(model="tiny", messages=HI)
        gate.set()
        assert (await running).choices[0].message.content == TEXT
        house.client.script = lambda request: Script(ids(TEXT), error_after=3)
        with pytest.raises(openai.APIError, match="Generation failed"):
            async for _ in await create(model="tiny", messages=HI, stream=True):
                pass
        with pytest.raises(openai.InternalServerError):
            await create(model="tiny", messages=HI)
        house.lifecycle.begin_drain()
        with pytest.raises(openai.InternalServerError) as draining:
            await create(model="tiny", messages=HI)
        assert draining.value.status_code == 503
