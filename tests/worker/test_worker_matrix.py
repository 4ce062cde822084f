"""The same requests through the real engine core and the real worker give the same tokens, however they are batched."""

from __future__ import annotations

import itertools
import json

import pytest
from test_runner import TINY

from ropeway.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from ropeway.engine.core import build_core
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor

PROMPTS = [[(7 * i + j) % 120 for j in range(length)] for i, length in enumerate([1, 31, 32, 33, 47, 5, 49, 16])]
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 42},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 1.5},
    {"temperature": 1.2, "seed": 3, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "seed": 9, "top_k": 5, "min_tokens": 20, "eos_token_ids": (3, 4, 5, 6, 7, 8, 9, 10)},
    {"temperature": 0.9, "seed": 11, "min_p": 0.1},
    {"temperature": 0.0, "logit_bias": ((17, 2.0),)},
]


def generate(folder, *, together: bool, budget: int, blocks: int, overlap: str, caching: bool):
    """Tokens per request, and how many preemptions it took."""
    config = Config(
        model=ModelConfig(load_format="dummy", seed=1),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=blocks, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, overlap=overlap),
        device=DeviceConfig(device="cpu"),
    )
    core, _ = build_core(config, LocalExecutor(config, folder), lambda: 0.0)
    requests = [
        AddRequest(i, prompt, SamplingParams(**{"max_tokens": 30, **sampling}), 0.0)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    preemptions = 0
    for group in [requests] if together else [[request] for request in requests]:
        for request in group:
            core.handle(request)
        for _ in range(5000):
            if core.idle:
                break
            outputs = core.step()
            if outputs is None:
                continue
            preemptions += outputs.stats.num_new_preemptions
            assert not outputs.errors
            begin = 0
            for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
                tokens[request_id] += outputs.token_ids[begin : begin + count]
                begin += count
        assert core.idle
    core.close()
    return tokens, preemptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def alone(folder):
    tokens, _ = generate(folder, together=False, budget=512, blocks=200, overlap="off", caching=False)
    assert all(len(tokens[i]) == 30 for i in range(8) if i != 5)
    return tokens


@pytest.mark.parametrize(
    ("budget", "blocks", "overlap"), list(itertools.product([11, 512], [30, 200], ["off", "on"])), ids=str
)
def test_same_tokens_together(folder, alone, budget, blocks, overlap):
    tokens, preemptions = generate(
        folder, together=True, budget=budget, blocks=blocks, overlap=overlap, caching=budget == 512
    )
    assert tokens == alone
    if blocks == 30:
        assert preemptions > 0, "the pool was meant to be too small"


def test_small_chunks_alone(folder, alone):
    tokens, _ = generate(folder, together=False, budget=8, blocks=200, overlap="off", caching=True)
    assert tokens == alone
