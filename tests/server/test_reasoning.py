"""Thoughts out of text, however it is cut, and how many tokens they have."""

from __future__ import annotations

import json
import typing
from itertools import pairwise
from typing import Any

import pytest
from http_harness import EOS, HI, House, chat_tokenizer, events, ids, in_loop, says
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import write_folder

from fakes import Script
from ropeway.config import ModelConfig
from ropeway.protocol import TokenLogprobs
from ropeway.server.output.format import OutputFormat
from ropeway.server.output.message import MessageParser
from ropeway.server.output.reasoning import THOUGHTS, ReasoningReader
from ropeway.server.stream import TextDelta
from ropeway.server.tokenizer import Tokenizer

URL = "/v1/chat/completions"


def read(pieces: list[str], *, is_open: bool = False, kind: str = "qwen3") -> tuple[str, str]:
    parser = MessageParser(ReasoningReader(THOUGHTS[kind], is_open=is_open))
    reasoning = content = ""
    for index, piece in enumerate([*pieces, ""]):
        delta = parser.feed(TextDelta(piece, finish_reason="stop" if index == len(pieces) else None))
        reasoning += delta.reasoning
        content += delta.content
    return reasoning, content


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm, <b>.\n\n</think>\n\nYes.\n", False, ("Hm, <b>.", "Yes.\n")),
        (" \n<think>a</think>b", False, ("a", "b")),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        ("\n\nHm.</think>", True, ("Hm.", "")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("<think>cut off </thi", False, ("cut off </thi", "")),
        ("cut off \n", True, ("cut off", "")),
        ("<thin", False, ("", "<thin")),
        ("", False, ("", "")),
        ("  ", False, ("", "  ")),
        ("a</think>b", False, ("", "a</think>b")),
    ],
)
def test_thoughts(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert read([text], is_open=is_open) == expected
    assert read(list(text), is_open=is_open) == expected
    for place in range(len(text)):
        assert read([text[:place], text[place:]], is_open=is_open) == expected


@settings(max_examples=400, deadline=None)
@given(
    scraps=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "😀 b"]), max_size=12),
    places=st.lists(st.integers(0, 60), max_size=6),
    is_open=st.booleans(),
)
def test_no_cut_changes_anything(scraps: list[str], places: list[int], is_open: bool) -> None:
    text = "".join(scraps)
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    whole = read([text], is_open=is_open)
    assert read([text[a:b] for a, b in pairwise(edges)], is_open=is_open) == whole
    assert read(list(text), is_open=is_open) == whole
    begins = is_open or text.lstrip().startswith("<think>")
    if not begins:
        assert whole == ("", text)


def test_a_long_thought_and_much_space() -> None:
    text = "<think>" + "\n" * 70000 + "x " * 70000 + "\n" * 70000 + "</think>" + "\n" * 70000 + "y"
    assert (
        read([text]) == read([text[at : at + 997] for at in range(0, len(text), 997)]) == (("x " * 70000).strip(), "y")
    )


def test_kinds() -> None:
    for name, thought in THOUGHTS.items():
        assert OutputFormat.find(f"... {thought.start} {thought.end}", "auto", "auto").thought == thought
        assert OutputFormat.find("", "auto", name).thought == thought
        assert read([f"{thought.start}a{thought.end}b"], kind=name) == ("a", "b")
    assert OutputFormat.find("<think></think>", "auto", "none").thought is None
    assert OutputFormat.find("{{ messages }}", "auto", "auto").thought is None
    names = set(typing.get_args(typing.get_type_hints(ModelConfig)["reasoning_parser"]))
    assert names == {"auto", "none", *THOUGHTS}


# Over HTTP

OPENING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


def house(text: str, tmp_path: Any, template: str = OPENING, **more: Any) -> House:
    tokenizer = Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=template))
    return House(says(text, **more), tokenizer=tokenizer)


