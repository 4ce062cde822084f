"""Prompt log-probabilities and embeddings of the demo model, through the whole engine, against Hugging Face in float32."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from ropeway.config import build_config
from ropeway.engine.core import EngineCore, build_core
from ropeway.hub import resolve_model
from ropeway.protocol import AddRequest, PromptLogprobs, SamplingParams
from ropeway.worker.executor import LocalExecutor

pytestmark = pytest.mark.real_model

TEXT = "A ropeway never stops: cabins pass at a steady pace, riders step on and off while it moves. " * 8
CHUNKS = [16, 64, 2048]
request_ids = itertools.count()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(resolve_model(""))(TEXT)["input_ids"][:150]


@pytest.fixture(scope="module")
def reference(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities ``[tokens, vocab]`` and hidden states ``[tokens, hidden_size]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(""), dtype=torch.float32).eval()
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), output_hidden_states=True)
    return out.logits[0].log_softmax(-1), out.hidden_states[-1][0]


@pytest.fixture(scope="module", params=CHUNKS)
def engine(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    config = build_config(
        {
            "device": "cpu",
            "dtype": "float32",
            "max_num_batched_tokens": request.param,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 200,
        }
    )
    core, _ = build_core(config, LocalExecutor(config, resolve_model("")), time.monotonic)
    yield core
    core.close()


def run(engine: EngineCore, *requests: tuple[list[int], SamplingParams]) -> list[PromptLogprobs | list[float] | None]:
    """All at once; what each was told of its prompt."""
    ids = [next(request_ids) for _ in requests]
    for request_id, (prompt, sampling) in zip(ids, requests, strict=True):
        engine.handle(AddRequest(request_id, prompt, sampling, 0.0))
    told: dict[int, PromptLogprobs | list[float]] = {}
    while not engine.idle:
        outputs = engine.step()
        assert outputs is not None
        assert not outputs.errors
        told |= outputs.prompt_logprobs | outputs.embeddings
    return [told.get(request_id) for request_id in ids]


SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
PLAIN = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
first_found: list[PromptLogprobs] = []  # by the engine of the first chunk size


def test_prompt_logprobs_equal_the_reference(
    engine: EngineCore, prompt: list[int], reference: tuple[torch.Tensor, torch.Tensor]
) -> None:
    (cold,) = run(engine, (prompt, SCORED))
    (warm,) = run(engine, (prompt, SCORED))
    run(engine, (prompt[:40] + prompt[:40], PLAIN))
    *_, crowded = run(engine, (prompt[3:60], PLAIN), ([*prompt[:64], 5, 6], PLAIN), (prompt, SCORED))
    assert isinstance(cold, PromptLogprobs)
    logprobs = reference[0][:-1]
    chosen = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])
    np.testing.assert_allclose(cold.logprobs, chosen.flatten(), atol=1e-4)
    assert list(cold.ranks) == (1 + (logprobs > chosen).sum(-1)).tolist()
    best = logprobs.topk(3)
    assert list(cold.top_ids) == best.indices.flatten().tolist()
    np.testing.assert_allclose(cold.top_logprobs, best.values.flatten(), atol=1e-4)
    # The same bits, whatever was cached, whoever else was there, and however the prompt was cut.
    assert cold == warm == crowded
    first_found.append(cold)
    assert cold == first_found[0]


def test_embeddings_equal_the_reference(
    engine: EngineCore, prompt: list[int], reference: tuple[torch.Tensor, torch.Tensor]
) -> None:
    mean, last, again = run(
        engine,
        *((prompt, SamplingParams(max_tokens=0, pooling=kind)) for kind in ("mean", "last", "last")),
    )
    np.testing.assert_allclose(mean, reference[1].mean(0), atol=2e-4)
    np.testing.assert_allclose(last, reference[1][-1], atol=2e-4)
    assert last == again
