"""Reported faults of kind 16: numerics. O-52's sampler level is in tests/worker/test_sampler.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from case_client import BROWN, COMPLETIONS, GREEDY, Answer, ask, post
from e2e_server import Server

pytestmark = pytest.mark.real_model
SEEDED = {"model": "tiny", "max_tokens": 12, "seed": 5}


def test_o52_rows_of_every_kind_in_one_batch(tiny: Server) -> None:
    bodies: list[dict[str, Any]] = [
        {**GREEDY, "prompt": "A list of colours:", "max_tokens": 12},
        {**SEEDED, "prompt": "The weather", "temperature": 1, "top_p": 0.9},
        {**SEEDED, "prompt": "The weather", "temperature": 0.01, "top_k": 1},
        {**GREEDY, "prompt": "Once", "max_tokens": 12, "logit_bias": {str(i): -100 for i in range(200, 220)}},
        {**SEEDED, "prompt": "Once", "temperature": 1, "min_p": 0.99},
        {**SEEDED, "prompt": "Once", "temperature": 2, "allowed_token_ids": [BROWN]},
    ]
    solo = [ask(tiny, COMPLETIONS, **body).text for body in bodies]
    assert solo[-1] == " brown" * 12
    with ThreadPoolExecutor(len(bodies)) as pool:
        for _ in range(3):
            together = list(pool.map(lambda body: ask(tiny, COMPLETIONS, **body).text, bodies))
            assert together == solo
    masked = post(tiny, COMPLETIONS, {**GREEDY, "prompt": "a", "allowed_token_ids": [5], "banned_token_ids": [5]})
    assert masked.status_code == 400  # nothing would be left, and that is seen at the door


def test_o53_neighbours_that_end_early(tiny: Server) -> None:
    lengths = [1, 2, 3, 5, 8, 20, 40, 60]
    prompts = ["The sun", "A cat", "Water is", "In 1990", "My name", "Trees", "I like", "Once upon"]
    kinds: list[dict[str, Any]] = [{}, {"stop": [","]}, {"presence_penalty": 1.0}, {"seed": 3, "temperature": 0.7}]
    bodies = [
        {**GREEDY, "prompt": prompt, "max_tokens": length, **kinds[index % 4]}
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def run(body: dict[str, Any]) -> Answer:
        return ask(tiny, COMPLETIONS, **body)

    solo = [run(body) for body in bodies]
    order = [index for shift in range(8) for index in [*range(shift, 8), *range(shift)]]
    with ThreadPoolExecutor(12) as pool:  # as soon as one ends, the next begins
        for index, answer in zip(order, pool.map(lambda index: run(bodies[index]), order), strict=True):
            assert (answer.text, answer.finish_reason) == (solo[index].text, solo[index].finish_reason), bodies[index]
