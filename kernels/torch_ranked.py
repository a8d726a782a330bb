"""`reference_ranked`'s quantization in few vectorized torch operations, on any device."""

import functools
import itertools

import torch
from kvchat_kernels.reference_ranked import LEVELS, RATIOS, decode_scale, encode_scale, hadamard
from kvchat_kernels.torch_pack import pack, unpack
from torch import Tensor


@functools.cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    return hadamard(size).to(device)


@functools.cache
def _levels(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels, and the edges between them."""
    levels = torch.tensor(LEVELS[bits], device=device)
    return levels, (levels[1:] + levels[:-1]) / 2


@functools.cache
def _runs(bits: tuple[int, ...]) -> list[tuple[int, int]]:
    """(bits, channels) of each run of channels with the same bits."""
    return [(own, len(list(run))) for own, run in itertools.groupby(bits)]


def pack_ranked(codes: Tensor, bits: tuple[int, ...], group: int) -> Tensor:
    groups = codes.unflatten(1, (-1, group)).transpose(2, 3)
    runs = groups.split([channels for _, channels in _runs(bits)], 2)
    return torch.cat([pack(run, own).flatten(2) for run, (own, _) in zip(runs, _runs(bits), strict=True)], -1)


def _unpack_groups(packed: Tensor, bits: tuple[int, ...], group: int) -> Tensor:
    """[heads, T / group, D, group], as the channels lie in memory."""
    runs = packed.split([own * channels * group // 8 for own, channels in _runs(bits)], -1)
    return torch.cat(
        [
            unpack(run.unflatten(2, (channels, -1)), own)
            for run, (own, channels) in zip(runs, _runs(bits), strict=True)
        ],
        2,
    )


def unpack_ranked(packed: Tensor, bits: tuple[int, ...], group: int) -> Tensor:
    return _unpack_groups(packed, bits, group).transpose(2, 3).flatten(1, 2)


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens, channels = x.shape
    values = x.float().view(heads, tokens // group, group, channels)
    top = torch.tensor([2**own - 1 for own in bits], device=x.device, dtype=torch.float32)
    low, high = torch.aminmax(values, dim=2, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    best: list[Tensor] = []  # error, codes, scale
    for ratio in RATIOS:
        scale = decode_scale(encode_scale(2 * half * ratio / top))
        zero = middle - scale * top / 2
        code = ((values - zero) / scale).round_().clamp_(min=0).minimum(top)
        error = (code * scale + zero - values).square_().sum(2, keepdim=True)
        new = [error, code, scale]
        best = [torch.where(error < best[0], n, b) for n, b in zip(new, best, strict=True)] if best else new
    _, code, scale = best
    spread = code.std(2, correction=0, keepdim=True)
    scale = torch.where(spread > 0, values.std(2, correction=0, keepdim=True) / spread, scale)
    scales = encode_scale(scale)
    zeros = values.mean(2, keepdim=True) - decode_scale(scales) * code.mean(2, keepdim=True)
    codes = code.to(torch.uint8).view(heads, tokens, channels)
    return pack_ranked(codes, bits, group), scales.squeeze(2), zeros.half().squeeze(2)


def dequantize_ranked(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: tuple[int, ...], group: int, dtype: torch.dtype
) -> Tensor:
    q = _unpack_groups(codes, bits, group).float()
    values = torch.addcmul(zero.float()[..., None], q, decode_scale(scale)[..., None])
    return values.transpose(2, 3).flatten(1, 2).to(dtype)


def quantize_rotated(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    levels, edges = _levels(bits, x.device)
    rotated = x.float() @ _hadamard(x.shape[-1], x.device)
    power = rotated.square().sum(-1, keepdim=True)
    codes = torch.bucketize(rotated / (power / x.shape[-1]).sqrt().clamp_min(1e-30), edges)
    scale = power / (rotated * levels[codes]).sum(-1, keepdim=True).clamp_min(1e-30)
    return pack(codes.to(torch.uint8), bits), encode_scale(scale)


def dequantize_rotated(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    levels = _levels(bits, codes.device)[0]
    rotated = levels[unpack(codes, bits).int()] * decode_scale(scale)
    return rotate_back(rotated).to(dtype)


def rotate_back(x: Tensor) -> Tensor:
    """Values [..., D], or sums of values, times the Hadamard matrix that they were rotated by."""
    return x @ _hadamard(x.shape[-1], x.device)
