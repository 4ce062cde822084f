"""Rotary position embedding: every kind of ``rope_parameters`` / ``rope_scaling`` that our architectures use.

Owns: RopeSpec, its parsing, the frequencies and the rotation. Must not know: layers, batches, the KV cache.
Called by: model.registry (parse_rope), model.decoder (Rotary, rotate).

Angles are computed for a step's positions (`Rotary.angles`), or once for all positions so far (`Rotary.table`) where a
native kernel looks them up. So a frequency may depend on the position alone, never on how long a sequence will become;
the two kinds that want that (dynamic, longrope) are bounded by `RopeSpec.max_positions`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropeway.errors import ConfigError


@dataclass(frozen=True)
class RopeSpec:
    """One way to turn positions into angles. Hashable: layers with equal specs share their angles."""

    kind: str  # default | linear | dynamic | llama3 | yarn | longrope
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; even
    max_positions: int  # longest sequence for which the angles are the reference's
    factor: float = 1.0
    original_positions: int = 0  # length the model was trained on before it was extended
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    dim_factors: tuple[float, ...] = ()  # longrope: one per pair of dimensions


_KEYS = {  # kind -> (required keys, optional keys)
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def parse_rope(
    table: Mapping[str, Any], *, theta: float, head_dim: int, max_positions: int, max_model_len: int = 0
) -> RopeSpec:
    """One flat ``rope_parameters`` table to a spec.

    theta: used where the table has no ``rope_theta``. max_positions: the config's ``max_position_embeddings``.
    max_model_len: longest sequence that will be served, 0 if unknown; it alone decides between longrope's two sets
    of factors. Raises ConfigError naming the key.
    """
    kind = table.get("rope_type", table.get("type")) or "default"
    if kind not in list(_KEYS):
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; known are {', '.join(_KEYS)}")
    required, optional = _KEYS[kind]
    for key in required:
        if table.get(key) is None:
            raise ConfigError(f"config.json: rope_type {kind!r} needs {key!r}")
    for key, value in table.items():
        if value is not None and key not in _COMMON and key not in required and key not in optional:
            raise ConfigError(f"config.json: {key!r} has no meaning for rope_type {kind!r}")

    def number(key: str, default: float) -> float:
        value = table.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"config.json: {key!r} in the rope settings is {value!r}; it must be a positive number")
        return float(value)

    rotary_dim = int(head_dim * number("partial_rotary_factor", 1.0))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"config.json: rotary dimension {rotary_dim} (head_dim {head_dim} times partial_rotary_factor) must be even "
            "and not larger than head_dim"
        )
    spec = RopeSpec(kind, number("rope_theta", theta), rotary_dim, max_positions, number("factor", 1.0))
    original = int(number("original_max_position_embeddings", max_positions))
    if spec.theta <= 1 or original <= 1:
        raise ConfigError("config.json: 'rope_theta' and 'original_max_position_embeddings' must be above 1")
    if kind == "llama3":
        low, high = number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)
        if low >= high:
            raise ConfigError("config.json: 'low_freq_factor' must be below 'high_freq_factor' in the rope settings")
        return dataclasses.replace(spec, original_positions=original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return dataclasses.replace(
            spec,
            original_positions=original,
            max_positions=max(max_positions, int(original * spec.factor)),
            attention_factor=number("attention_factor", _yarn_attention_factor(table, spec.factor)),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(table.get("truncate", True)),
        )
    if kind == "longrope":
        # The reference takes the short factors while a sequence fits the original length and re-computes its whole
        # cache with the long ones once it does not. A cache that is shared between requests needs one answer, so:
        # short if nothing longer will be served, long for all otherwise. Without being asked, exact but short.
        long = max_model_len > original
        extension = max_positions / original
        factor = number("factor", extension)
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return dataclasses.replace(
            spec,
            original_positions=original,
            max_positions=max_positions if long else min(original, max_positions),
            attention_factor=number("attention_factor", default),
            dim_factors=_factors(table, "long_factor" if long else "short_factor", rotary_dim // 2),
        )
    # dynamic: up to max_positions the reference does not scale at all, beyond it scales by the sequence's length.
    return spec


def _yarn_attention_factor(table: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv 2309.00071), section 3.4, with DeepSeek's two weights on the logarithm."""

    def weigh(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = table.get("mscale"), table.get("mscale_all_dim")
    return weigh(mscale) / weigh(mscale_all_dim) if mscale and mscale_all_dim else weigh(1.0)


def _factors(table: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    values = table[key]
    good = isinstance(values, list) and len(values) == count
    if not good or not all(isinstance(value, int | float) and value > 0 for value in values):
        raise ConfigError(f"config.json: {key!r} in the rope settings must be a list of {count} positive numbers")
    return tuple(float(value) for value in values)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position for each pair of dimensions, ``[rotary_dim / 2]`` float32 on the CPU."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.dim_factors, dtype=torch.float32) * spec.theta**exponents)
    if spec.kind == "llama3":
        # Pairs that turn at least high_freq_factor times over the original length keep their frequency, those that
        # turn less than low_freq_factor times are slowed by factor, and a straight line joins the two.
        turns = spec.original_positions * frequencies / (2 * math.pi)
        keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return (1 - keep) * frequencies / spec.factor + keep * frequencies
    if spec.kind == "yarn":
        low = _dim_that_turns(spec, spec.beta_fast)
        high = _dim_that_turns(spec, spec.beta_slow)
        if spec.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, spec.rotary_dim - 1)
        ramp = (torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
        slow = ramp.clamp(0.0, 1.0)
        return frequencies / spec.factor * slow + frequencies * (1 - slow)
    return frequencies


def _dim_that_turns(spec: RopeSpec, turns: float) -> float:
    """Index of the pair that makes ``turns`` full turns over the original length."""
    length = spec.original_positions / (turns * 2 * math.pi)
    return spec.rotary_dim * math.log(length) / (2 * math.log(spec.theta))


class Rotary:
    """Angles of one spec on one device."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self.frequencies = inverse_frequencies(spec).to(device)  # [rotary_dim / 2] float32

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions ``[num_tokens]`` -> cos and sin, each ``[num_tokens, 1, rotary_dim / 2]`` in ``dtype``."""
        angles = (positions.to(torch.float32)[:, None] * self.frequencies)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        if self.spec.attention_factor != 1.0:
            cos, sin = cos * self.spec.attention_factor, sin * self.spec.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions below ``num_positions``, each ``[num_positions, rotary_dim / 2]`` float32."""
        cos, sin = self.angles(torch.arange(num_positions, device=self.frequencies.device), torch.float32)
        return cos.squeeze(1), sin.squeeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of each head, pairing dimension i with i + rotary_dim / 2.

    heads ``[num_tokens, num_heads, head_dim]``, cos and sin as `Rotary.angles` gives them; returns a new tensor.
    """
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < heads.shape[-1]:
        parts.append(heads[..., 2 * half :])
    return torch.cat(parts, dim=-1)
