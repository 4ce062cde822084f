"""n, best_of, echo, prompt log-probabilities and embeddings of a real server, as the openai client asks for them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_server import MODEL, Server, running

from ropeway.server.openai.params import choice_seed

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


def text_of(length: int, seed: int) -> str:
    """One token per letter in the tiny model."""
    return "".join(random.Random(seed).choices(LETTERS, k=length))


@pytest.fixture(scope="module")
def uncached(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No prefix cache, chunks of 64 tokens, and few blocks: choices of one request preempt each other."""
    flags = [str(tiny_model), "--load-format", "dummy", "--served-model-name", MODEL, "--num-threads", "1"]
    flags += [
        "--no-enable-prefix-caching",
        "--num-gpu-blocks-override",
        "24",
        "--max-num-batched-tokens",
        "64",
        "--max-num-seqs",
        "8",
    ]
    with running(flags, tmp_path_factory.mktemp("uncached")) as server:
        yield server


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 100])
def test_each_choice_is_what_its_seed_gives_alone(server: Server, uncached: Server, length: int) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": text_of(length, length), "max_tokens": 40, "temperature": 1.0}
    extra = {"ignore_eos": True}
    with server.client() as client:
        alone = [
            client.completions.create(**request, seed=choice_seed(7, choice), extra_body=extra).choices[0].text
            for choice in range(4)
        ]
        assert len(set(alone)) == 4
    for other in (server, uncached):
        with other.client() as client:
            whole = client.completions.create(**request, seed=7, n=4, extra_body=extra)
            assert [choice.text for choice in whole.choices] == alone
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (length, 160)
            texts = [""] * 4
            for chunk in client.completions.create(**request, seed=7, n=4, stream=True, extra_body=extra):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == alone
        other.wait_at_base()


def test_the_prompt_of_many_choices_is_computed_once(uncached: Server) -> None:
    """Where there is no cache to find it in."""
    before = uncached.metrics()["vllm:iteration_tokens_total_sum"]
    with uncached.client() as client:
        client.completions.create(
            model=MODEL, prompt=text_of(130, 3), n=8, max_tokens=4, extra_body={"ignore_eos": True}
        )
    # The page may be a moment old.
    uncached.wait_metrics(lambda now: now["vllm:iteration_tokens_total_sum"] > before, "the page with these steps")
    computed = uncached.metrics()["vllm:iteration_tokens_total_sum"] - before
    assert 130 <= computed <= 130 + 8 * 4 + 8  # prompt, sampled tokens, and the last prompt token of each choice


def test_best_of(server: Server) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 12, "temperature": 1.0, "seed": 5}
    extra = {"ignore_eos": True}
    with server.client() as client:
        every = client.completions.create(**request, n=6, logprobs=0, extra_body=extra)
        best = client.completions.create(**request, n=2, best_of=6, extra_body=extra)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage is not None
    assert best.usage.completion_tokens == 72


def test_echo_and_prompt_logprobs(server: Server) -> None:
    prompt = text_of(150, 9)  # three chunks
    with server.client() as client:
        first = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=2
        )
        again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
        extra = {"prompt_logprobs": 2}
        other = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, n=2, extra_body=extra)
    block = first.choices[0].logprobs
    assert block is not None
    assert block.token_logprobs is not None
    assert first.choices[0].text.startswith(prompt)
    assert len(block.token_logprobs) == 153
    assert block.token_logprobs[0] is None
    assert block.text_offset[:150] == list(range(150))
    assert again.choices[0].text == prompt
    assert again.choices[0].logprobs.token_logprobs == block.token_logprobs[:150]
    for choice in other.choices:
        entries = choice.model_extra["prompt_logprobs"]
        told = [entry[id_of(entry, letter)]["logprob"] for entry, letter in zip(entries[1:], prompt[1:], strict=True)]
        assert told == block.token_logprobs[1:150]
    server.wait_at_base()


def id_of(entry: dict[str, Any], letter: str) -> str:
    """The id of the token that is this letter."""
    return next(token for token, value in entry.items() if value["decoded_token"] == letter)


def test_embeddings(server: Server) -> None:
    texts = [text_of(length, length) for length in (1, 16, 70, 200)]
    with server.client() as client:
        together = client.embeddings.create(model=MODEL, input=texts)
        alone = [client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in texts]
        short = client.embeddings.create(model=MODEL, input=texts[2], dimensions=16, encoding_format="float")
        last = client.embeddings.create(model=MODEL, input=texts[2], extra_body={"pooling": "last"})
        again = client.embeddings.create(model=MODEL, input=texts[2], extra_body={"pooling": "last"})
    assert together.usage.prompt_tokens == together.usage.total_tokens == 287
    for item, vector in zip(together.data, alone, strict=True):
        assert len(vector) == 64
        assert math.hypot(*vector) == pytest.approx(1.0)
        assert item.embedding == pytest.approx(vector, abs=1e-5)
    length = math.hypot(*alone[2][:16])
    assert short.data[0].embedding == pytest.approx([value / length for value in alone[2][:16]], abs=1e-5)
    assert last.data[0].embedding == pytest.approx(again.data[0].embedding, abs=1e-5)
    assert last.data[0].embedding != pytest.approx(alone[2], abs=1e-3)
    server.wait_at_base()
