"""Time per prompt token over the prompt's length: does any length fall off a cliff?

    python benchmarks/prefill_cliff.py                  # the demo model in bfloat16
    python benchmarks/prefill_cliff.py MODEL --plot cliff.png --output cliff.json

Each length is prefilled alone, from a cold cache, a few times; the lengths take turns, so that the machine's slow moments
fall on all of them, and the best time of each counts. Lengths lie 1.25 to 2x apart, with one more and one less than each
power of two from 64 on, where kernels change their shapes.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import count
from pathlib import Path

from stub import write_result

from ropeway.config import build_config
from ropeway.engine.core import EngineCore, build_core
from ropeway.hub import resolve_model
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor

LIMIT = 1.5
request_ids = count()


def lengths(longest: int) -> list[int]:
    result = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56}
    power = 64
    while power <= longest:
        result |= {power - 1, power, power + 1, power * 5 // 4, power * 3 // 2, power * 7 // 4}
        power *= 2
    return sorted(length for length in result if length <= longest)


def prefill_seconds(engine: EngineCore, length: int) -> float:
    """From the first step to the first token."""
    source = random.Random(length)
    prompt = [source.randrange(1000, 40000) for _ in range(length)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.handle(AddRequest(next(request_ids), prompt, sampling, time.monotonic()))
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    config = build_config({"dtype": options.dtype, "device": "cpu", "enable_prefix_caching": False})
    engine, _ = build_core(config, LocalExecutor(config, resolve_model(options.model)), time.perf_counter)
    best: dict[int, float] = {}
    for _ in range(options.rounds):
        for length in lengths(options.longest):
            best[length] = min(best.get(length, float("inf")), prefill_seconds(engine, length))
    engine.close()
    # A step reads every weight, so few tokens share its price and a token gets cheaper with each neighbour. A cliff is
    # where it gets dearer again.
    per_token = {length: seconds / length * 1e3 for length, seconds in best.items()}
    known = list(per_token)
    worst, worst_length = 0.0, known[0]
    print(f"{'tokens':>7} {'ms':>9} {'ms/token':>9}  against the length before")
    for before, length in zip([known[0], *known], known, strict=False):
        rise = per_token[length] / per_token[before]
        print(f"{length:7} {best[length] * 1e3:9.1f} {per_token[length]:9.3f}  {rise:5.2f}")
        if rise > worst:
            worst, worst_length = rise, length
    verdict = "no cliff" if worst <= LIMIT else "a cliff"
    print(f"steepest rise {worst:.2f} at {worst_length} tokens: {verdict} (limit {LIMIT})")
    write_result(options.output, "prefill_cliff", {"ms_per_token": per_token, "steepest_rise": worst})
    if options.plot:
        plot(per_token, options.plot)


def plot(per_token: dict[int, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.loglog(list(per_token), list(per_token.values()), marker=".")
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("prefill time per token (ms)")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
