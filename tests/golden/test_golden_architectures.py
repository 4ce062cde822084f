"""Every architecture and variant against Hugging Face: equal greedy tokens, logits within 1e-4, in float32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3

from ropeway.model.loader import load_model
from ropeway.model.parallel import SINGLE
from ropeway_kernels import cpu
from ropeway_kernels.cpu import NativeKernels
from tiny_models import edit_config, load, paged_answers, random_prompts, reference_answer, save_checkpoint, tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 17,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LONG_SHORT = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 4.0, 9.0]}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-all-heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-own-head-dim": ("LlamaForCausalLM", {"head_dim": 20}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "llama-theta": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic-unscaled": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama-yarn-options": (
        "LlamaForCausalLM",
        {
            "rope_parameters": YARN
            | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 5}),
    "mistral-own-head-dim": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2ForCausalLM", SLIDING),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-windows": ("Qwen3ForCausalLM", {"head_dim": 16, **SLIDING}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3-partial": (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "phi3-window": ("Phi3ForCausalLM", {"sliding_window": 5, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma3-untied": ("Gemma3ForCausalLM", GEMMA | {"tie_word_embeddings": False}),
    "gemma3-caps": ("Gemma3ForCausalLM", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3-scaled": (
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits, and on a busy machine waits long."""
    before = torch.get_num_threads()
    kernels = cpu.load()
    torch.set_num_threads(1)
    if kernels:
        kernels.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    if kernels:
        kernels.set_num_threads(before)


def assert_same_answers(model: Any, decoder: Any, lengths: tuple[int, ...] = (1, 9, 30), steps: int = 24) -> None:
    prompts = random_prompts(*lengths)
    ours = paged_answers(decoder, prompts, steps)
    for prompt, mine in zip(prompts, ours, strict=True):
        theirs = reference_answer(model, prompt, steps)
        assert theirs.logits.std() > 0.3, "logits too small for a difference to show"
        assert mine.tokens == theirs.tokens
        torch.testing.assert_close(mine.logits, theirs.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_reference(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: NativeKernels | None
) -> None:
    architecture, changes = VARIANTS[variant]
    if cap := changes.get("attn_logit_softcapping"):
        # The reference reads this setting and then leaves it out of its call; the formula itself is there.
        capped = functools.partial(modeling_gemma3.eager_attention_forward, softcap=cap)
        monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    model = save_checkpoint(tmp_path, tiny(architecture, **changes))
    assert_same_answers(model, load(tmp_path, native=native))


@pytest.mark.parametrize(("lengths", "steps", "max_model_len"), [((1, 9, 20), 12, 0), ((33, 40), 24, 100)])
def test_longrope_short_and_long(
    lengths: tuple[int, ...], steps: int, max_model_len: int, tmp_path: Path, native: NativeKernels | None
) -> None:
    """Served within the original length the short factors hold, beyond it the long ones, both as the reference's."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **LONG_SHORT}
    config = tiny("Phi3ForCausalLM", rope_parameters=rope, original_max_position_embeddings=32)
    model = save_checkpoint(tmp_path, config)
    decoder = load(tmp_path, max_model_len=max_model_len, native=native)
    assert decoder.config.max_position_embeddings == (256 if max_model_len else 32)
    assert_same_answers(model, decoder, lengths, steps)


def test_language_model_of_gemma3_with_vision(tmp_path: Path, native: NativeKernels | None) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = tiny("Gemma3ForCausalLM", **GEMMA).to_dict()
    cls = type(tiny("Gemma3ForConditionalGeneration"))
    config = cls(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=150,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    model = save_checkpoint(tmp_path, config)
    assert_same_answers(model, load(tmp_path, native=native))


WRONG = {
    "rope": lambda c: {"ropes": tuple(dataclasses.replace(spec, theta=spec.theta * 1.5) for spec in c.ropes)},
    "scale": lambda c: {"attention_scale": c.attention_scale * 1.1},
    "window": lambda c: {"sliding_windows": (7, None, 6)},
    "eps": lambda c: {"rms_norm_eps": 0.05},
    "embedding": lambda c: {"embedding_scale": 1.0},
    "activation": lambda c: {"activation": "silu"},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_flag_is_noticed(fault: str, tmp_path: Path, native: NativeKernels | None) -> None:
    """The comparison above has teeth: one flag off moves the logits by far more than its tolerance."""
    save_checkpoint(tmp_path, tiny("Gemma3ForCausalLM", **GEMMA))
    decoder = load(tmp_path, native=native)
    prompts = random_prompts(30)
    right = paged_answers(decoder, prompts, 1)[0].logits
    config = dataclasses.replace(decoder.config, **WRONG[fault](decoder.config))
    other = load_model(
        tmp_path,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="auto",
        seed=0,
        group=SINGLE,
        native=native,
    )
    assert (paged_answers(other, prompts, 1)[0].logits - right).abs().max() > 1e-2


def test_chunks_and_neighbours_do_not_matter(tmp_path: Path, native: NativeKernels | None) -> None:
    save_checkpoint(tmp_path, tiny("Qwen3ForCausalLM", head_dim=16, **SLIDING))
    decoder = load(tmp_path, native=native)
    prompts = random_prompts(3, 25, 14)
    together = paged_answers(decoder, prompts, 12, chunk=5)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = paged_answers(decoder, [prompt], 12, chunk=64, block_size=16)[0]
        assert alone.tokens == answer.tokens
        torch.testing.assert_close(alone.logits, answer.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype, tmp_path: Path, native: NativeKernels | None) -> None:
    """Rounding differs in places from the reference, so tokens may; the first logits must not be far off."""
    model = save_checkpoint(tmp_path, tiny("Gemma3ForCausalLM", **GEMMA)).to(dtype)
    decoder = load(tmp_path, dtype=dtype, native=native)
    (prompt,) = random_prompts(20)
    ours = paged_answers(decoder, [prompt], 1)[0].logits
    assert ours.dtype == torch.float32
    theirs = reference_answer(model, prompt, 1).logits.float()
    assert (ours - theirs).abs().max() < 0.1 * theirs.std()


OLD_SPELLINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: architecture, what the new config has, what an old config.json has instead
    "theta": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        {"rope_theta": 777.0, "rope_scaling": None},
    ),
    "type": (
        "Qwen2ForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0}},
        {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "su": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 777.0}
            | LONG_SHORT,
        },
        {"rope_theta": 777.0, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "su", **LONG_SHORT}},
    ),
    "gemma": (
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 777.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
            },
        },
        {
            "rope_theta": 777.0,
            "rope_local_base_freq": 55.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
            "torch_dtype": "float32",
        },
    ),
}


@pytest.mark.parametrize("name", OLD_SPELLINGS)
def test_old_config_spelling_is_equal(name: str, tmp_path: Path, native: NativeKernels | None) -> None:
    architecture, new, old = OLD_SPELLINGS[name]
    model = save_checkpoint(tmp_path, tiny(architecture, **new))
    modern = load(tmp_path, native=native).config
    drop = ("rope_parameters", "dtype", *(("layer_types",) if "sliding_window_pattern" in old else ()))
    edit_config(tmp_path, drop=drop, **{"torch_dtype": "float32"} | old)
    decoder = load(tmp_path, native=native)
    assert decoder.config == modern
    assert_same_answers(model, decoder, lengths=(12,))
