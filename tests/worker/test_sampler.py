"""The sampler: each parameter alone, rows together, distributions, log-probabilities, errors of single rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ropeway.engine.step import NewRow, SchedulerOutput
from ropeway.protocol import SamplingParams
from ropeway.worker.batch import RequestRows
from ropeway.worker.device import CpuDevice
from ropeway.worker.sampler import Sampled, SamplingInputs, _best, exponential_noise, noise_keys, sample
from ropeway_kernels import cpu

INF = float("inf")


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **changes})


def inputs_of(rows: list[tuple[SamplingParams, list[int], list[int]]], vocab: int) -> SamplingInputs:
    """Through RequestRows, as the runner does it. rows: (sampling, prompt, outputs so far)."""
    table = RequestRows(len(rows), 4096, 16, vocab, CpuDevice())
    plan = SchedulerOutput(0)
    for i, (sampling, prompt, outputs) in enumerate(rows):
        tokens = prompt + outputs
        plan.added.append(NewRow(i, 0, tokens, len(prompt), 0, list(range(1, len(tokens) // 16 + 2)), sampling))
        plan.request_ids.append(i)
        plan.start_positions.append(len(tokens) - 1)
        plan.num_tokens.append(1)
        plan.samples.append(True)
    table.apply(plan)
    return table.gather(plan).sampling


def run(logits: torch.Tensor, *rows: SamplingParams, prompt=(0,), outputs=()) -> Sampled:
    """One row per sampling; all with the same history."""
    return sample(logits.clone(), inputs_of([(row, list(prompt), list(outputs)) for row in rows], logits.shape[1]))


def draws(logits: torch.Tensor, count: int, **changes) -> np.ndarray:
    """Tokens for ``count`` output positions of one request."""
    vocab = logits.shape[-1]
    sampling = params(**changes)
    inputs = inputs_of([(sampling, [0], [])], vocab)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if getattr(inputs, name) is not None:
            setattr(inputs, name, getattr(inputs, name).expand(count, 1))
    inputs.num_rows = count
    inputs.random_rows = torch.arange(count)
    inputs.filtered = None if inputs.filtered is None else torch.arange(count)
    inputs.noise_keys = torch.from_numpy(noise_keys(np.full(count, sampling.seed, dtype=np.uint64), np.arange(count)))
    return sample(logits.expand(count, vocab), inputs).token_ids.numpy()


def chi_square_fits(tokens: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's test; accepts below about the 99.9th percentile (Wilson-Hilferty). Seeds are fixed, so no flakes."""
    observed = np.bincount(tokens, minlength=len(probabilities))
    assert observed[probabilities == 0].sum() == 0, "a token outside the distribution was drawn"
    expected = probabilities * len(tokens)
    used = expected > 0
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# --- greedy and masks -------------------------------------------------------------------------------------------------


def test_greedy_takes_the_best():
    logits = torch.randn(5, 300)
    assert run(logits, *[params()] * 5).token_ids.tolist() == logits.argmax(-1).tolist()


def test_allowed_banned_and_bias():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert run(logits, params(banned_token_ids=(0, 1))).token_ids.tolist() == [2]
    assert run(logits, params(allowed_token_ids=(4, 3))).token_ids.tolist() == [3]
    assert run(logits, params(allowed_token_ids=(4, 3), banned_token_ids=(3,))).token_ids.tolist() == [4]
    assert run(logits, params(logit_bias=((4, 100.0), (3, 98.5)))).token_ids.tolist() == [4]
    assert run(logits, params(logit_bias=((0, -3.0),))).token_ids.tolist() == [1]
    assert run(logits, params(banned_token_ids=(0,), logit_bias=((0, 100.0),))).token_ids.tolist() == [1]


def test_ids_outside_the_vocabulary_touch_nobody():
    logits = torch.zeros(3, 8)
    logits[:, 3] = 1.0
    odd = params(
        logit_bias=((8, 100.0), (-1, 100.0), (99999999999, 5.0)),
        stop_token_ids=(8, -1),
        min_tokens=3,
        banned_token_ids=(8, -5),
    )
    assert run(logits, params(), odd, params()).token_ids.tolist() == [3, 3, 3]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_every_end_until_enough_were_generated(ignore_eos):
    logits = torch.zeros(1, 50)
    logits[0, 2], logits[0, 0], logits[0, 7], logits[0, 49] = 9.0, 8.0, 7.0, 6.0
    sampling = params(min_tokens=6, eos_token_ids=(2, 0), stop_token_ids=(7,), ignore_eos=ignore_eos)
    long_prompt = list(range(40))
    for generated in range(8):
        result = run(logits, sampling, prompt=long_prompt, outputs=[5] * generated)
        assert result.token_ids.tolist() == ([49] if generated < 6 else [2])  # the last id of the vocabulary stays


