"""The native stack of layers against the same layers run one by one from Python: equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ropeway_kernels import cpu
from tiny_models import load, paged_answers, random_prompts, save_checkpoint, tiny

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
