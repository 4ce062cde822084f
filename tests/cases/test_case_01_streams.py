"""Reported faults of kind 1: the form of streams."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from case_client import BROWN, CHAT, COMPLETIONS, GREEDY, alive, both, forced, post, read_stream
from e2e_server import Server

pytestmark = pytest.mark.real_model


def test_o01_an_invalid_stream_fails_before_its_headers(tiny: Server) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    long = [{"role": "user", "content": "word " * 30_000}]
    for change, status in (
        ({"messages": long, "max_tokens": 5}, 400),
        ({"messages": hi, "temperature": -1}, 400),
        ({"messages": hi, "model": "other"}, 404),
    ):
        errors = []
        for stream in (True, False):
            response = post(tiny, CHAT, {"model": "tiny", **change, "stream": stream})
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"
            errors.append(response.json()["error"])
        assert errors[0] == errors[1]
        assert errors[0]["message"]
    alive(tiny)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"max_tokens": 1}], ids=["one", "n", "one token"])
def test_o02_o03_roles_and_reasons(tiny: Server, more: dict[str, Any]) -> None:
    hello = [{"role": "user", "content": "Count to five"}]
    body = {**GREEDY, "messages": hello, "max_tokens": 12, "stream": True, **more}
    text = post(tiny, CHAT, body).text
    for index in range(body.get("n", 1)):
        assert read_stream(text, index).finish_reason == "length"
    first: dict[int, dict[str, Any]] = {}
    for block in text.split("\n\n"):
        if block.startswith("data: {"):
            for choice in json.loads(block.removeprefix("data: "))["choices"]:
                if choice["index"] not in first:
                    first[choice["index"]] = choice["delta"]
                else:
                    assert choice["delta"].get("role", "assistant") == "assistant"
    assert len(first) == body.get("n", 1)
    assert all(delta["role"] == "assistant" for delta in first.values())
    both(tiny, COMPLETIONS, **{**GREEDY, "prompt": "Say hello", "max_tokens": 8})


def test_o04_comments_come_while_a_request_waits(tiny: Server) -> None:
    """All 16 rows are taken, so the next stream is queued; its headers and a comment per 0.3 s come all the same."""
    stop = threading.Event()

    def occupy() -> None:
        body = {**forced(BROWN), "prompt": "The", "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", tiny.url + COMPLETIONS, json=body, timeout=60) as response:
            for _ in response.iter_bytes():
                if stop.is_set():
                    return

    occupants = [threading.Thread(target=occupy) for _ in range(16)]
    for thread in occupants:
        thread.start()
    try:
        tiny.wait_metrics(lambda m: m["vllm:num_requests_running"] == 16, "all rows are taken")
        body = {**GREEDY, "prompt": "The capital of France is", "max_tokens": 3, "stream": True}
        comments, data = 0, ""
        with httpx.stream("POST", tiny.url + COMPLETIONS, json=body, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith(":"):
                    assert "data:" not in line
                    comments += 1
                elif line:
                    data += line + "\n\n"
                if comments == 3:
                    stop.set()  # it has waited long enough
        assert comments >= 3
        assert read_stream(data).text == " Paris.\n"
    finally:
        stop.set()
        for thread in occupants:
            thread.join()
    whole = post(tiny, COMPLETIONS, {**body, "stream": False})
    assert whole.json()["choices"][0]["text"] == " Paris.\n"
    tiny.wait_at_base()