# --- penalties --------------------------------------------------------------------------------------------------------


def processed_drop(sampling: SamplingParams, prompt: list[int], outputs: list[int], token: int) -> float:
    """How much the token's logit was lowered: the bias that makes it lead by a hair shows it."""
    from ropeway.worker.sampler import _process

    logits = torch.full((1, 100), 3.0)
    _process(logits, inputs_of([(sampling, prompt, outputs)], 100))
    return 3.0 - float(logits[0, token])


def test_only_the_rows_that_ask_for_it_are_changed():
    logits = torch.zeros(4, 50)
    rows = [(params(), [0], []), (params(logit_bias=((7, 1.0),)), [0], []), (params(), [0], [])]
    rows.append((params(banned_token_ids=(3,), presence_penalty=1.0), [0], [9]))
    sample(logits, inputs_of(rows, 50))
    assert logits.nonzero().tolist() == [[1, 7], [3, 3], [3, 9]]


def test_native_and_plain_argmax_choose_alike():
    native = cpu.load()
    if native is None:
        pytest.skip(cpu.why_not())
    logits = torch.randn(5, 3001, generator=torch.Generator().manual_seed(1))
    logits[1, 17] = logits[1, 2900] = 9.0  # the first of equals
    logits[2, 5] = float("nan")
    logits[3] = float("-inf")
    sampling = [params(), params(), params(), params(), params(temperature=0.7, seed=3, min_p=0.01)]
    inputs = inputs_of([(row, [0], []) for row in sampling], 3001)
    plain, fast = sample(logits.clone(), inputs), sample(logits, inputs, native)
    assert plain.token_ids.tolist() == fast.token_ids.tolist()
    assert plain.errors == fast.errors
    assert set(plain.errors) == {2, 3}


def test_presence_and_frequency_count_generated_tokens_only():
    sampling = params(presence_penalty=2.0, frequency_penalty=2.0)
    prompt = [64] * 5
    assert processed_drop(sampling, prompt, [], 64) == 0.0
    assert processed_drop(sampling, prompt, [64], 64) == 4.0
    assert processed_drop(sampling, prompt, [64, 1, 64], 64) == 6.0
    assert processed_drop(sampling, prompt, [64, 1, 64], 2) == 0.0


def test_repetition_acts_on_prompt_and_generated_tokens():
    sampling = params(repetition_penalty=1.5)
    assert processed_drop(sampling, [64], [7], 64) == pytest.approx(1.0)
    assert processed_drop(sampling, [64], [7], 7) == pytest.approx(1.0)
    assert processed_drop(sampling, [64], [7], 8) == 0.0
    logits = torch.full((1, 4), -1.0)
    logits[0, 3] = -1.4
    assert run(logits, sampling, prompt=(0, 1), outputs=(2,)).token_ids.tolist() == [3]  # negative ones are multiplied


def test_penalties_do_not_reach_neighbours():
    logits = torch.zeros(3, 20)
    logits[:, 4], logits[:, 5] = 2.0, 1.5
    punished = params(frequency_penalty=1.0)
    rows = [(params(), [0], [4]), (punished, [0], [4]), (params(), [0], [4])]
    assert sample(logits, inputs_of(rows, 20)).token_ids.tolist() == [4, 5, 4]


# --- random choice ----------------------------------------------------------------------------------------------------


def test_distribution_of_plain_sampling():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 1.5
    for temperature, seed in ((1.0, 7), (0.5, 2**64 - 1), (2.0, 0)):
        tokens = draws(logits, 6000, temperature=temperature, seed=seed)
        assert chi_square_fits(tokens, (logits[0] / temperature).softmax(-1).double().numpy())


def test_distribution_over_many_seeds_at_one_position():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    rows = [(params(temperature=1.0, seed=seed), [0], []) for seed in range(5000)]
    tokens = sample(logits.expand(5000, -1), inputs_of(rows, 30)).token_ids.numpy()
    assert chi_square_fits(tokens, logits[0].softmax(-1).double().numpy())


