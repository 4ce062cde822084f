"""Thoughts and tool calls through the Responses and the Anthropic endpoint: the same message in each one's words."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anthropic
import openai
from http_harness import READY, House, in_loop, says
from small_tokenizers import write_folder
from test_http_responses import typed_events

from ropeway.server.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    " {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% for tool in tools or [] %}tool: {{ tool | tojson }}\n{% endfor %}assistant: "
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLS = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>' for number in (1, 2))
ANSWER = f"<think>Hm.</think>Let me see.{CALLS}"
MESSAGES = [{"role": "user", "content": "Add."}]


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder("byte_level", Path(folder), chat_template=TEMPLATE))


def house(**more: Any) -> House:
    return House(says(ANSWER, **more), tokenizer=tokenizer(), ready=dataclasses.replace(READY, max_model_len=1500))


def last_prompt(house: House) -> str:
    return tokenizer().decode(house.client.added[-1].prompt_token_ids, skip_special_tokens=False)


@in_loop
async def test_responses_in_items_that_can_be_sent_back() -> None:
    home = house()
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    async with home.serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.responses.create(model="tiny", input="Add.", tools=tools)
        async with client.responses.stream(model="tiny", input="Add.", tools=tools) as stream:
            names = [event.type async for event in stream]
            final = await stream.get_final_response()
        for response in (whole, final):
            assert response.status == "completed"
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
            assert response.output[0].content[0].text == "Hm."  # type: ignore[union-attr,index]
            assert response.output_text == "Let me see."
            calls = [item for item in response.output if item.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
            assert len({call.call_id for call in calls}) == 2
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens > 0
        for name in ("reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"):
            assert f"response.{name}" in names
        assert names.count("response.output_item.done") == names.count("response.output_item.added") == 4
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(number)}
            for number, call in enumerate(calls)
        ]
        await client.responses.create(model="tiny", input=results, previous_response_id=final.id)
        stored = last_prompt(home)
        sent_back: Any = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in final.output), *results]
        await client.responses.create(model="tiny", input=sent_back, store=False)
    assert last_prompt(home) == stored
    assert stored.startswith("user: Add.assistant:<think>Hm.</think> Let me see.<tool_call>")
    assert stored.endswith("tool: 0tool: 1assistant: ")


@in_loop
async def test_anthropic_in_blocks_that_can_be_sent_back() -> None:
    home = house()
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    async with home.serving() as url, anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        body: Any = {"model": "tiny", "max_tokens": 400, "messages": MESSAGES, "tools": tools}
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            assert message.stop_reason == "tool_use"
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert message.content[0].thinking == "Hm."  # type: ignore[union-attr]
            assert message.content[1].text == "Let me see."  # type: ignore[union-attr]
            uses = [block for block in message.content if block.type == "tool_use"]
            assert [use.input for use in uses] == [{"a": 1}, {"a": 2}]
            assert len({use.id for use in uses}) == 2
        results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "3"} for use in uses]
        turns: Any = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
        await client.messages.create(**{**body, "messages": turns})
    prompt = last_prompt(home)
    assert prompt.startswith("user: Add.assistant:<think>Hm.</think> Let me see.<tool_call>")
    assert "tool: 3tool: 3" in prompt


@in_loop
async def test_a_call_that_the_limit_cut() -> None:
    home = house()
    num_tokens = len(tokenizer().encode(ANSWER[: ANSWER.index('"a": 1') + 4]))
    async with home.http() as http:
        body = {"max_tokens": num_tokens, "messages": MESSAGES, "tools": [{"name": "add", "input_schema": SCHEMA}]}
        message = (await http.post("/v1/messages", json=body)).json()
        assert message["stop_reason"] == "max_tokens" or message["content"][-1]["type"] == "tool_use"
        for block in message["content"]:
            assert block["type"] != "tool_use" or isinstance(block["input"], dict)
        stream = typed_events((await http.post("/v1/messages", json={**body, "stream": True})).text)
        assert stream[-1]["type"] == "message_stop"
        responses = {
            "input": "Add.",
            "max_output_tokens": num_tokens,
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        }
        response = (await http.post("/v1/responses", json=responses)).json()
        assert response["output"][-1]["status"] in ("completed", "incomplete")


@in_loop
async def test_choices_of_tools_in_either_s_words() -> None:
    home = house()
    async with home.http() as http:
        function = {"type": "function", "name": "add", "parameters": SCHEMA}
        for choice in ("none", "auto", "required", {"type": "function", "name": "add"}):
            body = {"input": "Add.", "tools": [function], "tool_choice": choice}
            assert (await http.post("/v1/responses", json=body)).status_code == 200, choice
            assert bool(home.client.added[-1].sampling.grammar) == (choice not in ("none", "auto"))
        body = {"input": "Add.", "tools": [function], "tool_choice": {"type": "function", "name": "subtract"}}
        assert (await http.post("/v1/responses", json=body)).status_code == 400
        for kind, forced in (("none", False), ("auto", False), ("any", True), ("tool", True)):
            choice = {"type": kind, **({"name": "add"} if kind == "tool" else {})}
            body = {"max_tokens": 50, "messages": MESSAGES, "tools": [{"name": "add", "input_schema": SCHEMA}]}
            assert (await http.post("/v1/messages", json={**body, "tool_choice": choice})).status_code == 200, kind
            assert bool(home.client.added[-1].sampling.grammar) == forced
