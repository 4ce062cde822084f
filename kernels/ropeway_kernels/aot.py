"""Compiles every Triton kernel for chips that are not here, and reads what each would take of them.

    python -m ropeway_kernels.aot                           # every variant, for sm_80, sm_90 and sm_100
    python -m ropeway_kernels.aot --only paged_attention --arch 90 --json resources.json
    python -m ropeway_kernels.aot --sample                  # every variant, each for one chip: what CI has time for

Owns: Variant, the list of kernel modules, the rule that nothing spills and everything fits. Must not know: what a kernel
computes, how one is launched. Called by: kernel modules (Variant), CI and people (the command).

`triton.compile` for a named target needs no GPU: the assembler is inside the wheel, and so is the tool that reads
registers, stack and shared memory from what it made. What is compiled lands in Triton's own cache (TRITON_CACHE_DIR),
keyed by the kernel's source, so a second run only reads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARCHS = (80, 90, 100)
MODULES = ("paged_attention", "kv_write", "norm", "activation", "block_copy", "sampling")
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one block may ask for
SYSTEM_SHARED = 1024  # bytes of each block that the system keeps; from sm_90 on told as static, outside the limit above
FP8_ARCH = 89  # the first with e4m3; Triton refuses the type below


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched: argument types, constants and launch options."""

    name: str
    kernel: Any  # the @triton.jit function
    signature: dict[str, str]  # every argument -> "*bf16", "*fp32", "*i32", "*i64", "*fp8e4nv", "i32", "constexpr", ...
    constants: dict[str, Any]  # value of each "constexpr"
    num_warps: int = 4
    num_stages: int = 2
    divisible_by_16: tuple[str, ...] = ()  # integer arguments that always are; pointers are always taken as aligned
    archs: tuple[int, ...] = ARCHS  # on which it is launched; a tuned configuration may be for one chip alone
    options: dict[str, Any] = field(default_factory=dict)  # what else it is launched with, as enable_fp_fusion

    def runs_on(self, arch: int) -> bool:
        has_fp8 = any("fp8e4nv" in kind for kind in self.signature.values())
        return arch in self.archs and (arch >= FP8_ARCH or not has_fp8)


@dataclass(frozen=True)
class Resources:
    """What one compiled variant takes."""

    registers: int  # per thread
    spills: int  # bytes of local memory per thread: registers that did not fit, or arrays that cannot be in registers
    shared: int  # bytes per block
    ptx: int  # bytes
    cubin: int  # bytes


@dataclass
class Outcome:
    """One variant on one architecture."""

    module: str
    variant: str
    arch: int
    resources: Resources | None = None
    error: str = ""  # why it did not compile
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)  # why it may not be launched

    def judge(self) -> None:
        if self.resources is None:
            self.faults = [self.error]
            return
        if self.resources.spills:
            self.faults.append(f"spills {self.resources.spills} bytes per thread")
        limit = SHARED_LIMIT[self.arch]
        if self.resources.shared > limit:
            self.faults.append(f"wants {self.resources.shared} bytes of shared memory, a block has {limit}")


def compile_variant(variant: Variant, arch: int) -> Resources:
    """arch: 80, 90, 100. Raises ValueError where the variant does not describe its kernel's arguments, and whatever
    Triton or its assembler raise."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = getattr(variant.kernel, "arg_names", None)
    if names is None or not hasattr(variant.kernel, "cache_key"):
        raise ValueError(f"{variant.name}: not a compilable kernel; is TRITON_INTERPRET set?")
    if missing := set(names) ^ set(variant.signature):
        raise ValueError(f"{variant.name}: the signature and the kernel differ in {', '.join(sorted(missing))}")
    constants = {name for name, kind in variant.signature.items() if kind == "constexpr"}
    if missing := constants ^ set(variant.constants):
        raise ValueError(f"{variant.name}: constexprs and constants differ in {', '.join(sorted(missing))}")
    aligned = {name for name, kind in variant.signature.items() if kind.startswith("*")} | set(variant.divisible_by_16)
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature[name] for name in names},
        constexprs=dict(variant.constants),
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    options |= variant.options
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = compiled.asm["cubin"]
    registers, stack, static = read_cubin(cubin)
    if arch >= 90:
        static = max(0, static - SYSTEM_SHARED)
    return Resources(registers, stack, static + int(compiled.metadata.shared), len(compiled.asm["ptx"]), len(cubin))


def read_cubin(cubin: bytes) -> tuple[int, int, int]:
    """Registers per thread, bytes of stack per thread, bytes of static shared memory of the one kernel in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return parse_usage(text)


def parse_usage(text: str) -> tuple[int, int, int]:
    """What `cuobjdump -res-usage` prints of a file with one kernel: registers, stack, static shared memory."""
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if len(found) != 1:
        raise ValueError(f"cuobjdump tells of {len(found)} kernels where there should be one:\n{text}")
    registers, stack, shared = map(int, found[0])
    return registers, stack, shared