@in_loop
async def test_streamed_and_whole(tmp_path: Any) -> None:
    thought, answer = "The quick brown fox", "It is fine."
    home = house(f"{thought}\n</think>\n\n{answer}", tmp_path)
    body = {"messages": HI, "stream_options": {"include_usage": True}, "stream": True, "reasoning_effort": "low"}
    async with home.http() as http:
        whole = (await http.post(URL, json={"messages": HI})).json()
        *chunks, usage, done = events((await http.post(URL, json=body)).text)
    assert done == "[DONE]"
    message = whole["choices"][0]["message"]
    assert message == {"role": "assistant", "content": answer, "refusal": None, "reasoning_content": thought}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.get("content", "") for delta in deltas) == answer
    assert sum("reasoning_content" in delta for delta in deltas) > 1  # as it comes
    num_tokens = len(ids(f"{thought}\n</think>"))
    for found in (whole["usage"], usage["usage"]):
        assert found["completion_tokens_details"]["reasoning_tokens"] in (num_tokens, num_tokens + 1)
    assert whole["usage"]["completion_tokens_details"] == usage["usage"]["completion_tokens_details"]


@in_loop
async def test_an_answer_that_is_all_thought(tmp_path: Any) -> None:
    home = house("The quick brown fox", tmp_path)
    async with home.http() as http:
        whole = (await http.post(URL, json={"messages": HI, "max_tokens": 3})).json()
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@in_loop
async def test_a_prompt_that_ends_the_thought_leaves_none(tmp_path: Any) -> None:
    home = house("It </think> is", tmp_path)
    async with home.http() as http:
        body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
        whole = (await http.post(URL, json=body)).json()
        continued = {"messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True}
        thinking = {"messages": [*HI, {"role": "assistant", "content": "<think>Well"}], "continue_final_message": True}
        answers = [(await http.post(URL, json=part)).json() for part in (continued, thinking)]
    assert whole["choices"][0]["message"]["content"] == "It </think> is"
    assert "completion_tokens_details" not in whole["usage"]
    assert answers[0]["choices"][0]["message"]["content"] == "It </think> is"
    assert answers[1]["choices"][0]["message"]["content"] == "is"
    assert answers[1]["choices"][0]["message"]["reasoning_content"] == "It"


@in_loop
async def test_logprobs_stay_one_per_token(tmp_path: Any) -> None:
    """O-13: they are of the raw output, marks included."""
    text = "The</think>quick"
    tokenizer = Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=OPENING))
    home = House(
        lambda request: Script([*ids(text), EOS], logprobs=lambda token, count: TokenLogprobs(-1.0, 1, [], [])),
        tokenizer=tokenizer,
    )
    async with home.http() as http:
        body = {"messages": HI, "logprobs": True}
        whole = (await http.post(URL, json=body)).json()["choices"][0]
        chunks = events((await http.post(URL, json={**body, "stream": True})).text)[:-1]
    streamed = [e for chunk in chunks if (found := chunk["choices"][0]["logprobs"]) for e in found["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [chat_tokenizer().token_text(token) for token in ids(text)]
    assert json.dumps(whole["message"]["reasoning_content"]) == '"The"'


@in_loop
async def test_a_budget_becomes_a_grammar(tmp_path: Any) -> None:
    """That it is kept is in test_tool_grammars.py."""
    home = house("The</think>quick", tmp_path)
    async with home.http() as http:
        for fields, expected in (
            ({}, False),
            ({"thinking_token_budget": 7}, True),
            ({"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ):
            assert (await http.post(URL, json={"messages": HI, **fields})).status_code == 200
            assert ("max_tokens=7" in home.client.added[-1].sampling.grammar) == expected
        response = await http.post(URL, json={"messages": HI, "thinking_token_budget": -1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")
        constrained = {"response_format": {"type": "json_object"}}
        assert (await http.post(URL, json={"messages": HI, **constrained})).status_code == 200
        assert "</think>" in home.client.added[-1].sampling.grammar  # the thought stays free
    home.app.state.service.close()
    plain = House()
    async with plain.http() as http:  # a model that does not think keeps any budget
        assert (await http.post(URL, json={"messages": HI, "thinking_token_budget": 1})).status_code == 200
    assert plain.client.added[0].sampling.grammar == ""
