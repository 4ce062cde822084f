"""Reported faults of kind 9: limits and validation. The many forms of O-31 to O-34 that never reach an engine are in
tests/server/test_http_validation.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from case_client import BROWN, CHAT, COMPLETIONS, GREEDY, alive, ask, forced, post, read_stream
from e2e_server import Server

pytestmark = pytest.mark.real_model

HI = [{"role": "user", "content": "Hi"}]


def test_o31_empty_prompts_and_no_tokens_harm_nobody(tiny: Server) -> None:
    neighbour: list[str] = []

    def stream() -> None:
        body = {**forced(BROWN), "prompt": "The", "max_tokens": 120, "stream": True}
        neighbour.append(read_stream(post(tiny, COMPLETIONS, body).text).text)

    thread = threading.Thread(target=stream)
    thread.start()
    for prompt in ("", [""], [], [[]], ["ok", ""], [[], [1, 2]]):
        response = post(tiny, COMPLETIONS, {"model": "tiny", "prompt": prompt, "max_tokens": 4})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    text = "Your answer: Yes"
    response = post(tiny, COMPLETIONS, {"model": "tiny", "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert response.status_code == 200
    value = response.json()
    choice = value["choices"][0]
    assert (choice["text"], choice["finish_reason"], value["usage"]["completion_tokens"]) == (text, "length", 0)
    block = choice["logprobs"]
    assert block["token_logprobs"][0] is None
    assert all(number < 0 for number in block["token_logprobs"][1:])
    ends = [*block["text_offset"][1:], len(text)]
    assert [text[begin:end] for begin, end in zip(block["text_offset"], ends, strict=True)] == block["tokens"]
    response = post(tiny, COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert post(tiny, CHAT, {"model": "tiny", "messages": []}).status_code == 400
    assert (
        post(tiny, CHAT, {**GREEDY, "messages": [{"role": "user", "content": ""}], "max_tokens": 2}).status_code == 200
    )
    thread.join()
    assert neighbour == [" brown" * 120]
    alive(tiny)


def test_o32_null_is_as_good_as_absent(tiny: Server) -> None:
    body = {**GREEDY, "messages": HI, "seed": 1, "max_tokens": 6}
    expected = ask(tiny, CHAT, **body).text
    fields = (
        "top_p", "max_completion_tokens", "n", "stop", "stream", "stream_options", "logit_bias", "logprobs",
        "top_logprobs", "presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice", "user",
        "parallel_tool_calls", "metadata",
    )  # fmt: skip
    for extra in (*({field: None} for field in fields), dict.fromkeys(fields)):
        assert ask(tiny, CHAT, **body, **extra).text == expected, extra
    for field in ("temperature", "max_tokens"):
        short = {"max_completion_tokens": 6, **body, field: None}
        assert post(tiny, CHAT, short).status_code == 200
    response = post(tiny, CHAT, {**body, "foo": 1})
    assert response.status_code == 200
    assert response.headers["x-ropeway-ignored-fields"] == "foo"


def test_o33_token_ids_outside_the_vocabulary(tiny: Server) -> None:
    before = tiny.metrics()
    bad: tuple[Any, ...] = (
        [999999],
        [49152],
        [-1],
        [1.5],
        ["a", 1],
        [[1, 2], [3, 49152]],
        [True],
        [9223372036854775808],
    )
    for prompt in bad:
        response = post(tiny, COMPLETIONS, {"model": "tiny", "prompt": prompt, "max_tokens": 2})
        assert response.status_code == 400, prompt
        assert response.json()["error"]["param"] == "prompt"
    after = tiny.metrics()
    for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total"):
        assert after[name] == before[name], "something reached the engine"
    assert post(tiny, COMPLETIONS, {"model": "tiny", "prompt": [49151], "max_tokens": 2}).status_code == 200
    alive(tiny)


def test_o34_unpaired_surrogates(tiny: Server) -> None:
    lone = rb'"x \ud83d"'
    bodies = [
        (CHAT, b'{"messages":[{"role":"user","content":%s}],"max_tokens":2%s}'),
        (COMPLETIONS, b'{"prompt":%s,"max_tokens":2%s}'),
        (COMPLETIONS, b'{"prompt":"x","max_tokens":2,"stop":[%s]%s}'),
        (COMPLETIONS, b'{"prompt":"x","max_tokens":2,"user":%s%s}'),
        (COMPLETIONS, b'{"prompt":"x","max_tokens":2,"model":%s%s}'),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"tools":[{"type":"function","function":'
               b'{"name":"f","description":%s}}]%s}'),
        (COMPLETIONS, b'{"prompt":"x","max_tokens":2,"structured_outputs":{"json":{"enum":[%s]}}%s}'),
    ]  # fmt: skip
    for path, body in bodies:
        for text in (lone, rb'"\ude00 y"', rb'"\udcf0"', b'"\xff"'):
            for stream in (b"", b',"stream":true'):
                response = post(tiny, path, body % (text, stream))
                assert response.status_code == 400, (path, text)
                assert response.headers["content-type"] == "application/json"
                response.json()["error"]["message"].encode()
    for text in (rb'"x \ud83d\ude00"', rb'"a\u0000b"'):
        for path, body in bodies[:2]:
            assert post(tiny, path, body % (text, b"")).status_code == 200
    alive(tiny)
