"""Reading config.json: every spelling understood, defaults as the reference has them, the rest refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import transformers

from ropeway.errors import ConfigError
from ropeway.model.registry import ARCHITECTURES, parse_config
from tiny_models import tiny

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def base(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return BASE | {"num_key_value_heads": 2, "head_dim": 16, "architectures": [f"{architecture}"]} | changes


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name.endswith("CausalLM")])
def test_defaults_are_the_reference_s(architecture: str) -> None:
    """Only the sizes are given: every other field equals what transformers fills in."""
    if architecture == "Gemma3ForCausalLM":
        given: dict[str, Any] = {"architectures": [architecture]}
    else:
        given = BASE | {"architectures": [architecture], "num_attention_heads": 32, "hidden_size": 4096}
    theirs = getattr(transformers, architecture).config_class(**{k: v for k, v in given.items() if k[0] != "a"})
    ours = parse_config(given)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.vocab_size == theirs.vocab_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(theirs, "sliding_window", None) else ""] * ours.num_layers
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert list(ours.sliding_windows) == windows
    for kind, spec in zip(kinds, ours.ropes, strict=True):
        table = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert (spec.kind, spec.theta) == (table["rope_type"], table["rope_theta"])


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name.endswith("CausalLM")])
def test_a_saved_config_is_read_without_complaint(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_config(json.loads(tiny(architecture).to_json_string(use_diff=False)))
    assert not caplog.records


def test_unknown_keys_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_config(base(residual_multiplier=0.5, harmless=None))
    assert "residual_multiplier" in caplog.text
    assert "harmless" not in caplog.text


def test_old_and_new_rope_spelling_are_equal() -> None:
    new = parse_config(base(rope_parameters={"rope_theta": 100000.0, "rope_type": "default"}))
    assert new == parse_config(base(rope_theta=100000))
    assert new == parse_config(base(rope_theta=100000.0, rope_scaling=None))
    assert new == parse_config(base(rope_theta=5.0, rope_parameters={"rope_theta": 100000.0}))
    assert new.ropes[0].theta == 100000.0
    assert new != parse_config(base())


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_dtype_spellings(name: str) -> None:
    assert parse_config(base(**{name: "bfloat16"})).torch_dtype == "bfloat16"
    assert parse_config(base()).torch_dtype is None


def test_head_dim_absent_null_or_other() -> None:
    without = {key: value for key, value in base().items() if key != "head_dim"}
    assert parse_config(without).head_dim == 16
    assert parse_config(base(head_dim=None)).head_dim == 16
    odd = parse_config(base(head_dim=20))
    assert (odd.head_dim, odd.attention_scale, odd.ropes[0].rotary_dim) == (20, 20**-0.5, 20)
    assert parse_config(base(head_dim=20, hidden_size=66)).hidden_size == 66


def test_tie_absent_follows_the_model_type() -> None:
    assert parse_config(base()).tie_word_embeddings is False
    assert parse_config(base("Gemma3ForCausalLM")).tie_word_embeddings is True
    assert parse_config(base(tie_word_embeddings=True)).tie_word_embeddings is True


def test_qwen_windows_need_the_switch() -> None:
    assert set(parse_config(base("Qwen2ForCausalLM", sliding_window=8)).sliding_windows) == {None}
    on = base("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=3)
    assert parse_config(on).sliding_windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert parse_config(on | {"layer_types": kinds}).sliding_windows == (8, None, None, 8)


def test_biases_by_architecture() -> None:
    def flags(architecture: str, **changes: Any) -> tuple[bool, bool, bool]:
        config = parse_config(base(architecture, **changes))
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert flags("LlamaForCausalLM") == (False, False, False)
    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert flags("Qwen2ForCausalLM") == (True, False, False)
    assert flags("Qwen3ForCausalLM", attention_bias=True) == (True, True, False)


def test_gemma3_vision_config_gives_its_language_model() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
            "vision_config": {"hidden_size": 1152},
            "torch_dtype": "bfloat16",
        }
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.torch_dtype == "bfloat16"
    assert (config.sliding_windows[4], config.sliding_windows[5]) == (1024, None)
    assert (config.ropes[4].theta, config.ropes[5].theta, config.ropes[5].factor) == (1e4, 1e6, 8.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MysteryForCausalLM"]}, "MysteryForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*quantised.*bfloat16.*gguf"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, r"quantised \(compressed-tensors\)"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "rotary dimension 15"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "unknown"}}, "unknown"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling.*rope_parameters",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": [1]}, "attention_bias"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -1}, "max_window"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "linear",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 1.5}, "sliding_window_pattern"),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": None}, "sliding_window"),
        ({"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(base() | changes)
