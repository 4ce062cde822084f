"""Gated activations on the GPU: ``gate(first half) * second half`` of a row.

Owns: the kernel and the gates' formulas. Must not know: models, which layer wants which gate.
Called by: model.layers, tests. Twin: reference.gated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ropeway_kernels.aot import Variant

GATES = ("silu", "gelu", "gelu_tanh")
_TILE = 1024  # columns of a program


@triton.jit
def _sigmoid(x):
    # By e^-|x|, which never overflows.
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def _gated(x, out, SIZE: tl.constexpr, TILE: tl.constexpr, GATE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    first = tl.load(x + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == "silu":
        share = _sigmoid(first)
    elif GATE == "gelu":
        share = 0.5 + 0.5 * tl.erf(first * 0.7071067811865476)
    else:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, with u = sqrt(2 / pi) (x + 0.044715 x^3): arXiv 1606.08415.
        share = _sigmoid(first * (1.5957691216057308 + 0.07135481282553473 * first * first))
    tl.store(out + row * SIZE + column, (first * share * second).to(out.dtype.element_ty), mask=inside)


def gated(x: Tensor, gate: str) -> Tensor:
    """x ``[rows, 2 * size]`` contiguous -> ``[rows, size]``. Float32 arithmetic, rounded once to x's type.

    gate: one of `GATES`; gelu is by the error function. A row's result depends on that row alone.
    """
    assert gate in GATES
    assert x.is_contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    constants = _constants(size, gate)
    _gated[(rows, triton.cdiv(size, constants["TILE"]))](x, out, **constants, num_warps=4)
    return out


def _constants(size: int, gate: str) -> dict[str, Any]:
    return {"SIZE": size, "TILE": min(_TILE, triton.next_power_of_2(size)), "GATE": gate}


def variants() -> list[Variant]:
    """For the ahead-of-time check: every gate and type, and widths of real models, odd shares of them too."""
    from ropeway_kernels.aot import Variant

    result = []
    for dtype in ("bf16", "fp16", "fp32"):
        for gate in GATES:
            for size in (1536, 3072, 4864, 8192) if dtype == "bf16" else (3072,):
                constants = _constants(size, gate)
                signature = {"x": f"*{dtype}", "out": f"*{dtype}"} | dict.fromkeys(constants, "constexpr")
                result.append(Variant(f"{gate}_{dtype}_{size}", _gated, signature, constants, num_warps=4))
    return result


__all__ = ["GATES", "gated", "variants"]
