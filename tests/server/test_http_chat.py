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
