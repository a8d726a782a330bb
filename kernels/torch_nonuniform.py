"""`reference_nonuniform`'s functions in few vectorized torch operations, on any device."""

import torch
from kvchat_kernels.torch_pack import pack, unpack
from torch import Tensor


def quantize_channels(
    x: Tensor, zero: Tensor, radius: Tensor, levels: Tensor, bits: int, outliers: int
) -> tuple[Tensor, Tensor, Tensor]:
    normal = (x.float() - zero) / radius
    return _codes(normal, levels, bits), *_farthest(x, normal.abs(), outliers)


def quantize_tokens(
    x: Tensor, levels: Tensor, bits: int, outliers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = x.float()
    heads, tokens, channels = x.shape
    flat = _by_token(x)
    distance = (flat - flat.median(1, keepdim=True).values).abs()
    values, places = _farthest(x, distance.view(tokens, heads, channels).transpose(0, 1), outliers)
    outside = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, places[0].long(), True)
    high = flat.masked_fill(outside, -torch.inf).amax(1)
    low = flat.masked_fill(outside, torch.inf).amin(1)
    zero, radius = ((high + low) / 2).half()[None, :, None], ((high - low) / 2).half()[None, :, None]
    normal = (x - zero.float()) / radius.float().clamp_min(1e-6)
    return _codes(normal, levels, bits), zero, radius, values, places


def _codes(normal: Tensor, levels: Tensor, bits: int) -> Tensor:
    edges = (levels[1:] + levels[:-1]) / 2
    return pack(torch.bucketize(normal.contiguous(), edges).to(torch.uint8), bits)


def _by_token(x: Tensor) -> Tensor:
    """[heads, T, D] to [T, heads * D]."""
    return x.transpose(0, 1).flatten(1)


def _farthest(x: Tensor, distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    places = _by_token(distance).topk(count, 1).indices.sort(1).values
    return _by_token(x).gather(1, places).half()[None], places.to(torch.int16)[None]


def dequantize_nonuniform(
    codes: Tensor,
    zero: Tensor,
    radius: Tensor,
    values: Tensor,
    places: Tensor,
    levels: Tensor,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    x = torch.addcmul(zero.float(), levels[unpack(codes, bits).int()], radius.float())
    heads, tokens, channels = x.shape
    flat = _by_token(x).scatter_(1, places[0].long(), values[0].float())
    return flat.view(tokens, heads, channels).transpose(0, 1).to(dtype)
