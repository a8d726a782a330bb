"""`reference.attention_packed` on the CPU, by loops that numba compiles. Outputs and LSE are float32.

The history is cut into splits of a fixed number of tokens, whose attention is computed apart (threads take a head and a split
each) and merged by LSE. The cuts depend on nothing but the number of tokens, so the result does not depend on the number of
threads. In a split, blocks of tokens are dequantized into a buffer that stays in the L1 cache and serves all query heads that
share the key head.

Loops are written for LLVM to vectorize: their lengths are constants of a compiled kernel (one for each head_dim and pair of
bits, kept on disk by numba), and what a lane reads lies beside what the next one reads.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from kvchat_kernels import torch_attend
from kvchat_kernels.reference import Packed
from torch import Tensor

BLOCK = 32
"""Tokens dequantized at once: the smallest group of keys."""

SPLIT = 512
"""Tokens whose attention is computed apart."""

TILE = 1024
"""Tokens staged at once for torch's matrix products."""

FEW_ROWS = 16
"""Rows (queries times query heads of a key head) up to which the loops here beat staging and torch's matrix products."""

# sums in any order, so that they can run in lanes; NaN and infinity keep their meaning
inlined = numba.njit(inline="always")
compiled = numba.njit(
    nogil=True, cache=True, parallel=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


@inlined
def _half(bits: Any) -> Any:
    """The float32 of a float16's bits."""
    sign, magnitude = (bits & 0x8000) << 16, (bits & 0x7FFF) << 13
    if magnitude >= 0x0F800000:  # infinity or NaN
        return np.uint32(sign | magnitude | 0x7F800000).view(np.float32)
    # the exponents' biases differ by 112; subnormals come out right
    return np.uint32(sign | magnitude).view(np.float32) * np.float32(2.0**112)


@inlined
def _exp(x: Any) -> Any:
    """e**x for float32 up to 88, to 2 units in the last place; below -87, e**-87. NaN stays NaN."""
    if x < np.float32(-87):
        x = np.float32(-87)
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@inlined
def _softmax(x: Any, softcap: Any) -> Any:
    """Turn scores into their softmax where they lie; returns their LSE. A softcap of 0 is none."""
    if softcap != 0:
        for i in range(x.shape[0]):
            doubled = 2 * x[i] / softcap
            doubled = np.float32(-40) if doubled < -40 else np.float32(40) if doubled > 40 else doubled
            x[i] = softcap - 2 * softcap / (_exp(doubled) + np.float32(1))
    top = x[0]
    for i in range(x.shape[0]):
        top = x[i] if x[i] > top else top
    total = np.float32(0)
    for i in range(x.shape[0]):
        x[i] = _exp(x[i] - top)
        total += x[i]
    for i in range(x.shape[0]):
        x[i] /= total
    return top + np.float32(np.log(total))


@inlined
def _unpack(codes: Any, bits: Any, dim: Any, out: Any) -> None:
    """Bit planes [BLOCK, dim * bits / 8] to codes [BLOCK, dim], uint8."""
    for t in range(BLOCK):
        row, to = codes[t], out[t]
        if bits == 4:
            for j in range(dim // 2):
                to[j] = row[j] & 15
                to[dim // 2 + j] = row[j] >> 4
        else:
            for f in range(4):
                for j in range(dim // 4):
                    to[f * (dim // 4) + j] = (row[j] >> (2 * f)) & 3
        if bits == 3:
            for f in range(8):
                for j in range(dim // 8):
                    to[f * (dim // 8) + j] |= ((row[dim // 4 + j] >> f) & 1) << 2


@inlined
def _keys(
    codes: Any, scale: Any, zero: Any, bits: Any, dim: Any, cos: Any, sin: Any, raw: Any, out: Any
) -> None:
    """A block of keys whose tokens share scale and zero [dim]; turned by cos and sin [BLOCK, dim] unless they are empty."""
    _unpack(codes, bits, dim, raw)
    s, z = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for c in range(dim):
        s[c] = _half(scale[c])
        z[c] = _half(zero[c])
    for t in range(BLOCK):
        for c in range(dim):
            out[t, c] = np.float32(raw[t, c]) * s[c] + z[c]
    if cos.shape[0]:
        half = dim // 2
        for t in range(BLOCK):
            for c in range(half):
                a, b = out[t, c], out[t, half + c]
                out[t, c] = a * cos[t, c] - b * sin[t, c]
                out[t, half + c] = b * cos[t, half + c] + a * sin[t, half + c]


@inlined
def _values(codes: Any, scale: Any, zero: Any, bits: Any, dim: Any, group: Any, raw: Any, out: Any) -> None:
    """A block of values; scale and zero [BLOCK * ceil(dim / group)]."""
    _unpack(codes, bits, dim, raw)
    groups = (dim + group - 1) // group
    s, z = np.empty(BLOCK * groups, np.float32), np.empty(BLOCK * groups, np.float32)
    for g in range(BLOCK * groups):
        s[g] = _half(scale[g])
        z[g] = _half(zero[g])
    for t in range(BLOCK):
        for g in range(groups):
            step, low = s[t * groups + g], z[t * groups + g]
            for c in range(g * group, min(dim, (g + 1) * group)):
                out[t, c] = np.float32(raw[t, c]) * step + low


class _Flat(NamedTuple):
    """Packed rows of all heads as flat arrays, from the first byte in use to the last, and how far a head is from the next."""

    codes: Any
    scale: Any
    zero: Any
    codes_stride: int
    scale_stride: int


def _flat(packed: Packed) -> _Flat:
    codes, scale, zero = packed[:3]
    if scale.stride() != zero.stride():
        raise ValueError("scale and zero must lie in memory alike")
    arrays = []
    for part in (codes, scale.view(torch.uint16), zero.view(torch.uint16)):
        heads, rows, width = part.shape
        if part.stride(2) != 1 or part.stride(1) != width:
            part = part.contiguous()
        arrays.append(part.as_strided(((heads - 1) * part.stride(0) + rows * width,), (1,)).numpy())
    return _Flat(arrays[0], arrays[1], arrays[2], codes.stride(0), scale.stride(0))


@inlined
def _rows(flat: Any, start: Any, count: Any, width: Any) -> Any:
    return flat[start : start + count * width].reshape(count, width)


@functools.cache
def _kernels(dim: int, key_bits: int, value_bits: int, value_group: int) -> tuple[Any, Any]:
    """`attend` and `stage`, compiled at their first call."""
    key_row, value_row, groups = dim * key_bits // 8, dim * value_bits // 8, -(-dim // value_group)

    @compiled
    def attend(
        query: Any, keys: Any, key_group: Any, values: Any, tokens: Any, cos: Any, sin: Any, softcap: Any
    ) -> Any:
        """query [Hkv, rows, dim], scaled. Returns output [Hkv, rows, dim] and LSE [Hkv, rows]; softcap 0 is none."""
        k_codes, k_scale, k_zero, k_codes_stride, k_scale_stride = keys
        v_codes, v_scale, v_zero, v_codes_stride, v_scale_stride = values
        heads, rows, _ = query.shape
        splits = -(-tokens // SPLIT)
        outputs = np.zeros((heads, splits, rows, dim), np.float32)
        lses = np.empty((heads, splits, rows), np.float32)
        for job in numba.prange(heads * splits):
            h, split = job // splits, job % splits
            first = split * SPLIT
            count = min(SPLIT, tokens - first)
            q, o = query[h], outputs[h, split]
            raw = np.empty((BLOCK, dim), np.uint8)
            block = np.empty((BLOCK, dim), np.float32)
            weights = np.empty((rows, SPLIT), np.float32)
            for at in range(0, count, BLOCK):
                t0 = first + at
                scale_at = h * k_scale_stride + t0 // key_group * dim
                turned = min(t0, cos.shape[0])
                _keys(
                    _rows(k_codes, h * k_codes_stride + t0 * key_row, BLOCK, key_row),
                    k_scale[scale_at : scale_at + dim],
                    k_zero[scale_at : scale_at + dim],
                    key_bits,
                    dim,
                    cos[turned : turned + BLOCK],
                    sin[turned : turned + BLOCK],
                    raw,
                    block,
                )
                for r in range(rows):
                    for t in range(BLOCK):
                        score = np.float32(0)
                        for c in range(dim):
                            score += q[r, c] * block[t, c]
                        weights[r, at + t] = score
            for r in range(rows):
                lses[h, split, r] = _softmax(weights[r, :count], softcap)
            for at in range(0, count, BLOCK):
                t0 = first + at
                scale_at = h * v_scale_stride + t0 * groups
                _values(
                    _rows(v_codes, h * v_codes_stride + t0 * value_row, BLOCK, value_row),
                    v_scale[scale_at : scale_at + BLOCK * groups],
                    v_zero[scale_at : scale_at + BLOCK * groups],
                    value_bits,
                    dim,
                    value_group,
                    raw,
                    block,
                )
                for r in range(rows):
                    for t in range(0, BLOCK, 8):
                        w = weights[r, at + t : at + t + 8]
                        for c in range(dim):
                            o[r, c] += (
                                w[0] * block[t, c]
                                + w[1] * block[t + 1, c]
                                + w[2] * block[t + 2, c]
                                + w[3] * block[t + 3, c]
                                + w[4] * block[t + 4, c]
                                + w[5] * block[t + 5, c]
                                + w[6] * block[t + 6, c]
                                + w[7] * block[t + 7, c]
                            )
        output = np.zeros((heads, rows, dim), np.float32)
        lse = np.empty((heads, rows), np.float32)
        for h in range(heads):
            for r in range(rows):
                shares = lses[h, :, r].copy()
                lse[h, r] = _softmax(shares, np.float32(0))
                for split in range(splits):
                    for c in range(dim):
                        output[h, r, c] += shares[split] * outputs[h, split, r, c]
        return output, lse

    @compiled
    def stage(
        keys: Any, key_group: Any, values: Any, first: Any, cos: Any, sin: Any, key_out: Any, value_out: Any
    ) -> None:
        """Tokens from `first` on, as many as key_out and value_out [Hkv, n, dim] have room for."""
        k_codes, k_scale, k_zero, k_codes_stride, k_scale_stride = keys
        v_codes, v_scale, v_zero, v_codes_stride, v_scale_stride = values
        heads, count, _ = key_out.shape
        blocks = count // BLOCK
        for job in numba.prange(heads * blocks):
            h, at = job // blocks, job % blocks * BLOCK
            t0 = first + at
            raw = np.empty((BLOCK, dim), np.uint8)
            scale_at = h * k_scale_stride + t0 // key_group * dim
            turned = min(t0, cos.shape[0])
            _keys(
                _rows(k_codes, h * k_codes_stride + t0 * key_row, BLOCK, key_row),
                k_scale[scale_at : scale_at + dim],
                k_zero[scale_at : scale_at + dim],
                key_bits,
                dim,
                cos[turned : turned + BLOCK],
                sin[turned : turned + BLOCK],
                raw,
                key_out[h, at : at + BLOCK],
            )
            scale_at = h * v_scale_stride + t0 * groups
            _values(
                _rows(v_codes, h * v_codes_stride + t0 * value_row, BLOCK, value_row),
                v_scale[scale_at : scale_at + BLOCK * groups],
                v_zero[scale_at : scale_at + BLOCK * groups],
                value_bits,
                dim,
                value_group,
                raw,
                value_out[h, at : at + BLOCK],
            )

    return attend, stage


def attention_packed(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    if key.axis != "channel" or value.axis != "token" or key.group % BLOCK:
        raise ValueError("keys go by channel in groups of whole blocks, values by token")
    count, dim = query.shape[1:]
    kv_heads, tokens, _ = key.codes.shape
    attend, stage = _kernels(dim, key.bits, value.bits, value.group)
    keys, values = _flat(key), _flat(value)
    none = np.empty((0, dim), np.float32)
    cos, sin = (none, none) if rope is None else (t.float().contiguous().numpy() for t in rope)
    rows = query.shape[0] // kv_heads * count
    if rows <= FEW_ROWS:
        folded = (query.float() * scaling).reshape(kv_heads, rows, dim).numpy()
        output, lse = attend(folded, keys, key.group, values, tokens, cos, sin, np.float32(softcap or 0))
        return (
            torch.from_numpy(output).reshape(query.shape),
            torch.from_numpy(lse).reshape(query.shape[:2]),
        )
    state = None
    for first in range(0, tokens, TILE):
        staged = torch.empty(2, kv_heads, min(TILE, tokens - first), dim)
        stage(keys, key.group, values, first, cos, sin, staged[0].numpy(), staged[1].numpy())
        state = torch_attend.merge(
            state, torch_attend.attention(query, staged[0], staged[1], scaling, softcap=softcap)
        )
    assert state is not None
    return state
