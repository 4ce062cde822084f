"""Reported faults of kind 6: chat templates. What templates themselves do is in tests/server/test_chat_template.py."""

from __future__ import annotations

from typing import Any

from http_harness import HI, House, chat_tokenizer, in_loop
from small_tokenizers import write_folder

from ropeway.server.tokenizer import Tokenizer

URL = "/v1/chat/completions"


def prompt_text(house: House, index: int = -1) -> str:
    return chat_tokenizer().decode(house.client.added[index].prompt_token_ids, skip_special_tokens=False)


@in_loop
async def test_o20_parts_are_joined_like_text() -> None:
    """By a newline. What is not text is refused, by its place."""
    house = House()
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    async with house.http() as http:
        for content in (parts, "Say \nhello", [], ""):
            messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]
            response = await http.post(URL, json={"messages": [*messages, {"role": "user", "content": content}]})
            assert response.status_code == 200
        first, second, third, fourth = (request.prompt_token_ids for request in house.client.added)
        assert first == second
        assert third == fourth
        assert prompt_text(house, 0).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay \nhello"
        )
        for part in (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
            {"type": "foo"},
            {"type": "text"},
            {"type": "text", "text": 5},
            {},
        ):
            response = await http.post(URL, json={"messages": [*HI, {"role": "assistant", "content": [part]}]})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages[1].content"


@in_loop
async def test_o21_assistant_turns_with_tool_calls() -> None:
    """Content missing, null and empty are the same; "tool_calls": [] is as if absent."""
    house = House()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}

    def turns(assistant: dict[str, Any], result: Any = "2") -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", **assistant},
            {"role": "tool", "tool_call_id": "c1", "content": result},
            {"role": "user", "content": "thanks"},
        ]

    async with house.http() as http:
        for messages in (
            turns({"tool_calls": [call]}),
            turns({"tool_calls": [call], "content": None}),
            turns({"tool_calls": [call], "content": ""}),
            turns({"tool_calls": [call]}, [{"type": "text", "text": "2"}]),
            turns({"tool_calls": [], "content": "x"}),
            turns({"content": "x"}),
        ):
            response = await http.post(URL, json={"messages": messages})
            assert response.status_code == 200
            assert "None" not in prompt_text(house)
    prompts = [request.prompt_token_ids for request in house.client.added]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert prompts[4] == prompts[5] != prompts[0]
    assert "[add]" in prompt_text(house, 0)


@in_loop
async def test_o19_the_templates_own_error_is_a_400() -> None:
    house = House()
    async with house.http() as http:
        for stream in (True, False):
            body = {"messages": [*HI, *HI], "stream": stream}
            response = await http.post(URL, json=body)
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            assert "roles must alternate" in response.json()["error"]["message"]
            response = await http.post(URL, json={"messages": [], "stream": stream})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        assert (await http.post(URL, json={"messages": [{"role": "wizard", "content": "x"}]})).status_code == 200
    assert len(house.client.added) == 1


@in_loop
async def test_o22_continuing_the_final_message() -> None:
    house = House()
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two "}]
    async with house.http() as http:
        for flags in (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True},
        ):
            assert (await http.post(URL, json={"messages": messages, **flags})).status_code == 200
            assert prompt_text(house).endswith("<|im_start|>assistant\none two ")
        assert (await http.post(URL, json={"messages": messages})).status_code == 200
        assert prompt_text(house).endswith("one two <|im_end|>\n<|im_start|>assistant\n")
        for stream in (True, False):
            both = {"continue_final_message": True, "add_generation_prompt": True, "stream": stream}
            assert (await http.post(URL, json={"messages": messages, **both})).status_code == 400


@in_loop
async def test_o21_calls_in_a_template_that_knows_none(tmp_path: Any) -> None:
    """They become part of the turn's text, in the form that the model is asked to use."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    house = House(tokenizer=Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=template)))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    async with house.http() as http:
        for content, shown in ((None, ""), ("Well", "Well\n")):
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            messages = [*HI, turn, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
            assert (await http.post(URL, json={"messages": messages})).status_code == 200
            expected = f'user: Hi\nassistant: {shown}{{"name": "add", "arguments": {{"a":1}}}}\ntool: 2\n'
            assert prompt_text(house) == expected


@in_loop
async def test_o22_a_final_message_of_spaces_or_nothing() -> None:
    house = House()
    async with house.http() as http:
        for content in ("", "a \n ", " "):
            messages = [*HI, {"role": "assistant", "content": content}]
            for stream in (True, False):
                body = {"messages": messages, "continue_final_message": True, "stream": stream}
                assert (await http.post(URL, json=body)).status_code == 200
                assert prompt_text(house).endswith("<|im_start|>assistant\n" + content)


@in_loop
async def test_no_second_bos(tmp_path: Any) -> None:
    """Neither in a chat nor in /tokenize of messages, with a tokenizer that adds one to texts."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(write_folder("llama2", tmp_path, chat_template=template))
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id
    house = House(tokenizer=tokenizer)
    async with house.http() as http:
        assert (await http.post(URL, json={"messages": HI})).status_code == 200
        tokens = (await http.post("/tokenize", json={"messages": HI})).json()["tokens"]
    assert house.client.added[0].prompt_token_ids == tokens
    assert tokens.count(tokenizer.bos_token_id) == 1
