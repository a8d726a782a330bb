"""`reference_ranked`'s quantization in few vectorized torch operations, on any device."""

import functools

import torch
from kvchat_kernels.reference_ranked import LEVELS, RATIOS, decode_scale, encode_scale, hadamard, plane_widths
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


def pack_ranked(codes: Tensor, bits: tuple[int, ...]) -> Tensor:
    planes = [pack((codes[..., :width] >> b) & 1, 1) for b, width in enumerate(plane_widths(bits))]
    return torch.cat(planes, -1)


def unpack_ranked(packed: Tensor, bits: tuple[int, ...]) -> Tensor:
    widths = plane_widths(bits)
    codes = None
    for b, plane in enumerate(packed.split([width // 8 for width in widths], -1)):
        plane_codes = unpack(plane, 1)
        if codes is None:
            codes = plane_codes
        else:
            codes[..., : widths[b]] |= plane_codes << b
    assert codes is not None
    return codes


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens, channels = x.shape
    values = x.float().view(heads, tokens // group, group, channels)
    top = torch.tensor([2**own - 1 for own in bits], device=x.device, dtype=torch.float32)
    low, high = torch.aminmax(values, dim=2, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    best: list[Tensor] = []  # error, codes, scale codes, zeros
    for ratio in RATIOS:
        scale_code = encode_scale(2 * half * ratio / top)
        step = decode_scale(scale_code)
        zero = (middle - step * top / 2).half()
        code = ((values - zero.float()) / step).round_().clamp_(min=0).minimum(top)
        error = (code * step + zero.float() - values).square_().sum(2, keepdim=True)
        new = [error, code, scale_code, zero]
        best = [torch.where(error < best[0], n, b) for n, b in zip(new, best, strict=True)] if best else new
    codes = best[1].to(torch.uint8).view(heads, tokens, channels)
    return pack_ranked(codes, bits), best[2].squeeze(2), best[3].squeeze(2)


def dequantize_ranked(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: tuple[int, ...], group: int, dtype: torch.dtype
) -> Tensor:
    q = unpack_ranked(codes, bits).float()
    heads, tokens, channels = q.shape
    q = q.view(heads, tokens // group, group, channels)
    return torch.addcmul(zero.float()[:, :, None], q, decode_scale(scale)[:, :, None]).flatten(1, 2).to(dtype)


def quantize_rotated(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    rotated = x.float() @ _hadamard(x.shape[-1], x.device)
    scale = encode_scale(rotated.square().mean(-1, keepdim=True).sqrt())
    codes = torch.bucketize(rotated / decode_scale(scale), _levels(bits, x.device)[1])
    return pack(codes.to(torch.uint8), bits), scale


def dequantize_rotated(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    levels = _levels(bits, codes.device)[0]
    rotated = levels[unpack(codes, bits).int()] * decode_scale(scale)
    return (rotated @ _hadamard(rotated.shape[-1], codes.device)).to(dtype)
