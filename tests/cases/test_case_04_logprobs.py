"""Reported faults of kind 4: log-probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from case_client import CHAT, COMPLETIONS, GREEDY, HALF_EMOJI, alive, ask, forced, post
from e2e_server import Server

from ropeway.hub import resolve_model

pytestmark = pytest.mark.real_model

TEXT = "A ropeway never stops. Cabins pass at a steady pace, and riders step on and off while it moves along. " * 2


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids = transformers.AutoTokenizer.from_pretrained(resolve_model(""))(TEXT)["input_ids"]
    assert len(ids) >= 40
    return ids[:40]


@pytest.fixture(scope="module")
def reference(prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[40, vocab]`` of an independent forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(""), dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


def strictly(text: str) -> Any:
    """Parsed as JSON without NaN and Infinity."""

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


def echoed(server: Server, prompt: list[int], **more: Any) -> dict[str, list[Any]]:
    body = {**GREEDY, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 3, **more}
    response = post(server, COMPLETIONS, body)
    assert response.status_code == 200, response.text
    return strictly(response.text)["choices"][0]["logprobs"]


def test_o11_prompt_logprobs_together_with_the_prefix_cache(
    tiny: Server, prompt: list[int], reference: torch.Tensor
) -> None:
    expected = reference[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten().numpy()
    found = [echoed(tiny, prompt) for _ in range(3)]
    ask(tiny, COMPLETIONS, **GREEDY, prompt="Something else altogether", max_tokens=3)
    found.append(echoed(tiny, prompt))
    ask(tiny, COMPLETIONS, **GREEDY, prompt=[*prompt[:32], 5, 6, 7], max_tokens=3)
    found.append(echoed(tiny, prompt))
    for block in found:
        first, *rest = block["token_logprobs"]
        assert first is None
        assert len(rest) == 40
        assert all(math.isfinite(value) for value in rest)
        np.testing.assert_allclose(rest[:39], expected, atol=1e-4)
        np.testing.assert_allclose(rest, found[0]["token_logprobs"][1:], atol=1e-4)
        assert {len(column) for column in block.values()} == {41}
    # A request that wants the prompt's log-probabilities leaves its blocks for others.
    assert ask(tiny, COMPLETIONS, **GREEDY, prompt=prompt, max_tokens=1).usage["prompt_tokens_details"] == {
        "cached_tokens": 32
    }
    alive(tiny)


def test_o11_every_form_tells_the_same(tiny: Server, prompt: list[int], reference: torch.Tensor) -> None:
    best = reference[:-1].topk(5)
    body = {**GREEDY, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 5}
    entries = post(tiny, COMPLETIONS, body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    for position, entry in enumerate(entries[1:]):
        for token, logprob in zip(best.indices[position].tolist(), best.values[position].tolist(), strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        ranks = {int(token): value["rank"] for token, value in entry.items()}
        assert [token for token, rank in sorted(ranks.items(), key=lambda pair: pair[1])][:5] == best.indices[
            position
        ].tolist()
        assert str(prompt[position + 1]) in entry
    only = echoed(tiny, prompt, max_tokens=0)
    assert only["token_logprobs"] == echoed(tiny, prompt)["token_logprobs"][:40]
    text = post(tiny, COMPLETIONS, {**body, "stream": True}).text
    streamed = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    assert streamed["choices"][0]["prompt_logprobs"] == entries


def test_o12_bytes_of_a_token_that_is_part_of_a_character(tiny: Server) -> None:
    messages = [{"role": "user", "content": "Repeat: 😀😀😀😀"}]
    ordinary = {**GREEDY, "messages": messages, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    halves = {**ordinary, **forced(HALF_EMOJI), "max_tokens": 3}
    for body in (ordinary, halves):
        value = post(tiny, CHAT, body).json()
        choice = value["choices"][0]
        entries = choice["logprobs"]["content"]
        data = bytes(byte for entry in entries for byte in entry["bytes"])
        assert data.decode("utf-8", "replace") == choice["message"]["content"]
        hidden = choice["finish_reason"] == "stop"
        assert len(entries) == value["usage"]["completion_tokens"] - hidden
        for entry in entries:
            assert [239, 191, 189] not in [entry["bytes"], *(other["bytes"] for other in entry["top_logprobs"])]
    assert [entry["bytes"] for entry in entries] == [[240, 159]] * 3


@pytest.mark.parametrize("top", [3, 0, None])
def test_o13_the_reported_token_is_the_sampled_one(tiny: Server, top: int | None) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Write a random word list"}],
        "max_tokens": 40,
        "temperature": 1.5,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": top,
        "stop": ["Helloxxx"],
    }
    choice = post(tiny, CHAT, body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    assert data.decode("utf-8", "replace") == choice["message"]["content"]
    elsewhere = 0
    for entry in entries:
        others = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(others) == (top or 0)
        assert others == sorted(others, reverse=True)
        same = [other["logprob"] for other in entry["top_logprobs"] if other["bytes"] == entry["bytes"]]
        if same:
            assert same == [entry["logprob"]]
        elif others:
            elsewhere += 1
            assert entry["logprob"] <= others[-1]
    assert elsewhere or not top, "at this temperature some token is not among the best"
    streamed: list[Any] = []
    for block in post(tiny, CHAT, {**body, "stream": True}).text.split("\n\n"):
        if block.startswith("data: {"):
            found = json.loads(block.removeprefix("data: "))["choices"][0]["logprobs"]
            streamed += found["content"] if found else []
    assert streamed == entries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "yes or no?"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "e", "schema": {"enum": ["yes", "no"]}},
                },
                "logprobs": True,
                "top_logprobs": 20,
                "max_tokens": 6,
            },
        ),
        (COMPLETIONS, {"prompt": "correct horse", "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1}),
        (COMPLETIONS, {"prompt": "correct horse", "logprobs": 20, "temperature": 1, "top_p": 0.01}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 20, "allowed_token_ids": [6354]}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 20, "prompt_logprobs": 20, "logit_bias": {"6354": -100}}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "yes or no?"}],
                "logprobs": True,
                "top_logprobs": 20,
                "min_tokens": 2,
            },
        ),
    ],
)
def test_o14_every_logprob_is_a_number(tiny: Server, path: str, body: dict[str, Any], stream: bool) -> None:
    response = post(tiny, path, {"model": "tiny", "max_tokens": 2, **body, "stream": stream})
    assert response.status_code == 200
    blocks = [response.text]
    if stream:
        blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: {")]
    numbers: list[float] = []

    def visit(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                visit(part, key if key == "top_logprobs" and name != "logprob" else name)
        elif isinstance(value, list):
            for part in value:
                visit(part, key)
        elif key in ("logprob", "token_logprobs", "top_logprobs") and isinstance(value, float):
            numbers.append(value)

    for block in blocks:
        visit(strictly(block)["choices"])
    assert len(numbers) >= 2
    assert all(math.isfinite(number) and number <= 0 for number in numbers)
