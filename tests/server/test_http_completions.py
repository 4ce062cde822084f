"""/v1/completions, /tokenize, /detokenize and /v1/models over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from http_harness import (
    EOS,
    HI,
    MAX_MODEL_LEN,
    TEXT,
    VOCAB_SIZE,
    House,
    chat_tokenizer,
    events,
    ids,
    in_loop,
    says,
    stream_text,
)

from fakes import Script
from ropeway.protocol import TokenLogprobs

URL = "/v1/completions"


@in_loop
async def test_four_forms_of_prompt() -> None:
    house = House()
    hello, fox = ids("Hello"), ids("fox")
    async with house.http() as http:
        for prompt, expected in (
            ("Hello", [hello]),
            (hello, [hello]),
            (["Hello", "fox"], [hello, fox]),
            ([hello, fox], [hello, fox]),
            ([VOCAB_SIZE - 1], [[VOCAB_SIZE - 1]]),
        ):
            house.client.added.clear()
            response = await http.post(URL, json={"prompt": prompt})
            assert [request.prompt_token_ids for request in house.client.added] == expected
            answer = response.json()
            assert [choice["text"] for choice in answer["choices"]] == [TEXT] * len(expected)
            assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
            assert answer["object"] == "text_completion"
    assert {request.sampling.max_tokens for request in house.client.added} == {16}  # OpenAI's default here


@in_loop
async def test_choices_are_numbered_prompt_by_prompt() -> None:
    scripts = {tuple(ids("a")): "first", tuple(ids("b")): "second"}
    house = House(lambda request: Script([*ids(scripts[tuple(request.prompt_token_ids)]), EOS]))
    body = {"prompt": ["a", "b"], "n": 2, "seed": 3, "echo": True}
    async with house.http() as http:
        whole = (await http.post(URL, json=body)).json()
        chunks = events((await http.post(URL, json={**body, "stream": True})).text)[:-1]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = ["afirst", "afirst", "bsecond", "bsecond"]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [stream_text(chunks, index) for index in range(4)] == texts
    assert whole["usage"]["prompt_tokens"] == len(ids("a")) + len(ids("b"))
    seeds = [request.sampling.seed for request in house.client.added[:4]]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


@in_loop
async def test_stream_has_the_form_that_clients_expect() -> None:
    house = House(says(tokens_per_delta=3))
    body = {"prompt": "Hello", "stream": True, "stream_options": {"include_usage": True}}
    async with house.http() as http:
        *chunks, usage, done = events((await http.post(URL, json=body)).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids(TEXT)) + 1
    assert stream_text(chunks) == TEXT
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["id"] for chunk in [*chunks, usage]} == {chunks[0]["id"]}


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_nothing_but_the_prompt(stream: bool) -> None:
    """O-31: max_tokens 0 with echo; the engine is not asked."""
    house = House()
    prompt = "Your answer: Yes"
    async with house.http() as http:
        for form in (prompt, ids(prompt)):
            response = await http.post(URL, json={"prompt": form, "max_tokens": 0, "echo": True, "stream": stream})
            if stream:
                [chunk, _] = events(response.text)
                choice = chunk["choices"][0]
            else:
                choice = response.json()["choices"][0]
                assert response.json()["usage"]["completion_tokens"] == 0
            assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        response = await http.post(URL, json={"prompt": prompt, "max_tokens": 0, "stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert house.client.added == []


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_logprobs(stream: bool) -> None:
    text = " brown 😀"

    def logprobs(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(-3.5, 9, [5, 6, 7][:count], [-0.5, -1.5, float("-inf")][:count])

    house = House(lambda request: Script([*ids(text), EOS], logprobs=logprobs))
    tokenizer = chat_tokenizer()
    async with house.http() as http:
        for count in (0, 2, 3):
            response = await http.post(URL, json={"prompt": "x", "logprobs": count, "stream": stream})
            assert "Infinity" not in response.text
            block: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            values = events(response.text)[:-1] if stream else [response.json()]
            assert stream_text(values) == text
            for value in values:
                for key, part in (value["choices"][0]["logprobs"] or {}).items():
                    block[key] += part
            length = len(ids(text))
            assert [len(part) for part in block.values()] == [length] * 4
            assert block["token_logprobs"] == [-3.5] * length
            for token, name, top in zip(ids(text), block["tokens"], block["top_logprobs"], strict=True):
                data = tokenizer.token_bytes(token)
                expected = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if name.startswith("bytes:") else name
                assert name == expected
                assert top[name] == -3.5
                assert len(top) == count + 1  # and the sampled one
                assert min(top.values()) == (-9999.0 if count == 3 else -3.5)
            assert any(name.startswith("bytes:") for name in block["tokens"])  # the emoji is several tokens
            assert block["text_offset"] == sorted(block["text_offset"])
            assert block["text_offset"][0] == 0
            assert block["text_offset"][-1] <= len(text)


@in_loop
async def test_stop_token_and_stop_string_shown() -> None:
    house = House(says(" The quick brown fox jumps"))
    stop = ids(" b")[0]
    assert stop in ids(TEXT)
    async with house.http() as http:
        body = {"prompt": "x", "stop_token_ids": [stop], "max_tokens": 50}
        choice = (await http.post(URL, json=body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" The quick", "stop", stop)
        body = {"prompt": "x", "stop": "brown", "include_stop_str_in_output": True}
        choice = (await http.post(URL, json=body)).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (" The quick brown", "brown")


@in_loop
async def test_truncation_of_the_prompt() -> None:
    house = House()
    prompt = [5, 6, 7, 8] * 100
    async with house.http() as http:
        for keep, length in ((3, 3), (1000, None), (-1, MAX_MODEL_LEN - 16)):
            response = await http.post(URL, json={"prompt": prompt, "truncate_prompt_tokens": keep})
            if length is None:
                assert response.status_code == 400
            else:
                assert house.client.added[-1].prompt_token_ids == prompt[-length:]


@in_loop
async def test_token_ids_on_request() -> None:
    house = House()
    body = {"prompt": "Hello", "return_token_ids": True}
    async with house.http() as http:
        [choice] = (await http.post(URL, json=body)).json()["choices"]
        chunks = events((await http.post(URL, json={**body, "stream": True})).text)[:-1]
    assert choice["prompt_token_ids"] == chunks[0]["choices"][0]["prompt_token_ids"] == ids("Hello")
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert choice["token_ids"] == streamed == [*ids(TEXT), EOS]


@in_loop
async def test_tokenize_gives_what_generation_starts_from() -> None:
    house = House()
    async with house.http() as http:
        answer = (await http.post("/tokenize", json={"prompt": "Hello 😀", "return_token_strs": True})).json()
        assert answer["tokens"] == ids("Hello 😀")
        assert (answer["count"], answer["max_model_len"]) == (len(ids("Hello 😀")), MAX_MODEL_LEN)
        assert len(answer["token_strs"]) == answer["count"]
        back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "Hello 😀"}
        answer = (await http.post("/tokenize", json={"model": "tiny", "messages": HI})).json()
        await http.post("/v1/chat/completions", json={"messages": HI})
        assert answer["tokens"] == house.client.added[-1].prompt_token_ids
        for body in ({}, {"prompt": "x", "messages": HI}, {"prompt": 5}, {"prompt": "x", "model": "nix"}):
            assert (await http.post("/tokenize", json=body)).status_code in (400, 404)
        for tokens in ([VOCAB_SIZE], [-1], [True], ["a"], "x", None):
            assert (await http.post("/detokenize", json={"tokens": tokens})).status_code == 400


@in_loop
async def test_models() -> None:
    house = House()
    async with house.http() as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "org/alias"]
        assert cards[0]["max_model_len"] == MAX_MODEL_LEN
        assert (await http.get("/v1/models/org/alias")).json() == cards[1]
        missing = await http.get("/v1/models/nix/da")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        answer = (await http.post(URL, json={"model": "org/alias", "prompt": "x"})).json()
        assert answer["model"] == "tiny"
