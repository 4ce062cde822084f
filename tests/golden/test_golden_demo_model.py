"""The demo model's real weights against Hugging Face, in float32."""

from __future__ import annotations

import pytest
import torch
import transformers

from ropeway.hub import resolve_model
from ropeway_kernels.cpu import NativeKernels
from tiny_models import load, paged_answers, reference_answer

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"]
STEPS = 24


@pytest.mark.real_model
def test_demo_model_equals_reference(native: NativeKernels | None) -> None:
    folder = resolve_model("")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ours = paged_answers(load(folder, native=native), prompts, STEPS, block_size=16, chunk=8)
    for prompt, mine in zip(prompts, ours, strict=True):
        theirs = reference_answer(model, prompt, STEPS)
        assert mine.tokens == theirs.tokens
        # 30 layers, logits of 30. From float64, ours are 1.1e-4 away at most and the reference's 0.5e-4, and the reference
        # moves by another 0.5e-4 with the number of its threads.
        torch.testing.assert_close(mine.logits, theirs.logits, atol=2e-4, rtol=1e-5)
