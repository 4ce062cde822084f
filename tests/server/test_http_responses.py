"""POST /v1/responses over a scripted engine: the official client's calls, the order of events, turns, stored ones."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_harness import EOS, TEXT, House, in_loop, says

from ropeway.errors import RequestError
from ropeway.server.openai.response_store import LIFE_SECONDS, ResponseStore
from ropeway.server.openai.responses import to_messages

RESPONSES = "/v1/responses"


def typed_events(body: str) -> list[dict[str, Any]]:
    """Every event of the stream; each must carry its type twice and a number of its own."""
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        assert value.get("sequence_number", len(found)) == len(found)
        found.append(value)
    return found


@in_loop
async def test_the_official_client_creates_streams_and_continues() -> None:
    house = House(says())
    async with house.serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.responses.create(model="tiny", input="Hi", instructions="Be brief.", temperature=0)
        assert whole.output_text == TEXT
        assert (whole.status, whole.instructions, whole.temperature) == ("completed", "Be brief.", 0)
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        stored = await client.responses.retrieve(whole.id)
        assert stored.output_text == TEXT
        async with client.responses.stream(
            model="tiny", input=[{"role": "user", "content": "More"}], previous_response_id=whole.id
        ) as stream:
            streamed = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == TEXT
        assert final.previous_response_id == whole.id
        assert "".join(e.delta for e in streamed if e.type == "response.output_text.delta") == TEXT
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="tiny", input="x", previous_response_id=whole.id)
    prompts = [house.app.state.service.tokenizer.decode(r.prompt_token_ids, False) for r in house.client.added]
    assert (
        prompts[0] == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # The earlier turn is there, its instructions are not.
    assert prompts[1] == (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


@in_loop
async def test_the_order_of_events() -> None:
    house = House(says())
    async with house.http() as http:
        body = {"input": "Hi", "stream": True, "store": False}
        stream = typed_events((await http.post(RESPONSES, json=body)).text)
        kinds = [event["type"].removeprefix("response.") for event in stream]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert stream[0]["response"]["output"] == []
        assert stream[2]["item"]["content"] == []
        last = stream[-1]["response"]
        assert last["output"] == [stream[-2]["item"]]
        assert last["output"][0]["content"][0]["text"] == TEXT
        assert (await http.get(f"{RESPONSES}/{last['id']}")).status_code == 404  # store false
        whole = (await http.post(RESPONSES, json={**body, "stream": False})).json()
        ids = {"id": "", "created_at": 0}
        strip = [{**item, "id": ""} for item in whole["output"]]
        assert {**whole, **ids, "output": strip} == {**last, **ids, "output": [{**last["output"][0], "id": ""}]}


@in_loop
async def test_an_answer_that_was_cut_says_so() -> None:
    house = House(says())
    async with house.http() as http:
        for stream in (False, True):
            response = await http.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 2, "stream": stream})
            last = typed_events(response.text)[-1] if stream else {"response": response.json()}
            assert last.get("type", "response.incomplete") == "response.incomplete"
            assert last["response"]["status"] == "incomplete"
            assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
            assert last["response"]["output"][0]["status"] == "incomplete"


@in_loop
async def test_a_failing_engine_ends_the_stream_with_response_failed() -> None:
    house = House(says(error_after=2))
    async with house.http() as http:
        stream = typed_events((await http.post(RESPONSES, json={"input": "Hi", "stream": True})).text)
        assert stream[-1]["type"] == "response.failed"
        assert stream[-1]["response"]["error"]["code"] == "generation_failed"
        assert (await http.post(RESPONSES, json={"input": "Hi"})).status_code == 500


@in_loop
async def test_bad_bodies_name_the_field_of_this_endpoint() -> None:
    house = House(says())
    async with house.http() as http:
        for change, param in (
            ({"input": []}, "input"),
            ({"input": 5}, "input"),
            ({"input": [1]}, "input[0]"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ({"input": "x " * 4000}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 10_000}, "input"),
            ({"temperature": 3}, "temperature"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"include": ["file_search_call.results"]}, "include"),
            ({"background": True}, "background"),
        ):
            for stream in (False, True):
                response = await http.post(RESPONSES, json={"input": "Hi", "stream": stream, **change})
                assert response.status_code == 400, change
                assert response.headers["content-type"] == "application/json"
                assert response.json()["error"]["param"] == param, change
    assert not house.client.added


@in_loop
async def test_truncation_drops_the_oldest_turns() -> None:
    house = House(says())
    turns = [{"role": role, "content": f"{i} " + "word " * 20} for i in range(8) for role in ("user", "assistant")]
    body = {"input": [*turns, {"role": "user", "content": "Last"}], "instructions": "Rule.", "max_output_tokens": 5}
    async with house.http() as http:
        assert (await http.post(RESPONSES, json=body)).status_code == 400
        assert (await http.post(RESPONSES, json={**body, "truncation": "auto"})).status_code == 200
    (request,) = house.client.added
    prompt = house.app.state.service.tokenizer.decode(request.prompt_token_ids, False)
    assert prompt.startswith("<|im_start|>system\nRule.<|im_end|>\n<|im_start|>user\n")
    assert "Last" in prompt
    assert "<|im_start|>user\n0 " not in prompt


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":2}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]

    def call(id: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}

    assert to_messages(items) == [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Add.",
            "tool_calls": [call("c1", '{"a":2}'), call("c2", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "0"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
    ]


def test_the_store_is_bounded_expires_and_knows_its_callers() -> None:
    now = 0.0
    store = ResponseStore(clock=lambda: now, max_bytes=3000)

    def add(id: str, size: int = 500) -> None:
        store.add({"id": id}, [{"text": "x" * size}], "mine")

    def has(id: str, key: str = "mine") -> bool:
        try:
            return store.get(id, key) == {"id": id}
        except RequestError:
            return False

    add("a")
    assert has("a")
    assert not has("a", "yours")
    for id in "bcde":
        add(id)
    assert has("e")
    assert has("b")
    add("f")
    assert not has("a")  # the oldest went
    add("huge", 5000)
    assert not has("huge")
    assert has("f")  # and nothing for its sake
    now = LIFE_SECONDS + 1
    assert not has("f")
    add("g")
    assert has("g")
    assert store._size < 600


@in_loop
async def test_a_stored_response_is_its_callers_alone() -> None:
    house = House(lambda request: says()(request), api_key=["a", "b"])
    async with house.http() as http:
        mine, yours = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        id = (await http.post(RESPONSES, json={"input": "Hi"}, headers=mine)).json()["id"]
        assert (await http.get(f"{RESPONSES}/{id}", headers=yours)).status_code == 404
        body = {"input": "x", "previous_response_id": id}
        assert (await http.post(RESPONSES, json=body, headers=yours)).status_code == 404
        assert (await http.post(RESPONSES, json=body, headers=mine)).status_code == 200
    assert EOS
