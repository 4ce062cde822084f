"""/v1/chat/completions over a scripted engine: prompts, answers, streams, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from http_harness import EOS, HI, MAX_MODEL_LEN, TEXT, House, chat_tokenizer, events, ids, in_loop, says, stream_text

from fakes import Script
from ropeway.protocol import TokenLogprobs

URL = "/v1/chat/completions"


def prompt_text(house: House, index: int = -1) -> str:
    return chat_tokenizer().decode(house.client.added[index].prompt_token_ids, skip_special_tokens=False)


@in_loop
async def test_whole_answer_and_usage() -> None:
    house = House(says(num_cached_tokens=16))
    async with house.http() as http:
        answer = (await http.post(URL, json={"model": "tiny", "messages": HI})).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    [added] = house.client.added
    assert answer["usage"] == {
        "prompt_tokens": len(added.prompt_token_ids),
        "completion_tokens": len(ids(TEXT)) + 1,  # the end token counts
        "total_tokens": len(added.prompt_token_ids) + len(ids(TEXT)) + 1,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert prompt_text(house) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert added.sampling.max_tokens == MAX_MODEL_LEN - len(added.prompt_token_ids)  # all there is room for


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 50])
@in_loop
async def test_stream_has_the_form_that_clients_expect(n: int, max_tokens: int) -> None:
    """O-02, O-03: role first, finish_reason present and null until the end, one id, no null content."""
    house = House()
    body = {"messages": HI, "stream": True, "n": n, "max_tokens": max_tokens}
    async with house.http() as http:
        whole = (await http.post(URL, json={**body, "stream": False})).json()
        response = await http.post(URL, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    for key in ("id", "created", "model", "object"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(n):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert all(isinstance(choice["delta"].get("content", ""), str) for choice in choices)
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == whole["choices"][index]["finish_reason"] == ("length" if max_tokens == 1 else "stop")
        assert stream_text(chunks, index) == whole["choices"][index]["message"]["content"]


@in_loop
async def test_usage_in_streams() -> None:
    house = House(says(num_cached_tokens=3))
    async with house.http() as http:
        body: dict[str, Any] = {"messages": HI, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        *chunks, usage, _ = events((await http.post(URL, json=body)).text)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        prompt = len(house.client.added[0].prompt_token_ids)
        completion = 2 * (len(ids(TEXT)) + 1)
        assert usage["usage"] == {
            "prompt_tokens": prompt,  # once, not per choice
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        body = {"messages": HI, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        *chunks, _ = events((await http.post(URL, json=body)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == len(ids(TEXT)) + 1


@in_loop
async def test_text_that_json_must_escape() -> None:
    text = 'a "quoted" \\ back\nline\ttab \x01 😀🚀 žluť </script>  end'
    house = House(says(text))
    async with house.http() as http:
        chunks = events((await http.post(URL, json={"messages": HI, "stream": True})).text)
        whole = (await http.post(URL, json={"messages": HI})).json()
    assert stream_text(chunks) == text == whole["choices"][0]["message"]["content"]
    assert all(chunk["choices"][0]["delta"].get("content") != "" for chunk in chunks[1:-1])  # half an emoji is no event


@in_loop
async def test_stop_string_ends_the_engine_request() -> None:
    house = House(says())
    for stream in (True, False):
        body = {"messages": HI, "stop": ["quick", "zebra"], "stream": stream, "ignore_eos": True}
        async with house.http() as http:
            response = await http.post(URL, json=body)
        if stream:
            *chunks, _ = events(response.text)
            text, choice = stream_text(chunks), chunks[-1]["choices"][0]
        else:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
        assert text == " The "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "quick")
    assert house.client.aborted == [request.request_id for request in house.client.added]
    await house.quiet()


@in_loop
async def test_sampling_fields_reach_the_engine() -> None:
    house = House()
    body = {
        "messages": HI,
        "max_completion_tokens": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.25,
        "presence_penalty": 1,
        "frequency_penalty": -2,
        "repetition_penalty": 1.5,
        "seed": -1,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [8],
        "allowed_token_ids": [5, 6],
        "banned_token_ids": [6],
        "ignore_eos": True,
        "cache_salt": "salt",
        "user": "ann",
    }
    async with house.http() as http:
        assert (await http.post(URL, json=body)).status_code == 200
        await http.post(URL, json={"messages": HI, "top_k": -1, "top_p": 0, "max_tokens": 1})
    added, neutral = house.client.added
    sampling = added.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 4, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -2, 1.5)
    assert sampling.seed == 2**64 - 1
    assert sampling.logit_bias == ((5, -100), (6, 1.5))
    assert (sampling.stop_token_ids, sampling.allowed_token_ids, sampling.banned_token_ids) == ((8,), (5, 6), (6,))
    assert sampling.ignore_eos
    assert sampling.eos_token_ids == (EOS,)
    assert (added.cache_salt, added.tenant) == ("salt", "ann")
    assert sampling.logprobs is None
    assert neutral.sampling.top_k == 0
    assert 0 < neutral.sampling.top_p < 1e-6
    assert (neutral.sampling.temperature, neutral.sampling.repetition_penalty) == (1, 1)


@in_loop
async def test_each_choice_has_a_seed_of_its_own() -> None:
    house = House()
    async with house.http() as http:
        await http.post(URL, json={"messages": HI, "n": 4, "seed": 11})
        await http.post(URL, json={"messages": HI, "seed": 11})
        await http.post(URL, json={"messages": HI})
        await http.post(URL, json={"messages": HI})
    seeds = [request.sampling.seed for request in house.client.added]
    assert len(set(seeds[:4])) == 4
    assert seeds[0] == seeds[4] == 11  # the first choice is what n = 1 gives
    assert len(set(seeds[4:])) == 3  # without a seed, a new one each time


@in_loop
async def test_defaults_of_the_model(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.25, "top_k": 5, "top_p": null, "eos_token_id": 2}'
    )
    for flag, expected in (("auto", (0.25, 5, 1.0)), ("none", (1.0, 0, 1.0))):
        house = House(model_folder=tmp_path, generation_config=flag)
        async with house.http() as http:
            await http.post(URL, json={"messages": HI})
            await http.post(URL, json={"messages": HI, "temperature": 2})
        first, second = (request.sampling for request in house.client.added)
        assert (first.temperature, first.top_k, first.top_p) == expected
        assert second.temperature == 2


# Messages


@in_loop
async def test_parts_are_joined_like_text() -> None:
    """O-20."""
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
async def test_assistant_turns_with_tool_calls() -> None:
    """O-21: content missing, null and empty are the same; "tool_calls": [] is as if absent."""
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
async def test_the_templates_own_error_is_a_400() -> None:
    """O-19."""
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
async def test_continuing_the_final_message() -> None:
    """O-22."""
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
async def test_tools_that_ask_for_nothing() -> None:
    """O-25 (a) to (e), as far as there are no tool calls yet."""
    house = House()
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
    async with house.http() as http:
        for fields in (
            {},
            {"tool_choice": "none"},
            {"tools": []},
            {"tools": [], "tool_choice": "auto"},
            {"tools": None, "tool_choice": None},
            {"parallel_tool_calls": False},
        ):
            assert (await http.post(URL, json={"messages": HI, **fields})).status_code == 200
        assert len({tuple(request.prompt_token_ids) for request in house.client.added}) == 1
        assert (await http.post(URL, json={"messages": HI, "tools": [tool], "tool_choice": "none"})).status_code == 200
        assert "tools: 1" in prompt_text(house)
        for fields in ({"tools": [tool]}, {"tool_choice": "required"}, {"tools": [tool], "tool_choice": {"type": "x"}}):
            response = await http.post(URL, json={"messages": HI, **fields})
            assert response.status_code == 400
            assert "not supported yet" in response.json()["error"]["message"]
            assert response.json()["error"]["param"] in ("tools", "tool_choice")


# Log-probabilities


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The sampled token is the second best; the last alternative is impossible."""
    top = [token + 1, token, token + 2, token + 3][:count]
    return TokenLogprobs(-1.5, 2, top, [-0.5, -1.5, -2.5, float("-inf")][:count])


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_logprobs(stream: bool) -> None:
    """O-13, O-14: one entry per token, of the sampled token, finite; the hidden end token has none."""
    text = " brown 😀"
    house = House(lambda request: Script([*ids(text), EOS], logprobs=_logprobs))
    tokenizer = chat_tokenizer()
    async with house.http() as http:
        for top in (None, 0, 3, 4):
            body = {"messages": HI, "logprobs": True, "top_logprobs": top, "stream": stream}
            response = await http.post(URL, json=body)
            assert "Infinity" not in response.text
            if stream:
                choices = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
                entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
                content = "".join(choice["delta"].get("content", "") for choice in choices)
            else:
                [choice] = response.json()["choices"]
                entries, content = choice["logprobs"]["content"], choice["message"]["content"]
            assert content == text
            assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
            assert [entry["token"] for entry in entries] == [tokenizer.token_text(token) for token in ids(text)]
            for token, entry in zip(ids(text), entries, strict=True):
                assert entry["logprob"] == -1.5
                assert len(entry["top_logprobs"]) == (top or 0)
                values = [other["logprob"] for other in entry["top_logprobs"]]
                assert values == [-0.5, -1.5, -2.5, -9999.0][: top or 0]
                if top:
                    assert entry["top_logprobs"][1]["bytes"] == list(tokenizer.token_bytes(token))
    assert [request.sampling.logprobs for request in house.client.added] == [0, 0, 3, 4]


@in_loop
async def test_token_ids_on_request() -> None:
    house = House()
    async with house.http() as http:
        whole = (await http.post(URL, json={"messages": HI, "return_token_ids": True})).json()
        chunks = events((await http.post(URL, json={"messages": HI, "return_token_ids": True, "stream": True})).text)[
            :-1
        ]
    prompt = house.client.added[0].prompt_token_ids
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == prompt
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert whole["choices"][0]["token_ids"] == streamed == [*ids(TEXT), EOS]


@in_loop
async def test_special_tokens_shown_on_request() -> None:
    house = House(lambda request: Script([*ids("a"), chat_tokenizer().encode("<|im_start|>")[0], EOS]))
    async with house.http() as http:
        for skip, expected in ((True, "a"), (False, "a<|im_start|>")):
            answer = (await http.post(URL, json={"messages": HI, "skip_special_tokens": skip})).json()
            assert answer["choices"][0]["message"]["content"] == expected
