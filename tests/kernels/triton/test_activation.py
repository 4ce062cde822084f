"""The Triton gates, interpreted, against the readable ones in `reference`; and the layer that runs on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ropeway.model.layers import ACTIVATIONS, Gate, Placement
from ropeway.model.parallel import SINGLE
from ropeway_kernels import activation, reference
from ropeway_kernels.activation import GATES, gated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to the exact result: float32 arithmetic, then one rounding. To bf16 the interpreter cuts off where a GPU
# rounds to the nearest: a whole step, 2^-7, and not half of one. Absolute: near 0 a gate is a difference of float32.
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


def close(got: Tensor, exact: Tensor) -> None:
    assert exact.dtype == torch.float64
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[got.dtype], atol=3e-6)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 576, 577, 1024, 4096])
def test_equals_the_reference(gate: str, dtype: torch.dtype, size: int):
    x = (torch.randn(3, 2 * size) * 3).to(dtype)
    before = x.clone()
    out = gated(x, gate)
    assert out.dtype == dtype
    close(out, reference.gated(x.double(), gate))
    assert torch.equal(x, before)


@pytest.mark.parametrize("gate", GATES)
def test_is_good_to_a_millionth_over_its_whole_range(gate: str):
    first = torch.linspace(-12, 12, 5001)[None]
    got = gated(torch.cat([first, torch.ones_like(first)], dim=1), gate)
    want = reference.GATES[gate](first.double())
    assert ((got - want).abs() <= 1e-6 * first.abs().clamp(min=1.0)).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("gate", GATES)
def test_extreme_values(gate: str):
    first = torch.tensor([[-1e30, -100.0, -90.0, -0.0, 100.0, 1e10, inf, nan]])
    got = gated(torch.cat([first, torch.full_like(first, 2.0)], dim=1), gate)
    want = torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 2e10, inf, nan]])
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("size", [7, 1030])
def test_nothing_is_written_around_the_output(size: int):
    memory = torch.full((3 * size + 64,), nan)
    x, out = torch.randn(3, 2 * size), memory[32:-32].view(3, size)
    constants = activation._constants(size, "silu")
    activation._gated[(3, -(-size // constants["TILE"]))](x, out, **constants)
    close(out, reference.gated(x.double(), "silu"))
    assert memory[:32].isnan().all()
    assert memory[-32:].isnan().all()


def test_no_rows():
    assert gated(torch.randn(0, 64), "silu").shape == (0, 32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_means_the_same_on_them(activation: str):
    """Every activation that a model may ask for has its kernel."""
    x = torch.randn(3, 2 * 40)
    place = Placement(torch.float32, torch.device("cpu"), SINGLE)
    on_torch = Gate(activation, place)(x)
    on_triton = Gate(activation, Placement(place.dtype, place.device, place.group, triton=True))(x)
    assert not torch.equal(on_triton, torch.zeros_like(on_triton))
    torch.testing.assert_close(on_triton, on_torch, rtol=1e-5, atol=3e-6)
