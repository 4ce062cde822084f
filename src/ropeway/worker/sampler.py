"""From logits to tokens: a pure function of logits and sampling tensors.

Owns: the order and meaning of every sampling parameter, and the noise. Must not know: requests, rows, models.
Called by: worker.runner (with the SamplingInputs that worker.batch gathered).

A row's token depends on that row alone: the noise is a hash of (seed, output position, token id), and whichever shortcut
a row takes, it compares the same numbers. So a seeded request gives the same answer alone, in any batch, and again
after a preemption or a restart.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropeway.protocol import TokenLogprobs
from ropeway_kernels.cpu import NativeKernels

_CANDIDATES = 256  # a row whose top_k, top_p and min_p leave at most this many tokens never sorts its vocabulary
_CHUNK = 2**21  # elements; temporaries over whole vocabularies stay at a few of these
_KERNEL_LOGPROBS = 64  # best tokens per row up to which a GPU kernel finds them faster than a sort
_NEGATIVE_INFINITY = float("-inf")


@dataclass(slots=True)
class Penalties:
    rows: Tensor  # [n] int64; which of the sampled rows
    slots: Tensor  # [n] int64; their lines in the two tables below
    presence: Tensor  # [n, 1] float32
    frequency: Tensor  # [n, 1] float32
    repetition: Tensor  # [n, 1] float32
    output_counts: Tensor  # [slots, vocab] int32; how often each token was generated
    in_prompt: Tensor  # [slots, vocab] bool


@dataclass(slots=True)
class SamplingInputs:
    """One step's sampled rows, in plan order. What no row asks for is None or empty, and costs nothing."""

    num_rows: int
    random_rows: Tensor | None = None  # [num_random] int64; rows with a temperature above 0
    temperature: Tensor | None = None  # [num_random, 1] float32
    noise_keys: Tensor | None = None  # [num_random, 2] int32; see noise_keys()
    filtered: Tensor | None = None  # [num_filtered] int64; those of random_rows with a top_k, top_p or min_p
    unfiltered: Tensor | None = None  # [num_random - num_filtered] int64; the others
    top_k: Tensor | None = None  # [num_filtered, 1] int64; at least the vocabulary size where there is no bound
    top_p: Tensor | None = None  # [num_filtered, 1] float32
    min_p: Tensor | None = None  # [num_filtered, 1] float32
    masks: tuple[Tensor, Tensor] | None = None  # (rows [n] int64, bits [n, words] int32 over the vocabulary: allowed)
    allowed: list[tuple[int, Tensor]] = field(default_factory=list)  # (row, token ids [n] int64)
    banned: tuple[Tensor, Tensor] | None = None  # (rows [n], token ids [n]) int64; includes ends below min_tokens
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # (rows [n], token ids [n], values [n] float32)
    penalties: Penalties | None = None
    logprobs: list[tuple[int, int]] = field(default_factory=list)  # (row, how many of the best)


@dataclass(slots=True)
class Drawn:
    """What a step has drawn, still on the device; nothing has been waited for on CUDA."""

    token_ids: Tensor  # [num_rows] int64; 0 for a row in error
    best: Tensor  # [num_rows] float32; the greatest processed logit, not finite for a row in error
    logprobs: Logprobs | None = None  # where any were asked for


@dataclass(slots=True)
class Logprobs:
    """Of the raw distributions of n rows; k is the most that one of them wants."""

    chosen: Tensor  # [n] float32
    ranks: Tensor  # [n] int64; 1 for the best
    top_ids: Tensor  # [n, k] int64
    top: Tensor  # [n, k] float32, falling

    def columns(self) -> list[Tensor]:
        return [self.chosen, self.ranks, self.top_ids, self.top]


@dataclass(slots=True)
class Sampled:
    token_ids: Tensor  # [num_rows] int64; 0 for a row in error
    errors: dict[int, str]  # row -> why it has no token
    logprobs: dict[int, TokenLogprobs]  # row -> of the raw distribution


def sample(
    logits: Tensor, inputs: SamplingInputs, native: NativeKernels | None = None, *, triton: bool | None = None
) -> Sampled:
    """draw() and report() at once."""
    return report(draw(logits, inputs, native, triton=triton), inputs)


