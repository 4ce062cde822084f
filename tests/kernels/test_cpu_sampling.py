"""The native CPU kernels that draw tokens and penalise repeated ones, against the sampler in torch and exact sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import cpu_sets
from ropeway.worker.sampler import Penalties, SamplingInputs, noise_keys, sample
from ropeway_kernels import cpu

if cpu.load() is None:
    pytest.skip(f"no native kernels: {cpu.why_not()}", allow_module_level=True)

SETS = cpu_sets.usable()
inf, nan = float("inf"), float("nan")
every_set = pytest.mark.parametrize("isa", SETS)

Filters = tuple[int, float, float]  # top_k (0: all), top_p, min_p
NO_FILTERS = (0, 1.0, 0.0)
FILTERS: list[Filters] = [
    NO_FILTERS,
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (50, 0.9, 0.0),
    (700, 1.0, 0.0),
    (2000, 0.5, 0.0),
    (10**6, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 0.97, 0.0),
    (0, 0.9999, 0.0),
    (0, 1e-7, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (0, 0.9, 0.02),
    (40, 0.95, 0.05),
]
TEMPERATURES = [1.0, 0.7, 1.7, 0.05, 30.0, 1e-30]


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


def exact_noise(keys: Tensor, vocab: int) -> np.ndarray:
    """``[n, vocab]`` float64 from the float32 that is uniform."""
    first, second = (keys.numpy().view(np.uint32)[:, i, None] for i in (0, 1))
    h = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1) + first
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B) ^ second
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    uniform = ((h & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-31)
    with np.errstate(divide="ignore"):
        return -np.log1p(-uniform.astype(np.float64))


def exact_race(logits: Tensor, inputs: SamplingInputs, slack: float) -> np.ndarray:
    """``[n, vocab]`` float64: what each token runs with, 0 where it is filtered out. slack: by how much, relative to
    the row, a token at the edge of top_p or min_p may fail the condition and still run; negative: must pass it."""
    assert inputs.temperature is not None
    assert inputs.noise_keys is not None
    x = logits.numpy()
    scores = (x - x.max(1, keepdims=True)) / inputs.temperature.numpy()
    assert scores.dtype == np.float32  # equal scores are equal in float32
    weights = np.exp(scores.astype(np.float64))
    weights[scores < -87.3] = 0.0  # float32 has no normal numbers there
    keep = np.ones_like(scores, dtype=bool)
    if inputs.filtered is not None:
        for i, row in enumerate(inputs.filtered.tolist()):
            top_k, top_p, min_p = (float(each[i]) for each in (inputs.top_k, inputs.top_p, inputs.min_p))
            ordered = np.sort(weights[row])[::-1]
            ordered_scores = np.sort(scores[row])[::-1]
            ordered = ordered[: int(top_k)]
            before = np.cumsum(ordered) - ordered
            inside = (before < (top_p + slack) * ordered.sum()) | (top_p >= 1)
            inside &= ordered >= min_p * (1 - slack)
            keep[row] = scores[row] >= ordered_scores[max(1, int(inside.sum())) - 1]
    return np.where(keep, weights, 0.0) / exact_noise(inputs.noise_keys, x.shape[1])


def check_tokens(tokens: Tensor, logits: Tensor, inputs: SamplingInputs) -> int:
    """Each token wins the exact race, or is within a few ulp of the winner, or owes it to a token at the very edge of a
    filter. Returns how many needed one of the excuses."""
    certain, possible = exact_race(logits, inputs, -1e-6), exact_race(logits, inputs, 1e-6)
    rows = np.arange(len(tokens))
    value = possible[rows, tokens.numpy()]
    assert (value > 0).all(), "a token was drawn that a filter takes out"
    assert (value >= certain.max(1) * (1 - 1e-6)).all(), "a better token was passed over"
    return int((exact_race(logits, inputs, 0.0).argmax(1) != tokens.numpy()).sum())


def check_alike(isa: str, logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """The set's tokens, after a check of them and of torch's."""
    native = sample(logits.clone(), inputs, cpu_sets.native(isa)).token_ids
    plain = sample(logits.clone(), inputs).token_ids
    for row in (native != plain).nonzero().flatten().tolist():
        # Each of the two must be excused on its own; here, that they are neighbours of one another.
        race = exact_race(logits, inputs, 1e-6)[row]
        first, second = race[native[row]], race[plain[row]]
        edge = race.copy()
        edge[exact_race(logits, inputs, -1e-6)[row] > 0] = 0.0  # tokens of which it is uncertain whether they run
        assert abs(first - second) <= 1e-6 * first or edge[native[row]] > 0 or edge[plain[row]] > 0
    check_tokens(plain, logits, inputs)
    excused = check_tokens(native, logits, inputs)
    assert excused <= max(2, len(native) // 50)
    return native


# --- the same tokens --------------------------------------------------------------------------------------------------


@every_set
@pytest.mark.parametrize("vocab", [1, 7, 63, 64, 65, 500, 3001, 20_000])
def test_tokens_are_those_of_the_plain_sampler(isa: str, vocab: int):
    torch.manual_seed(vocab)
    cases = [(filters, temperature) for filters in FILTERS for temperature in TEMPERATURES] * 2
    logits = torch.randn(len(cases), vocab) * 2
    logits[len(cases) // 2 :, ::9] += 6.0  # a few stand out, as in a model's
    inputs = make_inputs([filters for filters, _ in cases], [temperature for _, temperature in cases], vocab)
    tokens = check_alike(isa, logits, inputs)
    if vocab > 500:
        assert len(set(tokens.tolist())) > len(cases) / 2
    for row, (filters, temperature) in enumerate(cases):
        if filters[0] == 1 or filters[1] < 1e-6 or filters[2] == 1.0 or temperature < 1e-9:
            assert tokens[row] == logits[row].argmax()


@every_set
@pytest.mark.parametrize("levels", [1, 2, 5, 40])
def test_equal_scores_at_the_cutoff_stay_together(isa: str, levels: int):
    torch.manual_seed(levels)
    cases = [filters for filters in FILTERS for _ in range(12)]
    logits = torch.randint(levels, (len(cases), 3001)) * 0.5
    logits[:, 7] = -inf
    inputs = make_inputs(cases, [1.0] * len(cases), 3001)
    check_alike(isa, logits, inputs)
    if levels == 1:  # no order among equals is invented
        tokens = sample(logits, inputs, cpu_sets.native(isa)).token_ids.tolist()
        assert len(set(tokens)) > len(cases) * 0.9


@every_set
def test_masked_tokens_are_never_drawn(isa: str):
    torch.manual_seed(1)
    cases = [filters for filters in FILTERS for _ in range(4)]
    for allowed in (1, 2, 70, 2000):
        logits = torch.full((len(cases), 3001), -inf)
        ids = torch.randperm(3001)[:allowed]
        logits[:, ids] = torch.randn(len(cases), allowed)
        inputs = make_inputs(cases, [1.0] * len(cases), 3001, first_seed=1000)
        tokens = check_alike(isa, logits, inputs)
        assert set(tokens.tolist()) <= set(ids.tolist())


@every_set
@pytest.mark.parametrize("rising", [False, True])
def test_logits_in_order_and_far_apart(isa: str, rising: bool):
    """Rising, the leader of the race changes all the time."""
    line = torch.linspace(-400.0, 0.0, 5000)
    logits = (line if rising else line.flip(0)).expand(len(FILTERS) * 3, -1).contiguous()
    inputs = make_inputs(FILTERS * 3, [3.0] * len(logits), 5000)
    check_alike(isa, logits, inputs)
    logits[:] = logits * 1e30  # all weights but one are 0
    assert (sample(logits, inputs, cpu_sets.native(isa)).token_ids == (4999 if rising else 0)).all()


@every_set
def test_only_the_rows_that_draw_are_touched_and_bad_ones_are_left_out(isa: str):
    torch.manual_seed(2)
    logits = torch.randn(8, 700)
    inputs = make_inputs([(0, 0.9, 0.0)] * 3 + [NO_FILTERS] * 2, [1.0] * 5, 700)
    inputs.num_rows = 8
    inputs.random_rows = torch.tensor([6, 1, 3, 4, 0])
    logits[1, 5], logits[4, 600], logits[0] = nan, inf, -inf
    before = logits.clone()
    result = sample(logits, inputs, cpu_sets.native(isa))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert set(result.errors) == {0, 1, 4}
    assert result.token_ids[[0, 1, 4]].tolist() == [0, 0, 0]
    assert result.token_ids[[2, 5, 7]].tolist() == logits[[2, 5, 7]].argmax(-1).tolist()
    assert result.token_ids.tolist() == sample(logits, inputs).token_ids.tolist()


def test_rows_may_lie_apart():
    torch.manual_seed(3)
    logits = torch.randn(len(FILTERS), 1000)[:, :777]
    inputs = make_inputs(FILTERS, [1.0] * len(FILTERS), 777)
    native = cpu_sets.native(None)
    assert torch.equal(sample(logits, inputs, native).token_ids, sample(logits.clone(), inputs, native).token_ids)


def test_every_set_draws_the_same():
    torch.manual_seed(4)
    cases = FILTERS * 20
    logits = torch.randn(len(cases), 3001) * 3
    inputs = make_inputs(cases, [0.9] * len(cases), 3001, first_seed=77)
    tokens = [sample(logits, inputs, cpu_sets.native(isa)).token_ids for isa in SETS]
    for row in range(len(cases)):
        different = {int(each[row]) for each in tokens}
        if len(different) > 1:
            values = exact_race(logits, inputs, 1e-6)[row][list(different)]
            assert values.max() - values.min() <= 1e-6 * values.max()


# --- any batch, any number of threads ---------------------------------------------------------------------------------


@every_set
def test_a_row_is_the_same_in_any_batch_and_with_any_number_of_threads(isa: str):
    torch.manual_seed(5)
    native = cpu_sets.native(isa)
    cases = FILTERS * 3
    logits = torch.randn(len(cases), 5003) * 2
    inputs = make_inputs(cases, [1.1] * len(cases), 5003)
    try:
        native.set_num_threads(1)
        want = sample(logits, inputs, native).token_ids
        for threads in (1, 2, 3, 7):
            native.set_num_threads(threads)
            assert torch.equal(sample(logits, inputs, native).token_ids, want)
            for begin, end in ((0, 1), (5, 6), (3, 20), (10, 45)):
                part = make_inputs(cases[begin:end], [1.1] * (end - begin), 5003, first_seed=begin)
                assert torch.equal(sample(logits[begin:end], part, native).token_ids, want[begin:end])
    finally:
        native.set_num_threads(torch.get_num_threads())


# --- distribution -----------------------------------------------------------------------------------------------------


@every_set
@pytest.mark.parametrize(
    "filters", [NO_FILTERS, (12, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (30, 0.9, 0.05)], ids=str
)
def test_draws_follow_the_distribution(isa: str, filters: Filters):
    torch.manual_seed(6)
    count, vocab = 6000, 150  # more than two blocks, the last one part of one
    logits = torch.randn(1, vocab) * 1.5
    inputs = make_inputs([filters] * count, [1.3] * count, vocab)
    tokens = sample(logits.expand(count, vocab).contiguous(), inputs, cpu_sets.native(isa)).token_ids
    top_k, top_p, min_p = filters
    probabilities, ids = (logits[0] / 1.3).double().softmax(-1).sort(descending=True)
    if top_k:
        probabilities[top_k:] = 0.0
    probabilities /= probabilities.sum()
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0.0
    probabilities[probabilities < min_p * probabilities[0]] = 0.0
    probabilities /= probabilities.sum()
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[ids] = probabilities * count
    observed = torch.bincount(tokens, minlength=vocab)
    assert not observed[expected == 0].any()
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1  # below about the 99.9th percentile (Wilson-Hilferty); seeds are fixed, so no flakes
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# --- penalties --------------------------------------------------------------------------------------------------------


@every_set
@pytest.mark.parametrize("vocab", [1, 7, 64, 3001])
def test_penalties_are_bitwise_those_of_the_plain_sampler(isa: str, vocab: int):
    torch.manual_seed(7)
    logits = torch.randn(9, vocab) * 4
    logits[:, ::5] = -inf
    logits[:, 1::6] = 0.0
    logits[:, 2::6] = -0.0
    logits[3, vocab // 2] = nan
    logits[4, vocab // 2] = inf
    counts = torch.randint(-3, 4, (12, vocab), dtype=torch.int32).clamp_(min=0)
    penalties = Penalties(
        rows=torch.tensor([8, 0, 3, 4, 5]),
        slots=torch.tensor([2, 11, 0, 5, 7]),
        presence=torch.tensor([[0.3], [-0.7], [0.0], [2.0], [1.1]]),
        frequency=torch.tensor([[0.1], [0.0], [-0.4], [0.9], [0.7]]),
        repetition=torch.tensor([[1.0], [1.3], [0.8], [1.7], [1.1]]),
        output_counts=counts,
        in_prompt=torch.rand(12, vocab) < 0.3,
    )
    plain, native = logits.clone(), logits.clone()
    inputs = SamplingInputs(9, penalties=penalties)
    sample(plain, inputs)
    sample(native, inputs, cpu_sets.native(isa))
    plain.nan_to_num_(nan=1e30)
    native.nan_to_num_(nan=1e30)
    assert torch.equal(plain.view(torch.int32), native.view(torch.int32))
