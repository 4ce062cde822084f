"""Frequencies and rotation of every rope kind against the reference's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ropeway.errors import ConfigError
from ropeway.model.rotary import Rotary, inverse_frequencies, parse_rope, rotate
from tiny_models import tiny

POSITIONS = torch.tensor([0, 1, 10, 200, 1000, 30000])
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(32)], "long_factor": [1.0 + 2.0 * i for i in range(32)]}
TABLES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 9.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 1.7},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 3.0, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 4096, "attention_factor": 1.25, **FACTORS},
]


def reference(table: dict[str, Any], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    config = tiny(
        "LlamaForCausalLM",
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 50000.0, **table},
    )
    return ROPE_INIT_FUNCTIONS[table["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["rope_type"])
def test_frequencies_equal_reference(table: dict[str, Any]) -> None:
    expected, scale = reference(table)
    spec = parse_rope(table, theta=50000.0, head_dim=64, max_positions=131072)
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(scale)


@pytest.mark.parametrize("served", [4097, 131072])
def test_longrope_beyond_the_original_length(served: int) -> None:
    table = TABLES[-3]
    expected, scale = reference(table, seq_len=served)
    spec = parse_rope(table, theta=50000.0, head_dim=64, max_positions=131072, max_model_len=served)
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(scale)
    assert spec.max_positions == 131072


def test_longrope_within_the_original_length_is_bounded() -> None:
    for served in (0, 4096):
        spec = parse_rope(TABLES[-3], theta=5e4, head_dim=64, max_positions=131072, max_model_len=served)
        assert spec.max_positions == 4096
        assert spec.dim_factors == tuple(FACTORS["short_factor"])


def test_yarn_extends_the_length() -> None:
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse_rope(table, theta=1e6, head_dim=64, max_positions=32768).max_positions == 131072


@pytest.mark.parametrize("table", [{}, *TABLES], ids=lambda table: table.get("rope_type", "default"))
def test_rotation_equals_reference_at_all_positions(table: dict[str, Any]) -> None:
    rotary = Rotary(parse_rope(table, theta=50000.0, head_dim=64, max_positions=131072), torch.device("cpu"))
    heads = torch.randn(len(POSITIONS), 3, 64)
    if table:
        frequencies, scale = reference(table)
    else:
        frequencies, scale = 50000.0 ** -(torch.arange(0, 64, 2) / 64), 1.0
    angles = torch.cat([POSITIONS[:, None] * frequencies] * 2, dim=-1)
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos() * scale, angles.sin() * scale)
    # A float32 angle of 30000 radians carries an error of its own of some 2e-3.
    torch.testing.assert_close(rotate(heads, *rotary.angles(POSITIONS, torch.float32)), expected, atol=5e-3, rtol=0)
    near = POSITIONS <= 1000
    torch.testing.assert_close(
        rotate(heads, *rotary.angles(POSITIONS, torch.float32))[near], expected[near], atol=5e-4, rtol=0
    )


def test_partial_rotation_leaves_the_rest() -> None:
    spec = parse_rope({"partial_rotary_factor": 0.5}, theta=1e4, head_dim=16, max_positions=64)
    heads = torch.randn(4, 2, 16)
    turned = rotate(heads, *Rotary(spec, torch.device("cpu")).angles(torch.arange(4), torch.float32))
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    assert torch.equal(turned[0], heads[0])
    assert not torch.allclose(turned[1:, :, :8], heads[1:, :, :8])
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))


def test_scores_depend_on_distance_only() -> None:
    rotary = Rotary(parse_rope({}, theta=1e4, head_dim=16, max_positions=4096), torch.device("cpu"))
    q, k = torch.randn(1, 1, 16).double(), torch.randn(1, 1, 16).double()

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, *rotary.angles(torch.tensor([at]), torch.float64)) for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-4)
    assert score(107, 101) != pytest.approx(score(7, 0), abs=1e-2)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"rope_type": "unknown"}, "unknown"),
        ({"rope_type": ["linear"]}, "linear"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "default", "factor": 8.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 32}, "short_factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 32}, "short_factor"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
    ],
)
def test_what_is_not_understood_is_named(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_rope(table, theta=1e4, head_dim=64, max_positions=4096)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["rope_type"])
def test_the_table_holds_the_angles_of_each_position(table: dict[str, Any]) -> None:
    spec = parse_rope(table, theta=10000.0, head_dim=64, max_positions=131072)
    rotary = Rotary(spec, torch.device("cpu"))
    cos, sin = rotary.table(3000)
    for positions in (torch.tensor([0, 1, 10, 200, 2999]), torch.arange(1000, 1037)):
        for part, angles in zip((cos, sin), rotary.angles(positions, torch.float32), strict=True):
            assert torch.equal(part[positions], angles.squeeze(1))
