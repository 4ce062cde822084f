"""Native linears over packed weights: against float64, and the same bits whatever rows are computed together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cpu_sets
from ropeway_kernels import cpu

if cpu.load() is None:
    pytest.skip(f"no native kernels: {cpu.why_not()}", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of a result to its type
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=cpu_sets.usable())
def kernels(request: pytest.FixtureRequest) -> Iterator[cpu.NativeKernels]:
    torch.manual_seed(0)
    native = cpu_sets.native(request.param)
    yield native
    native.set_num_threads(torch.get_num_threads())


def whole_numbers(*shape: int) -> Tensor:
    """Every type holds them, and float32 their sums, so that a result must be exact in any order."""
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_all_pairs_of_types_are_exact(
    kernels: cpu.NativeKernels, weight_dtype: torch.dtype, x_dtype: torch.dtype, out_dtype: torch.dtype
):
    k, out_features = 38, 3 * kernels.panel + 5
    x, weight, bias = whole_numbers(23, k), whole_numbers(out_features, k), whole_numbers(out_features)
    want = (x.double() @ weight.double().T + bias.double()).to(out_dtype)
    packed = kernels.pack(weight.to(weight_dtype), bias)
    for rows in (1, 2, 3, 23):
        got = kernels.linear(x[:rows].to(x_dtype), packed, out_dtype)
        assert got.dtype == out_dtype
        assert torch.equal(got, want[:rows]), rows


@dtypes
@pytest.mark.parametrize("panels", [(0, 1), (0, 7), (1, 0), (1, 1), (5, -1), (9, 3)], ids=str)
def test_every_row_count_and_panel_edge_is_exact(
    kernels: cpu.NativeKernels, dtype: torch.dtype, panels: tuple[int, int]
):
    k, out_features = 38, panels[0] * kernels.panel + panels[1]
    x, weight = whole_numbers(40, k), whole_numbers(out_features, k)
    want, packed = (x @ weight.T).to(dtype), kernels.pack(weight.to(dtype))
    for rows in range(1, 41):
        assert torch.equal(kernels.linear(x[:rows].to(dtype), packed), want[:rows]), rows


@dtypes
@pytest.mark.parametrize("k", [2, 16, 1024, 1538, 5000])
def test_depths_of_one_and_of_many_blocks_are_exact(kernels: cpu.NativeKernels, dtype: torch.dtype, k: int):
    weight = whole_numbers(3 * kernels.panel + 5, k)
    packed = kernels.pack(weight.to(dtype))
    for rows in (1, 2, 3, 9, 40, 150):
        x = whole_numbers(rows, k)
        assert torch.equal(kernels.linear(x.to(dtype), packed, torch.float32), x @ weight.T), rows


@dtypes
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (5, 576), (33, 5000)])
def test_real_numbers_are_close(
    kernels: cpu.NativeKernels, dtype: torch.dtype, x_dtype: torch.dtype, rows: int, k: int
):
    x, weight, bias = torch.randn(rows, k).to(x_dtype), torch.randn(101, k).to(dtype), torch.randn(101)
    seen = x.bfloat16() if kernels.isa == "avx512bf16" and dtype == torch.bfloat16 else x
    want = seen.double() @ weight.double().T + bias.double()
    # Rounding errors of a sum of k products wander; four standard deviations and more.
    drift = 2**-22 * k**0.5 * (seen.double().abs() @ weight.double().abs().T + 1)
    for out_dtype in DTYPES:
        got = kernels.linear(x, kernels.pack(weight, bias), out_dtype).double()
        assert ((got - want).abs() <= drift + ROUNDING[out_dtype] * want.abs()).all()


@dtypes
@pytest.mark.parametrize("k", [64, 2000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    kernels: cpu.NativeKernels, dtype: torch.dtype, k: int, threads: int
):
    weight = torch.randn(6 * kernels.panel + 3, k).to(dtype)
    packed = kernels.pack(weight, torch.randn(weight.shape[0]))
    x = torch.randn(131, k).to(dtype)
    kernels.set_num_threads(1)
    alone = torch.cat([kernels.linear(row[None], packed) for row in x])
    kernels.set_num_threads(threads)
    for rows in (*range(1, 20), 32, 33, 64, 131):
        assert torch.equal(kernels.linear(x[:rows], packed), alone[:rows]), rows
        assert torch.equal(kernels.linear(x[131 - rows :], packed), alone[131 - rows :]), rows


@dtypes
def test_rows_of_x_and_of_the_weight_may_lie_apart(kernels: cpu.NativeKernels, dtype: torch.dtype):
    x, weight = torch.randn(9, 75).to(dtype), torch.randn(50, 100).to(dtype)
    apart = kernels.linear(x[:, 3:67], kernels.pack(weight[:, 5:69]))
    together = kernels.linear(x[:, 3:67].contiguous(), kernels.pack(weight[:, 5:69].contiguous()))
    assert torch.equal(apart, together)


@dtypes
def test_nothing_is_written_outside_the_result(kernels: cpu.NativeKernels, dtype: torch.dtype):
    out_features, rows, k = 2 * kernels.panel + 1, 11, 20
    packed, x = kernels.pack(torch.randn(out_features, k).to(dtype)), torch.randn(rows, k).to(dtype)
    y = torch.full((rows + 2, out_features + 4), 7.0, dtype=dtype)
    kernels._linear(
        packed.args,
        x.data_ptr(),
        cpu.TYPES[dtype],
        rows,
        x.stride(0),
        y[1:, 2:].data_ptr(),
        cpu.TYPES[dtype],
        y.stride(0),
    )
    inside = torch.zeros_like(y, dtype=torch.bool)
    inside[1:-1, 2:-2] = True
    assert (y[~inside] == 7).all()
    assert torch.equal(y[1:-1, 2:-2], kernels.linear(x, packed))


@dtypes
def test_a_row_of_nans_and_infinities_stays_alone(kernels: cpu.NativeKernels, dtype: torch.dtype):
    x, packed = torch.randn(7, 32).to(dtype), kernels.pack(torch.randn(40, 32).to(dtype))
    want = kernels.linear(x, packed)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    got = kernels.linear(x, packed)
    keep = [0, 1, 2, 5, 6]
    assert torch.equal(got[keep], want[keep])
    assert got[3].isnan().all()
    assert got[4].isinf().all()


def test_no_rows_give_no_rows(kernels: cpu.NativeKernels):
    assert kernels.linear(torch.empty(0, 32), kernels.pack(torch.randn(40, 32))).shape == (0, 40)


@dtypes
def test_a_packed_weight_gives_its_rows_back(kernels: cpu.NativeKernels, dtype: torch.dtype):
    table = torch.randn(3 * kernels.panel + 2, 54).to(dtype)
    packed = kernels.pack(table)
    ids = torch.tensor([0, 5, table.shape[0] - 1, kernels.panel, 5])
    assert torch.equal(kernels.embedding(ids, packed), table[ids])
    adopted = kernels.adopt(packed.data.clone(), *table.shape)
    assert torch.equal(kernels.linear(table[:3], adopted), kernels.linear(table[:3], packed))


def test_what_cannot_be_packed(kernels: cpu.NativeKernels):
    assert kernels.can_pack(torch.empty(3, 4))
    assert not kernels.can_pack(torch.empty(3, 5))  # pairs along the depth
    assert not kernels.can_pack(torch.empty(3, 4, dtype=torch.float64))
