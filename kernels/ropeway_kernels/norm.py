"""Root-mean-square norm on the GPU, with the residual stream's addition where there is one.

Owns: the kernel, how rows are dealt to programs. Must not know: models, which norms there are.
Called by: model.layers, tests. Twins: reference.rms_norm and reference.add_rms_norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ropeway_kernels.aot import Variant

MAX_SIZE = 16_384  # of a row: all of it is in registers at once
_TILE = 1024  # elements of a program that has several rows


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
):
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)[:, None]
    column = tl.arange(0, SIZE_TILE)[None, :]
    inside = (row < num_rows) & (column < SIZE)
    at = row.to(tl.int64) * SIZE + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        total = value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value = total.to(residual.dtype.element_ty)
        tl.store(residual + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)
    wide = wide * scale * tl.load(weight + column, mask=column < SIZE, other=0.0)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The norm of each row of x ``[rows, size]``, or of residual + x, which is stored in residual first. Contiguous.

    weight ``[size]`` float32. Float32 arithmetic, rounded once to x's type; residual is rounded first and the norm taken
    of what is then stored, as the native CPU kernels do. A row's result depends on that row alone. Raises ValueError
    for a size above `MAX_SIZE`.
    """
    num_rows, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"a row of {size} elements is too long for one program; at most {MAX_SIZE}")
    assert x.is_contiguous()
    assert weight.dtype == torch.float32
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    constants, num_warps = _launch(size)
    grid = (triton.cdiv(num_rows, constants["ROW_TILE"]),)
    _rms_norm[grid](x, residual, weight, out, num_rows, eps, **constants, num_warps=num_warps)
    return out


def _launch(size: int) -> tuple[dict[str, int], int]:
    """Constants and warps for rows of this size. Both depend on nothing else, so neither does the order of the sums."""
    size_tile = triton.next_power_of_2(size)
    row_tile = max(1, _TILE // size_tile)
    # 8 elements for each thread: 16 bytes of a narrow type, which is the widest load there is.
    return {"SIZE": size, "ROW_TILE": row_tile, "SIZE_TILE": size_tile}, min(16, row_tile * size_tile // 256)


def variants() -> list[Variant]:
    """For the ahead-of-time check: the widths of real models and of their heads, and the widest row."""
    from ropeway_kernels.aot import Variant

    result = []
    for dtype, sizes in {
        "bf16": (64, 128, 256, 576, 896, 1024, 2048, 4096, 8192, MAX_SIZE),
        "fp16": (128, 1024, 4096),
        "fp32": (128, 576, 4096, 8192, MAX_SIZE),
    }.items():
        for size in sizes:
            for added in (False, True):
                constants, num_warps = _launch(size)
                signature = {
                    "x": f"*{dtype}",
                    "residual": f"*{dtype}" if added else "constexpr",
                    "weight": "*fp32",
                    "out": f"*{dtype}",
                    "num_rows": "i32",
                    "eps": "fp32",
                } | dict.fromkeys(constants, "constexpr")
                all_constants: dict[str, Any] = dict(constants) if added else {"residual": None, **constants}
                name = f"{dtype}_{size}" + ("_add" if added else "")
                result.append(Variant(name, _rms_norm, signature, all_constants, num_warps=num_warps))
    return result


__all__ = ["MAX_SIZE", "rms_norm", "variants"]
