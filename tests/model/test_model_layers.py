"""The layers: packed against plain, norm, and each rank's share of every layer against the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropeway.errors import ConfigError
from ropeway.model.layers import (
    ColumnParallelLinear,
    Placement,
    RMSNorm,
    RowParallelLinear,
    Slots,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from ropeway.model.parallel import SINGLE, ProcessGroup

CPU = torch.device("cpu")


class Rank(ProcessGroup):
    """One rank on its own: collectives leave its partial result as it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def place(group: ProcessGroup = SINGLE, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(dtype, CPU, group)


def fill(slots: Slots, tensors: dict[str, Tensor]) -> None:
    assert slots.keys() == tensors.keys()
    for name, slot in slots.items():
        assert slot.shape == tuple(tensors[name].shape)
        slot.load(tensors[name])
        assert slot.filled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    layer = ColumnParallelLinear(70, (33,), bias=bias, place=place(dtype=dtype))
    tensors = {"p.weight": torch.randn(33, 70)} | ({"p.bias": torch.randn(33)} if bias else {})
    fill(layer.slots(["p"]), tensors)
    inputs = [torch.randn(rows, 70, dtype=dtype) for rows in (0, 1, 3, 65)]
    plain = [layer(x) for x in inputs]
    layer.finalize()
    for x, expected in zip(inputs, plain, strict=True):
        torch.testing.assert_close(layer(x), expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("merged", [False, True])
def test_column_shares_make_up_the_whole(size: int, merged: bool) -> None:
    x = torch.randn(5, 8)
    weights, biases = [torch.randn(n, 8) for n in (12, 6, 6)], [torch.randn(n) for n in (12, 6, 6)]
    names = ["p"] if merged else ["q", "k", "v"]
    if merged:
        tensors = {"p.weight": torch.cat(weights), "p.bias": torch.cat(biases)}
    else:
        tensors = {f"{n}.weight": w for n, w in zip(names, weights, strict=True)}
        tensors |= {f"{n}.bias": b for n, b in zip(names, biases, strict=True)}
    outputs = []
    for rank in range(size):
        layer = ColumnParallelLinear(8, (12, 6, 6), bias=True, place=place(Rank(rank, size)))
        fill(layer.slots(names), tensors)
        layer.finalize()
        outputs.append(layer(x).split(layer.local_sizes, dim=-1))
    for part, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        whole = torch.cat([output[part] for output in outputs], dim=-1)
        torch.testing.assert_close(whole, x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_shares_add_up_to_the_whole(size: int) -> None:
    x, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    total = torch.zeros(5, 7)
    for rank in range(size):
        layer = RowParallelLinear(12, 7, bias=True, place=place(Rank(rank, size)))
        fill(layer.slots("p"), {"p.weight": weight, "p.bias": bias})
        layer.finalize()
        total += layer(x.chunk(size, dim=-1)[rank])
    torch.testing.assert_close(total, x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [9, 12])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_shares_make_up_the_whole(size: int, vocab_size: int, tied: bool) -> None:
    """9 over 4 ranks: three rows each, the last rank holding nothing but padding."""
    table, head_table = torch.randn(vocab_size, 6), torch.randn(vocab_size, 6)
    ids, x = torch.arange(vocab_size).flip(0), torch.randn(3, 6)
    hidden, logits = torch.zeros(vocab_size, 6), []
    for rank in range(size):
        embedding = VocabParallelEmbedding(vocab_size, 6, place=place(Rank(rank, size)))
        head = VocabParallelHead(embedding, tied=tied, place=place(Rank(rank, size)))
        fill(embedding.slots("e"), {"e.weight": table})
        if not tied:
            fill(head.slots("h"), {"h.weight": head_table})
        head.finalize()
        hidden += embedding(ids)
        logits.append(head(x))
    torch.testing.assert_close(hidden, table[ids])
    whole = torch.cat(logits, dim=-1)[:, :vocab_size]
    torch.testing.assert_close(whole, x @ (table if tied else head_table).T)


def test_a_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tensor-parallel-size 2.*layer width \(9\)"):
        ColumnParallelLinear(4, (9,), bias=False, place=place(Rank(0, 2)))


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(plus_one: bool, dtype: torch.dtype) -> None:
    stored = torch.randn(16).to(dtype)
    norm = RMSNorm(16, 1e-3, plus_one=plus_one, place=place(dtype=dtype))
    fill(norm.slots("n"), {"n.weight": stored})
    norm.finalize()
    x, residual = torch.randn(5, 16).to(dtype), torch.randn(5, 16).to(dtype)
    added, new_residual = norm.add(x, residual)
    assert torch.equal(new_residual, x + residual)
    wide = (x + residual).double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (stored.double() + plus_one)
    assert added.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(added.double(), expected, rtol=tolerance, atol=tolerance)
