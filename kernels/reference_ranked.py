"""The truth for kvchat's own formats: keys with bits by rank, values rotated. Plain torch, written to be read."""

import math
from typing import NamedTuple

import torch
from kvchat_kernels.reference import attention, pack, rotated, unpack
from torch import Tensor

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of a group's range that are tried; the one with the least squared error is taken."""

LEVELS = {
    2: (-1.5104, -0.4528, 0.4528, 1.5104),
    3: (-2.1520, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1520),
    4: (
        *(-2.7326, -2.0690, -1.6181, -1.2562, -0.9424, -0.6568, -0.3881, -0.1284),
        *(0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    ),
}
"""Lloyd-Max levels of a normal variable (Max, 1960), by bits."""


class PackedRanked(NamedTuple):
    """The packed keys of one layer: what `quantize_ranked` returned, and the channels [heads, D] in rank order."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor
    bits: tuple[int, ...]
    group: int


class PackedRotated(NamedTuple):
    """The packed values of one layer: what `quantize_rotated` returned."""

    codes: Tensor
    scale: Tensor
    bits: int


def attention_packed(
    query: Tensor,
    key: PackedRanked,
    value: PackedRotated,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.attention_packed`."""
    ranked = dequantize_ranked(key.codes, key.scale, key.zero, key.bits, key.group, torch.float64)
    k = torch.zeros_like(ranked).scatter_(2, key.order[:, None].expand_as(ranked), ranked)
    v = dequantize_rotated(*value, torch.float64)
    return attention(query, k if rope is None else rotated(k, rope), v, scaling, softcap=softcap)


def encode_scale(scale: Tensor) -> Tensor:
    """Positive scales as uint8, in eighths of an octave around 1: 2**-16 to 2**15.9, each within 4.5 %."""
    return ((scale.clamp_min(2.0**-16).log2() * 8).round() + 128).clamp(0, 255).to(torch.uint8)


def decode_scale(code: Tensor) -> Tensor:
    return torch.exp2((code.float() - 128) / 8)


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Affine codes a channel and group of tokens, each channel with its own bits.

    x: [heads, T, D] floats, channels in rank order, T a multiple of `group`; bits: of each channel, at least 1. The range is
    shrunk about its middle by the ratio of RATIOS that loses least; then scale and zero are set so that what is read back has
    the group's mean and standard deviation (halfway between least squares, which shrinks scores, and no bias).
    Returns codes (`pack_ranked`), scale codes (uint8) and zeros (float16), both [heads, T / group, D].
    """
    heads, tokens, channels = x.shape
    codes = torch.zeros(heads, tokens, channels, dtype=torch.uint8, device=x.device)
    scales = torch.zeros(heads, tokens // group, channels, dtype=torch.uint8, device=x.device)
    zeros = torch.zeros(heads, tokens // group, channels, dtype=torch.float16, device=x.device)
    for h in range(heads):
        for g in range(tokens // group):
            for c in range(channels):
                values = x[h, g * group : (g + 1) * group, c].float()
                code, scale = _nearest_codes(values, bits[c])
                if code.min() < code.max():
                    scale = values.std(correction=0) / code.std(correction=0)
                scales[h, g, c] = encode_scale(scale)
                zeros[h, g, c] = values.mean() - decode_scale(scales[h, g, c]) * code.mean()
                codes[h, g * group : (g + 1) * group, c] = code.to(torch.uint8)
    return pack_ranked(codes, bits, group), scales, zeros


def _nearest_codes(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of the scale that loses least, and that scale."""
    top = 2**bits - 1
    middle, half = (values.max() + values.min()) / 2, (values.max() - values.min()) / 2
    found = []
    for ratio in RATIOS:
        scale = decode_scale(encode_scale(2 * half * ratio / top))
        zero = middle - scale * top / 2
        code = ((values - zero) / scale).round().clamp(0, top)
        found.append((float((code * scale + zero - values).square().sum()), code, scale))
    _, code, scale = min(found, key=lambda each: each[0])
    return code, scale


def pack_ranked(codes: Tensor, bits: tuple[int, ...], group: int) -> Tensor:
    """Codes [heads, T, D] to [heads, T / group, sum(bits) * group / 8]: in each group of tokens channel after channel, its
    tokens packed as `pack` does a row."""
    groups = codes.unflatten(1, (-1, group))
    return torch.cat([pack(groups[..., c], own) for c, own in enumerate(bits)], -1)


def unpack_ranked(packed: Tensor, bits: tuple[int, ...], group: int) -> Tensor:
    """Inverse of `pack_ranked`: [heads, T, D], uint8."""
    channels = packed.split([own * group // 8 for own in bits], -1)
    return torch.stack([unpack(row, own) for row, own in zip(channels, bits, strict=True)], -1).flatten(1, 2)


def dequantize_ranked(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: tuple[int, ...], group: int, dtype: torch.dtype
) -> Tensor:
    """x' = q * s + z, in rank order: [heads, T, D]."""
    q = unpack_ranked(codes, bits, group).float()
    s, z = decode_scale(scale).repeat_interleave(group, 1), zero.float().repeat_interleave(group, 1)
    return (q * s + z).to(dtype)


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix [size, size] by Sylvester's construction, in blocks along the diagonal where `size` is
    no power of two. It is symmetric: its own inverse."""
    block = size & -size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix / math.sqrt(block)] * (size // block))


def quantize_rotated(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Each token rotated by `hadamard`, divided by its root mean square, and each element to the nearest of LEVELS.

    The token's scale is such that <x, x'> = <x, x>: attention averages values over tokens, in which errors cancel and a bias
    does not (as in RaBitQ, arXiv:2405.12497, section 3.2). x: [heads, T, D] floats.
    Returns packed codes [heads, T, D * bits / 8] and scale codes (uint8) [heads, T, 1].
    """
    levels = torch.tensor(LEVELS[bits], device=x.device)
    rotated = x.float() @ hadamard(x.shape[-1]).to(x.device)
    power = rotated.square().sum(-1, keepdim=True)
    normal = rotated / (power / x.shape[-1]).sqrt().clamp_min(1e-30)
    codes = (normal[..., None] - levels).abs().argmin(-1)
    scale = power / (rotated * levels[codes]).sum(-1, keepdim=True).clamp_min(1e-30)
    return pack(codes.to(torch.uint8), bits), encode_scale(scale)


def dequantize_rotated(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """[heads, T, D]: the level of each code times its token's scale, rotated back."""
    levels = torch.tensor(LEVELS[bits], device=codes.device)
    rotated = levels[unpack(codes, bits).long()] * decode_scale(scale)
    return (rotated @ hadamard(rotated.shape[-1]).to(codes.device)).to(dtype)
