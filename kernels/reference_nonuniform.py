"""The truth for KVQuant's quantization (arXiv:2401.18079): levels of a codebook, the farthest elements kept exactly."""

import torch
from kvchat_kernels.reference import pack, unpack
from torch import Tensor


def quantize_channels(
    x: Tensor, zero: Tensor, radius: Tensor, levels: Tensor, bits: int, outliers: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys by calibrated ranges a channel (section 3.1), the elements farthest outside them kept exactly (section 3.4).

    x: [heads, T, D] floats; zero and radius: [heads, 1, D], the middle of a channel's range and half its width; levels:
    [2**bits] in [-1, 1], rising; outliers: elements kept a token, over all heads. Returns packed codes
    [heads, T, D * bits / 8], and the outliers [1, T, outliers]: float16 values and their places h * D + c (int16), rising.
    """
    normal = (x.float() - zero) / radius
    codes = (normal[..., None] - levels).abs().argmin(-1)
    return pack(codes.to(torch.uint8), bits), *_farthest(x, normal, outliers)


def quantize_tokens(
    x: Tensor, levels: Tensor, bits: int, outliers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values by the range of their token over all heads, without the outliers, which lie farthest from its median (sections
    3.3 and 3.4). As `quantize_channels`; zero and radius [1, T, 1], float16, come after the codes.
    """
    heads, tokens, channels = x.shape
    x = x.float()
    zero = torch.zeros(1, tokens, 1, device=x.device)
    radius = torch.ones(1, tokens, 1, device=x.device)
    distance = torch.zeros_like(x)
    for t in range(tokens):
        distance[:, t] = (x[:, t] - x[:, t].median()).abs()
        kept = distance[:, t].flatten().argsort()[: heads * channels - outliers]
        rest = x[:, t].flatten()[kept]
        zero[0, t, 0] = (rest.max() + rest.min()) / 2
        radius[0, t, 0] = (rest.max() - rest.min()) / 2
    zero, radius = zero.half(), radius.half()
    normal = (x - zero.float()) / radius.float().clamp_min(1e-6)
    codes = (normal[..., None] - levels).abs().argmin(-1)
    return pack(codes.to(torch.uint8), bits), zero, radius, *_farthest(x, distance, outliers)


def _farthest(x: Tensor, distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` elements of each token that are farthest away: values and places, [1, T, count]."""
    tokens = x.shape[1]
    values = torch.zeros(1, tokens, count, dtype=torch.float16, device=x.device)
    places = torch.zeros(1, tokens, count, dtype=torch.int16, device=x.device)
    for t in range(tokens):
        farthest = distance[:, t].flatten().abs().argsort(descending=True, stable=True)[:count]
        places[0, t] = farthest.sort().values.to(torch.int16)
        values[0, t] = x[:, t].flatten()[places[0, t].long()].half()
    return values, places


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
    """x' = levels[q] * radius + zero, and the outliers in their places: [heads, T, D]."""
    x = levels[unpack(codes, bits).long()] * radius.float() + zero.float()
    for t in range(x.shape[1]):
        for value, place in zip(values[0, t], places[0, t].tolist(), strict=True):
            x[place // x.shape[2], t, place % x.shape[2]] = value
    return x.to(dtype)
