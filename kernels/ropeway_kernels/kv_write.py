"""What lies between the projection and attention, as one kernel: norms of q and k, rotation, the write to the cache.

Owns: the kernel, rounding to the cache's type. Must not know: models, batches, who reads the cache.
Called by: attention.triton, tests. Twin: reference.rope_kv_write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ropeway_kernels.aot import Variant

_TILE = 4096  # elements of a program: 8 of each half of a head for each thread, 16 bytes of a narrow type
_NUM_WARPS = 8


@triton.jit
def _to_e4m3(x):
    """The bits of the nearest e4m3 of each float32, ties to even; 448 for what is greater. NaN stays NaN.

    By hand: the machine's own conversion exists only from sm_89 on, and Triton's interpreter gets carries wrong.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 3 of 23 fraction bits stay; the exponent is biased by 7 where it was by 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 a step is 2^-9 throughout, and that is float32's at 2^14.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _weigh(x, scale, column, inside, is_q, is_k, q_norm, k_norm):
    """x times its head's scale and weight, where its kind of head has a norm."""
    if q_norm is not None:
        x = tl.where(is_q, x * scale * tl.load(q_norm + column, mask=inside, other=0.0), x)
    if k_norm is not None:
        x = tl.where(is_k, x * scale * tl.load(k_norm + column, mask=inside, other=0.0), x)
    return x


@triton.jit
def _put(x, head_at, cache_at, column, write_q, write_kv, E4M3: tl.constexpr):
    """Each row either back to where it came from (q) or to the cache (k and v)."""
    tl.store(head_at + column, x.to(head_at.dtype.element_ty), mask=write_q)
    if E4M3:
        tl.store(cache_at + column, _to_e4m3(x), mask=write_kv)
    else:
        tl.store(cache_at + column, x.to(cache_at.dtype.element_ty), mask=write_kv)


