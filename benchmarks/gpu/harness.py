"""What the sections of check.py share: findings, errors against a reference, poisoned outputs, times on the device.

Owns: how a figure is taken and what is remembered of it. Must not know: what is measured. Called by: check.py and the
sections beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

FLUSH_BYTES = 2**30  # many times any L2, and long enough to hide the launch of what is timed after it


class OutOfTimeError(Exception):
    """The section's budget is spent."""


@dataclass
class Finding:
    """One line of the report."""

    name: str
    value: float | str
    unit: str = ""
    bar: str = ""  # what was asked for, in words
    passed: bool | None = None  # None: a figure, not a verdict
    note: str = ""

    def text(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        verdict = {True: "ok", False: "FAIL", None: ""}[self.passed]
        return f"{verdict:5}{self.name:58} {value:>12} {self.unit:10} {self.bar:14} {self.note}".rstrip()


def at_least(name: str, value: float, bar: float, unit: str = "", note: str = "") -> Finding:
    return Finding(name, value, unit, f">= {bar:g}", value >= bar, note)


def at_most(name: str, value: float, bar: float, unit: str = "", note: str = "") -> Finding:
    return Finding(name, value, unit, f"<= {bar:g}", value <= bar, note)  # NaN is not at most anything


def holds(name: str, true: bool, note: str = "") -> Finding:
    return Finding(name, "yes" if true else "no", bar="yes", passed=bool(true), note=note)


@dataclass
class Context:
    """What every section gets."""

    device: torch.device
    quick: bool  # tiny shapes, no times: on a CPU in Triton's interpreter
    seed: int
    deadline: float = float("inf")  # of the section, time.monotonic()
    facts: dict[str, float] = field(default_factory=dict)  # measured by one section for those after it

    def check_time(self) -> None:
        """Raises OutOfTimeError once the section's budget is spent."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def generator(self, salt: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + salt)

    def normal(self, *shape: int, dtype: torch.dtype, salt: int = 0, scale: float = 1.0) -> Tensor:
        """Fresh normal numbers in that type; fp8 goes through float32."""
        numbers = torch.randn(shape, generator=self.generator(salt), device=self.device)
        return (numbers * scale).to(dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- right or wrong -------------------------------------------------------------------------------------------------


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN everywhere (all ones in an integer type), so that an element nobody wrote cannot look right."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), device=device).to(dtype)
    return torch.full(shape, -1, dtype=dtype, device=device)


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers: indexing works for every type, fp8 on every device included, and NaNs stay."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def row_error(out: Tensor, reference: Tensor) -> float:
    """The worst ||out - reference|| / ||reference|| of a row (the last dimension); NaN where an element was not written.

    A norm over everything would hide one wrong row among many.
    """
    out, reference = out.double(), reference.double()
    size = reference.shape[-1]
    difference = (out - reference).reshape(-1, size).norm(dim=-1)
    scale = reference.reshape(-1, size).norm(dim=-1).clamp_min(1e-12)
    return float((difference / scale).max()) if difference.numel() else 0.0


# --- how fast -------------------------------------------------------------------------------------------------------


class Timer:
    """Median seconds of work on the device, from an empty L2.

    Before each call a large buffer is written: it empties the cache and keeps the device busy while the host launches
    what is timed, so that the events see the work and not the launch.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=context.device)

    def median(self, work: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> float:
        for _ in range(warm_up):
            work()
        self._context.synchronize()
        pairs = []
        for _ in range(repeats):
            self._context.check_time()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        self._context.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def copy_bandwidth(timer: Timer, device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    source = torch.empty(2**32, dtype=torch.uint8, device=device)
    source.view(torch.int64).random_()
    target = torch.empty_like(source)
    seconds = timer.median(lambda: target.copy_(source), repeats=10)
    return 2 * source.numel() / seconds


def gemm_peak(timer: Timer, device: torch.device, size: int = 8192) -> float:
    """Operations per second of a large bf16 product of random numbers (zeros would run faster)."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    seconds = timer.median(lambda: torch.matmul(a, b, out=out), repeats=10)
    return 2 * size**3 / seconds
