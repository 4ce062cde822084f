"""Reported faults of kind 10: cancellation and disconnects. O-37 is in tests/server/test_http_streams.py and below."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from case_client import BROWN, CHAT, COMPLETIONS, GREEDY, alive, ask, forced, post
from e2e_server import Server

pytestmark = pytest.mark.real_model


def leave_after(server: Server, path: str, body: dict[str, Any], *, chunks: int) -> list[str]:
    """Read so many chunks of a stream, then close the connection."""
    seen: list[str] = []
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seen.append(line)
            if len(seen) == chunks:
                break
    return seen


def test_o35_clients_that_leave_at_any_moment(tiny: Server) -> None:
    control = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 20}
    solo = ask(tiny, COMPLETIONS, **control).text
    before = tiny.metrics()
    source = random.Random(35)
    jobs = [(source.randint(1, 20), source.uniform(0, 0.3)) for _ in range(150)]

    def disturb(job: tuple[int, float]) -> None:
        max_tokens, patience = job
        body = {"model": "tiny", "prompt": f"{max_tokens} and", "max_tokens": max_tokens, "stream": max_tokens % 2 == 0}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(tiny.url + COMPLETIONS, json=body, timeout=max(0.001, patience))

    with ThreadPoolExecutor(24) as pool:
        disturbances = [pool.submit(disturb, job) for job in jobs]
        controls = [pool.submit(ask, tiny, COMPLETIONS, **control) for _ in range(10)]
        assert {running.result().text for running in controls} == {solo}
        for disturbance in disturbances:
            disturbance.result()
    for id in ("chatcmpl-nothing", "cmpl-nothing"):
        for _ in range(2):
            assert post(tiny, f"/v1/requests/{id}/cancel", b"").status_code == 404
    tiny.wait_at_base()
    assert tiny.metrics()["ropeway_engine_restarts_total"] == before["ropeway_engine_restarts_total"] == 0
    alive(tiny)


def test_o35_a_request_is_cancelled_twice(tiny: Server) -> None:
    body = {**forced(BROWN), "prompt": "The", "max_tokens": 1500, "request_id": "twice"}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, tiny, COMPLETIONS, body)
        deadline = time.monotonic() + 20
        while post(tiny, "/v1/requests/twice/cancel", b"").status_code == 404:
            assert time.monotonic() < deadline
        assert post(tiny, "/v1/requests/twice/cancel", b"").status_code in (200, 404)
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"
    tiny.wait_at_base()


def test_o36_the_next_turn_right_after_a_stopped_one(tiny: Server, scarce: Server) -> None:
    """Three conversations over few blocks; each stops its answer and asks on at once."""

    def turns(index: int) -> None:
        messages = [{"role": "user", "content": f"Tell me about number {index}."}]
        for _ in range(4):
            body = {**GREEDY, "messages": messages, "max_tokens": 60}
            seen = leave_after(scarce, CHAT, body, chunks=4)
            assert len(seen) == 4
            follow_up = {
                **GREEDY,
                "messages": [*messages, {"role": "assistant", "content": "I"}, {"role": "user", "content": "Go on."}],
            }
            answers = [ask(server, CHAT, **follow_up, max_tokens=12) for server in (scarce, tiny)]
            assert answers[0].text == answers[1].text
            assert answers[0].usage["prompt_tokens"] == answers[1].usage["prompt_tokens"]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(turns, range(3)))
    scarce.wait_at_base()
    metrics = scarce.metrics()
    assert metrics["ropeway_kv_blocks"] == 12  # used and free together
    assert metrics["ropeway_engine_restarts_total"] == 0


@pytest.mark.parametrize("prompts", [1, 8])
def test_o37_an_abort_takes_every_choice_and_prompt(scarce: Server, prompts: int) -> None:
    if prompts == 1:
        leave_after(scarce, COMPLETIONS, {**forced(BROWN), "prompt": "a", "n": 4, "max_tokens": 150}, chunks=8)
    else:
        body = {**forced(BROWN), "prompt": list("abcdefgh"), "max_tokens": 150}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(scarce.url + COMPLETIONS, json=body, timeout=0.5)
    scarce.wait_at_base()
    before = scarce.metrics()["vllm:generation_tokens_total"]
    threading.Event().wait(0.3)
    assert scarce.metrics()["vllm:generation_tokens_total"] == before  # no child began after the close
    alive(scarce)
