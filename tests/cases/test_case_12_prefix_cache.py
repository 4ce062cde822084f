"""Reported faults of kind 12: the prefix cache. What O-42 asks of hashes and reference counts is checked after every step
of thousands of traces in tests/engine/test_symbolic_traces.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import transformers
from case_client import COMPLETIONS, GREEDY, TINY, Answer, alive, ask, post
from e2e_server import Server, running

from ropeway.hub import resolve_model

pytestmark = pytest.mark.real_model

TEXT = "A ropeway never stops: cabins pass at a steady pace, and riders step on and off while it moves along. " * 30
salts = count()


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(resolve_model(""))(TEXT)["input_ids"]


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """64 tokens are computed at a time."""
    flags = [*TINY, "--num-gpu-blocks-override", "400", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
    with running(flags, tmp_path_factory.mktemp("chunked")) as server:
        yield server


def complete(server: Server, prompt: list[int], max_tokens: int, **more: Any) -> Answer:
    body = {**GREEDY, "ignore_eos": True, "prompt": prompt, "max_tokens": max_tokens}
    return ask(server, COMPLETIONS, **body, **more)


def cold(server: Server, prompt: list[int], max_tokens: int) -> str:
    """With a salt of its own, nothing cached is found."""
    answer = complete(server, prompt, max_tokens, cache_salt=f"cold {next(salts)}")
    assert cached(answer) == 0
    return answer.text


def cached(answer: Answer) -> int:
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


def test_o41_no_chunk_is_empty_whatever_is_cached(chunked: Server, tiny: Server, text_ids: list[int]) -> None:
    """Conversations that grow by every number of tokens at which the rest that is not cached needs a chunk more."""
    for number, new in enumerate((1, 16, 63, 64, 65, 128)):
        for offset in (0, 300):  # two conversations by turns
            start = offset + 3 * number  # another first token, so that each begins cold
            turns = [text_ids[start : start + length] for length in (50, 50 + new, 50 + 2 * new)]
            known = 0
            for turn in turns:
                before = chunked.metrics()
                answer = complete(chunked, turn, 4)
                after = chunked.metrics()
                assert answer.text == cold(tiny, turn, 4)
                assert known <= cached(answer) < len(turn)
                known = len(turn) // 16 * 16 - 16
                computed = after["vllm:iteration_tokens_total_sum"] - before["vllm:iteration_tokens_total_sum"]
                # Counted are prefill tokens, but for a last chunk of one, and the 4 that are sampled.
                assert computed - 4 in (len(turn) - cached(answer), len(turn) - cached(answer) - 1)
    alive(chunked)


def test_o42_a_recycled_block_is_not_found_under_its_old_name(
    scarce: Server, tiny: Server, text_ids: list[int]
) -> None:
    a = text_ids[:48]
    variant = [*a[:32], *text_ids[500:516]]
    others = [text_ids[begin : begin + 96] for begin in (100, 210, 320)]
    texts = {tuple(prompt): cold(tiny, prompt, 8) for prompt in (a, variant, *others)}
    source = random.Random(42)
    hits = 0
    for _ in range(8):
        order = [*others, a]
        source.shuffle(order)
        for prompt in order:
            answer = complete(scarce, prompt, 8)
            assert answer.text == texts[tuple(prompt)]
            hits += cached(answer) > 0
        with ThreadPoolExecutor(3) as pool:
            running = [(p, pool.submit(complete, scarce, p, 8)) for p in (order[0], a, variant)]
            for prompt, job in running:
                assert job.result().text == texts[tuple(prompt)]
    assert hits > 0
    scarce.wait_at_base()
    assert scarce.metrics()["ropeway_kv_blocks"] == 12  # used and free together
    alive(scarce)


def test_o43_a_prompt_that_is_cached_whole(tiny: Server, text_ids: list[int]) -> None:
    lengths = (15, 16, 17, 32, 33, 64)
    prompts = [text_ids[300 + 7 * index :][:length] for index, length in enumerate(lengths)]
    texts = [cold(tiny, prompt, 40) for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        logprobs = []
        for repeat, max_tokens in enumerate((1, 1, 1, 40)):
            body = {**GREEDY, "ignore_eos": True, "prompt": prompt, "max_tokens": max_tokens, "logprobs": 0}
            response = post(tiny, COMPLETIONS, body)
            assert response.status_code == 200
            value = response.json()
            said = value["choices"][0]["text"]
            assert said == text if max_tokens == 40 else said and text.startswith(said)
            logprobs.append(value["choices"][0]["logprobs"]["token_logprobs"][0])
            found = value["usage"]["prompt_tokens_details"]["cached_tokens"]
            if repeat:
                assert len(prompt) > found >= len(prompt) - 16 - len(prompt) % 16
        assert logprobs == pytest.approx([logprobs[0]] * 4, abs=1e-4)
    # On from a prompt and its own answer: all that was computed for those is found.
    body = {**GREEDY, "ignore_eos": True, "prompt": prompts[-1], "max_tokens": 40, "return_token_ids": True}
    answered = post(tiny, COMPLETIONS, body).json()["choices"][0]["token_ids"]
    assert len(answered) == 40
    follow_up = [*prompts[-1], *answered, 5]
    assert cached(complete(tiny, follow_up, 3)) >= (64 + 40) // 16 * 16 - 16
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = [pool.submit(complete, tiny, prompt, 40) for prompt in prompts]
        assert [job.result().text for job in together] == texts