def test_noise_is_uniform_in_every_bit_and_uncorrelated():
    keys = torch.from_numpy(noise_keys(np.arange(64, dtype=np.uint64), np.arange(64)))
    uniform = 1 - (-exponential_noise(torch.arange(4096, dtype=torch.int32), keys).double()).exp()
    assert abs(uniform.mean().item() - 0.5) < 0.002
    histogram = np.histogram(uniform.numpy(), bins=64, range=(0, 1))[0]
    statistic = ((histogram - histogram.mean()) ** 2 / histogram.mean()).sum()
    assert statistic < 63 * (1 - 2 / (9 * 63) + 3.09 * math.sqrt(2 / (9 * 63))) ** 3
    centred = uniform - 0.5
    for first, second in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:])):
        assert abs((first * second).mean().item() * 12) < 0.01  # correlation between rows, and between tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 10, "top_p": 0.5},
        {"top_k": 300, "top_p": 0.9, "vocab": 1000},
        {"top_p": 0.97, "vocab": 2000},
        {"top_p": 0.9, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_filters_keep_the_right_tokens_and_their_proportions(changes):
    changes = dict(changes)
    vocab = changes.pop("vocab", 40)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))
    ordered, ids = logits[0].double().softmax(-1).sort(descending=True)
    keep = torch.ones(vocab, dtype=torch.bool)
    if top_k := changes.get("top_k"):
        keep[top_k:] = False
    left = ordered * keep
    left = left / left.sum()
    keep &= (left.cumsum(0) - left) < changes.get("top_p", 1.0)
    keep &= ordered >= changes.get("min_p", 0.0) * ordered[0]
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[ids[keep]] = ordered[keep] / ordered[keep].sum()
    tokens = draws(logits, 4000, temperature=1.0, seed=5, **changes)
    if keep.sum() == 1:
        assert (tokens == int(ids[0])).all()
    elif keep.sum() < 100:
        assert chi_square_fits(tokens, expected.numpy())
    else:  # too few draws per token for the test: compare which half is drawn, and the support
        assert expected.numpy()[tokens].min() > 0
        likely = expected > expected.median()
        share = likely.numpy()[tokens].mean()
        assert abs(share - expected[likely].sum().item()) < 4 * 0.5 / math.sqrt(4000)


def test_equal_scores_at_the_edge_all_stay():
    logits = torch.zeros(1, 1000)
    tokens = draws(logits, 2000, temperature=1.0, top_k=5, seed=1)
    assert len(set(tokens.tolist())) > 500  # no order among equals is invented


def test_shortcut_and_long_way_choose_the_same(monkeypatch):
    from ropeway.worker import sampler

    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(4)) * 2
    rows = [params(temperature=1.0, seed=i, top_k=[0, 5, 40, 600][i % 4], top_p=[0.8, 1.0][i % 2]) for i in range(40)]
    short = run(logits, *rows).token_ids
    monkeypatch.setattr(sampler, "_CANDIDATES", 1)  # next to nobody is done after the shortcut
    assert torch.equal(run(logits, *rows).token_ids, short)
    monkeypatch.setattr(sampler, "_CANDIDATES", 5000)
    assert torch.equal(run(logits, *rows).token_ids, short)


def test_best_is_topk():
    for vocab, count in ((5000, 20), (5003, 64), (100, 50), (33, 1), (50000, 257)):
        scores = torch.randn(4, vocab)
        values, ids = _best(scores, count)
        assert torch.equal(values, scores.topk(count).values)
        assert torch.equal(scores.gather(1, ids), values)


KINDS = [
    params(temperature=0.8, seed=42),
    params(temperature=0.8, seed=43),
    params(),
    params(temperature=1.0, seed=1, top_k=5),
    params(temperature=1.5, seed=2, top_p=0.7),
    params(temperature=1.5, seed=2**63 + 1, top_p=0.99),
    params(temperature=0.7, seed=4, min_p=0.1, presence_penalty=1.0),
    params(temperature=0.01, seed=5, top_k=1),
    params(temperature=1.0, seed=6, min_p=0.99),
    params(allowed_token_ids=(5,)),
    params(temperature=1.0, seed=8, allowed_token_ids=(17,)),
    params(logit_bias=tuple((token, -100.0) for token in range(20))),
    params(temperature=1.0, seed=9, top_p=0.9, logprobs=3),
    params(temperature=1e-30, seed=9),
]


def test_a_row_gives_the_same_alone_and_in_any_batch():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(KINDS), 3000, generator=generator) * 3
    logits[3, 100:] = -INF
    logits[4, 1:] = -INF  # all but one entry masked
    alone = [run(logits[i : i + 1], sampling).token_ids.item() for i, sampling in enumerate(KINDS)]
    assert run(logits, *KINDS).token_ids.tolist() == alone
    assert alone[9] == 5
    assert alone[10] == 17
    assert alone[4] == 0
    assert alone[7] == logits[7].argmax()
    order = torch.randperm(len(KINDS), generator=generator).tolist()
    for size in (2, 5, 9):
        chosen = order[:size]
        together = run(logits[chosen], *[KINDS[i] for i in chosen]).token_ids.tolist()
        assert together == [alone[i] for i in chosen]