# Every element is loaded once and its address stored once with what depends on it: q can be changed in place without a
# barrier. So the two halves of a rotation are two tiles and never one tile that is read twice.
@triton.jit
def _rope_kv_write(
    heads,
    kv_layer,
    slot_mapping,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    block_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    E4M3: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    plane = head - NUM_HEADS  # of a block: the heads of K, then those of V
    is_head = plane < 2 * NUM_KV_HEADS
    is_q = plane < 0
    is_k = (plane >= 0) & (plane < NUM_KV_HEADS)
    is_kv = (plane >= 0) & is_head
    head_at = heads + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cache_at = kv_layer + block * block_stride + (plane * BLOCK_SIZE + offset) * HEAD_DIM

    column = tl.arange(0, HALF_TILE)[None, :]
    in_half = column < HALF
    rest_column = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
    in_rest = rest_column < HEAD_DIM
    if HALF > 0:
        first = tl.load(head_at + column, mask=is_head & in_half, other=0.0).to(tl.float32)
        second = tl.load(head_at + HALF + column, mask=is_head & in_half, other=0.0).to(tl.float32)
    if 2 * HALF < HEAD_DIM:
        rest = tl.load(head_at + rest_column, mask=is_head & in_rest, other=0.0).to(tl.float32)

    if NORM:
        squares = tl.zeros([HEAD_TILE, 1], tl.float32)
        if HALF > 0:
            squares += tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        if HALF > 0:
            first = _weigh(first, scale, column, in_half, is_q, is_k, q_norm, k_norm)
            second = _weigh(second, scale, HALF + column, in_half, is_q, is_k, q_norm, k_norm)
        if 2 * HALF < HEAD_DIM:
            rest = _weigh(rest, scale, rest_column, in_rest, is_q, is_k, q_norm, k_norm)

    if HALF > 0:
        c = tl.load(cos + token * HALF + column, mask=in_half, other=0.0)
        s = tl.load(sin + token * HALF + column, mask=in_half, other=0.0)
        turns = is_q | is_k
        turned_first = tl.where(turns, first * c - second * s, first)
        turned_second = tl.where(turns, second * c + first * s, second)
        _put(turned_first, head_at, cache_at, column, is_q & in_half, is_kv & in_half, E4M3)
        _put(turned_second, head_at, cache_at, HALF + column, is_q & in_half, is_kv & in_half, E4M3)
    if 2 * HALF < HEAD_DIM:
        _put(rest, head_at, cache_at, rest_column, is_q & in_rest, is_kv & in_rest, E4M3)


def rope_kv_write(
    heads: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (if given) and rotate q in place and k, then write k and v into their slots.

    heads ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`` contiguous: q, k, v; k and v stay as they are there.
    kv_layer ``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` of any of torch's narrow types or e4m3, each block
    contiguous. slot_mapping ``[num_tokens]`` int64: block id * block_size + offset; a token whose slot is -1 is padding,
    and nothing of it is written, neither k and v nor q. cos and sin ``[num_tokens, 1, rotary_dim / 2]`` contiguous float32,
    None for no rotation; dimensions from rotary_dim on stay. q_norm and k_norm ``[head_dim]`` float32.

    Float32 arithmetic, then one rounding to heads' type (q) or the cache's (k and v). e4m3 ends at 448: what is greater
    becomes that, not NaN.
    """
    num_tokens, total, head_dim = heads.shape
    _, two, num_kv_heads, block_size, width = kv_layer.shape
    half = 0 if cos is None else cos.shape[-1]
    assert two == 2
    assert width == head_dim
    assert total == num_heads + 2 * num_kv_heads
    assert 2 * half <= head_dim
    assert heads.is_contiguous()
    assert kv_layer[0].is_contiguous()
    assert slot_mapping.dtype == torch.int64
    assert (cos is None) == (sin is None)
    for angles in (cos, sin):
        assert angles is None or (angles.dtype == torch.float32 and angles.is_contiguous())
    for weight in (q_norm, k_norm):
        assert weight is None or (weight.dtype == torch.float32 and weight.is_contiguous())
    if num_tokens == 0:
        return
    e4m3 = kv_layer.dtype == torch.float8_e4m3fn
    if e4m3:
        kv_layer = kv_layer.view(torch.uint8)
    norm = q_norm is not None or k_norm is not None
    constants = _constants(num_heads, num_kv_heads, head_dim, half, block_size, norm=norm, e4m3=e4m3)
    _rope_kv_write[(num_tokens, triton.cdiv(total, constants["HEAD_TILE"]))](
        heads,
        kv_layer,
        slot_mapping,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        kv_layer.stride(0),
        **constants,
        num_warps=_NUM_WARPS,
    )


def _constants(
    num_heads: int, num_kv_heads: int, head_dim: int, half: int, block_size: int, *, norm: bool, e4m3: bool
) -> dict[str, Any]:
    """half: rotary_dim / 2."""
    head_tile = max(1, _TILE // triton.next_power_of_2(head_dim))
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_SIZE": block_size,
        "NORM": norm,
        "E4M3": e4m3,
        "HEAD_TILE": min(head_tile, triton.next_power_of_2(num_heads + 2 * num_kv_heads)),
        "HALF_TILE": triton.next_power_of_2(max(1, half)),
        "REST_TILE": triton.next_power_of_2(max(1, head_dim - 2 * half)),
    }


def variants() -> list[Variant]:
    """For the ahead-of-time check: every head size, partial rotation, norms, and every type of cache."""
    from ropeway_kernels.aot import Variant

    result = []
    for num_heads, num_kv_heads, head_dim, half, norm in (
        (9, 3, 64, 32, False),
        (14, 2, 64, 32, False),
        (32, 32, 80, 16, False),
        (32, 32, 96, 48, False),
        (24, 8, 128, 48, False),
        (16, 8, 128, 64, True),
        (64, 8, 128, 64, False),
        (4, 1, 256, 128, True),
        (0, 8, 128, 0, False),
        (16, 8, 128, 0, True),
    ):
        for dtype, cache in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "u8"), ("fp16", "u8")):
            constants = _constants(num_heads, num_kv_heads, head_dim, half, 16, norm=norm, e4m3=cache == "u8")
            absent: dict[str, Any] = {}
            if not half:
                absent |= {"cos": None, "sin": None}
            if not norm:
                absent |= {"q_norm": None, "k_norm": None}
            signature = {"heads": f"*{dtype}", "kv_layer": f"*{cache}", "slot_mapping": "*i64"}
            signature |= {
                name: "constexpr" if name in absent else "*fp32" for name in ("cos", "sin", "q_norm", "k_norm")
            }
            signature |= {"eps": "fp32", "block_stride": "i32"} | dict.fromkeys(constants, "constexpr")
            rotated = f"{2 * half}of{head_dim}" + ("_norm" if norm else "")
            result.append(
                Variant(
                    f"{num_heads}q{num_kv_heads}kv_{rotated}_{dtype}_{'e4m3' if cache == 'u8' else cache}",
                    _rope_kv_write,
                    signature,
                    {**constants, **absent},
                    num_warps=_NUM_WARPS,
                    divisible_by_16=("block_stride",),
                )
            )
    return result


__all__ = ["rope_kv_write", "variants"]