@functools.cache
def _cuobjdump() -> str:
    """Versions of Triton differ in how they name their tools; all have had them in this folder."""
    import triton.backends.nvidia

    beside = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    return str(beside) if beside.exists() else "cuobjdump"


def load_variants(module: str) -> list[Variant]:
    variants: list[Variant] = importlib.import_module(f"ropeway_kernels.{module}").variants()
    names = [variant.name for variant in variants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{module}: two variants called {', '.join(sorted(twice))}")
    return variants


def _compile_task(task: tuple[str, str, int]) -> Outcome:
    """In a process of the pool: names travel, kernels cannot."""
    module, name, arch = task
    variant = next(variant for variant in load_variants(module) if variant.name == name)
    outcome, began = Outcome(module, name, arch), time.perf_counter()
    noise = io.StringIO()  # a failing assembler's whole input is printed
    try:
        with contextlib.redirect_stdout(noise):
            outcome.resources = compile_variant(variant, arch)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}".strip()
    outcome.seconds = time.perf_counter() - began
    outcome.judge()
    return outcome


def compile_all(
    modules: Sequence[str] = MODULES,
    archs: Sequence[int] = ARCHS,
    *,
    only: str = "",
    sample: bool = False,
    processes: int = 2,
) -> list[Outcome]:
    """Every variant of the modules on every architecture that it runs on, in the order listed.

    only: variants with this in ``module.name``. sample: each variant on one of its architectures, these in turn, so that
    every variant is compiled and every architecture compiled for. Raises ImportError where a module is missing.
    """
    tasks: list[tuple[str, str, int]] = []
    for module in modules:
        for i, variant in enumerate(load_variants(module)):
            if only not in f"{module}.{variant.name}":
                continue
            runs_on = [arch for arch in archs if variant.runs_on(arch)]
            if sample and runs_on:
                runs_on = [runs_on[i % len(runs_on)]]
            tasks += [(module, variant.name, arch) for arch in runs_on]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_task, tasks))


def details(outcomes: Iterable[Outcome], archs: Sequence[int]) -> str:
    """A line per variant: registers, shared memory and spills on each architecture."""
    by_name: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(f"{outcome.module}.{outcome.variant}", {})[outcome.arch] = outcome
    width = max(map(len, by_name), default=10)
    lines = [" ".join([f"{'registers, shared, spills':{width}}", *(f"{f'sm_{arch}':>16}" for arch in archs)])]
    for name, row in by_name.items():
        cells = []
        for arch in archs:
            found = row.get(arch)
            if found is None:
                cells.append("-")
            elif found.resources is None:
                cells.append("fails")
            else:
                cells.append(f"{found.resources.registers} {found.resources.shared} {found.resources.spills}")
        lines.append(" ".join([f"{name:{width}}", *(f"{cell:>16}" for cell in cells)]))
    return "\n".join(lines)


def summary(outcomes: Iterable[Outcome]) -> str:
    """A line per module and architecture: how many variants, and the most that one of them takes."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.module, outcome.arch), []).append(outcome)
    head = f"{'kernel':18} {'arch':7} {'variants':>8} {'registers':>10} {'shared KiB':>11} {'spills':>7} {'faults':>7}"
    lines = [head]
    for (module, arch), group in groups.items():
        taken = [outcome.resources for outcome in group if outcome.resources is not None]
        registers = max((r.registers for r in taken), default=0)
        shared = max((r.shared for r in taken), default=0) / 1024
        spills = max((r.spills for r in taken), default=0)
        faults = sum(bool(outcome.faults) for outcome in group)
        numbers = f"{len(group):8} {registers:10} {shared:11.1f} {spills:7} {faults:7}"
        lines.append(f"{module:18} {f'sm_{arch}':7} {numbers}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ropeway_kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--only", default="", metavar="NAME", help="variants with this in module.variant")
    parser.add_argument("--sample", action="store_true", help="each variant for one architecture, these in turn")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    args = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    began = time.perf_counter()
    outcomes = compile_all(args.modules, args.arch, only=args.only, sample=args.sample, processes=args.processes)
    print(details(outcomes, args.arch), summary(outcomes), sep="\n\n")
    bad = [outcome for outcome in outcomes if outcome.faults]
    for outcome in bad:
        for fault in outcome.faults:
            print(f"FAULT {outcome.module}.{outcome.variant} on sm_{outcome.arch}: {fault}")
    print(f"{len(outcomes)} compiled in {time.perf_counter() - began:.0f} s, {len(bad)} with faults")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")
    if not outcomes:
        print("nothing was compiled", file=sys.stderr)
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    from ropeway_kernels import aot  # not this copy of the module, whose Variant is another class

    raise SystemExit(aot.main())
