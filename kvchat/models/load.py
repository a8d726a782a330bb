"""Open a model that is on this disk, for kvchat's attention, on the chosen device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from kvchat.errors import DoesNotFit, ModelRefused, UsageError
from kvchat.kv import attention
from kvchat.kv.shape import CacheShape
from kvchat.memory import human
from kvchat.models.families import FAMILIES, cache_shape, context_length, read_config
from kvchat.models.find import Found
from kvchat.models.tokenizer import FolderTokenizer


@dataclass(frozen=True)
class LoadedModel:
    name: str
    model: Any
    tokenizer: Any
    shape: CacheShape
    context: int  # tokens
    device: torch.device
    dtype: torch.dtype
    stop_ids: frozenset[int]
    folder: Path


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU. Raises UsageError for a device that isn't there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; take auto, cpu, cuda, cuda:N or mps") from None
    there = {
        "cpu": device.index in (None, 0),
        "cuda": (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise UsageError(f"there is no device {name} on this machine; take auto or cpu")
    return device


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where a GPU computes in it, float16 on others; float32 on a CPU, whose 16-bit products are slower."""
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float16


def load(found: Found, device_name: str = "auto", tokenizer: FolderTokenizer | None = None) -> LoadedModel:
    """Open weights and tokenizer (unless it is open) from `found.folder`. Runs no code that comes with the model, reads no pickle.

    Raises ModelRefused for a model that cannot be served, DoesNotFit when the weights don't.
    """
    config = read_config(found.folder)
    shape = cache_shape(config)
    device = choose_device(device_name)
    tokenizer = tokenizer or FolderTokenizer(found.folder)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    attention.register()
    try:
        settings = AutoConfig.from_pretrained(found.folder, trust_remote_code=False, local_files_only=True)
        if not FAMILIES[config["model_type"]].may_slide:
            # some such models carry a window that their attention ignores, and transformers' caches would heed
            settings.sliding_window = None
        model, info = AutoModelForCausalLM.from_pretrained(
            found.folder,
            config=settings,
            output_loading_info=True,
            dtype=choose_dtype(device),
            device_map={"": device} if device.type != "cpu" else None,
            attn_implementation=attention.NAME,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        )
    except torch.OutOfMemoryError:
        raise DoesNotFit(
            f"the weights of {found.name} ({human(found.weight_bytes)}) do not fit {device}; try --device cpu"
        ) from None
    except Exception as error:  # the files are foreign: transformers and its readers raise anything
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"{found.name} cannot be opened ({line}); pull it again") from None
    _check_whole(found.name, info)
    return LoadedModel(
        found.name,
        model.eval(),
        tokenizer,
        shape,
        context_length(config),
        device,
        model.dtype,
        _stop_ids(model, tokenizer),
        found.folder,
    )


def _check_whole(name: str, info: dict[str, Any]) -> None:
    """Weights that are not in the files would be random, and weights that the configuration does not place are unused."""
    for kind, what in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has another shape than its configuration says of"),
        ("unexpected_keys", "has, beyond its configuration,"),
    ):
        if keys := sorted(map(str, info.get(kind) or ())):
            raise ModelRefused(
                f"{name} {what} {len(keys)} tensors, such as {keys[0]}; it is not whole: pull it again"
            )


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return frozenset(i for i in ids if i is not None)


def free_bytes(device: torch.device) -> int:
    """What the device itself says is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
