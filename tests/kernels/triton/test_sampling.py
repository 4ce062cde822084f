"""The Triton sampling kernels against the sampler in torch, and both against sums in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ropeway.worker.sampler import Penalties, SamplingInputs, draw, exponential_noise, noise_keys, sample
from ropeway_kernels import sampling

inf, nan = float("inf"), float("nan")

Filters = tuple[int, float, float]  # top_k (0: all), top_p, min_p
NO_FILTERS = (0, 1.0, 0.0)
FILTERS: list[Filters] = [
    *itertools.product((0, 1, 40, 700), (1.0, 0.9), (0.0, 0.05)),
    (5, 1.0, 0.0),
    (10**6, 0.5, 0.0),
    (2000, 0.97, 0.0),
    (0, 0.9999, 0.0),
    (0, 1 - 2.0**-24, 0.0),
    (0, 1e-7, 0.0),
    (0, 1.0, 1.0),
]
TEMPERATURES = [1.0, 0.6, 3.0, 1e-30]
SLACK = 1e-6  # relative; a few units in the last place of float32


def make_inputs(filters: list[Filters], temperatures: list[float], vocab: int, first_seed: int = 0) -> SamplingInputs:
    """Row i draws with filters[i], temperatures[i] and a seed of its own."""
    count = len(filters)
    seeds = np.arange(first_seed, first_seed + count, dtype=np.uint64)
    inputs = SamplingInputs(
        count,
        random_rows=torch.arange(count),
        temperature=torch.tensor(temperatures)[:, None],
        noise_keys=torch.from_numpy(noise_keys(seeds, seeds % 17)),
    )
    filtered = torch.tensor([row != NO_FILTERS for row in filters])
    if filtered.any():
        used = [row for row in filters if row != NO_FILTERS]
        inputs.filtered = filtered.nonzero().flatten()
        inputs.unfiltered = None if filtered.all() else (~filtered).nonzero().flatten()
        inputs.top_k = torch.tensor([min(top_k, vocab) or vocab for top_k, _, _ in used])[:, None]
        inputs.top_p = torch.tensor([top_p for _, top_p, _ in used])[:, None]
        inputs.min_p = torch.tensor([min_p for _, _, min_p in used])[:, None]
    return inputs


# --- what must come out, in float64 -----------------------------------------------------------------------------------


def exact_noise(keys: Tensor, vocab: int) -> np.ndarray:
    """``[n, vocab]`` float64."""
    first, second = (keys.numpy().view(np.uint32)[:, i, None] for i in (0, 1))
    h = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1) + first
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B) ^ second
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    uniform = ((h & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-31)
    return -np.log1p(-np.minimum(uniform, 1 - 2**-24).astype(np.float64))


def scores_of(logits: Tensor, inputs: SamplingInputs) -> np.ndarray:
    assert inputs.temperature is not None
    x = logits.numpy()
    scores = (x - x.max(1, keepdims=True)) / inputs.temperature.numpy()
    assert scores.dtype == np.float32  # equal scores are equal in float32
    return scores


def staying(scores: np.ndarray, inputs: SamplingInputs, slack: float) -> np.ndarray:
    """``[n, vocab]``; which tokens run. slack: by how much, relative to the row's whole weight, a token at the edge of
    top_p or min_p may fail the condition and still run; negative: must pass it."""
    weights = np.exp(scores.astype(np.float64))
    keep = np.ones_like(scores, dtype=bool)
    if inputs.filtered is not None:
        for i, row in enumerate(inputs.filtered.tolist()):
            top_k, top_p, min_p = (float(each[i]) for each in (inputs.top_k, inputs.top_p, inputs.min_p))
            ordered_scores = np.sort(scores[row])[::-1][: int(top_k)]
            ordered = np.exp(ordered_scores.astype(np.float64))
            before = np.cumsum(ordered) - ordered
            before = before[np.searchsorted(-ordered_scores, -ordered_scores)]  # of equals, what lies before the first
            inside = (before < (top_p + slack) * ordered.sum()) | (top_p >= 1)
            inside &= ordered >= min_p * (1 - slack)
            keep[row] = scores[row] >= ordered_scores[max(1, int(inside.sum())) - 1]
    return keep & (weights > 1e-37)


def check_tokens(tokens: Tensor, logits: Tensor, inputs: SamplingInputs) -> None:
    """Each token wins the exact race, or is within a few units in the last place of the winner, or owes it to a token
    at the very edge of a filter."""
    scores = scores_of(logits, inputs)
    assert inputs.noise_keys is not None
    speeds = np.exp(scores.astype(np.float64)) / exact_noise(inputs.noise_keys, logits.shape[1])
    rows = np.arange(len(tokens))
    mine = np.where(staying(scores, inputs, SLACK), speeds, 0.0)[rows, tokens.numpy()]
    assert (mine > 0).all(), "a token was drawn that a filter takes out"
    best = np.where(staying(scores, inputs, -SLACK), speeds, 0.0).max(1)
    assert (mine >= best * (1 - SLACK)).all(), "a better token was passed over"


def check_alike(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """The kernels' tokens, after a check of them and of torch's."""
    kernels = sample(logits.clone(), inputs, triton=True).token_ids
    plain = sample(logits.clone(), inputs, triton=False).token_ids
    check_tokens(kernels, logits, inputs)
    check_tokens(plain, logits, inputs)
    scores = scores_of(logits, inputs)
    certain = staying(scores, inputs, -SLACK) == staying(scores, inputs, SLACK)
    for row in (kernels != plain).nonzero().flatten().tolist():
        if certain[row].all():  # nothing lies at the edge of a filter, so the two must be neighbours
            assert inputs.noise_keys is not None
            noise = exact_noise(inputs.noise_keys[row : row + 1], logits.shape[1])[0]
            speeds = np.exp(scores[row].astype(np.float64)) / noise
            assert speeds[kernels[row]] == pytest.approx(speeds[plain[row]], rel=SLACK)
    assert int((kernels != plain).sum()) <= max(1, len(plain) // 50)
    return kernels


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [7, 50, 1000, 3001])
def test_tokens_are_those_of_the_plain_sampler(vocab: int):
    torch.manual_seed(vocab)
    # Every filter with two of the temperatures, by turns.
    cases = [(filters, TEMPERATURES[(i + j) % 4]) for i, filters in enumerate(FILTERS) for j in (0, 1)]
    logits = torch.randn(len(cases), vocab) * 2
    logits[::2, ::9] += 6.0  # a few stand out, as in a model's
    inputs = make_inputs([filters for filters, _ in cases], [temperature for _, temperature in cases], vocab)
    tokens = check_alike(logits, inputs)
    if vocab >= 1000:
        assert len(set(tokens.tolist())) > len(cases) / 2
    for row, (filters, temperature) in enumerate(cases):
        if filters[0] == 1 or filters[1] < 1e-6 or filters[2] == 1.0 or temperature < 1e-9:
            assert tokens[row] == logits[row].argmax()


def test_a_vocabulary_of_several_chunks():
    """With more blocks than top_k, so that most are never read again; with fewer; and with a flat row."""
    torch.manual_seed(1)
    cases = [NO_FILTERS, (20, 0.95, 0.0), (3, 1.0, 0.0), (90, 0.5, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.02)]
    logits = torch.cat([torch.randn(6, 9000) * 2, torch.randn(6, 9000) * 0.01])
    check_alike(logits, make_inputs(cases * 2, [0.9] * 12, 9000))


def kept_by_kernel(logits: Tensor, inputs: SamplingInputs) -> np.ndarray:
    """``[n, vocab]``; which tokens run."""
    assert inputs.random_rows is not None
    assert inputs.temperature is not None
    assert inputs.filtered is not None
    greatest, best, _ = sampling._survey(logits)
    filters = inputs.top_k, inputs.top_p, inputs.min_p
    cutoffs = sampling._cutoffs(
        logits, greatest, best, inputs.random_rows, inputs.temperature, inputs.filtered, *filters
    )
    depths = (scores_of(logits, inputs).view(np.int32) & 0x7FFFFFFF) - sampling._OFFSET.value
    return depths <= cutoffs.numpy()[:, None]


@pytest.mark.parametrize("vocab", [50, 1300, 9000])
def test_the_cutoff_is_exact(vocab: int):
    """Who stays, token by token: what the race sees of it is the winner only."""
    torch.manual_seed(vocab)
    cases = [filters for filters in FILTERS if filters != NO_FILTERS]
    logits = torch.randn(len(cases), vocab) * 3
    logits[1::3] = (logits[1::3] * 2).round() / 2  # many equals
    logits[:, 5] = -inf
    inputs = make_inputs(cases, [0.8] * len(cases), vocab)
    scores = scores_of(logits, inputs)
    kept = kept_by_kernel(logits, inputs)
    must, may = staying(scores, inputs, -SLACK), staying(scores, inputs, SLACK)
    assert (kept | ~must).all()
    assert (may | ~kept).all()
    only_top_k = [row for row, (_, top_p, min_p) in enumerate(cases) if (top_p, min_p) == (1.0, 0.0)]
    assert len(only_top_k) > 3
    assert (kept == may)[only_top_k].all()
    assert (kept.sum(1) > 1).sum() > len(cases) / 2


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p_reaches_into_a_tail_of_unlikely_tokens(top_p: float):
    """As light as tokens at its edge can be: all but one together weigh little more than 1 - top_p."""
    vocab = 2000
    tail = np.log(1.3 * (1 - top_p) / top_p / vocab) + np.linspace(0.05, -0.05, vocab)
    logits = torch.from_numpy(tail).float()[None]
    logits[0, 1234] = 0.0
    inputs = make_inputs([(0, top_p, 0.0)], [1.0], vocab)
    kept, scores = kept_by_kernel(logits, inputs), scores_of(logits, inputs)
    assert 10 < kept.sum() < vocab / 2
    assert (kept | ~staying(scores, inputs, -SLACK)).all()
    assert (staying(scores, inputs, SLACK) | ~kept).all()


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_equal_scores_at_the_cutoff_stay_together(levels: int):
    torch.manual_seed(levels)
    cases = FILTERS
    logits = torch.randint(levels, (len(cases), 3001)) * 0.5
    logits[:, 7] = -inf
    tokens = check_alike(logits, make_inputs(cases, [1.0] * len(cases), 3001))
    if levels == 1:  # no order among equals is invented
        assert len(set(tokens.tolist())) > len(cases) * 0.9


def test_masked_tokens_are_never_drawn():
    torch.manual_seed(2)
    for allowed, cases in ((1, FILTERS[::2]), (2, FILTERS[1::2]), (70, FILTERS)):
        logits = torch.full((len(cases), 3001), -inf)
        ids = torch.randperm(3001)[:allowed]
        logits[:, ids] = torch.randn(len(cases), allowed)
        tokens = check_alike(logits, make_inputs(cases, [1.0] * len(cases), 3001, first_seed=1000))
        assert set(tokens.tolist()) <= set(ids.tolist())


def test_greedy_takes_the_first_of_equals_and_finds_what_is_no_number():
    logits = torch.randn(7, 5003)
    logits[0, 4999] = logits[0, 130] = logits[0, 131] = 9.0
    logits[1, 5002] = 50.0
    logits[2, 77] = nan
    logits[3] = -inf
    logits[4, 3] = inf
    logits[5] = nan
    logits[6, 1:] = -inf
    best, tokens = sampling.draw(logits)
    assert tokens.tolist() == [130, 5002, 0, 0, 0, 0, 0]
    torch.testing.assert_close(best, torch.tensor([9.0, 50.0, nan, -inf, inf, nan, logits[6, 0]]), equal_nan=True)


def test_rows_that_are_no_numbers_fail_alone():
    torch.manual_seed(3)
    cases = [NO_FILTERS, (5, 0.9, 0.0), (0, 0.9, 0.1)] * 4
    logits = torch.randn(12, 700)
    inputs = make_inputs(cases, [1.0] * 12, 700)
    clean = sample(logits.clone(), inputs, triton=True)
    assert clean.errors == {}
    for row, value in ((0, nan), (4, nan), (5, inf), (6, inf)):
        logits[row, 300] = value
    logits[7] = logits[9] = -inf
    inputs.logprobs = [(1, 2), (4, 2)]
    kernels, plain = sample(logits.clone(), inputs, triton=True), sample(logits.clone(), inputs, triton=False)
    assert kernels.errors == plain.errors
    assert sorted(kernels.errors) == [0, 4, 5, 6, 7, 9]
    assert set(kernels.logprobs) == {1}
    for row, token in enumerate(kernels.token_ids.tolist()):
        assert token == (0 if row in kernels.errors else clean.token_ids[row])


def test_a_row_draws_the_same_alone_and_in_any_batch():
    torch.manual_seed(4)
    cases = [*FILTERS, NO_FILTERS, NO_FILTERS]
    temperatures = [0.9] * len(cases)
    logits = torch.randn(len(cases), 2, 1500)[:, 1]  # rows are not neighbours in memory
    inputs = make_inputs(cases, temperatures, 1500)
    together = sample(logits.clone(), inputs, triton=True).token_ids
    _, strided = sampling.draw(
        logits,
        rows=inputs.random_rows,
        temperature=inputs.temperature,
        noise_keys=inputs.noise_keys,
        filtered=inputs.filtered,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        min_p=inputs.min_p,
    )
    assert torch.equal(strided, together)
    for row in range(0, len(cases), 3):
        filters, temperature = cases[row], temperatures[row]
        alone = make_inputs([filters], [temperature], 1500, first_seed=row)
        assert sample(logits[row : row + 1].clone(), alone, triton=True).token_ids.tolist() == [together[row]]


def test_parameters_without_effect_are_as_good_as_rows_left_out():
    """The form of a captured step: every row is listed everywhere, and the tensors say what applies."""
    torch.manual_seed(5)
    logits = torch.randn(6, 1500)
    keys = torch.from_numpy(noise_keys(np.arange(6, dtype=np.uint64), np.arange(6)))
    inputs = SamplingInputs(6, random_rows=torch.tensor([1, 2, 4, 5]), filtered=torch.tensor([1, 3]))
    inputs.temperature, inputs.noise_keys = torch.full((4, 1), 0.7), keys[[1, 2, 4, 5]]
    inputs.top_k, inputs.top_p, inputs.min_p = (
        torch.tensor([[9], [1500]]),
        torch.tensor([[1.0], [0.8]]),
        torch.tensor([[0.0], [0.01]]),
    )
    few = draw(logits.clone(), inputs, triton=True)
    every = torch.arange(6)
    best, tokens = sampling.draw(
        logits,
        rows=every,
        temperature=torch.tensor([0.0, 0.7, 0.7, 0.0, 0.7, 0.7])[:, None],
        noise_keys=keys,
        filtered=every,
        top_k=torch.tensor([1500, 1500, 9, 3, 1500, 1500])[:, None],
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 0.8])[:, None],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.01])[:, None],
    )
    assert torch.equal(tokens, few.token_ids)
    assert torch.equal(best, few.best)
    assert tokens[[0, 3]].tolist() == logits[[0, 3]].argmax(1).tolist()


# --- noise ------------------------------------------------------------------------------------------------------------


@triton.jit
def _noise_kernel(keys, noise, SIZE: tl.constexpr):
    tokens = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(noise + tokens, sampling._noise(tokens, tl.load(keys), tl.load(keys + 1)))


def test_noise_is_exact_to_a_few_units_in_the_last_place():
    keys = torch.from_numpy(noise_keys(np.array([3], dtype=np.uint64), np.array([8])))
    noise = torch.empty(1, 2**20)
    _noise_kernel[(16,)](keys, noise, SIZE=2**16)
    exact = exact_noise(keys, 2**20)
    assert exact.min() < 2e-6
    assert exact.max() > 13
    np.testing.assert_allclose(noise.numpy(), exact, rtol=5e-7)
    plain = exponential_noise(torch.arange(2**20, dtype=torch.int32), keys)
    torch.testing.assert_close(noise, plain, rtol=5e-7, atol=0.0)


def test_the_greatest_noise_is_finite():
    keys = torch.tensor([[-2064110163, 0]], dtype=torch.int32)  # token 5's hash is 2^31 - 1, so its u rounds to 1
    noise = torch.empty(1, 8)
    _noise_kernel[(1,)](keys, noise, SIZE=8)
    assert noise[0, 5] == pytest.approx(24 * np.log(2))
    torch.testing.assert_close(noise, exponential_noise(torch.arange(8, dtype=torch.int32), keys), rtol=1e-6, atol=0.0)


# --- penalties --------------------------------------------------------------------------------------------------------


def make_penalties(vocab: int) -> Penalties:
    counts = torch.randint(0, 4, (6, vocab), dtype=torch.int32) * (torch.rand(6, vocab) < 0.2)
    return Penalties(
        rows=torch.tensor([4, 0, 2]),
        slots=torch.tensor([1, 5, 3]),
        presence=torch.tensor([[0.5], [0.0], [-1.1]]),
        frequency=torch.tensor([[0.3], [0.0], [0.7]]),
        repetition=torch.tensor([[1.0], [1.3], [0.7]]),
        output_counts=counts.int(),
        in_prompt=torch.rand(6, vocab) < 0.3,
    )


@pytest.mark.parametrize("vocab", [7, 5003])
def test_penalties_are_the_plain_ones(vocab: int):
    torch.manual_seed(6)
    inputs = SamplingInputs(5, penalties=make_penalties(vocab))
    logits = torch.randn(5, vocab) * 3
    logits[4, 3], logits[1, 2] = -inf, -inf
    kernels, plain = logits.clone(), logits.clone()
    assert torch.equal(sample(kernels, inputs, triton=True).token_ids, sample(plain, inputs, triton=False).token_ids)
    assert torch.equal(kernels, plain)
    assert torch.equal(kernels[[1, 3]], logits[[1, 3]])
    assert not torch.equal(kernels[[0, 2, 4]], logits[[0, 2, 4]])


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [7, 1000, 9000])
def test_logprobs_are_those_of_float64(vocab: int):
    torch.manual_seed(7)
    logits = torch.randn(6, vocab) * torch.tensor([1.0, 5.0, 20.0, 0.1, 1.0, 1.0])[:, None]
    logits[3] += 30.0
    logits[4, : vocab // 2] = -inf  # in the widest, a whole chunk
    tokens = torch.randint(vocab, (6,))
    tokens[0], tokens[4] = logits[0].argmax(), vocab - 1
    count = min(20, vocab)
    chosen, ranks, top_ids, top = sampling.logprobs(logits, tokens, count)
    exact = logits.double().log_softmax(-1)
    picked = exact.gather(1, tokens[:, None])
    torch.testing.assert_close(chosen.double(), picked.flatten(), rtol=0, atol=1e-5)
    assert ranks.tolist() == ((exact > picked).sum(1) + 1).tolist()
    best = exact.topk(count)
    torch.testing.assert_close(top.double(), best.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.gather(1, top_ids), best.values, rtol=0, atol=0)
    assert all(len(set(ids)) == count for ids in top_ids.tolist())


def test_logprobs_of_equals_list_the_first_tokens():
    logits = torch.zeros(1, 5000)
    logits[0, 4500] = 1.0
    _, ranks, top_ids, _ = sampling.logprobs(logits, torch.tensor([17]), 4)
    assert top_ids.tolist() == [[4500, 0, 1, 2]]
    assert ranks.tolist() == [2]
    assert sampling.logprobs(logits, torch.tensor([17]), 0)[2].shape == (1, 0)


# --- all of it at once ------------------------------------------------------------------------------------------------


def test_a_mixed_batch_through_the_sampler():
    torch.manual_seed(8)
    vocab = 2000
    inputs = make_inputs([NO_FILTERS, (20, 0.95, 0.0), (0, 0.9, 0.05)], [0.8, 1.2, 1.0], vocab)
    inputs.num_rows, inputs.random_rows = 5, torch.tensor([0, 2, 3])
    inputs.allowed = [(1, torch.tensor([4, 90, 1999]))]
    inputs.banned = torch.tensor([0, 2, 2]), torch.tensor([5, 6, 7])
    inputs.bias = torch.tensor([3, 4]), torch.tensor([11, 12]), torch.tensor([2.0, 30.0])
    inputs.penalties = make_penalties(vocab)
    inputs.logprobs = [(0, 0), (4, 5), (2, 3), (1, 70)]
    logits = torch.randn(5, vocab) * 2
    kernels, plain = sample(logits.clone(), inputs, triton=True), sample(logits.clone(), inputs, triton=False)
    assert kernels.token_ids.tolist() == plain.token_ids.tolist()
    assert kernels.token_ids[4] == 12
    inputs.logprobs = inputs.logprobs[:3]  # few enough for the kernel
    kernels = sample(logits.clone(), inputs, triton=True)
    for row, _ in inputs.logprobs:
        ours, theirs = kernels.logprobs[row], plain.logprobs[row]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert ours.rank == theirs.rank
        assert ours.top_ids == theirs.top_ids
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-5)
