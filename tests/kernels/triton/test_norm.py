"""The Triton norm, interpreted, against the readable one in `reference`; and the layer that runs on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ropeway.model.layers import Placement, RMSNorm
from ropeway.model.parallel import SINGLE
from ropeway_kernels import norm, reference
from ropeway_kernels.norm import MAX_SIZE, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to the exact result: float32 arithmetic, then one rounding. To bf16 the interpreter cuts off where a GPU
# rounds to the nearest: a whole step, 2^-7, and not half of one.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7 + 2e-6, torch.float16: 2**-11 + 2e-6}
inf, nan = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def close(got: Tensor, exact: Tensor, absolute: float = 1e-6) -> None:
    assert exact.dtype == torch.float64
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[got.dtype], atol=absolute, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 300, 576, 577, 1024, 4096])
def test_equals_the_reference(dtype: torch.dtype, size: int):
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size)
    before = x.clone()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    close(out, reference.rms_norm(x.double(), weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 300, 576, 577, 4096])
def test_adds_to_the_residual_first_and_takes_the_norm_of_what_is_stored(dtype: torch.dtype, size: int):
    memory = torch.full((4 * size + 64,), nan, dtype=dtype)
    residual = memory[32 : 32 + 4 * size].view(4, size)
    residual.copy_(torch.randn(4, size))
    x, weight = torch.randn(4, size).to(dtype), torch.randn(size)
    before, total = x.clone(), residual.double()
    reference.add_rms_norm(x.double(), total, weight, 1e-6)
    out = rms_norm(x, weight, 1e-6, residual)
    close(residual, total)
    close(out, reference.rms_norm(residual.double(), weight, 1e-6))
    # Bit for bit, because a sum that was not rounded would be within any tolerance.
    assert torch.equal(out, rms_norm(residual, weight, 1e-6))
    assert torch.equal(x, before)
    assert memory[:32].isnan().all()
    assert memory[32 + 4 * size :].isnan().all()


def test_the_widest_row():
    x, weight = torch.randn(2, MAX_SIZE), torch.randn(MAX_SIZE)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight, 1e-6))
    with pytest.raises(ValueError, match="16385"):
        rms_norm(torch.randn(1, MAX_SIZE + 1), torch.randn(MAX_SIZE + 1), 1e-6)


@pytest.mark.parametrize("size", [7, 300, 577])
def test_a_row_is_bitwise_the_same_in_any_batch(size: int):
    x, weight = torch.randn(9, size), torch.randn(size)
    alone = torch.cat([rms_norm(row[None], weight, 1e-6) for row in x])
    for rows in (9, 8, 3):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6), alone[:rows])


@pytest.mark.parametrize("size", [7, 300, 577])
def test_nothing_is_written_around_the_output(size: int):
    memory = torch.full((3 * size + 64,), nan)
    x, weight, out = torch.randn(3, size), torch.randn(size), memory[32:-32].view(3, size)
    constants, _ = norm._launch(size)
    norm._rms_norm[(-(-3 // constants["ROW_TILE"]),)](x, None, weight, out, 3, 1e-6, **constants)
    close(out, reference.rms_norm(x.double(), weight, 1e-6))
    assert memory[:32].isnan().all()
    assert memory[-32:].isnan().all()


def test_no_rows():
    assert rms_norm(torch.randn(0, 64), torch.randn(64), 1e-6).shape == (0, 64)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_rows_are_those_of_torch_in_float32(dtype: torch.dtype):
    x = torch.randn(6, 40)
    x[0] *= 1e18  # squares still fit
    x[1] *= 1e25  # squares do not: the norm is 0
    x[2] = 0.0
    x[3, 7] = inf
    x[4, 39] = nan
    x[5] *= 1e-30
    x = x.to(dtype)
    want = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).double()
    close(rms_norm(x, torch.ones(40), 1e-6), want, absolute=0.0)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_means_the_same_on_it(plus_one: bool, dtype: torch.dtype):
    layer = RMSNorm(48, 1e-3, plus_one=plus_one, place=Placement(dtype, torch.device("cpu"), SINGLE, triton=True))
    stored = torch.randn(48).to(dtype)
    layer.slots("n")["n.weight"].load(stored)
    layer.finalize()
    assert layer.weight.dtype == torch.float32
    weight = stored.double() + plus_one
    heads = torch.randn(5, 7, 48).to(dtype)[:, 2:5]  # as they lie between the others
    close(layer(heads), reference.rms_norm(heads.double(), weight, 1e-3))
    x, residual = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    exact = residual.double() + x.double()
    out, total = layer.add(x, residual)
    close(total, exact)
    close(out, reference.rms_norm(total.double(), weight, 1e-3))
