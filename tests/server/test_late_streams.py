"""Streams whose reader is late: tokens that wait are sent together, the first one and those in time by themselves.

The test plays the engine behind the real client: `steps` hands over step messages that all arrive before any stream
gets to read, as they do when the event loop is behind; `blocked` is a client that does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from http_harness import EOS, HI, READY, chat_tokenizer, events, ids, in_loop, stream_text, until
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.config import build_config
from ropeway.engine.process_client import InProcessEngineClient
from ropeway.metrics import Metrics
from ropeway.protocol import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInput,
    EngineOutput,
    FinishReason,
    StepOutputs,
    TokenLogprobs,
)
from ropeway.server.app import create_app

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = " The quick brown fox jumps over the lazy dog"
TOKENS = ids(TEXT)


class PlayedTransport:
    """An engine that says what the test tells it to."""

    def __init__(
        self, config: Any, factory: Any, deliver: Callable[[EngineOutput], None], ended: Callable[[str], None]
    ) -> None:
        self.deliver, self.ended = deliver, ended
        self.added: list[AddRequest] = []
        self.aborted: list[int] = []
        self.deliver(READY)

    def send(self, message: EngineInput) -> None:
        if isinstance(message, AddRequest):
            self.added.append(message)
        elif isinstance(message, AbortRequests):
            self.aborted += message.request_ids

    def stop(self, timeout: float) -> None:
        pass


class PlayedClient(InProcessEngineClient):
    _transport_type = PlayedTransport


class Reader:
    """One streaming request, at the ASGI boundary: each body is one write to the socket."""

    def __init__(self, house: LateHouse, path: str, body: dict[str, Any]) -> None:
        self.bodies: list[bytes] = []
        self.ready = asyncio.Event()  # cleared: the socket takes no more
        self.ready.set()
        self.gone = asyncio.Event()
        self._body = json.dumps({"stream": True, **body}).encode()
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": "",
            "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(house.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.ready.wait()
        if message.get("body"):
            self.bodies.append(message["body"])

    async def end(self) -> list[Any]:
        """All events, when the response is over."""
        await self.task
        return events(b"".join(self.bodies).decode())

    async def written(self, count: int) -> None:
        """Until there have been so many writes."""
        await until(lambda: len(self.bodies) >= count)
        assert len(self.bodies) == count

    def texts(self) -> list[str]:
        """The text of each write so far."""
        return [stream_text(events(body.decode())) for body in self.bodies]


class LateHouse:
    def __init__(self) -> None:
        config = build_config({"served_model_name": ["tiny"]})
        self.metrics = Metrics("tiny", config)
        self.client = PlayedClient(config, lambda: None, self.metrics.on_step)  # type: ignore[arg-type]
        self.app = create_app(config, self.client, chat_tokenizer(), self.metrics, ready=READY)

    @property
    def engine(self) -> PlayedTransport:
        assert isinstance(self.client._transport, PlayedTransport)
        return self.client._transport

    async def read(self, path: str = COMPLETIONS, **body: Any) -> Reader:
        """A request that the engine has got."""
        count = len(self.engine.added)
        prompt = {"messages": HI} if path == CHAT else {"prompt": "a"}
        reader = Reader(self, path, {**prompt, "max_tokens": 60, **body})
        await until(lambda: len(self.engine.added) == count + body.get("n", 1))
        return reader

    def steps(
        self, tokens: list[int], finish: FinishReason | None = None, *request_ids: int, first: bool = False
    ) -> None:
        """One message per token, for all requests or these. finish: with the last token. first: it opens the stream."""
        requests = [r for r in self.engine.added if not request_ids or r.request_id in request_ids]
        names = [request.request_id for request in requests]
        for number, token in enumerate(tokens):
            outputs = StepOutputs(names, [1] * len(names), [token] * len(names))
            if number == 0 and first:
                outputs.cached_tokens = dict.fromkeys(names, 1)
                outputs.first_scheduled = {request.request_id: request.arrival_time for request in requests}
            if number == len(tokens) - 1 and finish is not None:
                outputs.finished = dict.fromkeys(names, finish)
            for request in requests:
                if (count := request.sampling.logprobs) is not None:
                    best = TokenLogprobs(-0.5 - token, 1, [token] * count, [-0.5 - token] * count)
                    outputs.logprobs[request.request_id] = [best]
            self.engine.deliver(outputs)

    @property
    def num_waiting(self) -> list[int]:
        return [len(live._pending) for live in self.client._live.values()]


@contextlib.asynccontextmanager
async def late_house() -> AsyncIterator[LateHouse]:
    house = LateHouse()
    await house.client.start()
    try:
        yield house
    finally:
        await house.client.close()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_tokens_in_time_are_sent_one_by_one(path: str) -> None:
    async with late_house() as house:
        reader = await house.read(path)
        for number, token in enumerate(TOKENS):
            house.steps([token], first=number == 0)
            await reader.written(number + 1)
        house.steps([EOS], FinishReason.STOP)
        stream = await reader.end()
        assert reader.texts()[: len(TOKENS)] == [chat_tokenizer().token_text(token) for token in TOKENS]
        assert stream_text(stream) == TEXT


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_tokens_that_wait_are_sent_together_after_the_first(path: str) -> None:
    async with late_house() as house:
        reader = await house.read(path)
        house.steps(TOKENS, first=True)
        await reader.written(2)
        first = chat_tokenizer().token_text(TOKENS[0])
        assert reader.texts() == [first, TEXT.removeprefix(first)]
        house.steps(TOKENS)
        await reader.written(3)
        house.steps([*TOKENS, EOS], FinishReason.STOP)
        assert stream_text(await reader.end()) == 3 * TEXT
        assert len(reader.bodies) == 5  # and [DONE]
        assert house.metrics._itl._counts[0] == 3 * len(TOKENS)  # the gaps of all tokens but the first


@in_loop
async def test_a_client_that_does_not_read_gets_the_rest_at_once() -> None:
    async with late_house() as house:
        slow, quick = await house.read(CHAT), await house.read(CHAT)
        for number, token in enumerate(TOKENS):
            house.steps([token], first=number == 0)
            await quick.written(number + 1)
            if number == 1:
                slow.ready.clear()
            assert all(count <= 1 for count in house.num_waiting)
        assert len(slow.bodies) == 2
        house.steps([EOS], FinishReason.STOP)
        assert stream_text(await quick.end()) == TEXT
        assert len(quick.bodies) == len(TOKENS) + 2
        slow.ready.set()
        assert stream_text(await slow.end()) == TEXT
        assert len(slow.bodies) == 5  # two in time, the third that was stuck, the rest, [DONE]


RUNS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(runs=RUNS, with_logprobs=st.booleans(), choices=st.integers(1, 2), chat=st.booleans())
def test_lateness_changes_no_content(runs: list[int], with_logprobs: bool, choices: int, chat: bool) -> None:
    """Text, order, logprobs, token ids and usage are those of a stream in time, whatever came together."""
    path = CHAT if chat else COMPLETIONS
    logprobs = ({"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}) if with_logprobs else {}
    options = {"include_usage": True, "continuous_usage_stats": True}
    tokens = [TOKENS[index % len(TOKENS)] for index in range(sum(runs))]

    @in_loop
    async def test() -> None:
        async with late_house() as house:
            reader = await house.read(
                path, n=choices, return_token_ids=True, stream_options=options, max_tokens=len(tokens), **logprobs
            )
            at = 0
            for index, length in enumerate(runs):
                at_once = choices * (2 if index == 0 and length > 1 else 1)
                sent, last = len(reader.bodies), index == len(runs) - 1
                house.steps(tokens[at : at + length], FinishReason.LENGTH if last else None, first=index == 0)
                at += length
                if not last:
                    await reader.written(sent + at_once)
            stream = await reader.end()
        check(stream[:-1])
        assert stream[-1] == "[DONE]"

    def check(stream: list[Any]) -> None:
        usages = [chunk["usage"]["completion_tokens"] for chunk in stream]
        assert usages == sorted(usages)
        assert usages[-1] == choices * len(tokens)
        assert stream[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        for index in range(choices):
            chunks = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
            assert [token for c in chunks for token in c.get("token_ids", [])] == tokens
            assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
            text = stream_text(stream, index)
            assert text == chat_tokenizer().decode(tokens)
            blocks = [c["logprobs"] for c in chunks if c["logprobs"]]
            if not with_logprobs:
                assert blocks == []
            elif chat:
                entries = [entry for block in blocks for entry in block["content"]]
                assert [entry["logprob"] for entry in entries] == [-0.5 - token for token in tokens]
                assert "".join(entry["token"] for entry in entries) == text
            else:
                assert [value for block in blocks for value in block["token_logprobs"]] == [-0.5 - t for t in tokens]
                words = [word for block in blocks for word in block["tokens"]]
                offsets = [offset for block in blocks for offset in block["text_offset"]]
                assert offsets == [len("".join(words[:number])) for number in range(len(words))]

    test()


@in_loop
async def test_a_stop_string_within_what_came_late() -> None:
    async with late_house() as house:
        reader = await house.read(stop=["jumps over"])
        house.steps(TOKENS[:1], first=True)
        await reader.written(1)
        house.steps(TOKENS[1:])
        stream = await reader.end()
        assert stream_text(stream) == TEXT.partition("jumps over")[0]
        assert stream[-2]["choices"][0]["finish_reason"] == "stop"
        assert house.engine.aborted == [house.engine.added[0].request_id]


@in_loop
async def test_a_client_that_leaves_while_tokens_wait() -> None:
    async with late_house() as house:
        leaving, staying = await house.read(CHAT, n=2), await house.read(CHAT)
        house.steps(TOKENS[:2], first=True)
        await staying.written(2)
        leaving.ready.clear()
        house.steps(TOKENS[2:5])
        await staying.written(3)
        leaving.gone.set()
        await leaving.task
        names = [request.request_id for request in house.engine.added]
        assert sorted(house.engine.aborted) == names[:2]
        house.steps([*TOKENS[5:], EOS], FinishReason.STOP)  # also for those that have left: the messages crossed
        assert stream_text(await staying.end()) == TEXT
        assert house.app.state.lifecycle.in_flight == 0
        assert house.num_waiting == []


@in_loop
async def test_an_engine_that_dies_while_tokens_wait() -> None:
    """What it said is sent, then the error."""
    async with late_house() as house:
        reader = await house.read(CHAT)
        house.steps(TOKENS[:4], first=True)
        house.engine.deliver(EngineFailed("the engine crashed"))
        house.engine.ended("failed")
        stream = await reader.end()
        assert stream_text(stream[:-1]) == "".join(map(chat_tokenizer().token_text, TOKENS[:4]))
        assert stream[-1]["error"]["code"] == "engine_dead"


@in_loop
async def test_an_abort_while_tokens_wait() -> None:
    async with late_house() as house:
        reader = await house.read(CHAT)
        house.steps(TOKENS[:4], first=True)
        await house.client.abort_all()
        stream = await reader.end()
        assert stream[-2]["choices"][0]["finish_reason"] == "abort"
        assert house.engine.aborted == [house.engine.added[0].request_id]
