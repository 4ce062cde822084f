"""The whole engine against Hugging Face `generate`: whatever the batch, chunks, blocks, cache or overlap, the same tokens.

The two ranks of tensor parallelism are compared in tests/model, below the executor, which runs one rank for now.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ropeway.config import build_config
from ropeway.engine.core import build_core
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor
from ropeway_kernels import cpu
from tiny_models import random_prompts, reference_answer, save_checkpoint, tiny

STEPS = 24
MODELS: dict[str, Any] = {
    "llama": tiny("LlamaForCausalLM"),
    "gemma3": tiny(
        "Gemma3ForCausalLM",
        head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
    ),
}
STEM = random_prompts(18, seed=7)[0]
PROMPTS = [*random_prompts(1, 15, 16, 33), [*STEM, 5], [*STEM, 6, 7], STEM, [*STEM, 5, 9, 11, 12]]


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and the reference's continuation of every prompt alone."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_checkpoint(folder, MODELS[request.param])
    return folder, [reference_answer(model, prompt, STEPS).tokens for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("caching", "num_tokens", "budget", "overlap"),
    list(itertools.product([True, False], [96, 1600], [8, 512], ["off", "on"])),
)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_engine_equals_reference(
    case: tuple[Path, list[list[int]]], backend: str, caching: bool, num_tokens: int, budget: int, overlap: str
) -> None:
    if backend == "cpu" and cpu.load() is None:
        pytest.skip(cpu.why_not())
    folder, expected = case
    block_size = 4 if backend == "torch" else 8
    config = build_config(
        {
            "attention_backend": backend,
            "block_size": block_size,
            "num_gpu_blocks_override": num_tokens // block_size,
            "enable_prefix_caching": caching,
            "max_num_seqs": 8,
            "max_num_batched_tokens": budget,
            "overlap": overlap,
            "device": "cpu",
        }
    )
    core, _ = build_core(config, LocalExecutor(config, folder), lambda: 0.0)
    tokens: dict[int, list[int]] = {}
    preemptions = hits = 0
    for request_id, prompt in enumerate([*PROMPTS, *PROMPTS]):  # the second round comes while the first is running
        sampling = SamplingParams(max_tokens=STEPS, temperature=0.0)
        core.handle(AddRequest(request_id, prompt, sampling, 0.0))
        tokens[request_id] = []
    for _ in range(5000):
        if core.idle:
            break
        outputs = core.step()
        if outputs is None:
            continue
        preemptions += outputs.stats.num_new_preemptions
        hits += outputs.stats.num_new_prefix_hits
        assert not outputs.errors
        remaining = iter(outputs.token_ids)
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            tokens[request_id] += itertools.islice(remaining, count)
    assert core.idle
    core.close()
    assert [tokens[i] for i in range(len(tokens))] == [*expected, *expected]
    assert (preemptions > 0) == (num_tokens == 96)
    assert (hits > 0) == caching
