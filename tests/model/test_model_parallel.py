"""Two processes that share one model give the answer of one process."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from ropeway.model.parallel import SINGLE, DistributedGroup
from tiny_models import load, paged_answers, random_prompts, save_checkpoint, tiny

PROMPTS = random_prompts(9, 1)
STEPS = 6


def run_rank(rank: int, folder: Path, rendezvous: str, results: Connection) -> None:
    try:
        torch.set_num_threads(1)
        group = DistributedGroup(rank, 2, backend="gloo", init_method=rendezvous, timeout=60)
        fact = torch.tensor([10.0 * (rank + 1), rank])
        assert group.all_reduce(fact.clone()).tolist() == [30.0, 1.0]
        assert group.all_gather(fact[:, None]).tolist() == [[10.0, 20.0], [0.0, 1.0]]
        assert group.broadcast(fact.clone(), source=1).tolist() == [20.0, 1.0]
        answers = paged_answers(load(folder, group=group), PROMPTS, STEPS, group=group)
        results.send([(answer.tokens, answer.logits.tolist()) for answer in answers])
        group.close()
    except BaseException:
        results.send(traceback.format_exc())
        raise


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Phi3ForCausalLM", {}),
    ],
)
def test_two_ranks_equal_one(architecture: str, changes: dict[str, bool], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny(architecture, **changes))
    alone = paged_answers(load(tmp_path), PROMPTS, STEPS)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=run_rank, args=(rank, tmp_path, f"file://{tmp_path}/rendezvous", sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        for receiver, _ in pipes:
            assert receiver.poll(60), "a rank did not answer"
            result = receiver.recv()
            assert not isinstance(result, str), result
            for (tokens, logits), answer in zip(result, alone, strict=True):
                assert tokens == answer.tokens
                torch.testing.assert_close(torch.tensor(logits), answer.logits, atol=1e-4, rtol=0)
        for rank in ranks:
            rank.join(30)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()


def test_a_group_of_one_changes_nothing() -> None:
    x = torch.randn(3, 4)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.all_gather(x) is x
    assert SINGLE.broadcast(x) is x
    assert SINGLE.share(9, "anything") == 9
