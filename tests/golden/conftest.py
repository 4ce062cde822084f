"""Golden tests run on torch alone and on the native kernels."""

from __future__ import annotations

import pytest

from ropeway_kernels import cpu


@pytest.fixture(params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> cpu.NativeKernels | None:
    if request.param == "torch":
        return None
    kernels = cpu.load()
    if kernels is None:
        pytest.skip(cpu.why_not())
    return kernels
