"""Devices: where tensors live, how arrays get there and back, how much memory there is.

Owns: CpuDevice and CudaDevice behind one protocol, and what the container grants this process. Must not know: models,
requests, plans. Called by: worker.executor (picks one), worker.batch (uploads), worker.runner (downloads, ends steps),
worker.graphs (captures), worker.memory's caller (budget).

A device whose ``runs_ahead`` is true does what it is given in order, while the program goes on; nothing but a download's
`result` waits for it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ropeway.errors import ConfigError
from ropeway.worker.staging import Download, Downloads, Event, Queue, Uploads
from ropeway_kernels import cpu as cpu_kernels

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_KV_LIMIT = 4 * 2**30  # bytes; a server on somebody's own machine should not take all of it unasked


class Results(Protocol):
    """Tensors on their way to the host."""

    def result(self) -> list[Tensor]:
        """Their values in host memory, once they are there. Once only."""
        ...


Replay = Callable[[], Tensor]
"""Does again what was captured, on the same memory, and returns the same tensor with new values."""


class Device(Protocol):
    name: str
    torch_device: torch.device
    runs_ahead: bool  # it computes by itself: planning the next step meanwhile costs it nothing
    native: cpu_kernels.NativeKernels | None  # on which the model's layers run, where there are any

    def prepare(self, num_threads: int) -> None:
        """Once, before there are tensors. num_threads: host threads for the model; 0 chooses."""
        ...

    def computes_natively(self, dtype: torch.dtype) -> bool: ...

    def step_tokens(self, num_parameters: int) -> int:
        """See KVCapacity. num_parameters: of the model."""
        ...

    def kv_budget(self, utilization: float, *, mapped_bytes: int = 0, activation_bytes: int = 0) -> int:
        """Bytes that the KV cache may take now that the weights are loaded. mapped_bytes: of weights that lie in a
        mapped file, whose memory the system counts as available; activation_bytes: what a step needs besides."""
        ...

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy int32, int64 and float32 arrays to the device in one transfer. They hold until `end_step`. A device that
        does not run ahead copies nothing: the tensors are the arrays' own memory."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Results:
        """Begin to copy tensors, which nobody changes any more, to the host; with none, to learn when it got here."""
        ...

    def end_step(self) -> None:
        """All work of this step has been given to the device."""
        ...

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """Record the work of ``run``, without doing it. ``run`` allocates as it likes; whatever else it reads or writes
        must stay where it is for as long as the replay is used."""
        ...


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
    runs_ahead = False  # the engine would take a core from the model

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

    def step_tokens(self, num_parameters: int) -> int:
        return 256  # linears are as near the processor's peak as with thousands, first tokens come in half the time

    def kv_budget(self, utilization: float, *, mapped_bytes: int = 0, activation_bytes: int = 0) -> int:
        return min(int(max(0, available_memory() - mapped_bytes) * utilization), _CPU_KV_LIMIT)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def download(self, tensors: Sequence[Tensor]) -> Results:
        return _Here(list(tensors))

    def end_step(self) -> None:
        pass

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        return run


class _Here:
    """Results that need no download."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def result(self) -> list[Tensor]:
        return self._tensors


_cuda: Any = torch.cuda  # without its annotations, of which some are missing and some too narrow


class CudaQueues:
    """staging.Queues on one CUDA device: torch's current stream computes, beside two streams that copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = {"upload": _cuda.Stream(device), "download": _cuda.Stream(device)}

    def _stream(self, queue: Queue) -> Any:
        return _cuda.current_stream(self._device) if queue == "compute" else self._copying[queue]

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, target: Tensor, source: Tensor, queue: Queue) -> None:
        with torch.cuda.stream(self._stream(queue)):
            target.copy_(source, non_blocking=True)

    def record(self, queue: Queue) -> Event:
        event = _cuda.Event(blocking=True)  # who waits sleeps, instead of spinning on a core
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        self._stream(queue).wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        event.synchronize()


class CudaDevice:
    name = "cuda"
    runs_ahead = True
    native: cpu_kernels.NativeKernels | None = None

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        queues = CudaQueues(self.torch_device)
        self._uploads, self._downloads = Uploads(queues), Downloads(queues)
        self._graph_pool: Any = None  # one for all graphs: no two of them run at the same time

    def prepare(self, num_threads: int) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)

    def computes_natively(self, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)

    def step_tokens(self, num_parameters: int) -> int:
        return cuda_step_tokens(num_parameters)

    def kv_budget(self, utilization: float, *, mapped_bytes: int = 0, activation_bytes: int = 0) -> int:
        torch.cuda.empty_cache()  # what loading freed is free for others, too
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total * utilization) - (total - free) - activation_bytes

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return self._uploads.upload(arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return self._downloads.download(tensors)

    def end_step(self) -> None:
        self._uploads.end_step()

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        if self._graph_pool is None:
            self._graph_pool = _cuda.graph_pool_handle()
        graph = _cuda.CUDAGraph()
        # thread_local: no other thread of this process uses the device, and one that did should not spoil the capture.
        with _cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def cuda_step_tokens(num_parameters: int) -> int:
    """As many tokens as a GPU at 400 TFLOP/s gets through the linears in 50 ms, between 2,048 and 8,192.

    A step of mixed prompts and decodes is the pause between two tokens of everybody who decodes, so a large model's must
    be short; and from 2,048 rows on a product fills the chip several times over, so longer gains little. A small model's
    step is bound by its launches instead, some hundred however many tokens there are, so it takes more at a time.
    """
    tokens = int(0.05 * 400e12 / (2 * max(1, num_parameters)))
    return min(8192, max(2048, tokens // 1024 * 1024))


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


__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Replay",
    "Results",
    "available_memory",
    "choose_dtype",
    "cuda_step_tokens",
    "make_device",
    "usable_cores",
]
