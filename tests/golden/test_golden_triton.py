"""The worker on Triton's kernels, run by their interpreter on the CPU: the same greedy tokens as on plain torch.

Everything of the GPU path but the device takes part: fused KV write, paged attention with its plans, norms, gates, and
decode steps padded as for a graph.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports the kernels
pytest.importorskip("triton")

from ropeway.config import build_config
from ropeway.engine.core import build_core
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor
from tiny_models import random_prompts, save_checkpoint, tiny

STEPS = 4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
MODELS: dict[str, Any] = {
    "llama": tiny("LlamaForCausalLM", **SIZES),
    "qwen3": tiny("Qwen3ForCausalLM", **SIZES),
    "gemma3": tiny(
        "Gemma3ForCausalLM",
        **SIZES,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
}
PROMPTS = random_prompts(1, 15, 21)


def generate(folder: Path, backend: str, **options: Any) -> list[list[int]]:
    config = build_config(
        {
            "attention_backend": backend,
            "block_size": 16,
            "num_gpu_blocks_override": 12,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "device": "cpu",
        }
        | options
    )
    core, _ = build_core(config, LocalExecutor(config, folder), lambda: 0.0)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for request_id, prompt in enumerate(PROMPTS):
        core.handle(AddRequest(request_id, prompt, SamplingParams(max_tokens=STEPS, temperature=0.0), 0.0))
    for _ in range(100):
        if core.idle:
            break
        if (outputs := core.step()) is None:
            continue
        assert not outputs.errors
        begin = 0
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            tokens[request_id] += outputs.token_ids[begin : begin + count]
            begin += count
    core.close()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_on_triton_as_on_torch(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, MODELS[name])
    expected = generate(tmp_path, "torch")
    assert all(len(row) == STEPS for row in expected)
    assert generate(tmp_path, "triton") == expected


def test_a_cache_of_8_bit_floats_serves(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, MODELS["llama"])
    assert all(len(row) == STEPS for row in generate(tmp_path, "triton", kv_cache_dtype="fp8"))
