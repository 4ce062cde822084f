"""Which attention backend and KV type are chosen on which device, and how the rest is refused."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ropeway.errors import ConfigError
from ropeway.worker import backends
from ropeway.worker.backends import choose_backend, choose_kv_dtype
from ropeway.worker.device import CpuDevice

has_triton = importlib.util.find_spec("triton") is not None


@dataclass
class Gpu:
    """No more of one than is asked here."""

    torch_device = torch.device("cuda", 0)
    native = None


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def plain_cpu() -> CpuDevice:
    device = CpuDevice()
    device.native = None
    return device


def choose(wanted: str, device: Any, block_size: int = 16, head_dim: int = 64) -> str:
    return choose_backend(wanted, device, block_size, head_dim)


def test_auto_on_a_cpu() -> None:
    device = CpuDevice()
    assert choose("auto", device) == ("torch" if device.native is None else "cpu")
    assert choose("auto", device, block_size=4) == "torch"
    assert choose("auto", plain_cpu()) == "torch"
    assert choose("torch", device) == "torch"


@pytest.mark.skipif(not has_triton, reason="needs triton")
def test_auto_on_a_gpu_is_triton_if_it_can(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose("auto", Gpu()) == choose("triton", Gpu()) == "triton"
        assert not caplog.records
        assert choose("auto", Gpu(), block_size=24) == "torch"
        assert "24" in caplog.text


def test_auto_on_a_gpu_without_triton_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose("auto", Gpu()) == "torch"
    assert "triton is not installed" in caplog.text
    with pytest.raises(ConfigError, match="triton is not installed"):
        choose("triton", Gpu())


@pytest.mark.parametrize(
    ("wanted", "device", "sizes", "words"),
    [
        ("cpu", Gpu(), (16, 64), "on a GPU"),
        ("cpu", plain_cpu(), (16, 64), "no native kernels"),
        ("triton", plain_cpu(), (16, 64), "needs a GPU|not installed"),
        ("flash-attn", plain_cpu(), (16, 64), "needs a GPU"),
        ("flashinfer", plain_cpu(), (16, 64), "needs a GPU"),
        pytest.param("triton", Gpu(), (24, 64), "block-size 24", marks=pytest.mark.skipif(not has_triton, reason="")),
        pytest.param("triton", Gpu(), (16, 20), "20 dimensions", marks=pytest.mark.skipif(not has_triton, reason="")),
    ],
)
def test_what_cannot_be_done_is_refused(wanted: str, device: Any, sizes: tuple[int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {wanted}: .*({words})"):
        choose(wanted, device, *sizes)


def test_libraries_are_chosen_on_a_gpu() -> None:
    assert choose("flash-attn", Gpu()) == "flash-attn"
    assert choose("flashinfer", Gpu()) == "flashinfer"
    assert choose("torch", Gpu()) == "torch"


def test_kv_types() -> None:
    assert choose_kv_dtype("auto", torch.bfloat16, CpuDevice(), "cpu") == torch.bfloat16
    assert choose_kv_dtype("auto", torch.float16, Gpu(), "triton") == torch.float16
    for name in ("fp8", "fp8_e4m3"):
        assert choose_kv_dtype(name, torch.bfloat16, Gpu(), "triton") == torch.float8_e4m3fn
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name}: needs a GPU"):
            choose_kv_dtype(name, torch.bfloat16, CpuDevice(), "cpu")
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name}: the attention backend torch"):
            choose_kv_dtype(name, torch.bfloat16, Gpu(), "torch")
