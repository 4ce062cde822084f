"""HF transformers' `generate` over static batches behind lines of JSON; runs in its own environment, started by systems.py.

    transformers_runner.py MODEL_FOLDER SETTINGS_JSON

The same lines as openvino_runner.py. Equal lengths and full batches: the best case of batching without continuity.
Must not know: anything of Ropeway.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints goes to the log, not between the answers

    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, settings["dtype"]))
    model.eval()

    class Stamps(StoppingCriteria):
        """Called once per step: asks for no stop, only notes the time."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def level(prompts: list[list[int]], output_tokens: int, concurrency: int) -> list[list[float]]:
        timings: list[list[float]] = []
        for start in range(0, len(prompts), concurrency):
            tokens = torch.tensor(prompts[start : start + concurrency])
            stamps = Stamps()
            began = time.perf_counter()
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                stopping_criteria=[stamps],
            )
            made = output.shape[1] - tokens.shape[1]
            timings += [[began, stamps.times[0], stamps.times[-1], made] for _ in range(len(tokens))]
        return timings

    with torch.inference_mode():
        level([list(range(100, 116))], 1, 1)
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            print(json.dumps({"timings": level(**json.loads(line))}), file=answers)


if __name__ == "__main__":
    main()
