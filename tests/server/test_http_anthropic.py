"""POST /v1/messages over a scripted engine: the official anthropic client, the order of events, blocks, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from http_harness import HI, TEXT, House, in_loop, says
from test_http_responses import typed_events

from ropeway.server.anthropic.messages import to_messages

MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": HI}


@in_loop
async def test_the_official_client_creates_streams_and_counts() -> None:
    house = House(says(num_cached_tokens=4))
    async with house.serving() as url, anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        whole = await client.messages.create(system="Be brief.", extra_body={"temperature": 0.0, "top_k": 5}, **BODY)
        assert [(block.type, block.text) for block in whole.content if block.type == "text"] == [("text", TEXT)]
        assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
        count = await client.messages.count_tokens(model="tiny", system="Be brief.", messages=BODY["messages"])
        assert whole.usage.cache_read_input_tokens == 4
        assert whole.usage.input_tokens + 4 == count.input_tokens
        async with client.messages.stream(**BODY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == TEXT
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == whole.usage.output_tokens
        cut = await client.messages.create(**{**BODY, "max_tokens": 2})
        assert cut.stop_reason == "max_tokens"
        stopped = await client.messages.create(**BODY, stop_sequences=["brown"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "brown")
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.messages.create(**{**BODY, "model": "other"})
        assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert house.client.added[0].sampling.top_k == 5


@in_loop
async def test_the_order_of_events() -> None:
    house = House(says())
    async with house.http() as http:
        stream = typed_events((await http.post(MESSAGES, json={**BODY, "stream": True})).text)
        kinds = [event["type"] for event in stream]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert stream[0]["message"]["content"] == []
        assert stream[1]["content_block"] == {"type": "text", "text": ""}
        assert stream[-2]["delta"]["stop_reason"] == "end_turn"


@in_loop
async def test_errors_have_both_shapes_in_one() -> None:
    house = House(says())
    async with house.http() as http:
        for change, param in (
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
            ({"temperature": 1.5}, "temperature"),
            ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
            ({"stop_sequences": [""]}, "stop_sequences"),
        ):
            for stream in (False, True):
                response = await http.post(MESSAGES, json={**BODY, "stream": stream, **change})
                body = response.json()
                assert (response.status_code, body["type"]) == (400, "error"), change
                assert body["error"]["type"] == "invalid_request_error"
                assert body["error"]["param"] == param, change
                assert body["request_id"] == response.headers["x-request-id"]
        response = await http.post(MESSAGES, content=b"{")
        assert (response.status_code, response.json()["type"]) == (400, "error")
    assert not house.client.added


@in_loop
async def test_a_failing_engine_ends_the_stream_with_an_error_event() -> None:
    house = House(says(error_after=2))
    async with house.http() as http:
        stream = typed_events((await http.post(MESSAGES, json={**BODY, "stream": True})).text)
        assert (stream[-1]["type"], stream[-1]["error"]["type"]) == ("error", "api_error")
        response = await http.post(MESSAGES, json=BODY)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Add.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
    ]
    assert to_messages(messages, [{"type": "text", "text": "Be brief."}]) == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see."}],
            "reasoning_content": "Add.",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "4"}]},
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
    ]
