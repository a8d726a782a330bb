"""`reference_ranked.attention_packed` on the CPU: kvchat's own formats, by loops that numba compiles. Outputs and LSE are float32.

As `cpu_attend`, but keys are unpacked channel by channel into a block [dim, group], in which tokens lie side by side: codes, RoPE
and scores then run along tokens. Values stay rotated: the sum over tokens is rotated back once.

numba keeps what it compiled as long as this file does not change: touch it after a change of `cpu_loops`.
"""

import functools
from typing import Any

import numpy as np
import torch
from kvchat_kernels import torch_attend
from kvchat_kernels.cpu_attend import FEW_ROWS, TILE, _shared
from kvchat_kernels.cpu_loops import (
    BLOCK,
    SPLIT,
    _cap,
    _half,
    _join,
    _lanes,
    _run,
    _softmax,
    _unpack,
    compiled,
    inlined,
)
from kvchat_kernels.reference_ranked import LEVELS, PackedRanked, PackedRotated, decode_scale
from kvchat_kernels.torch_ranked import rotate_back
from torch import Tensor

_SCALES = decode_scale(torch.arange(256)).numpy()


def attention_packed(
    query: Tensor,
    key: PackedRanked,
    value: PackedRotated,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    heads, count, dim = query.shape
    kv_heads, blocks, _ = key.codes.shape
    tokens = blocks * key.group
    attend, stage = kernels(dim, key.bits, key.group, value.bits)
    keys = (*map(_flat, key[:3]), key.order.numpy())
    values = (*map(_flat, value[:2]),)
    none = np.empty(0, np.float32), 0
    cos, sin = (none, none) if rope is None else (_columns(t) for t in rope)
    rows = heads // kv_heads * count
    if rows <= FEW_ROWS:
        folded = (query.float() * scaling).reshape(kv_heads, rows, dim).contiguous().numpy()
        splits = -(-tokens // SPLIT)
        outputs = np.empty((kv_heads, splits, rows, dim), np.float32)
        lses = np.empty((kv_heads, splits, rows), np.float32)
        cap = np.float32(softcap or 0)
        _shared(attend, kv_heads * splits, folded, keys, values, tokens, cos, sin, cap, outputs, lses)
        output, lse = _join(outputs, lses)
        summed = torch.from_numpy(output).reshape(query.shape)
        return rotate_back(summed), torch.from_numpy(lse).reshape(heads, count)
    state = None
    for first in range(0, tokens, TILE):
        length = min(TILE, tokens - first)
        k, v = torch.empty(2, kv_heads, length, dim)
        groups = kv_heads * length // key.group
        _shared(stage, groups, keys, values, first, cos, sin, k.numpy(), v.numpy())
        part = torch_attend.attention(query, k, v, scaling, softcap=softcap)
        state = torch_attend.merge(state, part)
    assert state is not None
    return rotate_back(state[0]), state[1]


def _flat(part: Tensor) -> tuple[Any, int]:
    """A part of all heads as a flat array, float16 as its bits, and the elements from one head to the next."""
    heads, rows, width = part.shape
    if part.stride()[1:] != (width, 1):
        part = part.contiguous()
    if part.dtype == torch.float16:
        part = part.view(torch.uint16)
    length = (heads - 1) * part.stride(0) + rows * width
    return part.as_strided((length,), (1,)).numpy(), part.stride(0)


def _columns(table: Tensor) -> tuple[Any, int]:
    """cos or sin [S, dim] as a flat array in which a channel's positions lie side by side, and the elements between channels."""
    columns = table.t()
    if columns.stride(1) != 1:
        columns = columns.contiguous()
    length = (columns.shape[0] - 1) * columns.stride(0) + columns.shape[1]
    return columns.as_strided((length,), (1,)).numpy(), columns.stride(0)


@functools.cache
def _polynomial(bits: int) -> Any:
    """Coefficients of the odd polynomial in code - (2**bits - 1) / 2 that goes through LEVELS, which LLVM can vectorize."""
    count = 2 ** (bits - 1)
    x = np.arange(count) + 0.5
    powers = x[:, None] ** (2 * np.arange(count) + 1)
    return np.linalg.solve(powers, np.array(LEVELS[bits][count:]))


@functools.cache
def kernels(dim: int, bits: tuple[int, ...], group: int, value_bits: int) -> tuple[Any, Any]:
    """`attend` and `stage`, compiled at their first call. They do the jobs first .. end of all."""
    half = dim // 2
    key_row = sum(bits) * group // 8
    value_row, lanes, top_lanes = (
        dim * value_bits // 8,
        _lanes(dim, 4 if value_bits == 4 else 2),
        _lanes(dim, 1),
    )
    widths = np.array(bits)
    middle = np.float32((2**value_bits - 1) / 2)
    a, b, c3, d = (np.float32(x) for x in (*_polynomial(value_bits), 0, 0)[:4])
    scales = _SCALES

    @inlined
    def unpack_keys(keys: Any, head: int, token: int, cos: Any, sin: Any, block: Any) -> None:
        """Keys of a group of tokens, after RoPE, to block [dim * group], channel by channel."""
        (codes, codes_stride), (scale, scale_stride), (zero, zero_stride), order = keys
        row = token // group
        at = head * codes_stride + row * key_row
        for place in range(dim):
            to = order[head, place] * group
            step = scales[scale[head * scale_stride + row * dim + place]]
            low = _half(zero[head * zero_stride + row * dim + place])
            done = 0
            for width in (4, 2, 1):
                if widths[place] & width:
                    run = group * width // 8
                    for f in range(8 // width):
                        for i in range(0, run, 16):
                            if done == 0:
                                _run(
                                    codes,
                                    at + i,
                                    f * width,
                                    2**width - 1,
                                    step,
                                    low,
                                    block,
                                    to + f * run + i,
                                    16,
                                    False,
                                )
                            else:
                                higher = step * np.float32(1 << done)
                                _run(
                                    codes,
                                    at + i,
                                    f * width,
                                    2**width - 1,
                                    higher,
                                    low,
                                    block,
                                    to + f * run + i,
                                    16,
                                    True,
                                )
                    done += width
                    at += run
        if cos[0].shape[0]:
            for c in range(half):
                first = block[c * group : (c + 1) * group]
                second = block[(half + c) * group : (half + c + 1) * group]
                start, other = c * cos[1] + token, (half + c) * cos[1] + token
                cos_a, sin_a = cos[0][start : start + group], sin[0][start : start + group]
                cos_b, sin_b = cos[0][other : other + group], sin[0][other : other + group]
                for t in range(group):
                    x, y = first[t], second[t]
                    first[t] = x * cos_a[t] - y * sin_a[t]
                    second[t] = y * cos_b[t] + x * sin_b[t]

    @inlined
    def unpack_values(values: Any, head: int, token: int, ones: Any, zeros: Any, block: Any) -> None:
        """BLOCK tokens' values, still rotated, to block [BLOCK * dim]."""
        (codes, codes_stride), (scale, scale_stride) = values
        at = head * codes_stride + token * value_row
        _unpack(codes, at, value_bits, dim, lanes, top_lanes, ones, zeros, 1, dim, block)
        for t in range(BLOCK):
            size = scales[scale[head * scale_stride + token + t]]
            for c in range(t * dim, (t + 1) * dim):
                x = block[c] - middle
                square = x * x
                block[c] = x * (a + square * (b + square * (c3 + square * d))) * size

    @compiled
    def attend(
        first: int,
        end: int,
        query: Any,
        keys: Any,
        values: Any,
        tokens: int,
        cos: Any,
        sin: Any,
        softcap: Any,
        outputs: Any,
        lses: Any,
    ) -> None:
        """A job is a head and a split. query [Hkv, rows, dim], scaled; outputs [Hkv, splits, rows, dim]; softcap 0 is none."""
        splits, rows = outputs.shape[1:3]
        block = np.empty(dim * group, np.float32)
        flat = np.empty(BLOCK * dim, np.float32)
        ones, zeros = np.ones(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
        weights = np.empty((rows, SPLIT), np.float32)
        for job in range(first, end):
            head, split = job // splits, job % splits
            start = split * SPLIT
            count = min(SPLIT, tokens - start)
            q, o = query[head], outputs[head, split]
            for at in range(0, count, group):
                unpack_keys(keys, head, start + at, cos, sin, block)
                for r in range(rows):
                    score = weights[r, at : at + group]
                    score[:] = 0
                    for c in range(0, dim, 4):
                        w, x, y, z = q[r, c], q[r, c + 1], q[r, c + 2], q[r, c + 3]
                        k = block[c * group : (c + 4) * group]
                        for t in range(group):
                            score[t] += (w * k[t] + x * k[group + t]) + (
                                y * k[2 * group + t] + z * k[3 * group + t]
                            )
            for r in range(rows):
                if softcap != 0:
                    _cap(weights[r, :count], softcap)
                lses[head, split, r] = _softmax(weights[r, :count])
            o[:] = 0
            for at in range(0, count, BLOCK):
                unpack_values(values, head, start + at, ones, zeros, flat)
                for r in range(rows):
                    for t in range(0, BLOCK, 4):
                        w = weights[r, at + t : at + t + 4]
                        v = flat[t * dim : (t + 4) * dim]
                        for c in range(dim):
                            o[r, c] += (w[0] * v[c] + w[1] * v[dim + c]) + (
                                w[2] * v[2 * dim + c] + w[3] * v[3 * dim + c]
                            )

    @compiled
    def stage(
        first: int,
        end: int,
        keys: Any,
        values: Any,
        start: int,
        cos: Any,
        sin: Any,
        keys_out: Any,
        values_out: Any,
    ) -> None:
        """A job is a head and a group; tokens from `start` on go to keys_out and values_out [Hkv, n, dim], values rotated."""
        groups = keys_out.shape[1] // group
        block = np.empty(dim * group, np.float32)
        ones, zeros = np.ones(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
        for job in range(first, end):
            head, at = job // groups, job % groups * group
            unpack_keys(keys, head, start + at, cos, sin, block)
            out = keys_out[head, at : at + group]
            for c in range(dim):
                for t in range(group):
                    out[t, c] = block[c * group + t]
            for t in range(0, group, BLOCK):
                flat = values_out[head, at + t : at + t + BLOCK].reshape(BLOCK * dim)
                unpack_values(values, head, start + at + t, ones, zeros, flat)

    return attend, stage
