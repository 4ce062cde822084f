"""OpenVINO GenAI's continuous batching behind lines of JSON; runs in its own environment, started by systems.py.

    openvino_runner.py MODEL_FOLDER SETTINGS_JSON

Prints {"ready": true} once a first token exists. Then each line of standard input is one level
({"prompts", "output_tokens", "concurrency"}) and each answer is one line {"timings": [[sent, first, last, tokens], ...]},
in seconds of this process's clock. Must not know: anything of Ropeway.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from typing import Any


def main() -> None:
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints goes to the log, not between the answers

    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings["properties"])
    request_ids = count()

    def level(prompts: list[list[int]], output_tokens: int, concurrency: int) -> list[list[float]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        waiting = iter(prompts)
        running: dict[int, tuple[Any, list[float]]] = {}
        finished: list[list[float]] = []

        def send_next() -> None:
            if (prompt := next(waiting, None)) is not None:
                number = next(request_ids)
                tokens = ov.Tensor(np.array([prompt], dtype=np.int64))
                began = time.perf_counter()
                running[number] = (pipe.add_request(number, tokens, config), [began, 0.0, 0.0, 0])

        for _ in range(concurrency):
            send_next()
        while running:
            pipe.step()
            now = time.perf_counter()
            for number, (handle, timing) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        timing[3] += len(output.generated_ids)
                    timing[1] = timing[1] or now
                    timing[2] = now
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    finished.append(timing)
                    del running[number]
                    send_next()
        return finished

    level([list(range(100, 116))], 1, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"timings": level(**json.loads(line))}), file=answers)


if __name__ == "__main__":
    main()
