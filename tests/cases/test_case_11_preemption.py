"""Reported faults of kind 11: the scheduler and preemption. That no engine turns without progress, and that blocks are
conserved, is checked after every step of thousands of traces in tests/engine/test_symbolic_traces.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import transformers
from case_client import COMPLETIONS, Answer, alive, ask, post
from e2e_server import Server

from ropeway.hub import resolve_model

pytestmark = pytest.mark.real_model

TEXT = "A ropeway never stops: cabins pass at a steady pace, and riders step on and off while it moves along. " * 20
ENDLESS: dict[str, Any] = {"model": "tiny", "ignore_eos": True}


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(resolve_model(""))(TEXT)["input_ids"]


def together(server: Server, bodies: list[dict[str, Any]]) -> list[Answer]:
    """All at once; every other one is streamed."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [
            pool.submit(ask, server, COMPLETIONS, stream=index % 2 == 0, **body) for index, body in enumerate(bodies)
        ]
        return [answer.result() for answer in running]


def test_o38_preemption_does_not_change_the_output(tiny: Server, scarce: Server, text_ids: list[int]) -> None:
    def prompt(index: int) -> list[int]:
        return text_ids[3 * index : 3 * index + 30 + 3 * index]

    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 40}
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 3},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"temperature": 1, "seed": 4, "min_tokens": 30, "ignore_eos": False},
        {"temperature": 0, "stop": ["cabins pass at a steady pace, and riders step on and off while"]},
        {"temperature": 0, "structured_outputs": {"json": schema}, "ignore_eos": False},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3},
    ]
    bodies = [
        {**ENDLESS, "prompt": prompt(index), "max_tokens": 60, **variant} for index, variant in enumerate(variants)
    ]
    expected = [ask(tiny, COMPLETIONS, **body) for body in bodies]
    before = scarce.metrics()["vllm:num_preemptions_total"]
    for answer, solo, body in zip(together(scarce, bodies), expected, bodies, strict=True):
        assert answer.text == solo.text
        assert answer.finish_reason == solo.finish_reason
        assert answer.num_tokens == solo.num_tokens
        assert answer.usage["prompt_tokens"] == solo.usage["prompt_tokens"] == len(body["prompt"])
    assert scarce.metrics()["vllm:num_preemptions_total"] > before, "nothing was preempted: the case is void"
    scarce.wait_at_base()
    alive(scarce)


def test_o38_logprobs_are_told_once(tiny: Server, scarce: Server, text_ids: list[int]) -> None:
    bodies = [
        {
            **ENDLESS,
            "prompt": text_ids[5 * index : 5 * index + 40],
            "max_tokens": 60,
            "temperature": 0,
            "logprobs": 2,
            "echo": True,
            "prompt_logprobs": 1,
        }
        for index in range(8)
    ]

    def choice(server: Server, body: dict[str, Any]) -> dict[str, Any]:
        response = post(server, COMPLETIONS, body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    expected = [choice(tiny, body) for body in bodies]
    before = scarce.metrics()["vllm:num_preemptions_total"]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: choice(scarce, body), bodies))
    assert scarce.metrics()["vllm:num_preemptions_total"] > before
    for got, want in zip(found, expected, strict=True):
        assert len(got["prompt_logprobs"]) == 40
        assert len(got["logprobs"]["tokens"]) == 100
        assert got["text"] == want["text"]
        assert got["logprobs"]["tokens"] == want["logprobs"]["tokens"]
        assert got["logprobs"]["token_logprobs"][1:] == pytest.approx(want["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_o39_a_preempted_sequence_comes_back_and_finds_its_blocks(
    tiny: Server, scarce: Server, text_ids: list[int]
) -> None:
    stem = text_ids[100:132]
    prompts = [
        text_ids[:31],
        text_ids[40:72],
        [*stem, 700],
        [*stem, *text_ids[200:215]],
        text_ids[5:53],
        [*text_ids[60:92], *text_ids[:17]],
        [*text_ids[60:92], 900],
        text_ids[140:171],
    ]
    bodies = [{**ENDLESS, "prompt": prompt, "max_tokens": 60, "temperature": 0} for prompt in prompts]
    expected = [ask(tiny, COMPLETIONS, **body).text for body in bodies]
    before = scarce.metrics()["vllm:num_preemptions_total"]
    found = together(scarce, bodies)
    assert scarce.metrics()["vllm:num_preemptions_total"] > before, "nothing was preempted: the case is void"
    assert [answer.text for answer in found] == expected
    assert {answer.num_tokens for answer in found} == {60}
    scarce.wait_at_base()


def test_o40_who_fills_the_pool_alone_ends(scarce: Server, text_ids: list[int]) -> None:
    """192 tokens are all that 12 blocks hold."""
    too_much = post(scarce, COMPLETIONS, {**ENDLESS, "prompt": text_ids[:100], "max_tokens": 500})
    assert too_much.status_code == 400
    assert "192" in too_much.json()["error"]["message"]
    before = scarce.metrics()["vllm:num_preemptions_total"]
    for length in (100, 144, 159, 160, 175, 176, 191):
        body = {**ENDLESS, "prompt": text_ids[:length], "max_tokens": 192 - length, "temperature": 0}
        answer = ask(scarce, COMPLETIONS, **body)
        assert (answer.finish_reason, answer.num_tokens) == ("length", 192 - length)
    assert scarce.metrics()["vllm:num_preemptions_total"] == before, "it was alone: nobody had to give way"
    bodies = [
        {**ENDLESS, "prompt": text_ids[index : index + 100], "max_tokens": 92, "temperature": 0} for index in range(3)
    ]
    behind = {**ENDLESS, "prompt": "One more", "max_tokens": 5, "temperature": 0}
    for answer in together(scarce, [*bodies, behind])[:3]:
        assert (answer.finish_reason, answer.num_tokens) == ("length", 92)
    assert scarce.metrics()["vllm:num_preemptions_total"] - before <= 8
    scarce.wait_at_base()
    alive(scarce)
