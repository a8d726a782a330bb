"""`reference.quantize` and `dequantize` on a GPU, each in one pass over memory; codes, scales and zeros are the same to the bit."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16
"""Tokens a program, but for packing groups of tokens, where it is a group."""


@triton.jit
def _scale(low, high, LEVELS: tl.constexpr):
    """Scale and zero as they are stored. The IEEE division: the quicker one may be off by a bit."""
    levels = tl.full(low.shape, LEVELS, tl.float32)
    return tl.div_rn(high - low, levels).to(tl.float16), low.to(tl.float16)


@triton.jit
def _code(values, scale, zero, LEVELS: tl.constexpr):
    step = scale.to(tl.float32)
    step = tl.where(step == 0, 1.0, step)
    code = tl.div_rn(values - zero.to(tl.float32), step + tl.zeros_like(values))
    code = tl.minimum(tl.maximum(code, 0.0), LEVELS * 1.0)
    # to the nearest, halves to the even: a float32 has no bit left for a half at 2**23
    return ((code + 8388608.0) - 8388608.0).to(tl.int32)


@triton.jit
def _plane(
    x, codes, scale, zero, scales, zeros, present,
    D: tl.constexpr, LEVELS: tl.constexpr, ALONG_TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr, LOW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pack bits LOW .. LOW + WIDTH of every code: field f of byte j is channel f * N + j. `x` and `codes` are rows [T, 1].

    Along tokens, scales and zeros are found here, and stored by the first plane.
    """
    N: tl.constexpr = D * WIDTH // 8
    j = tl.arange(0, COLUMNS)
    packed = tl.zeros([BLOCK_T, COLUMNS], tl.int32)
    for f in tl.static_range(8 // WIDTH):
        c = f * N + j
        values = tl.load(x + c[None, :], mask=(j < N)[None, :], other=0.0).to(tl.float32)
        if ALONG_TOKENS:
            s, z = _scale(tl.min(values, 0), tl.max(values, 0), LEVELS)
            if LOW == 0:
                tl.store(scale + c, s, mask=j < N)
                tl.store(zero + c, z, mask=j < N)
            code = _code(values, s[None, :], z[None, :], LEVELS)
        else:
            s = tl.zeros([BLOCK_T, COLUMNS], tl.float16)
            z = tl.zeros([BLOCK_T, COLUMNS], tl.float16)
            for g in tl.static_range(f * N // GROUP, (f * N + N - 1) // GROUP + 1):
                own = (c // GROUP == g)[None, :]
                s = tl.where(own, scales[g][:, None], s)
                z = tl.where(own, zeros[g][:, None], z)
            code = _code(values, s, z, LEVELS)
        packed |= ((code >> LOW) & (2**WIDTH - 1)) << (f * WIDTH)
    tl.store(codes + j[None, :], packed.to(tl.uint8), mask=present & (j < N)[None, :])


@triton.jit
def _quantize(
    x, codes, scale, zero, x_head, x_token, tokens,
    D: tl.constexpr, BITS: tl.constexpr, ALONG_TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program packs BLOCK_T tokens of a head: one group along tokens, or several tokens of groups along channels."""
    LEVELS: tl.constexpr = 2**BITS - 1
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    present = (t < tokens)[:, None]
    x += (
        head * x_head + tl.minimum(t, tokens - 1)[:, None] * x_token
    )  # what is absent is read, and not stored
    codes += (head * tokens + t)[:, None] * (D * BITS // 8)
    scales = ()
    zeros = ()
    if ALONG_TOKENS:
        row = (head * (tokens // GROUP) + tl.program_id(0)) * D
        scale += row
        zero += row
    else:
        for g in tl.static_range(GROUPS):
            c = g * GROUP + tl.arange(0, GROUP)
            # a short last group: repeating its last value changes neither minimum nor maximum
            values = tl.load(x + tl.minimum(c, D - 1)[None, :]).to(tl.float32)
            s, z = _scale(tl.min(values, 1), tl.max(values, 1), LEVELS)
            place = (head * tokens + t) * GROUPS + g
            tl.store(scale + place, s, mask=t < tokens)
            tl.store(zero + place, z, mask=t < tokens)
            scales = scales + (s,)
            zeros = zeros + (z,)
    WIDTH: tl.constexpr = 4 if BITS == 4 else 2
    _plane(
        x, codes, scale, zero, scales, zeros, present,
        D, LEVELS, ALONG_TOKENS, GROUP, BLOCK_T, WIDTH, 0, COLUMNS,
    )  # fmt: skip
    if BITS == 3:
        _plane(
            x, codes + D // 4, scale, zero, scales, zeros, present,
            D, LEVELS, ALONG_TOKENS, GROUP, BLOCK_T, 1, 2, COLUMNS // 2,
        )  # fmt: skip


def quantize(x: Tensor, bits: int, axis: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    along_tokens = axis == "channel"
    scales = (tokens // group, dim) if along_tokens else (tokens, math.ceil(dim / group))
    codes = torch.empty(heads, tokens, dim * bits // 8, dtype=torch.uint8, device=x.device)
    scale, zero = (torch.empty(heads, *scales, dtype=torch.float16, device=x.device) for _ in range(2))
    block = group if along_tokens else TOKENS
    _quantize[(math.ceil(tokens / block), heads)](
        x, codes, scale, zero, *x.stride()[:2], tokens,
        D=dim, BITS=bits, ALONG_TOKENS=along_tokens, GROUP=group, BLOCK_T=block,
        COLUMNS=triton.next_power_of_2(dim * (4 if bits == 4 else 2) // 8),
    )  # fmt: skip
    return codes, scale, zero


@triton.jit
def _dequantize(
    codes, scale, zero, out, code_head, code_row, scale_head, scale_row, zero_head, zero_row, tokens,
    D: tl.constexpr, BITS: tl.constexpr, ALONG_TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program unpacks BLOCK_T tokens of a head: field by field, since a field is a run of channels."""
    WIDTH: tl.constexpr = 4 if BITS == 4 else 2
    N: tl.constexpr = D * WIDTH // 8
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    inside = (t < tokens)[:, None] & (j < N)[None, :]
    row = codes + head * code_head + t[:, None] * code_row
    low = tl.load(row + j[None, :], mask=inside, other=0).to(tl.int32)
    group = t // GROUP if ALONG_TOKENS else t
    scale += head * scale_head + group[:, None] * scale_row
    zero += head * zero_head + group[:, None] * zero_row
    for f in tl.static_range(8 // WIDTH):
        c = f * N + j
        code = (low >> (f * WIDTH)) & (2**WIDTH - 1)
        if BITS == 3:
            third = tl.load(row + (N + c % (D // 8))[None, :], mask=inside, other=0).to(tl.int32)
            code |= ((third >> (c // (D // 8))[None, :]) & 1) << 2
        place = c if ALONG_TOKENS else c // GROUP
        s = tl.load(scale + place[None, :], mask=inside, other=0.0).to(tl.float32)
        z = tl.load(zero + place[None, :], mask=inside, other=0.0).to(tl.float32)
        x = (code.to(tl.float32) * s + z).to(out.dtype.element_ty)
        tl.store(out + (head * tokens + t)[:, None] * D + c[None, :], x, mask=inside)


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: int, axis: str, group: int, dtype: torch.dtype
) -> Tensor:
    heads, tokens, width = codes.shape
    dim = width * 8 // bits
    out = torch.empty(heads, tokens, dim, dtype=dtype, device=codes.device)
    _dequantize[(math.ceil(tokens / TOKENS), heads)](
        codes, scale, zero, out, *codes.stride()[:2], *scale.stride()[:2], *zero.stride()[:2], tokens,
        D=dim, BITS=bits, ALONG_TOKENS=axis == "channel", GROUP=group, BLOCK_T=TOKENS,
        COLUMNS=triton.next_power_of_2(dim * (4 if bits == 4 else 2) // 8),
    )  # fmt: skip
    return out
