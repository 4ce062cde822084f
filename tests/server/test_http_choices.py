"""n and best_of over a scripted engine: what is asked of the engine, and which results come back."""

from __future__ import annotations

from typing import Any

import pytest
from http_harness import EOS, HI, House, chat_tokenizer, events, ids, in_loop

from fakes import Script
from ropeway.protocol import AddRequest, TokenLogprobs

URL = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXTS = [" a brown", " dog", " quick fox", " x"]
MEANS = [-2.0, -0.5, -1.0, -0.25]


class Numbered:
    """Gives the i-th sequence of each prompt its own text, and log-probabilities with its own mean."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], int] = {}

    def __call__(self, request: AddRequest) -> Script:
        key = tuple(request.prompt_token_ids)
        number = self.seen[key] = self.seen.get(key, -1) + 1
        mean = MEANS[number % 4]
        tokens = [*ids(TEXTS[number % 4]), EOS]
        # The end token, which is not shown, counts: without it the order would be another.
        values = {token: mean - 1.0 for token in tokens[:-1]} | {EOS: mean + len(tokens) - 1}
        return Script(
            tokens, logprobs=lambda token, count: TokenLogprobs(values[token], 1, [token][:count], [0.0][:count])
        )


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_choices_name_the_first_whose_prompt_they_share(stream: bool) -> None:
    house = House()
    async with house.http() as http:
        await http.post(URL, json={"prompt": ["Hello", "fox"], "n": 3, "stream": stream})
        await http.post(CHAT, json={"messages": HI, "n": 2, "stream": stream})
    first, second, third = (house.client.added[begin : begin + size] for begin, size in ((0, 3), (3, 3), (6, 2)))
    for group in (first, second, third):
        leader = group[0].request_id
        assert [request.fork_of for request in group] == [None] + [leader] * (len(group) - 1)
        assert len({tuple(request.prompt_token_ids) for request in group}) == 1
        assert len({request.sampling.seed for request in group}) == len(group)


@pytest.mark.parametrize("n", [1, 2, 3])
@in_loop
async def test_best_of_returns_the_likeliest_in_order(n: int) -> None:
    house = House(Numbered())
    body: dict[str, Any] = {
        "prompt": ["Hello", "fox trot"],
        "n": n,
        "best_of": 4,
        "echo": True,
        "return_token_ids": True,
    }
    async with house.http() as http:
        answer = (await http.post(URL, json=body)).json()
    assert len(house.client.added) == 8
    assert {request.sampling.logprobs for request in house.client.added} == {0}
    ranked = [" x", " dog", " quick fox", " a brown"][:n]
    choices = answer["choices"]
    assert [choice["text"] for choice in choices] == [p + t for p in ("Hello", "fox trot") for t in ranked]
    assert [choice["index"] for choice in choices] == list(range(2 * n))
    assert {tuple(c["prompt_token_ids"]) for c in choices[n:]} == {tuple(ids("fox trot"))}
    assert all(choice["logprobs"] is None for choice in choices)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(ids("Hello")) + len(ids("fox trot"))
    assert usage["completion_tokens"] == 2 * sum(len(ids(text)) + 1 for text in TEXTS), "all that were generated"
    await house.quiet()


@in_loop
async def test_best_of_with_logprobs_and_echo() -> None:
    house = House(Numbered())
    async with house.http() as http:
        body = {"prompt": "x", "n": 2, "best_of": 3, "logprobs": 1, "seed": 5}
        choices = (await http.post(URL, json=body)).json()["choices"]
    assert [choice["text"] for choice in choices] == [" dog", " quick fox"]
    assert choices[0]["logprobs"]["tokens"] == [chat_tokenizer().token_text(token) for token in ids(" dog")]
    assert [request.sampling.logprobs for request in house.client.added] == [1] * 3
    assert [request.fork_of for request in house.client.added] == [None, *[house.client.added[0].request_id] * 2]


@in_loop
async def test_what_best_of_cannot_be() -> None:
    house = House(Numbered())
    async with house.http() as http:
        for body in ({"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": 129}, {"best_of": 2, "stream": True}):
            response = await http.post(URL, json={"prompt": "x", **body})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of"), body
        response = await http.post(CHAT, json={"messages": HI, "best_of": 2})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        assert house.client.added == []
        same = await http.post(URL, json={"prompt": "x", "n": 2, "best_of": 2, "stream": True})
        assert events(same.text)[-1] == "[DONE]"
    full = House(Numbered(), max_num_queued_reqs=3)
    async with full.http() as http:
        assert (await http.post(URL, json={"prompt": "x", "best_of": 4})).status_code == 400
        assert (await http.post(URL, json={"prompt": "x", "best_of": 3})).status_code == 200
