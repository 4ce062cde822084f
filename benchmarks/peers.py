"""Ropeway and its peers on the same weights, prompts and cores, taking turns.

    python benchmarks/peers.py --setup-only                     # environments, weights, first starts; slow, once
    python benchmarks/peers.py --output peers.json              # the comparison on the demo model
    python benchmarks/peers.py --systems ropeway,openvino --concurrency 1 --rounds 5

In a round each system is started once, then every level is run by each system in turn (A B C, A B C): only what ran side
by side is compared. Speed of the whole machine is probed before and after. `taskset` bounds the cores of everything.
Runs in the environment of `.ci/run`; the peers get their own, in a cache folder outside the repository.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from peers_lib.environments import Environments, SetupError, default_root
from peers_lib.report import Measurement, as_json, measure, table
from peers_lib.systems import NAMES, Job, PeerError, System, build, cores
from probe import probe_in_own_process
from stub import write_result

from ropeway.errors import ConfigError
from ropeway.hub import resolve_model

WARM_TOKENS = 4
PROMPT_IDS = (200, 0.99)  # the first ids and the last hundredth hold special tokens in every vocabulary met so far


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    environments = Environments(options.peers_dir, _say)
    try:
        model = _hf_folder(options.model, environments)
    except (ConfigError, SetupError) as error:
        sys.exit(f"peers: {error}")
    job = Job(
        model, options.input_len, options.output_len, max(options.concurrency), tuple(shlex.split(options.ropeway_args))
    )

    systems: list[System] = []
    skipped: dict[str, str] = {}
    for name in options.systems:
        try:
            systems.append(build(name, job, environments))
        except SetupError as error:
            skipped[name] = str(error)
    if options.setup_only:
        for system in systems:  # one start fills the caches of compiled code and packed weights, for these very options
            try:
                _say(f"{system.name}: first start took {system.start():.1f} s")
                system.settle()
            except PeerError as error:
                skipped[system.name] = str(error)
            finally:
                system.stop()
        sys.exit("\n".join(f"peers: {reason}" for reason in skipped.values()) or 0)

    before = probe_in_own_process()
    measurements: list[Measurement] = []
    ready: dict[str, list[float]] = {}
    for round_ in range(options.rounds):
        running = [system for system in systems if system.name not in skipped]
        _round(round_, running, job, options, measurements, ready, skipped)
    after = probe_in_own_process()

    print(f"\n{model.name}, {job.input_len} in / {job.output_len} out, {cores()} cores, {options.rounds} rounds")
    print(f"machine before: {_probe_text(before)}; after: {_probe_text(after)}\n")
    print(table(measurements, ready, skipped))
    result = {
        "model": model.name,
        "input_len": job.input_len,
        "output_len": job.output_len,
        "rounds": options.rounds,
        "cpu": _cpu_name(),
        "kernel": platform.release(),
        "probe": {"before": before, "after": after},
        "systems": {system.name: system.settings for system in systems},
        "skipped": skipped,
        "ready_seconds": ready,
        **as_json(measurements),
    }
    write_result(options.output, "peers", result)


def _round(
    round_: int,
    systems: list[System],
    job: Job,
    options: argparse.Namespace,
    measurements: list[Measurement],
    ready: dict[str, list[float]],
    skipped: dict[str, str],
) -> None:
    """Starts all, runs every level on each in turn, stops all. A system that fails is noted and left out from then on."""
    source = random.Random(f"{options.seed} {round_}")
    limit = int(_vocabulary(job.model) * PROMPT_IDS[1])

    def prompts(number: int) -> list[list[int]]:
        return [[source.randrange(PROMPT_IDS[0], limit) for _ in range(job.input_len)] for _ in range(number)]

    def leave_out(system: System, error: PeerError) -> None:
        skipped[system.name] = str(error)
        _say(f"{system.name}: {error}")
        system.stop()

    alive: list[System] = []
    try:
        for system in systems:
            alive.append(system)
            try:
                seconds = system.start()
                for concurrency in options.concurrency:  # shapes met for the first time compile, allocate and pack
                    system.level(prompts(concurrency), WARM_TOKENS, concurrency)
                system.pause()
            except PeerError as error:
                leave_out(system, error)
                continue
            ready.setdefault(system.name, []).append(seconds)
            _say(f"round {round_ + 1}: {system.name} gave its first token after {seconds:.1f} s")
        for concurrency in options.concurrency:
            load = prompts(options.requests or max(4, 2 * concurrency))
            for system in alive:
                if system.name in skipped:
                    continue
                try:
                    system.resume()
                    system.level(prompts(1), WARM_TOKENS, 1)
                    timings = system.level(load, job.output_len, concurrency)
                    system.pause()
                except PeerError as error:
                    leave_out(system, error)
                    continue
                figures = measure(round_, concurrency, system.name, timings)
                measurements.append(figures)
                _say(
                    f"round {round_ + 1}: {concurrency:3} clients, {system.name}: {figures.output_tok_s:.1f} tok/s, "
                    f"TTFT {figures.ttft_ms:.0f} ms, TPOT {figures.tpot_ms:.1f} ms"
                )
    finally:
        for system in alive:
            system.stop()


def _hf_folder(model: str, environments: Environments) -> Path:
    """A folder with safetensors, which all systems or their converters can read."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return environments.hf_folder(path)
    return resolve_model(model)


def _vocabulary(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _probe_text(probe: dict[str, Any]) -> str:
    return f"{probe['read_gb_s']} GB/s read, {probe['fp32_gflop_s']} GFLOP/s fp32, {probe['bf16_gflop_s']} GFLOP/s bf16"


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be positive")
    return numbers


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(NAMES)}")
    return names


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Hugging Face folder or .gguf file; without one the demo model")
    parser.add_argument("--systems", type=_names, default=list(NAMES), help=f"comma-separated, of {','.join(NAMES)}")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 8, 32], help="comma-separated numbers of clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=0, help="per level; 0 takes two per client, at least four")
    parser.add_argument("--input-len", type=int, default=128, help="random token ids per prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens per answer, exactly")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--ropeway-args", default="", help="more flags for ropeway serve, as one string")
    parser.add_argument("--peers-dir", type=Path, default=default_root(), help="cache of environments and weights")
    parser.add_argument("--setup-only", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    options.peers_dir = options.peers_dir.expanduser().resolve()
    return options


if __name__ == "__main__":
    main()
