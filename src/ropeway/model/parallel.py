"""The ranks that share one model.

Owns: ProcessGroup and the three collectives the layers need. Must not know: layers, models, requests.
Called by: model.layers (all_reduce, all_gather), worker (broadcast; builds the group).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ropeway.errors import ConfigError


class ProcessGroup:
    """A group of one: every collective returns its argument. Larger groups override all three."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks; may work in place. Same shape on every rank."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate along the last dimension in rank order: ``[..., n]`` -> ``[..., n * size]``."""
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Rank ``source``'s values, in place."""
        return tensor

    def close(self) -> None:
        """Leave the group. No collective may follow."""

    def share(self, count: int, what: str) -> int:
        """This rank's part of ``count`` equal things. Raises ConfigError naming ``what`` if it does not come out even."""
        if count % self.size:
            raise ConfigError(f"--tensor-parallel-size {self.size} does not divide the model's {what} ({count})")
        return count // self.size


SINGLE = ProcessGroup()


class DistributedGroup(ProcessGroup):
    """All ranks of torch.distributed. ``backend`` is gloo (CPUs) or nccl (one GPU per rank)."""

    def __init__(self, rank: int, size: int, *, backend: str, init_method: str, timeout: float = 600.0) -> None:
        """``init_method``: ``tcp://host:port``, ``file:///path`` or ``env://`` (under torchrun). ``timeout``: seconds."""
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(tensor, source)
        return tensor

    def close(self) -> None:
        dist.destroy_process_group()
