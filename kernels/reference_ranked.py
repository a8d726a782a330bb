"""The truth for kvchat's own formats: keys with bits by rank, values rotated. Plain torch, written to be read."""

import math

import torch
from kvchat_kernels.reference import pack, unpack
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


def encode_scale(scale: Tensor) -> Tensor:
    """Positive scales as uint8, in eighths of an octave around 1: 2**-16 to 2**15.9, each within 4.5 %."""
    return ((scale.clamp_min(2.0**-16).log2() * 8).round() + 128).clamp(0, 255).to(torch.uint8)


def decode_scale(code: Tensor) -> Tensor:
    return torch.exp2((code.float() - 128) / 8)


def plane_widths(bits: tuple[int, ...]) -> list[int]:
    """Channels in each 1-bit plane, for the bits of each channel in rank order (falling): plane b has those above b."""
    return [sum(own > b for own in bits) for b in range(max(bits))]


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Affine codes a channel and group of tokens, each channel with its own bits.

    x: [heads, T, D] floats, channels in rank order, T a multiple of `group`; bits: of each channel, falling, at least 1.
    A group's range is shrunk about its middle by the ratio of RATIOS that loses least. Returns codes (1-bit planes, each as
    wide as `plane_widths`, [heads, T, bytes]), scale codes (uint8) and zeros (float16), both [heads, T / group, D].
    """
    heads, tokens, channels = x.shape
    codes = torch.zeros(heads, tokens, channels, dtype=torch.uint8, device=x.device)
    scales = torch.zeros(heads, tokens // group, channels, dtype=torch.uint8, device=x.device)
    zeros = torch.zeros(heads, tokens // group, channels, dtype=torch.float16, device=x.device)
    for h in range(heads):
        for g in range(tokens // group):
            for c in range(channels):
                values = x[h, g * group : (g + 1) * group, c].float()
                top = 2 ** bits[c] - 1
                middle, half = (values.max() + values.min()) / 2, (values.max() - values.min()) / 2
                least = math.inf
                for ratio in RATIOS:
                    scale_code = encode_scale(2 * half * ratio / top)
                    step = decode_scale(scale_code)
                    zero = (middle - step * top / 2).half()
                    code = ((values - zero.float()) / step).round().clamp(0, top)
                    error = float((code * step + zero.float() - values).square().sum())
                    if error < least:
                        least = error
                        codes[h, g * group : (g + 1) * group, c] = code.to(torch.uint8)
                        scales[h, g, c], zeros[h, g, c] = scale_code, zero
    return pack_ranked(codes, bits), scales, zeros


def pack_ranked(codes: Tensor, bits: tuple[int, ...]) -> Tensor:
    """Codes [..., D] in rank order to 1-bit planes, lowest bit first, side by side: [..., sum(plane_widths) / 8]."""
    planes = [pack((codes[..., :width] >> b) & 1, 1) for b, width in enumerate(plane_widths(bits))]
    return torch.cat(planes, -1)


def unpack_ranked(packed: Tensor, bits: tuple[int, ...]) -> Tensor:
    """Inverse of `pack_ranked`: [..., D], uint8."""
    codes = torch.zeros(*packed.shape[:-1], len(bits), dtype=torch.uint8, device=packed.device)
    start = 0
    for b, width in enumerate(plane_widths(bits)):
        codes[..., :width] |= unpack(packed[..., start : start + width // 8], 1) << b
        start += width // 8
    return codes


def dequantize_ranked(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: tuple[int, ...], group: int, dtype: torch.dtype
) -> Tensor:
    """x' = q * s + z, in rank order: [heads, T, D]."""
    q = unpack_ranked(codes, bits).float()
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

    x: [heads, T, D] floats. Returns packed codes [heads, T, D * bits / 8] and scale codes (uint8) [heads, T, 1].
    """
    levels = torch.tensor(LEVELS[bits], device=x.device)
    rotated = x.float() @ hadamard(x.shape[-1]).to(x.device)
    scale = encode_scale(rotated.square().mean(-1, keepdim=True).sqrt())
    distance = (rotated / decode_scale(scale))[..., None] - levels
    return pack(distance.abs().argmin(-1).to(torch.uint8), bits), scale


def dequantize_rotated(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """[heads, T, D]: the level of each code times its token's scale, rotated back."""
    levels = torch.tensor(LEVELS[bits], device=codes.device)
    rotated = levels[unpack(codes, bits).long()] * decode_scale(scale)
    return (rotated @ hadamard(rotated.shape[-1]).to(codes.device)).to(dtype)
