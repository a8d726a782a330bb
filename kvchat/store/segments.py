"""One segment of a stored cache: the tensors of `KVCache.part` and the token ids they belong to, as safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvchat.kv.layer import Layout
from kvchat.store.manifest import File, Unusable

IDS = "ids"


def encode(part: Mapping[str, Tensor], ids: Sequence[int]) -> bytes:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}
    return save({**tensors, IDS: torch.tensor(ids, dtype=torch.int64)})


def read(folder: Path, file: File, layout: Layout, ids: Sequence[int]) -> dict[str, Tensor]:
    """The part, read by mmap, after everything about it was checked. Raises Unusable."""
    file.check(folder)
    try:
        with safe_open(folder / file.name, framework="pt") as stored:
            part = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise Unusable(f"{file.name} is no safetensors file ({error})") from None
    if part.pop(IDS, torch.empty(0)).tolist() != list(ids):
        raise Unusable(f"{file.name} holds other tokens than these")
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()} != layout:
        raise Unusable(f"{file.name} does not have the tensors of this model and format")
    return part