def draw(
    logits: Tensor, inputs: SamplingInputs, native: NativeKernels | None = None, *, triton: bool | None = None
) -> Drawn:
    """Choose one token per row. logits ``[num_rows, vocab]`` float32; what masks, bias and penalties change is changed
    in place. native: kernels for a CPU. triton: whether to use those for a GPU; None is on CUDA, where there are any.
    All compare the same numbers, within a few roundings.

    Order: masks (of grammars and bad words), allowed and banned ids (with end tokens below min_tokens), logit_bias, penalties (repetition, frequency,
    presence), then greedy or temperature, top_k, top_p (of what top_k left), min_p (relative to the best token), noise.
    Log-probabilities are taken of the logits as they came.
    """
    gpu = _gpu_kernels() if (logits.is_cuda if triton is None else triton) else None
    raw = None  # [len(inputs.logprobs), vocab]
    if inputs.logprobs:
        wanted = _to_device([row for row, _ in inputs.logprobs], logits.device)
        raw = logits.index_select(0, wanted)
    _process(logits, inputs, native if gpu is None else gpu)
    if gpu is not None:
        best, token_ids = gpu.draw(
            logits,
            rows=inputs.random_rows,
            temperature=inputs.temperature,
            noise_keys=inputs.noise_keys,
            filtered=inputs.filtered,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
        )
    elif native is not None:
        best, token_ids = _draw_natively(logits, inputs, native)
    else:
        best, token_ids = _draw_plainly(logits, inputs)
    drawn = Drawn(token_ids, best)
    if raw is not None:
        most = max(count for _, count in inputs.logprobs)
        drawn.logprobs = raw_logprobs(raw, token_ids.index_select(0, wanted), most, triton=gpu is not None)
    return drawn


def raw_logprobs(logits: Tensor, token_ids: Tensor, most: int, *, triton: bool | None = None) -> Logprobs:
    """Of ``token_ids`` ``[n]`` and the ``most`` best tokens in ``logits`` ``[n, vocab]`` float32. triton: see draw()."""
    gpu = _gpu_kernels() if (logits.is_cuda if triton is None else triton) else None
    most = min(most, logits.shape[1])
    kernel = gpu.logprobs if gpu is not None and most <= _KERNEL_LOGPROBS else _logprobs
    return Logprobs(*kernel(logits, token_ids, most))


def report(drawn: Drawn, inputs: SamplingInputs) -> Sampled:
    """What the rows' owners hear of it. Waits for the device unless ``drawn`` has been copied from there."""
    errors = {
        row: "no token is allowed: every one is masked"
        if best == _NEGATIVE_INFINITY
        else "the model's logits are not numbers"
        for row, best in enumerate(drawn.best.tolist())
        if not math.isfinite(best)
    }
    logprobs: dict[int, TokenLogprobs] = {}
    if (found := drawn.logprobs) is not None:
        columns = [column.tolist() for column in found.columns()]
        for (row, count), value, rank, ids, values in zip(inputs.logprobs, *columns, strict=True):
            if row not in errors:
                logprobs[row] = TokenLogprobs(value, rank, ids[:count], values[:count])
    return Sampled(drawn.token_ids, errors, logprobs)


def _draw_natively(logits: Tensor, inputs: SamplingInputs, native: NativeKernels) -> tuple[Tensor, Tensor]:
    best, token_ids = native.argmax(logits)
    if inputs.random_rows is not None and inputs.temperature is not None and inputs.noise_keys is not None:
        native.sample(
            logits,
            best,
            token_ids,
            inputs.random_rows,
            temperature=inputs.temperature,
            noise_keys=inputs.noise_keys,
            filtered=inputs.filtered,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
        )
    if not all(map(math.isfinite, best.tolist())):
        token_ids.masked_fill_(~torch.isfinite(best), 0)
    return best, token_ids


