"""Devices: where tensors live, how a host array gets there, how much memory there is.

Owns: CpuDevice and CudaDevice behind one protocol, and what the container grants this process. Must not know: models,
requests, plans. Called by: worker.executor (picks one), worker.batch (stages arrays), worker.memory's caller (budget).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ropeway.errors import ConfigError
from ropeway_kernels import cpu as cpu_kernels

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_CPU_KV_LIMIT = 4 * 2**30  # bytes; a server on somebody's own machine should not take all of it unasked


class Device(Protocol):
    name: str
    torch_device: torch.device
    supports_overlap: bool  # it computes by itself, so planning the next step meanwhile costs it nothing
    step_tokens: int  # see KVCapacity
    native: cpu_kernels.NativeKernels | None  # on which the model's layers run, where there are any

    def prepare(self, num_threads: int) -> None:
        """Once, before there are tensors. num_threads: host threads for the model; 0 chooses."""
        ...

    def computes_natively(self, dtype: torch.dtype) -> bool: ...

    def kv_budget(self, utilization: float, mapped_bytes: int = 0) -> int:
        """Bytes that the KV cache may take now that the weights are loaded. mapped_bytes: of weights that lie in a
        mapped file, whose memory the system counts as available."""
        ...

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy int32, int64 and float32 arrays to the device in one transfer, in stream order."""
        ...

    def synchronize(self) -> None: ...


def make_device(name: str) -> Device:
    """``cpu``, ``cuda`` or ``auto``. Raises ConfigError when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
        return CudaDevice()
    return CpuDevice()


def choose_dtype(wanted: str, checkpoint: str | None, device: Device) -> torch.dtype:
    """``auto`` is the checkpoint's type if the device has units for it, else float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    dtype = DTYPES.get(checkpoint or "float32", torch.float32)
    return dtype if device.computes_natively(dtype) else torch.float32


class CpuDevice:
    name = "cpu"
    supports_overlap = False  # the engine would take a core from the model
    step_tokens = (
        256  # linears are as near the processor's peak as with thousands, and first tokens come in half the time
    )

    def __init__(self) -> None:
        """Raises ConfigError if the environment names an instruction set that the kernels do not have here."""
        self.torch_device = torch.device("cpu")
        try:
            self.native = cpu_kernels.load()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.native is None:
            logger.warning("No native CPU kernels (%s): the model runs on torch, slower.", cpu_kernels.why_not())

    def prepare(self, num_threads: int) -> None:
        num_threads = num_threads or usable_cores()
        torch.set_num_threads(num_threads)
        if self.native is not None:
            self.native.set_num_threads(num_threads)
        _keep_freed_memory()

    def computes_natively(self, dtype: torch.dtype) -> bool:
        if dtype == torch.float32 or self.native is not None:
            return True  # the native kernels widen as they read, so a narrow type is never slower
        has = torch.cpu.get_capabilities()
        if dtype == torch.bfloat16:
            return bool(has.get("avx512_bf16") or has.get("amx_bf16") or has.get("bf16"))
        return bool(has.get("avx512_fp16") or has.get("amx_fp16"))

    def kv_budget(self, utilization: float, mapped_bytes: int = 0) -> int:
        return min(int(max(0, available_memory() - mapped_bytes) * utilization), _CPU_KV_LIMIT)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def synchronize(self) -> None:
        pass


class CudaDevice:
    name = "cuda"
    supports_overlap = True
    step_tokens = 2048
    native: cpu_kernels.NativeKernels | None = None

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    def prepare(self, num_threads: int) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)

    def computes_natively(self, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)

    def kv_budget(self, utilization: float, mapped_bytes: int = 0) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total * utilization) - (total - free)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        # One pinned buffer per step from torch's caching host allocator, which keeps it until the copy has been done.
        begins, size = {}, 0
        for name, array in arrays.items():
            begins[name] = size
            size += math.ceil(array.nbytes / 8) * 8
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        memory = host.numpy()
        for name, array in arrays.items():
            memory[begins[name] : begins[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device = host.to(self.torch_device, non_blocking=True)
        return {
            name: device[begins[name] : begins[name] + array.nbytes].view(_TORCH_TYPES[array.dtype]).view(array.shape)
            for name, array in arrays.items()
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def _keep_freed_memory() -> None:
    """A step allocates and frees the same few megabytes again and again. By default glibc hands such blocks back to the
    kernel, and every page of the next one is a fault. Where the C library has no mallopt there is nothing to mend."""
    trim_threshold, mmap_threshold = -1, -3  # names of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, 32 * 2**20)  # the largest that it accepts
    mallopt(trim_threshold, 512 * 2**20)


# --- what this process may use ----------------------------------------------------------------------------------------

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores by affinity, further bounded by the container's CPU quota (cgroup v2 or v1), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = period = 0
    if text := _read(cgroup / "cpu.max"):
        parts = text.split()
        if parts[0] != "max":
            quota, period = int(parts[0]), int(parts[1])
    elif text := _read(cgroup / "cpu" / "cpu.cfs_quota_us"):
        quota, period = int(text), int(_read(cgroup / "cpu" / "cpu.cfs_period_us") or 0)
    if quota > 0 and period > 0:
        cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can still be allocated without swapping, by the machine and by the container's limit."""
    lines = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    if "MemAvailable" in lines:
        available = int(lines["MemAvailable"].split()[0]) * 1024
    else:  # not Linux: half of what is installed
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit_file, used_file, cache_key in (
        (cgroup / "memory.max", cgroup / "memory.current", "inactive_file"),
        (
            cgroup / "memory" / "memory.limit_in_bytes",
            cgroup / "memory" / "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        limit, used = _read(limit_file), _read(used_file)
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(limit_file.parent / "memory.stat").splitlines())
            reclaimable = int(stat.get(cache_key, 0))
            available = min(available, int(limit) - int(used) + reclaimable)
    return max(0, available)


def _read(path: Path) -> str:
    """The file's text without surrounding blanks; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


__all__ = ["CpuDevice", "CudaDevice", "Device", "available_memory", "choose_dtype", "make_device", "usable_cores"]
