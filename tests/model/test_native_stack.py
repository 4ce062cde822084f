"""The native stack of layers against the same layers run one by one from Python: equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ropeway.attention.base import AttentionMetadata
from ropeway_kernels import cpu
from tiny_models import backend_of, load, paged_answers, random_prompts, save_checkpoint, tiny

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "biases": ("Qwen2ForCausalLM", {}),
    "head norms and windows": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "partial rotation": ("Phi3ForCausalLM", {"head_dim": 16, "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_stack_equals_layers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    native = cpu.load()
    if native is None:
        pytest.skip(cpu.why_not())
    architecture, changes = MODELS[name]
    save_checkpoint(tmp_path, tiny(architecture, **changes))
    prompts = random_prompts(1, 9, 30)
    stacked, single = (load(tmp_path, dtype=dtype, native=native) for _ in range(2))
    single._stackable = False
    ours, theirs = paged_answers(stacked, prompts, 8), paged_answers(single, prompts, 8)
    assert stacked._stack is not None
    assert single._stack is None
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens
        assert torch.equal(mine.logits, other.logits)


def test_only_the_wanted_tokens_come_back(tmp_path: Path) -> None:
    """None, some twice, all: each as the layers one by one have it, though the stack drops the others on its way."""
    native = cpu.load()
    if native is None:
        pytest.skip(cpu.why_not())
    save_checkpoint(tmp_path, tiny("LlamaForCausalLM"))
    stacked, single = (load(tmp_path, native=native) for _ in range(2))
    single._stackable = False
    [prompt] = random_prompts(5)
    size = len(prompt)
    for wanted in ([], [4], [3, 0, 3], [1, 4, 2, 2, 0, 1, 3]):
        hidden = []
        for decoder in (stacked, single):
            backend, config = backend_of(decoder, 8), decoder.config
            shape = backend.kv_shape(2, 8, config.num_kv_heads, config.head_dim)
            caches = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(config.num_layers)]
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0, size], dtype=torch.int32),
                seq_lens=torch.tensor([size], dtype=torch.int32),
                block_table=torch.tensor([[1]], dtype=torch.int32),
                slot_mapping=8 + torch.arange(size),
                num_reqs=1,
                num_tokens=size,
                max_query_len=size,
                max_seq_len=size,
            )
            indices = torch.tensor(wanted, dtype=torch.int64)
            ids, positions = torch.tensor(prompt), torch.arange(size)
            hidden.append(decoder.hidden(ids, positions, caches, backend, backend.prepare(meta), indices))
        assert torch.equal(*hidden), wanted
