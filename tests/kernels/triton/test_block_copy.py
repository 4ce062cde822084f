"""The Triton block copy, interpreted, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropeway_kernels import reference
from ropeway_kernels.block_copy import copy_blocks


def random_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bit pattern, NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        ((16,), torch.uint8),  # the least that there is
        ((577, 4), torch.float32),
        ((3, 2, 2, 16, 80), torch.bfloat16),  # 30,720 bytes: two tiles of a program, the second in part
        ((2, 2, 3, 8, 64), torch.float8_e4m3fn),
        ((4096,), torch.int32),  # exactly one tile
        ((4100,), torch.int32),
    ],
    ids=str,
)
def test_blocks_arrive_and_nothing_else_changes(block: tuple[int, ...], dtype: torch.dtype):
    source, target = random_blocks((9, *block), dtype), random_blocks((7, *block), dtype)
    pairs = torch.tensor([[8, 0], [0, 6], [3, 3], [3, 5]])
    before, want = source.clone(), target.clone()
    reference.copy_blocks(source, want, pairs)
    assert not equal(want, target)
    copy_blocks(source, target, pairs)
    assert equal(target, want)
    assert equal(source, before)


def test_within_one_tensor_that_has_neighbours():
    memory = random_blocks((10, 1250, 4), torch.float32)
    blocks, want = memory[2:8], memory.clone()
    pairs = torch.tensor([[5, 0], [2, 1], [2, 4]])
    reference.copy_blocks(want[2:8], want[2:8], pairs)
    copy_blocks(blocks, blocks, pairs)
    assert equal(memory, want)


def test_no_pairs():
    source, target = torch.ones(2, 16), torch.zeros(2, 16)
    copy_blocks(source, target, torch.zeros(0, 2, dtype=torch.int64))
    assert not target.any()


def test_host_memory_that_a_device_cannot_reach_is_refused():
    blocks = torch.zeros(2, 16)
    with pytest.raises(ValueError, match="not pinned"):
        copy_blocks(blocks, blocks, torch.zeros(1, 2, dtype=torch.int64, device="meta"))