def _draw_plainly(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    best, token_ids = logits.max(dim=-1)  # NaN if the row has one
    failed = ~torch.isfinite(best)
    if inputs.random_rows is not None and inputs.temperature is not None:
        rows = inputs.random_rows
        scores, peak = logits.index_select(0, rows), best[rows]
        if bool(failed.any()):  # such a row gets harmless logits, so that nothing below can meet a NaN
            scores.masked_fill_(failed[rows, None], 0.0)
            peak.masked_fill_(failed[rows], 0.0)
        # Shifted before it is scaled: the best stays at exactly 0 whatever the temperature.
        scores.sub_(peak[:, None]).div_(inputs.temperature)
        token_ids[rows] = _sample_random(scores, inputs)
    return best, token_ids.masked_fill_(failed, 0)


@functools.cache
def _gpu_kernels() -> Any:
    """The module of Triton kernels, which nothing on a CPU's path may load; None where there is no Triton."""
    try:
        from ropeway_kernels import sampling
    except ImportError:
        return None
    return sampling


def _to_device(numbers: list[int], device: torch.device) -> Tensor:
    """int64; without waiting for what the device is doing."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


# --- logits processing ------------------------------------------------------------------------------------------------


def _process(logits: Tensor, inputs: SamplingInputs, kernels: Any = None) -> None:
    """kernels: native ones or Triton's, which penalise alike."""
    if inputs.masks is not None:
        mask = _mask_on_host if kernels is not None and logits.device.type == "cpu" else _mask
        mask(logits, *inputs.masks)
    for row, ids in inputs.allowed:
        line = logits[row]
        kept = line[ids]
        line.fill_(_NEGATIVE_INFINITY)
        line[ids] = kept
    if inputs.banned is not None:
        logits[inputs.banned] = _NEGATIVE_INFINITY
    if inputs.bias is not None:
        rows, ids, values = inputs.bias
        logits.index_put_((rows, ids), values, accumulate=True)
    if (penalties := inputs.penalties) is not None:
        if kernels is not None:
            kernels.penalise(
                logits,
                penalties.rows,
                penalties.slots,
                presence=penalties.presence,
                frequency=penalties.frequency,
                repetition=penalties.repetition,
                output_counts=penalties.output_counts,
                in_prompt=penalties.in_prompt,
            )
        else:
            _penalise(logits, penalties)


def _mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Tokens without a bit become impossible. See SamplingInputs.masks."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    banned = (bits.view(torch.uint8)[:, :, None] & powers == 0).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):  # all of them, in their order
        logits.masked_fill_(banned, _NEGATIVE_INFINITY)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(banned, _NEGATIVE_INFINITY))


