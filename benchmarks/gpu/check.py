"""Is the GPU path right, and how fast is it? One run of at most eight minutes on a machine with one GPU.

    PYTHONPATH=src:kernels python3 benchmarks/gpu/check.py --out results
    PYTHONPATH=src:kernels python3 benchmarks/gpu/check.py --sections limits attention
    TRITON_INTERPRET=1 PYTHONPATH=src:kernels python3 benchmarks/gpu/check.py --device cpu --quick

Needs torch, triton and numpy; no network, no weights (dummy ones), no installation. Sections:

    kernels       every kernel against float64, fresh random inputs, outputs poisoned first
    golden        a tiny model's greedy tokens: graphs = eager = the CPU in float32
    limits        what a copy and a bf16 product reach here; the sections below are measured against it
    attention     decode and prefill attention, as shares of those limits, beside SDPA and other libraries
    nano          256 requests of 100 to 1,024 tokens in and out: tok/s, and share of the decode roofline
    idle          how long the device waits in between while that model decodes
    determinism   which changes of the batch change an answer, with and without fixed spans, and what those cost

Each section has a budget of its own; a failure in one is noted and the next one runs. All findings go to
``OUT/check.json`` as they come. The exit code is 0 if every section ended and every verdict was good.

The kernels' cases are shared out among processes, because compiling them is what takes the time and one process
compiles one kernel at a time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import Context, Finding, OutOfTimeError

SECTIONS = {  # name -> (module, function, budget in seconds, also on a CPU)
    "kernels": ("kernel_cases", "run", 130, True),
    "golden": ("engine_runs", "golden", 70, True),
    "limits": ("attention_speed", "limits", 20, False),
    "attention": ("attention_speed", "attention", 90, False),
    "nano": ("engine_runs", "nano", 90, True),
    "idle": ("engine_runs", "idle", 30, False),
    "determinism": ("determinism", "run", 40, True),
}


TOTAL = 470  # seconds; what is left of it bounds the last sections


@contextmanager
def budget(context: Context, seconds: float) -> Iterator[None]:
    """After that many seconds OutOfTimeError is raised, wherever the section is; well-behaved ones ask before."""

    def ring(signum: int, frame: object) -> None:
        raise OutOfTimeError

    context.deadline = time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds + 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_section(name: str, context: Context, seconds: float, options: dict[str, Any]) -> dict[str, Any]:
    """Findings of one section, and what ended it early."""
    module, function, _, _ = SECTIONS[name]
    findings: list[Finding] = []
    error = ""
    began = time.monotonic()
    print(f"\n== {name}", flush=True)
    try:
        with budget(context, seconds):
            for finding in getattr(importlib.import_module(module), function)(context, **options):
                findings.append(finding)
                print(finding.text(), flush=True)
    except OutOfTimeError:
        error = f"out of time after {seconds:.0f} s"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}".strip()
        traceback.print_exc()
    if error:
        print(f"{'FAIL':5}{name} did not end: {error[:300]}", flush=True)
    return {
        "section": name,
        "seconds": time.monotonic() - began,
        "error": error,
        "passed": not error and all(finding.passed is not False for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def kernels_in_processes(context: Context, seconds: float, processes: int) -> dict[str, Any]:
    """The section `kernels`, its cases dealt out to processes that share the device."""
    began = time.monotonic()
    print(f"\n== kernels, {processes} processes", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        running = []
        for number in range(processes):
            result = Path(scratch) / f"{number}.json"
            command = [
                *(sys.executable, __file__, "--sections", "kernels", "--device", str(context.device)),
                *("--share", f"{number}/{processes}", "--seed", str(context.seed), "--budget", str(seconds - 10)),
                *("--out", str(result.parent), "--name", result.name),
            ]
            log = (Path(scratch) / f"{number}.log").open("w+")
            running.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log, result))
        findings: list[dict[str, Any]] = []
        errors = []
        for number, (process, log, result) in enumerate(running):
            try:
                process.wait(max(1.0, began + seconds + 10 - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            text = log.read()
            log.close()
            shares = json.loads(result.read_text())["sections"] if result.exists() else []
            findings += [finding for share in shares for finding in share["findings"]]
            error = shares[0]["error"] if shares else f"exit status {process.returncode} without a result"
            if error:
                errors.append(f"process {number}: {error}")
                print(text[-3000:], flush=True)
    for finding in findings:
        print(Finding(**finding).text())
    return {
        "section": "kernels",
        "seconds": time.monotonic() - began,
        "error": "; ".join(errors),
        "passed": not errors and all(finding["passed"] is not False for finding in findings),
        "findings": findings,
    }


def machine(device: torch.device) -> dict[str, Any]:
    import triton

    about: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
        }
    return about


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # the machine may hold a copy of the files only


def main() -> int:
    parser = argparse.ArgumentParser(description="the GPU path: right? how fast?")
    parser.add_argument("--out", type=Path, help="folder for check.json")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, no times: for a machine without a GPU")
    parser.add_argument("--seed", type=int, default=None, help="of all inputs; a new one each time, and printed")
    parser.add_argument("--processes", type=int, default=min(10, max(1, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--budget", type=float, help="seconds per section, instead of its own")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of the kernels' cases: I/N, in a process of our own
    parser.add_argument("--name", default="check.json", help=argparse.SUPPRESS)
    args = parser.parse_args()

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --quick runs what can run without one", file=sys.stderr)
        return 2
    if device.type == "cpu" and not args.quick:
        parser.error("--device cpu goes with --quick")
    seed = int.from_bytes(os.urandom(3)) if args.seed is None else args.seed
    context = Context(device, args.quick, seed)
    report: dict[str, Any] = {"commit": commit(), "seed": seed, "machine": machine(device), "sections": []}
    print(f"seed {seed}, {json.dumps(report['machine'])}", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in args.sections:
        _, _, seconds, on_cpu = SECTIONS[name]
        if device.type == "cpu" and not on_cpu:
            continue
        seconds = args.budget or max(1.0, min(seconds, TOTAL - (time.monotonic() - began)))
        if name == "kernels" and args.share is None and device.type == "cuda" and args.processes > 1:
            section = kernels_in_processes(context, seconds, args.processes)
        else:
            options = {"share": tuple(map(int, args.share.split("/")))} if name == "kernels" and args.share else {}
            section = run_section(name, context, seconds, options)
        report["sections"].append(section)
        report["seconds"] = time.monotonic() - began
        if args.out is not None:
            (args.out / args.name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.share is None:
        print(table(report))
    return 0 if all(section["passed"] for section in report["sections"]) else 1


def table(report: dict[str, Any]) -> str:
    """Short, and last: verdicts per section, then what failed, then the figures with a bar."""
    lines = ["", f"{'section':14}{'seconds':>8} {'good':>6}{'bad':>5}  "]
    for section in report["sections"]:
        verdicts = [finding["passed"] for finding in section["findings"]]
        lines.append(
            f"{section['section']:14}{section['seconds']:8.1f} {verdicts.count(True):6}{verdicts.count(False):5}  "
            f"{'ok' if section['passed'] else 'FAIL'} {section['error'][:120]}".rstrip()
        )
    findings = [Finding(**finding) for section in report["sections"] for finding in section["findings"]]
    lines += [finding.text() for finding in findings if finding.passed is False][:30]
    shown = [finding for finding in findings if finding.bar.startswith(">=") or finding.passed is None]
    lines += ["", *(finding.text() for finding in shown)]
    good = all(section["passed"] for section in report["sections"])
    lines.append(f"{'ALL GOOD' if good else 'NOT GOOD'} in {report['seconds']:.0f} s, commit {report['commit']}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
