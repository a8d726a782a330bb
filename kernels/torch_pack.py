"""`reference.pack`, `unpack`, `quantize` and `dequantize` in few vectorized torch operations, on any device."""

import torch
import torch.nn.functional as F
from kvchat_kernels.reference import PLANES
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    planes, low = [], 0
    for width in PLANES[bits]:
        # a field is a run of consecutive channels, so the fields of a plane are chunks of the row
        fields = ((codes >> low) & (2**width - 1)).chunk(8 // width, -1)
        plane = fields[0].clone()
        for f, field in enumerate(fields[1:], 1):
            plane |= field << (f * width)
        planes.append(plane)
        low += width
    return torch.cat(planes, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    sizes = [packed.shape[-1] * width // bits for width in PLANES[bits]]
    codes, low = None, 0
    for plane, width in zip(packed.split(sizes, -1), PLANES[bits], strict=True):
        mask = 2**width - 1
        fields = torch.cat([(plane >> shift) & mask for shift in range(0, 8, width)], -1)
        codes = fields if codes is None else codes.bitwise_or_(fields << low)
        low += width
    assert codes is not None
    return codes


def _grouped(x: Tensor, axis: str, group: int) -> tuple[Tensor, int]:
    """x [heads, T, D] with its group axis split off: a view, and the dimension along which a group lies."""
    heads, tokens, channels = x.shape
    if axis == "channel":
        return x.view(heads, tokens // group, group, channels), 2
    return x.view(heads, tokens, -1, min(group, channels)), 3


def quantize(x: Tensor, bits: int, axis: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    channels, levels = x.shape[2], 2**bits - 1
    x = x.float()
    if axis == "token" and channels > group and channels % group:
        # a short last group: repeating its last value changes neither minimum nor maximum
        x = F.pad(x, (0, group - channels % group), mode="replicate")
    x, dim = _grouped(x.contiguous(), axis, group)
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    scale, zero = ((high - low) / levels).half(), low.half()
    step = scale.float()
    step.masked_fill_(scale == 0, 1)
    codes = ((x - zero.float()) / step).round_().clamp_(0, levels).to(torch.uint8)
    codes = codes.flatten(dim - 1, dim)[..., :channels]
    return pack(codes, bits), scale.squeeze(dim), zero.squeeze(dim)


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: int, axis: str, group: int, dtype: torch.dtype
) -> Tensor:
    # in float32 even for a 16-bit dtype: a zero of some hundreds would lose the step next to it
    q, s, z = unpack(codes, bits).float(), scale.float(), zero.float()
    channels = q.shape[2]
    if axis == "token" and channels > group and channels % group:
        s, z = (t.repeat_interleave(group, 2)[..., :channels] for t in (s, z))
        return torch.addcmul(z, q, s).to(dtype)
    q, dim = _grouped(q, axis, group)
    return torch.addcmul(z.unsqueeze(dim), q, s.unsqueeze(dim)).flatten(dim - 1, dim).to(dtype)