def test_seeds_and_positions_matter():
    logits = torch.zeros(1, 1000)
    tokens = {
        (seed, generated): run(logits, params(temperature=1.0, seed=seed), outputs=[1] * generated).token_ids.item()
        for seed in range(5)
        for generated in range(5)
    }
    assert len(set(tokens.values())) > 20


def scalar_noise(seed: int, position: int, token: int) -> float:
    """The noise once more, in unbounded integers: the wrapping arithmetic of tensors is easy to get wrong."""

    def splitmix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    key = splitmix((splitmix(seed) + position * 0x9E3779B97F4A7C15) % 2**64)
    h = (token * 0x9E3779B1 + key % 2**32) % 2**32
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h ^= key >> 32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    h ^= h >> 16
    return -math.log1p(-(h % 2**31 + 0.5) / 2**31)


def test_the_noise_is_a_function_of_seed_position_and_token():
    seeds, positions, tokens = [42, 0, 2**64 - 1, 2**63], [0, 1, 7, 100000], [0, 1, 2, 49151, 262143]
    keys = torch.from_numpy(noise_keys(np.array(seeds, dtype=np.uint64), np.array(positions)))
    noise = exponential_noise(torch.tensor(tokens, dtype=torch.int32), keys)
    want = [[scalar_noise(s, p, token) for token in tokens] for s, p in zip(seeds, positions, strict=True)]
    torch.testing.assert_close(noise, torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_a_token_that_runs_alone_wins_whatever_its_noise():
    keys = torch.tensor([[-2064110163, 0]], dtype=torch.int32)  # token 5's hash is 2^31 - 1, so its u rounds to 1
    assert exponential_noise(torch.tensor([5], dtype=torch.int32), keys).isfinite().all()
    alone = inputs_of([(params(temperature=1.0, allowed_token_ids=(5,)), [0], [])], 1000)
    filtered = inputs_of([(params(temperature=1.0, top_k=300, top_p=1e-6), [0], [])], 1000)  # races over all tokens
    logits = torch.randn(1, 1000)
    logits[0, 5] = 10.0
    for inputs in (alone, filtered):
        inputs.noise_keys = keys
        assert sample(logits.clone(), inputs).token_ids.tolist() == [5]


# --- errors of single rows --------------------------------------------------------------------------------------------


def test_bad_rows_fail_alone():
    logits = torch.randn(len(KINDS) + 4, 500)
    bad = {1: float("nan"), 4: -INF, 6: INF}
    rows = [*KINDS, *KINDS[:4]]
    clean = run(logits, *rows).token_ids.tolist()
    logits[1, 77] = float("nan")
    logits[4] = -INF
    logits[6, 3] = INF
    rows[8] = params(temperature=1.0, allowed_token_ids=(3,), banned_token_ids=(3,), logprobs=2)
    result = run(logits, *rows)
    assert sorted(result.errors) == [1, 4, 6, 8]
    assert "masked" in result.errors[8]
    assert "numbers" in result.errors[1]
    for i, token in enumerate(result.token_ids.tolist()):
        assert token == (0 if i in result.errors else clean[i])
    assert set(bad) <= set(result.errors)
    assert set(result.logprobs) == {12}


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.randn(3, 700)
    sampling = params(temperature=1.3, seed=11, top_k=50, logit_bias=((5, 50.0),), frequency_penalty=1.0, logprobs=3)
    result = run(logits, sampling, params(), params(logprobs=0), outputs=(5,))
    want = logits.double().log_softmax(-1)
    assert set(result.logprobs) == {0, 2}
    first = result.logprobs[0]
    token = result.token_ids[0].item()
    assert token == 5
    assert first.logprob == pytest.approx(want[0, 5].item(), abs=1e-5)
    assert first.rank == int((want[0] > want[0, 5]).sum()) + 1
    values, ids = want[0].topk(3)
    assert first.top_ids == ids.tolist()
    assert first.top_logprobs == pytest.approx(values.tolist(), abs=1e-5)
    last = result.logprobs[2]
    assert (last.rank, last.top_ids, last.top_logprobs) == (1, [], [])
    assert last.logprob == pytest.approx(want[2].max().item(), abs=1e-5)


def test_masked_logits_give_minus_infinity_not_nan():
    logits = torch.full((1, 10), -INF)
    logits[0, 4] = 0.5
    result = run(logits, params(logprobs=5)).logprobs[0]
    assert result.logprob == 0.0
    assert result.top_ids[0] == 4
    assert all(value == -INF for value in result.top_logprobs[1:])


def test_more_logprobs_than_vocabulary():
    result = run(torch.randn(1, 6), params(logprobs=20)).logprobs[0]
    assert sorted(result.top_ids) == list(range(6))
