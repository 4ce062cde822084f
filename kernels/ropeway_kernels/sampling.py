"""Sampling in Triton: from a row of logits to a token without a copy of the vocabulary, and without a word to the host.

Owns: the GPU's argmax, filters (top_k, top_p, min_p), noise, race, penalties and log-probabilities.
Must not know: requests, the order in which parameters apply. Called by: ropeway.worker.sampler, whose torch path says
what every number here means.

A vocabulary is seen as blocks of 128 tokens. A first pass keeps only each block's greatest logit; afterwards a block is
read again only where one of its tokens can matter. A token's score is (logit - best logit) / temperature, its weight
e^score, and its *depth* an integer that orders scores: 0 for the best, rising as they fall. The filters together are
one number per row, the greatest depth that stays; so equal scores stay or go together.

Every sum that decides something is of integers (counts, and weights in fixed point), so it is the same in any order:
a row's token depends on that row alone. All grids depend on shapes only, and nothing waits for the device, so a step
that uses these functions can be captured in a CUDA graph: then every row is among ``rows`` and ``filtered``, and a
temperature of 0 or filters without effect in the parameters' tensors turn them off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ropeway_kernels.aot import Variant

_BLOCK = tl.constexpr(128)  # tokens
_TILE = tl.constexpr(32)  # blocks that one program of a grid over the vocabulary takes
_CHUNK = tl.constexpr(4096)  # their tokens
_WIDE_TILE = 64  # blocks at a time where one program takes a whole row
_MAX_VOCAB = 2**19 - 1  # above, a sum of weights could leave 64 bits

# The depth is the bit pattern of -score, less _OFFSET. Scores above -3.1e-37 share depth 0; those below -104, whose
# weight is 0 in float32, lie at _DEPTHS or deeper. That makes 30 bits: three histograms of 10.
_OFFSET = tl.constexpr(0x02D00000)
_DEPTHS = tl.constexpr(2**30)
_BINS = tl.constexpr(1024)
_ONE = tl.constexpr(2.0**44)  # weight 1 in fixed point

_NO_TOKEN = tl.constexpr(2**31 - 1)
_NOTHING = tl.constexpr(-(2**63) + 1)  # below every packed (logit, token)


# --- for each row its best token --------------------------------------------------------------------------------------


def draw(
    logits: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: Tensor | None = None,
    noise_keys: Tensor | None = None,
    filtered: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per row of ``[num_rows, vocab]`` float32 logits: the best, or for ``rows`` ``[n]`` int64 one at random.

    temperature ``[n, 1]`` float32 (0 for the best after all), noise_keys ``[n, 2]`` int32. ``filtered`` ``[m]`` int64
    says which of the n have filters: top_k ``[m, 1]`` int64 (the vocabulary size for no bound), top_p (1 for all) and
    min_p (0 for all) ``[m, 1]`` float32.
    There is a row at least. Returns each row's greatest logit ``[num_rows]``, NaN if the row holds one, and the tokens
    ``[num_rows]`` int64, 0 where the greatest logit is not finite. Of equals the first wins.
    """
    vocab = logits.shape[1]
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert vocab <= _MAX_VOCAB, f"vocabularies above {_MAX_VOCAB} have no sampling kernels"
    greatest, best, token_ids = _survey(logits)
    if rows is None:
        return best, token_ids
    assert temperature is not None
    assert noise_keys is not None
    temperature, noise_keys = temperature.contiguous(), noise_keys.contiguous()
    cutoffs = None
    if filtered is not None:
        assert top_k is not None
        assert top_p is not None
        assert min_p is not None
        cutoffs = _cutoffs(logits, greatest, best, rows, temperature, filtered, top_k, top_p, min_p)
    count, num_chunks = rows.shape[0], triton.cdiv(vocab, _CHUNK.value)
    leads = logits.new_empty(count, num_chunks)
    leaders = torch.empty(count, num_chunks, dtype=torch.int32, device=logits.device)
    _race_kernel[(count, num_chunks)](
        logits,
        logits.stride(0),
        vocab,
        greatest,
        greatest.shape[1],
        best,
        rows,
        temperature,
        noise_keys,
        cutoffs,
        leads,
        leaders,
        FILTERED=cutoffs is not None,
        num_warps=8,
    )
    _winner_kernel[(count,)](
        best,
        rows,
        temperature,
        leads,
        leaders,
        num_chunks,
        token_ids,
        PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return best, token_ids


def _survey(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The greatest logit of each block ``[num_rows, num_blocks]``, and what draw() returns of the best tokens."""
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, _BLOCK.value)
    greatest, best = logits.new_empty(num_rows, num_blocks), logits.new_empty(num_rows)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    line = logits, logits.stride(0), vocab, greatest, num_blocks
    _survey_kernel[(num_rows, triton.cdiv(vocab, _CHUNK.value))](*line, num_warps=8)
    _best_kernel[(num_rows,)](*line, best, token_ids, PADDED_BLOCKS=triton.next_power_of_2(num_blocks))
    return greatest, best, token_ids


def _cutoffs(
    logits: Tensor,
    greatest: Tensor,
    best: Tensor,
    rows: Tensor,
    temperature: Tensor,
    filtered: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """The greatest depth that stays, ``[n]`` int32 for the n random rows."""
    num_filtered, num_blocks = filtered.shape[0], greatest.shape[1]
    padded_blocks = triton.next_power_of_2(num_blocks)
    cutoffs = torch.full((rows.shape[0],), _DEPTHS.value - 1, dtype=torch.int32, device=logits.device)
    _cutoff_kernel[(num_filtered,)](
        logits,
        logits.stride(0),
        logits.shape[1],
        greatest,
        num_blocks,
        best,
        rows,
        temperature,
        filtered,
        top_k.contiguous(),
        top_p.contiguous(),
        min_p.contiguous(),
        cutoffs.new_empty(num_filtered, padded_blocks),
        cutoffs.new_empty(num_filtered, 3 * _BINS.value),
        rows.new_empty(num_filtered, 5 * _BINS.value),
        cutoffs,
        PADDED_BLOCKS=padded_blocks,
        TILE=min(_WIDE_TILE, padded_blocks),
        num_warps=16,
    )
    return cutoffs


@triton.jit
def _survey_kernel(logits, stride, vocab, greatest, num_blocks):
    """Each block's greatest logit, NaN if it holds one. Grid (rows, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    tokens = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    is_nan = x != x
    top = tl.max(tl.where(is_nan, float("-inf"), x), 1)
    top = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), top)
    tl.store(greatest + row * num_blocks + blocks, top, mask=blocks < num_blocks)


