"""Reported faults of kind 5: sampling."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from case_client import BROWN, CHAT, COMPLETIONS, END, GREEDY, alive, ask, both, forced, post
from e2e_server import Server

pytestmark = pytest.mark.real_model
FIFTY = "word " * 50


def test_o15_min_tokens_counts_generated_tokens(tiny: Server) -> None:
    body = {**forced(END), "prompt": FIFTY, "max_tokens": 12, "min_tokens": 6}
    whole = post(tiny, COMPLETIONS, {**body, "return_token_ids": True}).json()
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"] == 7
    assert END not in ids[:6]
    assert ids[6] == END
    assert both(tiny, COMPLETIONS, **body, ignore_eos=True).num_tokens == 12
    last = {**body, "logit_bias": {"49151": 100}, "return_token_ids": True}
    assert post(tiny, COMPLETIONS, last).json()["choices"][0]["token_ids"][0] == 49151
    assert post(tiny, COMPLETIONS, {**body, "min_tokens": 13}).status_code == 400
    stopped = both(tiny, COMPLETIONS, **forced(BROWN), prompt="The", max_tokens=12, min_tokens=6, stop=["brown"])
    assert (stopped.num_tokens, stopped.finish_reason) == (6, "stop")


def test_o16_token_ids_outside_the_vocabulary(tiny: Server) -> None:
    hi = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    neighbour = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 40}
    solo = ask(tiny, COMPLETIONS, **neighbour).text
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, tiny, COMPLETIONS, **neighbour)
        for key in ("49152", "-1", "99999999999", "AI", "1.5"):
            response = post(tiny, CHAT, {**hi, "logit_bias": {key: 5}})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias"), key
        for value in (b'"x"', b"null", b"101", b"1e400"):
            body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":5,"logit_bias":{"5":' + value + b"}}"
            assert post(tiny, CHAT, body).status_code == 400, value
        for ids in ([49152], [-1]):
            response = post(tiny, CHAT, {**hi, "stop_token_ids": ids, "min_tokens": 3})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_token_ids")
            response = post(tiny, CHAT, {**hi, "allowed_token_ids": ids})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")
        for fine in ({}, None, {"49151": 5}):
            assert post(tiny, CHAT, {**hi, "logit_bias": fine}).status_code == 200
        assert running.result().text == solo
    alive(tiny)


def test_o17_a_seed_is_the_same_whoever_else_is_there(tiny: Server) -> None:
    seeded = {
        "model": "tiny",
        "max_tokens": 16,
        "temperature": 0.8,
        "ignore_eos": True,
        "prompt": "The capital of France is",
    }

    def run(**more: Any) -> str:
        return ask(tiny, COMPLETIONS, **{**seeded, **more}).text

    texts = {run(seed=42) for _ in range(2)}
    with ThreadPoolExecutor(8) as pool:
        for others in ({}, {"seed": 7}, {"max_tokens": 2}):
            neighbours = [pool.submit(run, **others) for _ in range(3)]
            texts |= set(pool.map(lambda _: run(seed=42), range(2)))
            for neighbour in neighbours:
                neighbour.result()
    assert len(texts) == 1
    prompts = ["The", "A list:", "Once", "I think", "Why"]
    assert [run(seed=1, prompt=p) for p in prompts] != [run(seed=2, prompt=p) for p in prompts]
    assert run(temperature=1.5) != run(temperature=1.5)


def test_o18_penalties_count_generated_tokens_only(tiny: Server) -> None:
    def first(prompt: str, **more: float) -> Any:
        body = {**GREEDY, "prompt": prompt, "max_tokens": 1, "logprobs": 5, **more}
        return post(tiny, COMPLETIONS, body).json()["choices"][0]["logprobs"]

    counted = "one two three four one two three four one two three"
    for prompt in (" brown brown brown brown brown", counted):
        plain, penalised = first(prompt), first(prompt, presence_penalty=2, frequency_penalty=2)
        assert penalised == plain
    assert first(counted)["tokens"] == [" four"]
    assert first(counted, repetition_penalty=100.0)["tokens"] != [" four"]  # that one does act on the prompt
