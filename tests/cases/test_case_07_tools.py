"""Reported faults of kind 7: tool calls. O-24 (how text is cut) is in tests/server/test_tool_parsers.py."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import jsonschema
import pytest
import tokenizers
from e2e_server import Server
from http_harness import EOS, HI, READY, House, events, ids, in_loop, says
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from small_tokenizers import write_folder

from fakes import Script
from ropeway.server.tokenizer import Tokenizer

LARGE = dataclasses.replace(READY, max_model_len=1500, vocab_size=500)
URL = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{% endfor %}\n"
    "{% endfor %}{% for tool in tools or [] %}tool: {{ tool | tojson }}\n{% endfor %}assistant: "
)


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


GET_TIME = tool("get_time", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
TOOLS = [GET_TIME, tool("add")]
FIRST = '{"city": "žluť \\"x\\""}'
SECOND = '{"a": [1, {}]}'
ONE = f'<tool_call>{{"name": "get_time", "arguments": {FIRST}}}</tool_call>'
TWO = f'Well.\n{ONE}\n<tool_call>{{"name": "add", "arguments": {SECOND}}}</tool_call>'


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder("byte_level", Path(folder), chat_template=TEMPLATE))


def house(text: str, **more: Any) -> House:
    return House(says(text), tokenizer=tokenizer(), ready=LARGE, **more)


def prompt_text(house: House) -> str:
    return tokenizer().decode(house.client.added[-1].prompt_token_ids, skip_special_tokens=False)


async def ask(http: httpx.AsyncClient, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """The choices, of a stream added up as clients do. Checks the form of its deltas."""
    body = {"messages": HI, "max_tokens": 150, "stream": stream, **fields}
    response = await http.post(URL, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        choices = response.json()["choices"]
        for choice in choices:
            assert choice["message"].get("tool_calls") != []
        return choices
    whole: dict[int, dict[str, Any]] = {}
    for chunk in events(response.text)[:-1]:
        [choice] = chunk["choices"]
        result = whole.setdefault(choice["index"], {"message": {"content": None}, "finish_reason": None})
        assert result["finish_reason"] is None
        result["finish_reason"] = choice["finish_reason"]
        message = result["message"]
        if text := choice["delta"].get("content"):
            message["content"] = (message["content"] or "") + text
        for call in choice["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
                assert call["function"]["arguments"] == ""
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return [whole[index] for index in sorted(whole)]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    found = choice["message"].get("tool_calls") or []
    assert bool(found) == (choice["finish_reason"] == "tool_calls")
    assert len({call["id"] for call in found}) == len(found)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_o23_the_reason_says_whether_there_is_a_call(stream: bool) -> None:
    async with house("I am fine.").http() as http:
        [choice] = await ask(http, stream, tools=TOOLS)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "I am fine."
        assert "tool_calls" not in choice["message"]
    async with house(ONE).http() as http:
        [choice] = await ask(http, stream, tools=TOOLS)
        assert calls_of(choice) == [("get_time", FIRST)]
        assert choice["message"]["content"] is None
        # Cut off inside the call: still a call, with what there is of it. Cut off before it is one: text.
        [choice] = await ask(http, stream, tools=TOOLS, max_tokens=len(ids(ONE)) - 20)
        [(name, arguments)] = calls_of(choice)
        assert name == "get_time"
        assert FIRST.startswith(arguments)
        [choice] = await ask(http, stream, tools=TOOLS, max_tokens=4)
        assert (choice["finish_reason"], calls_of(choice)) == ("length", [])
        assert ONE.startswith(choice["message"]["content"])


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_o23_without_a_parser_text_stays_text(stream: bool) -> None:
    async with house(ONE, tool_call_parser="none").http() as http:
        [choice] = await ask(http, stream, tools=TOOLS)
        assert (choice["message"]["content"], choice["finish_reason"], calls_of(choice)) == (ONE, "stop", [])
        for forced in ("required", {"type": "function", "function": {"name": "add"}}):
            body = {"messages": HI, "tools": TOOLS, "tool_choice": forced, "stream": stream}
            response = await http.post(URL, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_o23_forced_calls_come_with_a_grammar(stream: bool) -> None:
    """Which the engine enforces; what it lets pass is read back in tests/server/test_tool_grammars.py."""
    home = house(ONE)
    async with home.http() as http:
        for choice, in_it in (
            ("required", {"get_time", "add"}),
            ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ):
            [answer] = await ask(http, stream, tools=TOOLS, tool_choice=choice)
            assert calls_of(answer) == [("get_time", FIRST)]
            grammar = home.client.added[-1].sampling.grammar
            assert {name for name in ("get_time", "add") if f'{name}\\"' in grammar} == in_it
        await ask(http, stream, tools=TOOLS)
        assert home.client.added[-1].sampling.grammar == ""
        await ask(http, stream, tools=TOOLS, response_format={"type": "json_object"})
        assert "get_time" in home.client.added[-1].sampling.grammar  # a call, or the format
        unknown = tool("f", {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})
        response = await http.post(URL, json={"messages": HI, "tools": [unknown], "tool_choice": "required"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    home.app.state.service.close()


SCHEMAS = {
    "get_time": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
    "book": {
        "type": "object",
        "properties": {
            "seats": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
            "class": {"enum": ["první", "second"]},
            "when": {"$ref": "#/$defs/day"},
        },
        "required": ["seats", "class", "when"],
        "$defs": {"day": {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"}},
        "additionalProperties": False,
    },
}


@pytest.mark.real_model
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_o23_the_demo_model_is_made_to_call(tiny: Server, choice: str, stream: bool) -> None:
    """As reported, and hot with several schemas: every call there is obeys its schema, unless the answer was cut off."""
    client = OpenAI(base_url=f"{tiny.url}/v1", api_key="x")
    named = {"type": "function", "function": {"name": "book"}}
    for seed in range(3):
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hello, how are you?"}],
            "tools": [tool(name, schema) for name, schema in SCHEMAS.items()],
            "tool_choice": named if choice == "named" else choice,
            "parallel_tool_calls": seed == 2,
            "max_tokens": 128,
            "temperature": 1 if seed else 0,
            "seed": seed,
        }
        [answer] = ask_of(client, stream, **fields)
        calls = calls_of(answer)
        if choice != "auto":
            assert calls
        if seed < 2 and choice != "auto":
            assert len(calls) == 1
        if seed == 2:
            calls = calls[:1]  # several may run into the length limit
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert choice != "named" or name == "book"
        if not calls:
            assert isinstance(answer["message"]["content"], str)


def ask_of(client: OpenAI, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """The choices as the official client has them."""
    if not stream:
        answer = client.chat.completions.create(model="tiny", **fields)
        return [choice.model_dump() for choice in answer.choices]
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(model="tiny", stream=True, **fields):
        state.handle_chunk(chunk)
    return [choice.model_dump() for choice in state.current_completion_snapshot.choices]


BAD = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "x"}, "tools": TOOLS}, "tool_choice.type"),
    ({"tool_choice": {}, "tools": TOOLS}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.allowed_tools.mode"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools": TOOLS},
        "tool_choice.allowed_tools.tools",
    ),
    ({"tools": [GET_TIME, GET_TIME]}, "tools[1].function.name"),
    ({"tools": [tool("two words")]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", "x")]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": {}}, "tools"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("fields", "param"), BAD)
@in_loop
async def test_o23_bad_tools_are_refused_at_the_door(fields: dict[str, Any], param: str, stream: bool) -> None:
    home = house("x")
    async with home.http() as http:
        response = await http.post(URL, json={"messages": HI, "stream": stream, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not home.client.added


@in_loop
async def test_schemas_of_absurd_depth_are_the_clients_fault() -> None:
    home = house("x")
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    async with home.http() as http:
        for choice, code in (("auto", "context_length_exceeded"), ("required", "invalid_grammar")):
            response = await http.post(URL, json={"messages": HI, "tools": [tool("f", deep)], "tool_choice": choice})
            assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    home.app.state.service.close()


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_o25_none_and_empty_lists(stream: bool) -> None:
    """Tools are then not shown, nothing is looked for and nothing is taken out."""
    home = house(TWO)
    async with home.http() as http:
        for fields in (
            {},
            {"tool_choice": "none"},
            {"tools": []},
            {"tools": [], "tool_choice": "auto"},
            {"tools": None, "tool_choice": None},
            {"parallel_tool_calls": False},
            {"tools": TOOLS, "tool_choice": "none"},
        ):
            [choice] = await ask(http, stream, **fields)
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == TWO
            assert "tool_calls" not in choice["message"]
    assert len({tuple(request.prompt_token_ids) for request in home.client.added}) == 1


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_o26_two_calls_in_each_choice(stream: bool) -> None:
    home = house(TWO)
    async with home.http() as http:
        choices = await ask(http, stream, tools=TOOLS, n=2)
        assert [calls_of(choice) for choice in choices] == [[("get_time", FIRST), ("add", SECOND)]] * 2
        assert [choice["message"]["content"] for choice in choices] == ["Well."] * 2
        identities = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
        assert len(identities) == 4
        assert prompt_text(home).count("tool: ") == 2


@in_loop
async def test_o26_at_most_one_call() -> None:
    """With parallel_tool_calls false the answer ends after the first, and the engine is told so."""
    home = house(TWO)
    counts = []
    async with home.http() as http:
        for stream in (True, False):
            [choice] = await ask(http, stream, tools=TOOLS, parallel_tool_calls=False)
            assert calls_of(choice) == [("get_time", FIRST)]
            assert choice["message"]["content"] == "Well."
        answer = await http.post(URL, json={"messages": HI, "tools": TOOLS, "parallel_tool_calls": False})
        counts.append(answer.json()["usage"]["completion_tokens"])
    assert home.client.aborted == [request.request_id for request in home.client.added]
    assert counts[0] < len(ids(TWO)) - 10
    await home.quiet()


@in_loop
async def test_o26_the_openai_client_adds_up_the_same_calls() -> None:
    """Also with several tokens, and several calls, in one delta."""
    for per_delta in (1, 7, 400):
        home = House(
            lambda request, n=per_delta: Script([*ids(TWO), EOS], tokens_per_delta=n),
            tokenizer=tokenizer(),
            ready=LARGE,
        )
        async with home.serving() as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            asked: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": TOOLS}
            async with client.chat.completions.stream(**asked) as stream:
                added_up = (await stream.get_final_completion()).choices[0]
            whole = (await client.chat.completions.create(**asked)).choices[0]
        assert added_up.finish_reason == whole.finish_reason == "tool_calls"
        assert added_up.message.content == whole.message.content == "Well."
        for message in (added_up.message, whole.message):
            assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
                ("get_time", FIRST),
                ("add", SECOND),
            ]


@in_loop
async def test_tools_are_shown_as_they_were_given() -> None:
    home = house("x")
    shown = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"x": 1, "a": [None]}}}
    async with home.http() as http:
        await ask(http, False, tools=[shown])
        assert f"tool: {json.dumps(shown, ensure_ascii=False)}\n" in prompt_text(home)
        chosen = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", **tool("add")}]},
        }
        await ask(http, False, tools=TOOLS, tool_choice=chosen)
        assert "add" in prompt_text(home)
        assert "get_time" not in prompt_text(home)


@in_loop
async def test_a_template_without_tools_gets_them_in_a_system_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain = Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=template))
    text = f'{{"name": "get_time", "arguments": {FIRST}}}'
    home = House(says(text), tokenizer=plain, ready=LARGE)
    async with home.http() as http:
        for messages in (HI, [{"role": "system", "content": "Be brief."}, *HI]):
            for stream in (True, False):
                body = {"tools": [tool("get_time")], "messages": messages}
                [choice] = await ask(http, stream, **body)
                assert calls_of(choice) == [("get_time", FIRST)]
                shown = prompt_text(home)
                assert shown.startswith("system: You can call these functions:")
                assert shown.count("system: ") == 1
                assert '"get_time"' in shown
                assert shown.endswith("user: Hi\n")
        assert "Be brief." in shown
        tokens = (await http.post("/tokenize", json={"messages": messages, "tools": [tool("get_time")]})).json()
    assert tokens["tokens"] == home.client.added[-1].prompt_token_ids


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_marks_that_are_special_tokens(stream: bool, tmp_path: Path) -> None:
    """They reach the parser; other special tokens stay out of the content."""
    special = write_folder("byte_level", tmp_path, chat_template="{{ tools }}[TOOL_CALLS][ARGS]")
    backend = tokenizers.Tokenizer.from_file(str(special / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    backend.save(str(special / "tokenizer.json"))
    marked = Tokenizer.load(special)
    tokens = marked.encode(f"Well.[OTHER][TOOL_CALLS]get_time[ARGS]{FIRST}")
    home = House(lambda request: Script([*tokens, EOS]), tokenizer=marked, ready=LARGE)
    async with home.http() as http:
        [choice] = await ask(http, stream, tools=TOOLS)
        assert calls_of(choice) == [("get_time", FIRST)]
        assert choice["message"]["content"] == "Well."
        [choice] = await ask(http, stream)  # without tools they are like any other
        assert choice["message"]["content"] == f"Well.get_time{FIRST}"