@triton.jit
def _best_kernel(logits, stride, vocab, greatest, num_blocks, best, token_ids, PADDED_BLOCKS: tl.constexpr):
    """The row's greatest logit and the first token that has it. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED_BLOCKS)
    tops = tl.load(greatest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    is_nan = tops != tops
    tops = tl.where(is_nan, float("-inf"), tops)
    peak = tl.max(tops, 0)
    block = tl.min(tl.where(tops == peak, blocks, PADDED_BLOCKS), 0)
    tokens = block * _BLOCK + tl.arange(0, _BLOCK)
    x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    token = tl.min(tl.where(x == peak, tokens, _NO_TOKEN), 0)
    peak = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), peak)
    tl.store(best + row, peak)
    tl.store(token_ids + row, tl.where(tl.abs(peak) < float("inf"), token, 0).to(tl.int64))


# --- scores and noise -------------------------------------------------------------------------------------------------


@triton.jit
def _score(x, peak, temperature):
    # Shifted before it is scaled: the best is exactly 0 whatever the temperature. Rounded as on every other device.
    return tl.div_rn(x - peak, temperature)


@triton.jit
def _depth(score):
    """Of scores that are at most 0."""
    return tl.maximum((score.to(tl.int32, bitcast=True) & 0x7FFFFFFF) - _OFFSET, 0)


@triton.jit
def _weight_at(depth):
    return tl.exp(-((depth + _OFFSET).to(tl.float32, bitcast=True)))


@triton.jit
def _mass(weight):
    """A weight in fixed point. What rounds to 0 is, over a whole vocabulary, less than a float32 of it can show."""
    return (weight * _ONE).to(tl.int64)


@triton.jit
def _noise(tokens, first_key, second_key):
    """Exp(1) numbers, as worker.sampler.exponential_noise makes them: a hash of (keys, token) is a uniform u, and
    -log(1 - u) the noise. The device's own logarithm is too coarse near 1, which is where winners come from."""
    h = tokens.to(tl.uint32) * 0x9E3779B1 + first_key.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = h ^ second_key.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    u = ((h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    u = tl.minimum(u, 0.999999940395355)  # 1 - 2^-24: a token that stays must have some speed
    # 1 - u = (1 - f) 2^-e with f in [0, 1/2]; below 1/2 f is u itself, to the last bit.
    rest = 1.0 - u
    bits = rest.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    f = tl.where(u < 0.5, u, 1.0 - fraction)
    e = tl.where(u < 0.5, 0, 126 - (bits >> 23)).to(tl.float32)
    # -log(1 - f) = 2 artanh(s)
    s = f / (2.0 - f)
    z = s * s
    series = tl.fma(z, 0.07692308, 0.09090909)
    series = tl.fma(z, series, 0.11111111)
    series = tl.fma(z, series, 0.14285714)
    series = tl.fma(z, series, 0.2)
    series = tl.fma(z, series, 0.33333334)
    series = tl.fma(z, series, 1.0)
    return tl.fma(e, 0.6931472, 2.0 * s * series)


# --- the filters ------------------------------------------------------------------------------------------------------


@triton.jit
def _clear(counts, masses):
    bins = tl.arange(0, _BINS)
    for part in tl.static_range(5):
        if part < 3:
            tl.store(counts + part * _BINS + bins, tl.zeros([_BINS], tl.int32))
        tl.store(masses + part * _BINS + bins, tl.zeros([_BINS], tl.int64))


@triton.jit
def _tally(
    logits,
    vocab,
    peak,
    temperature,
    found,
    num_found,
    floor,
    prefix,
    SHIFT: tl.constexpr,
    counts,
    masses,
    counted,
    weighed,
    TILE: tl.constexpr,
):
    """Count and weigh the tokens of depths (prefix, bin, any SHIFT bits) into their bins, down to the depth ``floor``.
    They all lie in the blocks that are listed in ``found``."""
    for begin in range(0, num_found, TILE):
        places = begin + tl.arange(0, TILE)
        blocks = tl.load(found + places, mask=places < num_found, other=0)
        tokens = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        inside = (places < num_found)[:, None] & (tokens < vocab)
        score = _score(tl.load(logits + tokens, mask=inside, other=float("-inf")), peak, temperature)
        depth = _depth(score)
        here = (depth >> (SHIFT + 10) == prefix) & (depth <= floor)
        bins = (depth >> SHIFT) & (_BINS - 1)
        if counted:
            tl.atomic_add(counts + bins, 1, mask=here, sem="relaxed")
        if weighed:
            mass = _mass(tl.exp(score))
            tl.atomic_add(masses + bins, mass, mask=here & (mass > 0), sem="relaxed")
    tl.debug_barrier()  # a barrier orders the program's own atomics before the loads that follow


@triton.jit
def _find(histogram, before, bound):
    """The last bin that begins below ``bound``, when the first begins at ``before``; and where it begins."""
    bins = tl.arange(0, _BINS)
    amounts = tl.load(histogram + bins, volatile=True)
    begins = before + tl.cumsum(amounts, 0) - amounts
    place = tl.maximum(tl.sum((begins < bound).to(tl.int32), 0) - 1, 0)
    return place, before + tl.sum(tl.where(bins < place, amounts, 0), 0)


@triton.jit
def _before(histogram, place):
    bins = tl.arange(0, _BINS)
    return tl.sum(tl.where(bins < place, tl.load(histogram + bins, volatile=True), 0), 0)


@triton.jit
def _cutoff_kernel(
    logits,
    stride,
    vocab,
    greatest,
    num_blocks,
    best,
    rows,
    temperature,
    filtered,
    top_k,
    top_p,
    min_p,
    found,
    counts,
    masses,
    cutoffs,
    PADDED_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The greatest depth that stays. Grid (filtered rows,).

    A depth d stays if fewer than top_k tokens, and less than top_p of the weight that top_k leaves, lie above it, and
    if its own weight is min_p at least; all three then hold for every depth above d too. The first two are answered
    exactly by radix selection: a histogram of the depths' upper 10 bits, then one of the next 10 within the bin that
    was found, then the last 10. found, counts and masses are room for one program each.
    """
    index = tl.program_id(0).to(tl.int64)
    line = tl.load(filtered + index)
    row = tl.load(rows + line)
    peak = tl.load(best + row)
    warmth = tl.load(temperature + line)
    if (tl.abs(peak) < float("inf")) & (warmth > 0):
        k = tl.minimum(tl.load(top_k + index), vocab).to(tl.int32)
        p = tl.load(top_p + index)
        least = tl.load(min_p + index)
        bounded = k < vocab
        nucleus = p < 1.0
        logits += row * stride
        found += index * PADDED_BLOCKS
        counts += index * (3 * _BINS)
        masses += index * (5 * _BINS)
        cutoff = tl.zeros_like(k) + (_DEPTHS - 1)

        if bounded | nucleus:
            # Neither cutoff lies below `floor`. At least k tokens reach the greatest score of the k-th best block; its
            # upper bits will do. And tokens lighter than (1 - top_p) / vocab weigh less than 1 - top_p together, when
            # the best alone weighs 1; half of that, to be safe from rounding.
            blocks = tl.arange(0, PADDED_BLOCKS)
            tops = tl.load(greatest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
            depths = _depth(_score(tops, peak, warmth))
            floor = tl.zeros_like(k) + (_DEPTHS - 1)
            if not bounded:
                floor = tl.minimum(_depth(tl.log(tl.maximum(1.0 - p, 1e-9) / (2.0 * vocab)) - 0.01), floor)
            elif k <= num_blocks:
                floor = tl.zeros_like(k)
                for step in range(14):
                    deeper = floor + (1 << (29 - step))
                    floor = tl.where(tl.sum((depths < deeper).to(tl.int32), 0) < k, deeper, floor)
                floor += 0xFFFF
            reaches = depths <= floor
            num_found = tl.sum(reaches.to(tl.int32), 0)
            tl.store(found + tl.cumsum(reaches.to(tl.int32), 0) - 1, blocks, mask=reaches)
            _clear(counts, masses)
            tl.debug_barrier()

            _tally(logits, vocab, peak, warmth, found, num_found, floor, 0, 20, counts, masses, bounded, nucleus, TILE)
            if bounded:
                cutoff, fewer = _find(counts, tl.zeros_like(k), k)
                whole = _before(masses, cutoff)  # weight of all that top_k leaves
                for level in tl.static_range(1, 3):
                    histogram, weights = counts + level * _BINS, masses + level * _BINS
                    _tally(
                        logits,
                        vocab,
                        peak,
                        warmth,
                        found,
                        num_found,
                        floor,
                        cutoff,
                        20 - 10 * level,
                        histogram,
                        weights,
                        bounded,
                        nucleus,
                        TILE,
                    )
                    place, fewer = _find(histogram, fewer, k)
                    whole += _before(weights, place)
                    cutoff = cutoff * _BINS + place
                whole += (k - fewer) * _mass(_weight_at(cutoff))  # of equals at the end, as many as top_k has room for
            else:
                sums = tl.zeros([TILE * _BLOCK], tl.int64)
                for begin in range(0, vocab, TILE * _BLOCK):
                    tokens = begin + tl.arange(0, TILE * _BLOCK)
                    x = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf"))
                    sums += _mass(tl.exp(_score(x, peak, warmth)))
                whole = tl.sum(sums, 0)

            if nucleus:
                share = (p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
                edge, above = _find(masses, tl.zeros_like(whole), share)
                for level in tl.static_range(1, 3):
                    weights = masses + (level + 2) * _BINS
                    _tally(
                        logits,
                        vocab,
                        peak,
                        warmth,
                        found,
                        num_found,
                        floor,
                        edge,
                        20 - 10 * level,
                        counts,
                        weights,
                        False,
                        nucleus,
                        TILE,
                    )
                    place, above = _find(weights, above, share)
                    edge = edge * _BINS + place
                cutoff = tl.minimum(cutoff, edge)

        if least > 0:
            bins = tl.arange(0, _BINS)
            lightest = tl.zeros_like(k)
            for level in tl.static_range(3):
                stays = _weight_at(lightest + (bins << (20 - 10 * level))) >= least
                lightest += tl.maximum(tl.sum(stays.to(tl.int32), 0) - 1, 0) << (20 - 10 * level)
            cutoff = tl.minimum(cutoff, lightest)
        tl.store(cutoffs + line, cutoff)


# --- the race ---------------------------------------------------------------------------------------------------------


@triton.jit
def _race_kernel(
    logits,
    stride,
    vocab,
    greatest,
    num_blocks,
    best,
    rows,
    temperature,
    noise_keys,
    cutoffs,
    leads,
    leaders,
    FILTERED: tl.constexpr,
):
    """Each token that stays runs at weight / noise; the chunk's fastest, and the first of equals. Grid (n, chunks)."""
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows + line)
    peak = tl.load(best + row)
    warmth = tl.load(temperature + line)
    if (tl.abs(peak) < float("inf")) & (warmth > 0):
        blocks = chunk * _TILE + tl.arange(0, _TILE)
        tokens = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        inside = tokens < vocab
        if FILTERED:
            cutoff = tl.load(cutoffs + line)
            tops = tl.load(greatest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
            inside = inside & (_depth(_score(tops, peak, warmth)) <= cutoff)[:, None]
        else:
            cutoff = _DEPTHS - 1
        score = _score(tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")), peak, warmth)
        noise = _noise(tokens, tl.load(noise_keys + 2 * line), tl.load(noise_keys + 2 * line + 1))
        speed = tl.where(_depth(score) <= cutoff, tl.exp(score) / noise, -1.0)
        lead = tl.max(tl.max(speed, 1), 0)
        leader = tl.min(tl.min(tl.where(speed == lead, tokens, _NO_TOKEN), 1), 0)
        place = line * tl.num_programs(1) + chunk
        tl.store(leads + place, lead)
        tl.store(leaders + place, leader)


@triton.jit
def _winner_kernel(
    best,
    rows,
    temperature,
    leads,
    leaders,
    num_chunks,
    token_ids,
    PADDED_CHUNKS: tl.constexpr,
):
    """The fastest of the chunks' fastest. Grid (n,)."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    if (tl.abs(tl.load(best + row)) < float("inf")) & (tl.load(temperature + line) > 0):
        chunks = tl.arange(0, PADDED_CHUNKS)
        speeds = tl.load(leads + line * num_chunks + chunks, mask=chunks < num_chunks, other=-1.0)
        tokens = tl.load(leaders + line * num_chunks + chunks, mask=chunks < num_chunks, other=_NO_TOKEN)
        winner = tl.min(tl.where(speeds == tl.max(speeds, 0), tokens, _NO_TOKEN), 0)
        tl.store(token_ids + row, winner.to(tl.int64))


# --- penalties --------------------------------------------------------------------------------------------------------


def penalise(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
) -> None:
    """Penalties in place on ``rows`` ``[n]`` int64 of ``[lines, vocab]`` float32 logits.

    presence, frequency and repetition ``[n, 1]`` float32; ``slots`` ``[n]`` int64 are the rows' lines in output_counts
    ``[*, vocab]`` int32 and in_prompt ``[*, vocab]`` bool.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert output_counts.is_contiguous()
    assert in_prompt.is_contiguous()
    vocab = logits.shape[1]
    if rows.shape[0] == 0:
        return
    _penalise_kernel[(rows.shape[0], triton.cdiv(vocab, _CHUNK.value))](
        logits,
        logits.stride(0),
        vocab,
        rows,
        slots,
        presence.contiguous(),
        frequency.contiguous(),
        repetition.contiguous(),
        output_counts,
        in_prompt.view(torch.uint8),
        num_warps=8,
        enable_fp_fusion=False,  # two roundings, as everywhere else: equal logits stay equal on every device
    )


@triton.jit
def _penalise_kernel(logits, stride, vocab, rows, slots, presence, frequency, repetition, output_counts, in_prompt):
    """Grid (n, chunks)."""
    index = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * _CHUNK + tl.arange(0, _CHUNK)
    inside = tokens < vocab
    line = logits + tl.load(rows + index) * stride + tokens
    entry = tl.load(slots + index) * vocab + tokens
    x = tl.load(line, mask=inside, other=0.0)
    count = tl.load(output_counts + entry, mask=inside, other=0)
    generated = count > 0
    seen = generated | (tl.load(in_prompt + entry, mask=inside, other=0) != 0)
    factor = tl.load(repetition + index)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    x -= tl.load(frequency + index) * count.to(tl.float32)
    x -= tl.load(presence + index) * generated.to(tl.float32)
    tl.store(line, x, mask=inside)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of ``[n, vocab]`` float32 logits: the log-probability ``[n]`` float32 and rank ``[n]`` int64 (1 for
    the best) of ``token_ids`` ``[n]`` int64, and ids ``[n, count]`` int64 and log-probabilities ``[n, count]`` of the
    best tokens, falling, of equals the first. count: at most the vocabulary size.

    Meant for tens of tokens: a chunk finds its best one after the other.
    """
    n, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert 0 <= count <= vocab
    chosen, ranks = logits.new_empty(n), token_ids.new_empty(n)
    top_ids, top = token_ids.new_empty(n, count), logits.new_empty(n, count)
    if n == 0:
        return chosen, ranks, top_ids, top
    chunks = triton.cdiv(vocab, _CHUNK.value)
    peaks, sums = logits.new_empty(n, chunks), logits.new_empty(n, chunks)
    better = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    candidates = token_ids.new_empty(n, chunks, count)
    _logprob_chunk_kernel[(n, chunks)](
        logits, logits.stride(0), vocab, token_ids, count, peaks, sums, better, candidates, num_warps=8
    )
    _logprob_row_kernel[(n,)](
        logits,
        logits.stride(0),
        token_ids,
        count,
        peaks,
        sums,
        better,
        candidates,
        chunks,
        chosen,
        ranks,
        top_ids,
        top,
        PADDED_CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return chosen, ranks, top_ids, top


@triton.jit
def _logprob_chunk_kernel(logits, stride, vocab, token_ids, count, peaks, sums, better, candidates):
    """A chunk's greatest logit, the sum of e^(logit - that), how many are greater than the row's chosen logit, and the
    chunk's best ``count`` tokens, falling. Grid (n, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += row * stride
    tokens = chunk * _CHUNK + tl.arange(0, _CHUNK)
    inside = tokens < vocab
    x = tl.load(logits + tokens, mask=inside, other=float("-inf"))
    chosen = tl.load(logits + tl.load(token_ids + row))
    peak = tl.max(x, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # such a chunk adds nothing, not a NaN
    place = row * tl.num_programs(1) + chunk
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(x - shift), 0))
    tl.store(better + place, tl.sum((x > chosen).to(tl.int32), 0))
    # (logit, token) as one integer, of equals the first token greatest; an integer orders as its float does once the
    # lower bits of negative ones are flipped.
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.to(tl.int64) << 32) | (tokens ^ _NO_TOKEN).to(tl.int64)
    packed = tl.where(inside, packed, _NOTHING)
    for i in range(count):
        top = tl.max(packed, 0)
        tl.store(candidates + place * count + i, top)
        packed = tl.where(packed == top, _NOTHING, packed)


@triton.jit
def _logprob_row_kernel(
    logits,
    stride,
    token_ids,
    count,
    peaks,
    sums,
    better,
    candidates,
    num_chunks,
    chosen,
    ranks,
    top_ids,
    top,
    PADDED_CHUNKS: tl.constexpr,
):
    """Joins a row's chunks. Grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    inside = chunks < num_chunks
    place = row * num_chunks + chunks
    chunk_peaks = tl.load(peaks + place, mask=inside, other=float("-inf"))
    peak = tl.max(chunk_peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.load(sums + place, mask=inside, other=0.0) * tl.exp(chunk_peaks - shift), 0)
    log_total = tl.log(tl.maximum(total, 1e-37))
    x = tl.load(logits + row * stride + tl.load(token_ids + row))
    tl.store(chosen + row, x - shift - log_total)
    tl.store(ranks + row, 1 + tl.sum(tl.load(better + place, mask=inside, other=0), 0).to(tl.int64))
    taken = tl.zeros([PADDED_CHUNKS], tl.int32)  # of each chunk's candidates, which fall: a merge
    for i in range(count):
        heads = tl.load(candidates + place * count + taken, mask=inside & (taken < count), other=_NOTHING)
        head = tl.max(heads, 0)
        taken += (heads == head).to(tl.int32)
        ordered = (head >> 32).to(tl.int32)
        value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(top + row * count + i, value - shift - log_total)
        tl.store(top_ids + row * count + i, (head & 0xFFFFFFFF) ^ _NO_TOKEN)


# --- ahead of time ----------------------------------------------------------------------------------------------------


def variants() -> list[Variant]:
    """Every kernel as it is launched for vocabularies of 32,000, 49,152, 128,256 and 151,936 tokens."""
    from ropeway_kernels.aot import Variant

    survey = {"logits": "*fp32", "stride": "i32", "vocab": "i32", "greatest": "*fp32", "num_blocks": "i32"}
    race = {**survey, "best": "*fp32", "rows": "*i64", "temperature": "*fp32"}
    filters = {
        "filtered": "*i64",
        "top_k": "*i64",
        "top_p": "*fp32",
        "min_p": "*fp32",
        "found": "*i32",
        "counts": "*i32",
        "masses": "*i64",
        "cutoffs": "*i32",
    }
    runners = {"noise_keys": "*i32", "cutoffs": "*i32", "leads": "*fp32", "leaders": "*i32", "FILTERED": "constexpr"}
    unfiltered = {**race, **runners, "cutoffs": "constexpr"}
    winner = {
        "best": "*fp32",
        "rows": "*i64",
        "temperature": "*fp32",
        "leads": "*fp32",
        "leaders": "*i32",
        "num_chunks": "i32",
        "token_ids": "*i64",
        "PADDED_CHUNKS": "constexpr",
    }
    penalties = {
        "logits": "*fp32",
        "stride": "i32",
        "vocab": "i32",
        "rows": "*i64",
        "slots": "*i64",
        "presence": "*fp32",
        "frequency": "*fp32",
        "repetition": "*fp32",
        "output_counts": "*i32",
        "in_prompt": "*u8",
    }
    partial = {"peaks": "*fp32", "sums": "*fp32", "better": "*i32", "candidates": "*i64"}
    chunk = {"logits": "*fp32", "stride": "i32", "vocab": "i32", "token_ids": "*i64", "count": "i32", **partial}
    row = {"logits": "*fp32", "stride": "i32", "token_ids": "*i64", "count": "i32", **partial, "num_chunks": "i32"}
    row |= {"chosen": "*fp32", "ranks": "*i64", "top_ids": "*i64", "top": "*fp32", "PADDED_CHUNKS": "constexpr"}
    even = ("stride", "vocab")
    found = [
        Variant("sampling_survey", _survey_kernel, survey, {}, num_warps=8, divisible_by_16=even),
        Variant(
            "sampling_race",
            _race_kernel,
            unfiltered,
            {"cutoffs": None, "FILTERED": False},
            num_warps=8,
            divisible_by_16=even,
        ),
        Variant(
            "sampling_race_filtered",
            _race_kernel,
            {**race, **runners},
            {"FILTERED": True},
            num_warps=8,
            divisible_by_16=even,
        ),
        Variant("sampling_penalise", _penalise_kernel, penalties, {}, num_warps=8, divisible_by_16=even),
        Variant("sampling_logprob_chunk", _logprob_chunk_kernel, chunk, {}, num_warps=8, divisible_by_16=even),
    ]
    for vocab in (32_000, 49_152, 128_256, 151_936):
        blocks = {"PADDED_BLOCKS": triton.next_power_of_2(triton.cdiv(vocab, _BLOCK.value))}
        chunks = {"PADDED_CHUNKS": triton.next_power_of_2(triton.cdiv(vocab, _CHUNK.value))}
        best = {**survey, "best": "*fp32", "token_ids": "*i64", "PADDED_BLOCKS": "constexpr"}
        cutoff = {**race, **filters, "PADDED_BLOCKS": "constexpr", "TILE": "constexpr"}
        found += [
            Variant(f"sampling_best_{vocab}", _best_kernel, best, blocks, divisible_by_16=even),
            Variant(
                f"sampling_cutoff_{vocab}",
                _cutoff_kernel,
                cutoff,
                {**blocks, "TILE": _WIDE_TILE},
                num_warps=16,
                divisible_by_16=even,
            ),
            Variant(f"sampling_winner_{vocab}", _winner_kernel, winner, chunks, num_warps=1),
            Variant(f"sampling_logprob_row_{vocab}", _logprob_row_kernel, row, chunks, num_warps=1),
        ]
    return found


__all__ = ["draw", "logprobs", "penalise", "variants"]