def _mask_on_host(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """The same, in a time that depends on how few tokens are allowed, or not allowed: mostly a handful of either."""
    vocab = logits.shape[1]
    for row, allowed in zip(rows.tolist(), bits.numpy(), strict=True):
        line = logits[row].numpy()
        forbidden = ~allowed
        some_allowed, some_forbidden = np.flatnonzero(allowed), np.flatnonzero(forbidden)
        if 8 * min(len(some_allowed), len(some_forbidden)) > len(allowed):
            flags = np.unpackbits(forbidden.view(np.uint8), bitorder="little", count=vocab)
            logits[row].masked_fill_(torch.from_numpy(flags).view(torch.bool), _NEGATIVE_INFINITY)
        elif len(some_forbidden) < len(some_allowed):
            line[_ids_of(forbidden, some_forbidden, vocab)] = _NEGATIVE_INFINITY
        else:
            ids = _ids_of(allowed, some_allowed, vocab)
            kept = line[ids]
            line.fill(_NEGATIVE_INFINITY)
            line[ids] = kept


def _ids_of(words: np.ndarray, places: np.ndarray, vocab: int) -> np.ndarray:
    """Of the bits that are set in words ``[n]`` int32; places: where these are not 0."""
    flags = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    lines, columns = flags.nonzero()
    ids: np.ndarray = places[lines] * 32 + columns
    return ids[: np.searchsorted(ids, vocab)]


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    counts = penalties.output_counts.index_select(0, penalties.slots)  # [n, vocab]
    generated = counts > 0
    seen = penalties.in_prompt.index_select(0, penalties.slots).logical_or_(generated)
    penalised = logits.index_select(0, penalties.rows)
    repeated = torch.where(penalised > 0, penalised / penalties.repetition, penalised * penalties.repetition)
    penalised = torch.where(seen, repeated, penalised)
    penalised -= penalties.frequency * counts
    penalised -= penalties.presence * generated
    logits[penalties.rows] = penalised


# --- random choice ----------------------------------------------------------------------------------------------------


def _sample_random(scores: Tensor, inputs: SamplingInputs) -> Tensor:
    """scores ``[num_random, vocab]``, at most 0; returns token ids ``[num_random]``."""
    assert inputs.noise_keys is not None
    keys = inputs.noise_keys
    if inputs.filtered is None:
        return _race_all(scores, keys, None)
    token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    if inputs.unfiltered is not None:
        rows = inputs.unfiltered
        token_ids[rows] = _race_all(scores.index_select(0, rows), keys[rows], None)
    rows = inputs.filtered
    token_ids[rows] = _sample_filtered(scores.index_select(0, rows), keys[rows], inputs)
    return token_ids


def _sample_filtered(scores: Tensor, keys: Tensor, inputs: SamplingInputs) -> Tensor:
    """top_k, top_p and min_p together are one number per row: the lowest score that stays (equal scores all stay).

    Most rows find it among their best few tokens and race only those. The rest look further, as far as their
    parameters can reach, and race over the vocabulary.
    """
    assert inputs.top_k is not None
    assert inputs.top_p is not None
    assert inputs.min_p is not None
    vocab = scores.shape[1]
    total = scores.exp().sum(-1, keepdim=True)
    values, ids = _best(scores, min(vocab, _CANDIDATES + 1))
    cutoff = _cutoff(values, total, inputs.top_k, inputs.top_p, inputs.min_p)
    token_ids = _race(values, ids.int(), keys, cutoff)
    if values.shape[1] == vocab:
        return token_ids
    # The candidates are sorted, so when the last one is below the cutoff, none that stays is missing. But what top_p
    # takes is a share of all that top_k leaves, so all that must have been seen.
    seen = (inputs.top_k < values.shape[1]) | (inputs.top_k >= vocab)
    unresolved = ((values[:, -1:] >= cutoff) | ~seen).flatten().nonzero().flatten()
    if unresolved.numel() == 0:
        return token_ids
    scores, total = scores[unresolved], total[unresolved]
    top_k, top_p, min_p = inputs.top_k[unresolved], inputs.top_p[unresolved], inputs.min_p[unresolved]
    # Tokens less likely than (1 - top_p) / vocab weigh less than 1 - top_p together, so top_p never reaches them.
    # Half of that, to be safe from rounding.
    floor = torch.maximum(min_p, (1 - top_p) * total / (2 * vocab)).clamp_(min=1e-37).log()
    reach = torch.where(top_k < vocab, top_k, (scores >= floor).sum(-1, keepdim=True))
    values = scores.topk(min(vocab, int(reach.max()) + 1), dim=-1).values
    cutoff = _cutoff(values, total, top_k, top_p, min_p)
    token_ids[unresolved] = _race_all(scores, keys[unresolved], cutoff)
    return token_ids


def _cutoff(values: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest score that stays, ``[n, 1]``. values ``[n, k]`` are each row's best scores, falling; the best is 0.
    total ``[n, 1]``: sum of exp over the whole vocabulary."""
    rank = torch.arange(values.shape[1], device=values.device)
    inside = rank < top_k
    weights = values.exp().mul_(inside)
    mass = torch.where(top_k <= values.shape[1], weights.sum(-1, keepdim=True), total)
    before = weights.cumsum(-1) - weights  # weight of all better tokens
    keep = inside & ((before < top_p * mass) | (top_p >= 1)) & (weights >= min_p) & (weights > 0)
    count = keep.sum(-1, keepdim=True).clamp_(min=1)  # all three conditions hold for a prefix; the best always stays
    return values.gather(1, count - 1)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """topk, sorted, several times faster on a CPU for a small count and a large vocabulary.

    The vocabulary is seen as ``depth`` layers of equal width. The best ``count`` tokens lie in the columns with the
    ``count`` best maxima (a token in another column is beaten by all of those), or in the rest that fills no layer.
    """
    rows, vocab = scores.shape
    depth = 32
    width = vocab // depth
    if width < 2 * count:
        return scores.topk(count, dim=-1)
    maxima = scores[:, : depth * width].view(rows, depth, width).amax(1)
    columns = maxima.topk(count, dim=-1, sorted=False).indices  # [rows, count]
    layers = torch.arange(depth, device=scores.device) * width
    ids = (columns[:, :, None] + layers).flatten(1)
    rest = torch.arange(depth * width, vocab, device=scores.device).expand(rows, -1)
    ids = torch.cat((ids, rest), dim=1)
    values, positions = scores.gather(1, ids).topk(count, dim=-1)
    return values, ids.gather(1, positions)


# --- noise ------------------------------------------------------------------------------------------------------------


def _race_all(scores: Tensor, keys: Tensor, cutoff: Tensor | None) -> Tensor:
    """_race over the whole vocabulary, some rows at a time."""
    token_ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    step = max(1, _CHUNK // scores.shape[1])
    winners = [
        _race(
            scores[begin : begin + step],
            token_ids,
            keys[begin : begin + step],
            None if cutoff is None else cutoff[begin : begin + step],
        )
        for begin in range(0, scores.shape[0], step)
    ]
    return torch.cat(winners) if len(winners) > 1 else winners[0]


def _race(scores: Tensor, token_ids: Tensor, keys: Tensor, cutoff: Tensor | None) -> Tensor:
    """Draw from softmax(scores): each token runs for a time distributed as Exp(1) over its weight, the first wins (the
    Gumbel-max trick without the outer logarithm).

    scores ``[n, k]``; token_ids ``[k]`` or ``[n, k]`` int32, the tokens that the columns stand for; keys ``[n, 2]``.
    Returns token ids ``[n]`` int64.
    """
    weights = scores.exp()
    if cutoff is not None:
        weights.masked_fill_(scores < cutoff, 0.0)
    winner = weights.div_(exponential_noise(token_ids, keys)).argmax(-1)
    if token_ids.dim() == 1:
        return winner
    return token_ids.gather(1, winner[:, None]).flatten().long()


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Two 32-bit keys per row from (seed, output position): the splitmix64 output function, applied twice.

    seeds ``[n]`` uint64, positions ``[n]``; returns ``[n, 2]`` int32.
    """
    with np.errstate(over="ignore"):
        mixed = _mix64(_mix64(seeds) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    keys: np.ndarray = mixed[:, None].view(np.int32)
    return keys


def _mix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def exponential_noise(token_ids: Tensor, keys: Tensor) -> Tensor:
    """Exp(1) numbers, a function of (key, token id) alone, the same on every device.

    token_ids ``[k]`` or ``[n, k]`` int32; keys ``[n, 2]`` int32; returns ``[n, k]`` float32, above 0 and finite. The hash is the
    32-bit finalizer of MurmurHash3, keyed before and within; int32 products wrap, and shifts are masked to be logical.
    """
    h = token_ids * -1640531535 + keys[:, :1]
    h ^= (h >> 16) & 0xFFFF
    h *= -2048144789
    h ^= keys[:, 1:]
    h ^= (h >> 13) & 0x7FFFF
    h *= -1028477387
    h ^= (h >> 16) & 0xFFFF
    u = (h & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    # Not 1, to which the greatest round: without end, the noise would stop even a token that runs alone.
    u.clamp_(max=1 - 2.0**-24)
    # -log(1 - u): float32 is finest near u = 0, which is where winners come from.
    return u.neg_().log1p_().neg_()


# --- log-probabilities ------------------------------------------------------------------------------------------------


def _logprobs(raw: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As Logprobs has them, of ``raw`` ``[n, vocab]`` and the chosen ``token_ids`` ``[n]``."""
    logprobs = raw.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1).add_(1)
    if most:
        top, top_ids = _best(logprobs, most)
    else:
        top, top_ids = logprobs[:, :0], token_ids[:0].expand(len(raw), 0)
    return chosen.flatten(), ranks, top_ids, top


__all__ = [
    "Drawn",
    "Logprobs",
    "Penalties",
    "Sampled",
    "SamplingInputs",
    "draw",
    "exponential_noise",
    "noise_keys",
    "raw_logprobs",
    "report",
    "sample",
]
