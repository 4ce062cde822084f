"""Reported faults of kind 3: detokenisation. O-09's unit level is in tests/server/test_detokenizer.py."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from case_client import CHAT, COMPLETIONS, GREEDY, ask, both, post
from e2e_server import Server

pytestmark = pytest.mark.real_model
PROMPTS = [
    "😀 😀 😀 😀 😀 😀 😀 😀",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Příliš žluťoučký",
    "नमस्ते दुनिया नमस्ते दुनिया नमस्ते",
    "你好,世界。你好,世界。你好,",
    "👨‍👩‍👧‍👦 👨‍👩‍👧‍👦 👨‍👩‍👧‍👦",
]


def test_o09_a_leading_space_is_kept(tiny: Server) -> None:
    answer = both(tiny, COMPLETIONS, **GREEDY, prompt="Hello", max_tokens=20)
    ids = post(tiny, COMPLETIONS, {**GREEDY, "prompt": "Hello", "max_tokens": 20, "return_token_ids": True}).json()
    token_ids = ids["choices"][0]["token_ids"]
    assert answer.text == post(tiny, "/detokenize", {"tokens": token_ids}).json()["prompt"]
    space = post(tiny, "/tokenize", {"prompt": " brown"}).json()["tokens"][0]
    body = {**GREEDY, "logit_bias": {str(space): 100}, "max_tokens": 2}
    assert both(tiny, COMPLETIONS, **body, prompt="Hello").text == " brown brown"
    assert both(tiny, CHAT, **body, messages=[{"role": "user", "content": "Hi"}]).text == " brown brown"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_o10_characters_of_several_tokens(tiny: Server, prompt: str) -> None:
    body = {**GREEDY, "prompt": prompt, "max_tokens": 12}
    whole = post(tiny, COMPLETIONS, {**body, "return_token_ids": True}).json()["choices"][0]
    text = post(tiny, "/detokenize", {"tokens": whole["token_ids"]}).json()["prompt"]
    assert whole["text"] == text
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda _: ask(tiny, COMPLETIONS, stream=True, **body), range(4)))
    for stream in streams:
        assert stream.text == text
        for piece in stream.pieces:
            assert "\ufffd" not in piece or "\ufffd" in text
    raw = post(tiny, COMPLETIONS, {**body, "stream": True}).content.decode()  # valid UTF-8
    for line in raw.split("\n"):
        if line.startswith("data: {"):
            json.loads(line.removeprefix("data: "))["choices"][0]["text"].encode()  # no lone surrogate
