"""What answers say of the prompt's tokens, over a scripted engine: echo with logprobs, and `prompt_logprobs`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_harness import EOS, HI, House, chat_tokenizer, events, ids, in_loop, stream_text

from fakes import Script
from ropeway.protocol import AddRequest, TokenLogprobs
from ropeway.server.openai.prompt_report import Echo, token_pieces

URL = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The quick 😀 brown"
ANSWER = " fox é"


def scored(token: int, count: int) -> TokenLogprobs:
    """A token's log-probability is told by its id, its rank is 3, and one alternative is impossible."""
    return TokenLogprobs(-token / 16, 3, [7, token, 9][:count], [-0.25, -token / 16, float("-inf")][:count])


def script(request: AddRequest) -> Script:
    return Script([*ids(ANSWER), EOS], logprobs=scored)


def finite_json(text: str) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


def merged(values: list[Any], index: int = 0) -> dict[str, list[Any]]:
    """The logprobs columns of one choice, added up over chunks."""
    block: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for value in values:
        for choice in value["choices"]:
            if choice["index"] == index:
                for key, column in (choice["logprobs"] or {}).items():
                    block[key] += column
    return block


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 50])
@in_loop
async def test_echo_with_logprobs(stream: bool, form: str, max_tokens: int) -> None:
    house = House(script)
    body = {"prompt": PROMPT if form == "text" else ids(PROMPT), "echo": True, "logprobs": 3}
    async with house.http() as http:
        response = await http.post(URL, json={**body, "max_tokens": max_tokens, "stream": stream})
    assert response.status_code == 200
    assert "Infinity" not in response.text
    values = events(response.text)[:-1] if stream else [finite_json(response.text)]
    shown = ids(ANSWER)[:max_tokens]
    text = chat_tokenizer().decode([*ids(PROMPT), *shown])
    assert stream_text(values) == text
    block = merged(values)
    expected = [*ids(PROMPT), *shown]
    assert {len(column) for column in block.values()} == {len(expected)}
    assert block["token_logprobs"] == [None, *(-token / 16 for token in expected[1:])]
    assert block["top_logprobs"][0] is None
    for token, name, top in list(zip(expected, block["tokens"], block["top_logprobs"], strict=True))[1:]:
        assert top[name] == -token / 16
        assert min(top.values()) == -9999.0
    # Each token's text begins where its offset says. Parts of a character have the place where it begins.
    offsets = [*block["text_offset"], len(text)]
    assert offsets == sorted(offsets)
    for token, begin, end in zip(expected, offsets, offsets[1:], strict=False):
        whole = chat_tokenizer().token_bytes(token).decode("utf-8", "replace")
        assert "\ufffd" in whole or text[begin:end] == whole
    if not stream:
        usage = values[0]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
            len(ids(PROMPT)),
            min(max_tokens, len(shown) + 1),
        )
        assert values[0]["choices"][0]["finish_reason"] == ("stop" if max_tokens == 50 else "length")
    [request] = house.client.added
    assert (request.sampling.prompt_logprobs, request.sampling.max_tokens) == (3, max_tokens)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 2])
