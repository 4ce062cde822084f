"""Host memory between the program and a device that computes by itself: what a step needs goes down, its results come up.

Owns: the buffers and the order in which they may be used again. Must not know: CUDA (it is given queues), what the arrays
mean. Called by: worker.device's CudaDevice; tests run it on queues that execute late and in any order that is allowed.

Three queues run side by side, each in its own order: ``upload``, ``compute`` and ``download``. An event stands for all
that a queue was given before it was recorded. A buffer is used again only behind an event:

* pinned memory of an upload: after its copy has been done (the host waits, which with a few buffers it never has to)
* device memory of an upload: after the step that reads it (the upload queue waits, the host does not)
* pinned memory of a download: after its result was taken
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

Queue = Literal["upload", "compute", "download"]
Event = Any

_ALIGNMENT = 16  # bytes between the arrays of one upload; kernels may load that much at once
_SMALLEST = 2**16  # bytes; buffers are powers of two from here on, so that they soon stop growing
_NUM_UPLOADS = 6  # two per step: of the step that runs, of the one behind it, and of the one that is being launched
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Queues(Protocol):
    """What staging asks of a device."""

    def pinned(self, size: int) -> Tensor:
        """``[size]`` uint8 in host memory that the device can read and write by itself."""
        ...

    def memory(self, size: int) -> Tensor:
        """``[size]`` uint8 on the device. Work that the compute queue was given before may still use these bytes."""
        ...

    def copy(self, target: Tensor, source: Tensor, queue: Queue) -> None:
        """Same shapes, types and contiguous; returns at once. The caller keeps both alive until it is done."""
        ...

    def record(self, queue: Queue) -> Event: ...

    def wait(self, queue: Queue, event: Event) -> None:
        """What ``queue`` is given from now on starts after the event."""
        ...

    def wait_on_host(self, event: Event) -> None: ...


@dataclass(slots=True)
class _Upload:
    """A pair of equal buffers."""

    host: Tensor  # [size] uint8, pinned
    host_bytes: np.ndarray  # [size] uint8, the same memory
    device: Tensor  # [size] uint8
    copied: Event = None  # host to device
    read: Event = None  # by the step that it was for


class Uploads:
    """Arrays to the device, one transfer at a time, while the step before still runs."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._idle: deque[_Upload] = deque()  # the one used longest ago first
        self._open: list[_Upload] = []  # of the step that is being launched

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The arrays on the device for work given to the compute queue from now on, until `end_step`."""
        begins, size = {}, 0
        for name, array in arrays.items():
            begins[name] = size
            size += math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT
        buffer = self._take(size)
        for name, array in arrays.items():
            begin = begins[name]
            target = buffer.host_bytes[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            target[...] = array
        if size:
            self._queues.copy(buffer.device[:size], buffer.host[:size], "upload")
        buffer.copied = self._queues.record("upload")
        self._queues.wait("compute", buffer.copied)
        self._open.append(buffer)
        return {
            name: buffer.device[begins[name] : begins[name] + array.nbytes]
            .view(_TORCH_TYPES[array.dtype])
            .view(array.shape)
            for name, array in arrays.items()
        }

    def end_step(self) -> None:
        """All work that reads what this step uploaded has been given to the compute queue."""
        if self._open:
            read = self._queues.record("compute")
            for buffer in self._open:
                buffer.read = read
            self._idle.extend(self._open)
            self._open.clear()

    def _take(self, size: int) -> _Upload:
        if len(self._idle) + len(self._open) < _NUM_UPLOADS or not self._idle:
            return self._make(size)
        buffer = self._idle.popleft()
        self._queues.wait_on_host(buffer.copied)
        if buffer.host.numel() < size:
            return self._make(size)
        self._queues.wait("upload", buffer.read)
        return buffer

    def _make(self, size: int) -> _Upload:
        size = _round_up(size)
        host, device = self._queues.pinned(size), self._queues.memory(size)
        self._queues.wait("upload", self._queues.record("compute"))
        return _Upload(host, host.numpy(), device)


@dataclass(slots=True)
class _Pinned:
    memory: Tensor  # [size] uint8
    array: np.ndarray  # [size] uint8, the same memory


class Downloads:
    """Results to the host, without waiting for anything that was launched later."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self._free: list[_Pinned] = []

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying. The tensors must not be changed by later work on the compute queue."""
        tensors = [tensor.contiguous() for tensor in tensors]
        sizes = [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        buffer = self._take(sum(sizes))
        self.queues.wait("download", self.queues.record("compute"))
        begin = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if tensor.nbytes:
                target = buffer.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self.queues.copy(target, tensor, "download")
            begin += size
        return Download(self, tensors, buffer, self.queues.record("download"))

    def _take(self, size: int) -> _Pinned:
        for index, buffer in enumerate(self._free):
            if buffer.memory.numel() >= size:
                return self._free.pop(index)
        memory = self.queues.pinned(_round_up(size))
        return _Pinned(memory, memory.numpy())

    def give_back(self, buffer: _Pinned) -> None:
        self._free.append(buffer)


class Download:
    """Tensors on their way to the host. One whose result is never taken keeps its buffer."""

    def __init__(self, owner: Downloads, tensors: list[Tensor], buffer: _Pinned, done: Event) -> None:
        self._owner = owner
        self._tensors = tensors  # kept, or their memory could be given to later work before it has been copied
        self._buffer: _Pinned | None = buffer
        self._done = done

    def result(self) -> list[Tensor]:
        """Wait for the copies; the tensors' values in ordinary host memory. Once only."""
        assert self._buffer is not None, "a download's result is taken once"
        self._owner.queues.wait_on_host(self._done)
        results, begin = [], 0
        for tensor in self._tensors:
            values = self._buffer.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            results.append(values.clone())
            begin += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        self._tensors = []
        self._owner.give_back(self._buffer)
        self._buffer = None
        return results


def _round_up(size: int) -> int:
    return max(_SMALLEST, 1 << (size - 1).bit_length()) if size > 0 else _SMALLEST


__all__ = ["Download", "Downloads", "Queues", "Uploads"]
