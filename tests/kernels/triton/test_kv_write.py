"""The Triton kernel before attention, interpreted: norms, rotation and the write, against `reference`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropeway_kernels import reference
from ropeway_kernels.kv_write import rope_kv_write

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to the exact result: float32 arithmetic, then one rounding. To bf16 the interpreter cuts off where a GPU
# rounds to the nearest: a whole step, 2^-7, and not half of one. e4m3 has 3 bits, and a step of 2^-9 near 0.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7 + 2e-6, torch.float16: 2**-11 + 2e-6, E4M3: 2**-4 + 2e-6}
ABSOLUTE = {E4M3: 2**-10 + 3e-6}
GUARD = 64
nan = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(got: Tensor, exact: Tensor) -> None:
    assert exact.dtype == torch.float64
    absolute = ABSOLUTE.get(got.dtype, 3e-6)
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[got.dtype], atol=absolute)


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == E4M3:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(E4M3)
    return torch.full(shape, nan, dtype=dtype)


class Case:
    """Tokens in shuffled slots, two of them padding; the middle one of three layers; NaN wherever nothing should be."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        *,
        heads: int = 3,
        kv_heads: int = 2,
        head_dim: int = 64,
        rotary_dim: int = 64,
        block_size: int = 16,
        num_tokens: int = 9,
    ) -> None:
        self.num_heads = heads
        row = (heads + 2 * kv_heads) * head_dim
        self.memory = poison((2 * GUARD + num_tokens * row,), dtype)
        self.heads = self.memory[GUARD:-GUARD].view(num_tokens, -1, head_dim)
        self.heads.copy_(torch.randn(self.heads.shape))
        self.pool = poison((5, 3, 2, kv_heads, block_size, head_dim), kv_dtype or dtype)
        self.layer = self.pool[:, 1]
        self.slots = torch.randperm(5 * block_size)[:num_tokens]
        self.slots[[2, num_tokens - 1]] = -1
        self.angles: dict[str, Tensor] = {}
        if rotary_dim:
            angles = torch.rand(num_tokens, 1, rotary_dim // 2) * 1000
            self.angles = {"cos": angles.cos() * 1.1, "sin": angles.sin() * 1.1}

    def check(self, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> None:
        exact_heads, exact_layer = self.heads.double(), torch.full(self.layer.shape, nan, dtype=torch.float64)
        before = self.heads.clone()
        options = {"num_heads": self.num_heads, "q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6, **self.angles}
        reference.rope_kv_write(exact_heads, exact_layer, self.slots, **options)
        rope_kv_write(self.heads, self.layer, self.slots, **options)
        close(self.heads, exact_heads)
        padding = self.slots < 0
        assert torch.equal(self.heads[padding], before[padding])
        assert torch.equal(self.heads[:, self.num_heads :], before[:, self.num_heads :])
        assert self.memory[:GUARD].isnan().all()
        assert self.memory[-GUARD:].isnan().all()
        written = ~exact_layer.isnan()
        assert written.sum() == (~padding).sum() * 2 * self.layer.shape[2] * self.layer.shape[4]
        # Compared as it is written: bytes of e4m3 cannot be picked out by a mask.
        got = self.layer.float()
        assert torch.equal(~got.isnan(), written)
        close(got[written].to(self.layer.dtype), exact_layer[written])
        assert self.pool.float()[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [*DTYPES, E4M3], ids=str)
def test_every_pair_of_types(dtype: torch.dtype, kv_dtype: torch.dtype):
    Case(dtype, kv_dtype).check()
    Case(dtype, kv_dtype).check(torch.randn(64), torch.randn(64))


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (64, 16), (80, 80), (80, 32), (96, 72), (128, 128), (128, 2), (256, 256), (256, 64)],
)
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(1, 1, 8), (9, 3, 16), (4, 4, 128)])
def test_every_shape(head_dim: int, rotary_dim: int, heads: int, kv_heads: int, block_size: int):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "num_tokens": 4}
    Case(rotary_dim=rotary_dim, **shape).check()
    Case(torch.bfloat16, rotary_dim=rotary_dim, **shape).check(torch.randn(head_dim), torch.randn(head_dim))


def test_one_norm_of_the_two():
    Case().check(torch.randn(64), None)
    Case().check(None, torch.randn(64))


def test_without_rotation_or_without_queries():
    Case(rotary_dim=0).check()
    Case(rotary_dim=0).check(torch.randn(64), torch.randn(64))
    Case(heads=0, rotary_dim=0).check()
    Case(heads=0).check(None, torch.randn(64))
    Case(torch.bfloat16, E4M3, heads=0, head_dim=80, rotary_dim=0).check()


def test_more_heads_than_one_program_has():
    Case(torch.bfloat16, heads=40, kv_heads=5, num_tokens=4).check(torch.randn(64), torch.randn(64))
    Case(torch.bfloat16, E4M3, heads=7, kv_heads=1, head_dim=256, rotary_dim=128, num_tokens=4).check()


def test_padding_alone_writes_nothing():
    case = Case()
    case.slots.fill_(-1)
    case.check(torch.randn(64), torch.randn(64))
    assert case.pool.isnan().all()


def test_no_tokens():
    case = Case()
    rope_kv_write(case.heads[:0], case.layer, case.slots[:0], num_heads=3)
    assert case.pool.isnan().all()


def test_e4m3_is_rounded_as_torch_does_it_but_never_to_nan():
    """Every value of the type, every midpoint, both sides of each, subnormals, and what is too great."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # all that are not negative
    between = (codes[1:] + codes[:-1]) / 2
    inf = torch.tensor(float("inf"))
    great = torch.tensor([448.0, 455.0, 464.0, 464.1, 480.0, 1e6, 3e38, float("inf"), nan, 1e-9, 1e-40, 2**-10])
    values = torch.cat([codes, between, between.nextafter(inf), between.nextafter(-inf), great])
    values = torch.cat([values, 2.0 ** (torch.rand(1000) * 24 - 13)])
    values = torch.cat([values, -values[~values.isnan()]])
    values = torch.nn.functional.pad(values, (0, -len(values) % 256))
    v = values.view(-1, 2, 128)
    num_tokens = len(v)
    heads = torch.cat([torch.randn(num_tokens, 2, 128), v], dim=1)
    cache = poison((num_tokens // 16 + 1, 2, 2, 16, 128), E4M3)
    rope_kv_write(heads, cache, torch.arange(num_tokens), num_heads=0)
    got = cache[:, 1].transpose(1, 2).reshape(-1, 2, 128)[:num_tokens]
    want = reference.to_cache_type(v, E4M3)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert got.float().abs().nan_to_num(0.0).max() == 448.0
    assert got.float().isnan().sum() == 1
