"""The truth for packing, unpacking and attention: plain torch, written to be read, never fast.

The layout and the formulas are in README.md beside this file. Every fast path has the signature of a function here and is
tested against it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}
"""Widths of the bit planes that hold a code, the binary digits of its bits, lowest bits of the code first."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] (integers below 2**bits) into bytes [..., D * bits / 8]; D must be a multiple of 8."""
    channels = codes.shape[-1]
    planes = []
    low = 0
    for width in PLANES[bits]:
        count = channels * width // 8
        plane = torch.zeros(*codes.shape[:-1], count, dtype=torch.uint8, device=codes.device)
        for channel in range(channels):
            field, byte = divmod(channel, count)
            value = (codes[..., channel].to(torch.uint8) >> low) & (2**width - 1)
            plane[..., byte] |= value << (field * width)
        planes.append(plane)
        low += width
    return torch.cat(planes, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`: bytes [..., D * bits / 8] to codes [..., D], uint8."""
    channels = packed.shape[-1] * 8 // bits
    codes = torch.zeros(*packed.shape[:-1], channels, dtype=torch.uint8, device=packed.device)
    low = start = 0
    for width in PLANES[bits]:
        count = channels * width // 8
        for channel in range(channels):
            field, byte = divmod(channel, count)
            value = (packed[..., start + byte] >> (field * width)) & (2**width - 1)
            codes[..., channel] |= value << low
        start += count
        low += width
    return codes


def quantize(x: Tensor, bits: int, axis: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric round to nearest, as KIVI (arXiv:2402.02750, section 3).

    x: [heads, T, D] floats. axis "channel" groups `group` tokens of a channel (T must be a multiple of it), axis "token"
    groups `group` channels of a token. Returns packed codes, scale and zero (float16), shaped as README.md says.
    """
    heads, tokens, channels = x.shape
    x = x.float()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    if axis == "channel":
        shape: tuple[int, int, int] = (heads, tokens // group, channels)
        slices = [
            (g, slice(None), slice(g * group, (g + 1) * group), slice(None), 1)
            for g in range(tokens // group)
        ]
    else:
        shape = (heads, tokens, math.ceil(channels / group))
        slices = [
            (g, slice(None), slice(None), slice(g * group, (g + 1) * group), 2) for g in range(shape[2])
        ]
    scale = torch.zeros(shape, dtype=torch.float16, device=x.device)
    zero = torch.zeros_like(scale)
    for g, head, token, channel, dim in slices:
        values = x[head, token, channel]
        low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
        s = ((high - low) / (2**bits - 1)).half()
        z = low.half()
        step = torch.where(s == 0, torch.ones_like(s), s).float()
        codes[head, token, channel] = (
            ((values - z.float()) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
        )
        scale.select(dim, g).copy_(s.squeeze(dim))
        zero.select(dim, g).copy_(z.squeeze(dim))
    return pack(codes, bits), scale, zero


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: int, axis: str, group: int, dtype: torch.dtype
) -> Tensor:
    """x' = q * s + z for packed rows [heads, T, D * bits / 8]; returns [heads, T, D] in `dtype`."""
    q = unpack(codes, bits).float()
    s, z = (
        t.float().repeat_interleave(group, dim=1 if axis == "channel" else 2)[..., : q.shape[2]]
        for t in (scale, zero)
    )
    return (q * s + z).to(dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with all scores in memory, in float64.

    query [Hq, T, D]; key, value [Hkv, S, D], Hq a multiple of Hkv (query head h reads head h // (Hq / Hkv)).
    causal: the queries are the last T of the S tokens and look back only, at most `window` tokens, themselves included;
    otherwise every query sees every key. softcap: scores become softcap * tanh(score / softcap).
    Returns output [Hq, T, D] and LSE [Hq, T].
    """
    share = query.shape[0] // key.shape[0]
    q, k, v = query.double(), key.double(), value.double()
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        count, total = query.shape[1], key.shape[1]
        for i in range(count):
            newest = total - count + i
            scores[:, i, newest + 1 :] = -math.inf
            if window is not None:
                scores[:, i, : max(0, newest + 1 - window)] = -math.inf
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


class Packed(NamedTuple):
    """The packed keys or values of one layer: what `quantize` returned, and how."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    axis: str
    group: int


def attention_packed(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` of queries [Hq, T, D] over packed keys and values, all of which every query sees.

    rope: cos and sin [S, D] of each key's position, for keys that were packed before RoPE; channels c and c + D/2 turn
    together. Returns output [Hq, T, D] and LSE [Hq, T], float64.
    """
    k, v = (dequantize(*packed, torch.float64) for packed in (key, value))
    return attention(query, k if rope is None else rotated(k, rope), v, scaling, softcap=softcap)


def attention_step(
    query: Tensor,
    key: Packed,
    value: Packed,
    dense: tuple[Tensor, Tensor],
    counts: Tensor,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The newest token's attention, queries [Hq, 1, D], over packed tokens and dense ones.

    counts: how many of the packed tokens and of the dense keys and values [Hkv, C, D] there are, from the first on; int64 on
    the device, so that a captured step can be replayed when they have changed. There may be room for more behind them.
    Returns output [Hq, 1, D], float64.
    """
    packed, newest = counts.tolist()
    k, v = (dequantize(*p, torch.float64)[:, :packed] for p in (key, value))
    if rope is not None:
        k = rotated(k, (rope[0][:packed], rope[1][:packed]))
    pieces = [(k, v), (dense[0][:, :newest], dense[1][:, :newest])]
    return merge([attention(query, *piece, scaling, softcap=softcap) for piece in pieces])[0]


def rotated(key: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Keys [heads, S, D] after RoPE, by cos and sin [S, D]; channels c and c + D/2 turn together."""
    cos, sin = rope
    first, second = key.chunk(2, -1)
    return key * cos + torch.cat([-second, first], -1) * sin


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint pieces of a history: pairs of output [..., D] and LSE [...] to one such pair."""
    outputs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = lses.logsumexp(0)
    return ((lses - lse).exp()[..., None] * outputs).sum(0), lse
