"""`reference.attention` and `merge` by torch's own kernels, on any device. Outputs and LSE are float32."""

import torch
from torch import Tensor


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
    heads, count, dim = query.shape
    kv_heads, total, _ = key.shape
    square = causal and count == total and count > 1 and window is None
    # a single query is the newest token: only a window can hide anything from it
    hides = causal and (count > 1 or (window is not None and window < total))
    mask = _mask(query, total, window) if hides and not square else None
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        # FlashAttention: from Ampere on, in the inputs' precision, without masks
        flash = softcap is None and mask is None and value.shape[2] == dim and dim % 8 == 0 and dim <= 256
        flash &= torch.cuda.get_device_capability(query.device) >= (8, 0)
        operation = torch.ops.aten._scaled_dot_product_flash_attention
    else:
        query, key, value = query.float(), key.float(), value.float()
        flash = query.device.type == "cpu" and softcap is None and value.shape[2] == dim
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if flash:
        if square:
            # its own causal flag skips the upper half, but wants a key head for each query head
            key, value = (t.repeat_interleave(heads // kv_heads, 0) for t in (key, value))
        else:
            query, mask = _fold(query, mask, kv_heads)
        # the operations under scaled_dot_product_attention, which drops the LSE that merging needs
        settings = {} if query.is_cuda else {"attn_mask": mask}
        output, lse, *_ = operation(
            query[None], key[None], value[None], 0.0, square, scale=scaling, **settings
        )
        return output[0].reshape(heads, count, dim).float(), lse[0].reshape(heads, count)
    query, key, value = query.float(), key.float(), value.float()
    if square:
        mask = _mask(query, total, None)
    query, mask = _fold(query, mask, kv_heads)
    scores = (query * scaling) @ key.transpose(1, 2)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1, keepdim=True)
    output = scores.sub_(lse).exp_() @ value
    return output.reshape(heads, count, -1), lse.reshape(heads, count)


def merge(first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join two pieces; `None` is the empty one."""
    if first is None:
        return second
    (a, a_lse), (b, b_lse) = first, second
    share = torch.sigmoid(b_lse - a_lse)[..., None]  # exp(b) / (exp(a) + exp(b))
    return torch.lerp(a, b, share), torch.logaddexp(a_lse, b_lse)


def _fold(query: Tensor, mask: Tensor | None, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """Query heads that share a key head become more rows of it: [Hq, T, D] to [Hkv, Hq / Hkv * T, D]."""
    heads, _, dim = query.shape
    share = heads // kv_heads
    return query.reshape(kv_heads, -1, dim), mask if mask is None else mask.repeat(share, 1)


def _mask(query: Tensor, total: int, window: int | None) -> Tensor:
    """[T, S], 0 where a query may look and -inf elsewhere."""
    count = query.shape[1]
    newest = torch.arange(total - count, total, device=query.device)[:, None]
    key = torch.arange(total, device=query.device)
    hidden = key > newest
    if window is not None:
        hidden |= key <= newest - window
    return torch.zeros(count, total, device=query.device).masked_fill_(hidden, -torch.inf)