@in_loop
async def test_prompt_logprobs(stream: bool, count: int) -> None:
    house = House(script)
    async with house.http() as http:
        completion = await http.post(URL, json={"prompt": PROMPT, "prompt_logprobs": count, "stream": stream})
        chat = await http.post(CHAT, json={"messages": HI, "prompt_logprobs": count, "stream": stream})
    for response, holder in ((completion, lambda value: value["choices"][0]), (chat, lambda value: value)):
        values = events(response.text)[:-1] if stream else [finite_json(response.text)]
        told = [holder(value)["prompt_logprobs"] for value in values if "prompt_logprobs" in holder(value)]
        assert stream_text(values) == ANSWER if stream else True
        assert holder(values[0])["prompt_logprobs"] == told[0], "they come with the first chunk"
        assert len(told) == 1
        first, *entries = told[0]
        assert first is None
        prompt = house.client.added[0 if holder(values[0]) is not values[0] else 1].prompt_token_ids
        assert len(entries) == len(prompt) - 1
        for token, entry in zip(prompt[1:], entries, strict=True):
            best = {7: (1, -0.25), token: (2, -token / 16)} if count else {}
            expected = {**best, token: (3, -token / 16)}
            assert entry == {
                str(key): {"rank": rank, "logprob": logprob, "decoded_token": chat_tokenizer().token_text(key)}
                for key, (rank, logprob) in expected.items()
            }


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_only_the_first_choice_of_a_prompt_asks_and_all_tell(stream: bool) -> None:
    house = House(script)
    body = {
        "prompt": ["Hello", "fox trot"],
        "n": 3,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 2,
        "stream": stream,
    }
    async with house.http() as http:
        response = await http.post(URL, json=body)
    values = events(response.text)[:-1] if stream else [response.json()]
    assert [request.sampling.prompt_logprobs for request in house.client.added] == [2, None, None] * 2
    for index in range(6):
        prompt = ids("Hello" if index < 3 else "fox trot")
        block = merged(values, index)
        assert block["token_logprobs"][: len(prompt)] == [None, *(-token / 16 for token in prompt[1:])]
        assert {len(top) for top in block["top_logprobs"][1 : len(prompt)]} <= {1, 2}, "one of the best, and itself"
        told = [
            choice["prompt_logprobs"]
            for value in values
            for choice in value["choices"]
            if choice["index"] == index and "prompt_logprobs" in choice
        ]
        assert [len(entries) for entries in told] == [len(prompt)]
        assert all(len(entry) in (2, 3) for entry in told[0][1:])


@in_loop
async def test_a_choice_waits_for_what_is_told_of_its_prompt() -> None:
    """Also where it is ready before the first one, which asked."""
    gate = asyncio.Event()
    asking: list[AddRequest] = []

    def slow(request: AddRequest) -> Script:
        asking.append(request)
        return Script([*ids(ANSWER), EOS], logprobs=scored, waits={0: gate} if len(asking) == 1 else {})

    house = House(slow)
    async with house.http() as http:
        body = {"prompt": PROMPT, "n": 2, "prompt_logprobs": 1}
        answer = asyncio.create_task(http.post(URL, json=body))
        await asyncio.sleep(0.05)
        assert not answer.done()
        gate.set()
        choices = (await answer).json()["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    assert len(choices[0]["prompt_logprobs"]) == len(ids(PROMPT))
    await house.quiet()


@in_loop
async def test_too_many_are_refused() -> None:
    house = House(script, max_logprobs=5)
    async with house.http() as http:
        for url, body in ((URL, {"prompt": "x"}), (CHAT, {"messages": HI})):
            for value in (6, -1, 1.5, "2", True):
                response = await http.post(url, json={**body, "prompt_logprobs": value})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
            assert (await http.post(url, json={**body, "prompt_logprobs": 5})).status_code == 200
        response = await http.post(URL, json={"prompt": "x", "echo": True, "logprobs": 6})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


@in_loop
async def test_an_echo_of_a_truncated_prompt_is_what_was_kept() -> None:
    house = House(script)
    async with house.http() as http:
        for prompt in (PROMPT, ids(PROMPT)):
            body = {"prompt": prompt, "truncate_prompt_tokens": 2, "echo": True, "logprobs": 0, "max_tokens": 0}
            choice = (await http.post(URL, json=body)).json()["choices"][0]
            assert choice["text"] == chat_tokenizer().decode(ids(PROMPT)[-2:])
            assert len(choice["logprobs"]["tokens"]) == 2


def test_pieces_of_a_prompt_with_special_tokens() -> None:
    tokenizer = chat_tokenizer()
    text = "<|im_start|>user\nHi<|im_end|>"
    token_ids = tokenizer.encode(text)
    pieces = token_pieces(tokenizer, token_ids, Echo(text, shows_special_tokens=True))
    assert "".join(pieces) == text
    assert pieces[0] == "<|im_start|>"
    # One that the tokenizer added is not in the text.
    assert token_pieces(tokenizer, [EOS, *token_ids], Echo(text, shows_special_tokens=True)) == ["", *pieces]
    hidden = token_pieces(tokenizer, token_ids, Echo("user\nHi"))
    assert (hidden[0], hidden[-1], "".join(hidden)) == ("", "", "user\nHi")
    half = [ids("😀")[0]]
    assert token_pieces(tokenizer, half, Echo(tokenizer.decode(half))) == ["\ufffd"]
