"""The instruction sets of the native CPU kernels: which one is chosen, and that all of them compute the same."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cpu_sets
from ropeway_kernels import cpu

if cpu.load() is None:
    pytest.skip(f"no native kernels: {cpu.why_not()}", allow_module_level=True)

SETS = cpu_sets.usable()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Between two sets that round at different moments.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDS = {  # by the kernel's names of processor features
    "avx512bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avx2": {"avx2", "fma", "f16c"},
}


def processor() -> set[str]:
    """Its features by the operating system's account."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def allowed() -> list[str]:
    """What the processor has by the operating system's account, the widest first."""
    if platform.machine() == "aarch64":
        return ["neon", "scalar"]
    return [isa for isa, needs in NEEDS.items() if needs <= processor()] + ["scalar"]


on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="reads the features from Linux"
)


@on_linux
def test_the_widest_set_that_the_processor_has_is_chosen():
    assert allowed() == SETS
    assert cpu_sets.native(None).isa == allowed()[0]


@on_linux
def test_a_set_that_the_processor_lacks_is_refused_by_name():
    lacking = [isa for isa in cpu.ISAS if isa not in allowed()]
    assert lacking  # no processor has both AVX and NEON
    for isa in lacking:
        with pytest.raises(ValueError, match=f"{cpu.ISA_VARIABLE}={isa}: this processor"):
            cpu_sets.native(isa)


@on_linux
@pytest.mark.parametrize("isa", [None, "scalar"])
def test_the_features_are_the_processors_whatever_set_is_chosen(isa: str | None):
    assert cpu_sets.native(isa).features == tuple(name for name in cpu.FEATURES if name in processor())


def test_an_unknown_set_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(ValueError, match=r"ROPEWAY_CPU_ISA=sse9: must be one of .*avx2, neon, scalar"):
        cpu_sets.native("sse9")


@pytest.mark.parametrize("isa", SETS)
def test_the_set_asked_for_is_the_set_that_runs(isa: str):
    kernels = cpu_sets.native(isa)
    assert kernels.isa == isa
    lanes = {"avx512bf16": 16, "avx512": 16, "avx2": 8, "neon": 4, "scalar": 4}[isa]
    assert kernels.panel % lanes == 0


def close(got: Tensor, want: Tensor, absolute: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=TOLERANCE[want.dtype], atol=absolute, equal_nan=True)


others = pytest.mark.parametrize("isa", [isa for isa in SETS if isa != "scalar"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@others
@dtypes
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_linear_is_the_scalar_one(isa: str, weight_dtype: torch.dtype, dtype: torch.dtype):
    torch.manual_seed(0)
    kernels, scalar = cpu_sets.native(isa), cpu_sets.native("scalar")
    weight, bias = torch.randn(83, 206).to(weight_dtype), torch.randn(83)
    x = torch.randn(11, 206).to(dtype)
    if isa == "avx512bf16" and weight_dtype == torch.bfloat16:
        x = x.bfloat16()  # this set multiplies bf16 weights by bf16 activations
    got = kernels.linear(x, kernels.pack(weight, bias), dtype)
    close(got, scalar.linear(x, scalar.pack(weight, bias), dtype), absolute=1e-4)


@others
@dtypes
def test_row_by_row_kernels_are_the_scalar_ones(isa: str, dtype: torch.dtype):
    torch.manual_seed(1)
    kernels, scalar = cpu_sets.native(isa), cpu_sets.native("scalar")
    x = 4 * torch.randn(5, 94)
    x[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 88.0])
    for gate in cpu.GATES.values():
        close(kernels.gated(x.to(dtype), gate), scalar.gated(x.to(dtype), gate))
    x[0, :4] = 1e-30
    close(kernels.rms_norm(x.to(dtype), x[1], 1e-5), scalar.rms_norm(x.to(dtype), x[1], 1e-5))
    residuals = [x.to(dtype, copy=True), x.to(dtype, copy=True)]
    close(
        kernels.rms_norm(x.flip(0).to(dtype), x[1], 1e-5, residuals[0]),
        scalar.rms_norm(x.flip(0).to(dtype), x[1], 1e-5, residuals[1]),
    )
    assert torch.equal(*residuals)
    residuals = [x.to(dtype, copy=True), x.to(dtype, copy=True)]
    got_steps, got_scales = kernels.rms_norm_int8(x.flip(0).to(dtype), x[1], 1e-5, residuals[0])
    steps, scales = scalar.rms_norm_int8(x.flip(0).to(dtype), x[1], 1e-5, residuals[1])
    assert torch.equal(*residuals)
    assert torch.equal(got_steps, steps)  # the order of a sum only shows in the scales
    close(got_scales, scales)
    for got, want in zip(kernels.argmax(x), scalar.argmax(x), strict=True):
        assert torch.equal(got, want)


@others
@dtypes
@pytest.mark.parametrize("block_size", [8, 32])  # the widest vectors do not divide 8: a narrower set steps in
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_a_cache_written_by_one_set_is_read_by_another(
    isa: str, dtype: torch.dtype, block_size: int, sliding_window: int | None
):
    torch.manual_seed(2)
    kernels, scalar = cpu_sets.native(isa), cpu_sets.native("scalar")
    heads, kv_heads, head_dim, length, cached = 6, 2, 48, 301, 267
    qkv = torch.randn(length, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.randn(length, head_dim // 2)
    blocks = (1 + torch.randperm(-(-length // block_size), dtype=torch.int32))[None]
    slots = torch.tensor([int(blocks[0, p // block_size]) * block_size + p % block_size for p in range(length)])
    starts, lengths = torch.tensor([0, length - cached], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    results = []
    for writer, reader in ((kernels, scalar), (scalar, kernels), (scalar, scalar)):
        work = qkv.clone()
        cache = torch.zeros(1 + blocks.shape[1], 2, kv_heads, block_size, head_dim, dtype=dtype)
        writer.rope_kv(work, cache, slots, num_heads=heads, cos=angles.cos(), sin=angles.sin())
        q = work[cached:, : heads * head_dim].unflatten(1, (heads, head_dim))
        results.append(
            reader.attention(
                q, cache, starts, lengths, blocks, scale=head_dim**-0.5, sliding_window=sliding_window, soft_cap=20.0
            )
        )
    close(results[0], results[2], absolute=TOLERANCE[dtype])
    close(results[1], results[2], absolute=TOLERANCE[dtype])
