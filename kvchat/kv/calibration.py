"""`Calibration`: what KVQuant's formats know of a model beforehand: ranges of key channels, and codebooks, by layer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvchat.errors import KVChatError
from kvchat.kv.format import KVFormat, NonUniform

VERSION = 1
NAME = "calibration.kvchat"
"""Of the file in a model's folder. safetensors, with another ending: it is none of the model's weights."""


class Ranges(NamedTuple):
    """What a layer's keys or values need: levels [2**bits]; middle and half width of each channel, [heads, 1, D]."""

    zero: Tensor
    radius: Tensor
    levels: Tensor


@dataclass(frozen=True)
class Calibration:
    """Tensors by name, I the layer's index in the model, for the layers with full attention:

    `I.keys.pre`, `I.keys.post`: ends of the ranges of key channels before and after RoPE, [4, heads, D]: percentiles 0.5 and
    99.5, minimum, maximum. `I.keys.levels`, `I.values.levels`: codebooks [2, 28], without and with outliers taken out; the
    levels for 2, 3 and 4 bits side by side. `recipe` says what they were made from.
    """

    tensors: Mapping[str, Tensor]
    recipe: Mapping[str, str]

    def ranges(self, layer: int, fmt: KVFormat, device: torch.device) -> tuple[Ranges | None, Ranges | None]:
        """Of the keys and of the values of a layer, as float32; None where the format needs none."""
        return (
            self._ranges(layer, "keys", fmt.keys, fmt.pre_rope, device),
            self._ranges(layer, "values", fmt.values, fmt.pre_rope, device),
        )

    def _ranges(
        self, layer: int, what: str, quant: Any, pre_rope: bool, device: torch.device
    ) -> Ranges | None:
        if not isinstance(quant, NonUniform):
            return None
        ends = self.tensors[f"{layer}.keys.{'pre' if pre_rope else 'post'}"].float().to(device)
        low, high = (ends[0], ends[1]) if quant.outliers else (ends[2], ends[3])
        if quant.uniform:
            levels = torch.linspace(-1, 1, 2**quant.bits)
        else:
            first = 2**quant.bits - 4
            levels = self.tensors[f"{layer}.{what}.levels"][
                int(quant.outliers), first : first + 2**quant.bits
            ]
        return Ranges(
            ((high + low) / 2)[:, None],
            ((high - low) / 2).clamp_min(1e-6)[:, None],
            levels.float().to(device),
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._encode()).hexdigest()

    def _encode(self) -> bytes:
        about = json.dumps({"version": VERSION, "recipe": dict(self.recipe)}, sort_keys=True)
        # one entry: safetensors writes several in any order
        return save({name: t.contiguous().cpu() for name, t in self.tensors.items()}, {"kvchat": about})

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises KVChatError."""
        with _draft(path) as draft:
            draft.write_bytes(self._encode())
            os.replace(draft, path)

    @staticmethod
    def check_writable(path: Path) -> None:
        """Raises KVChatError where `write` would."""
        with _draft(path) as draft:
            draft.touch()

    @classmethod
    def read(cls, path: Path) -> Calibration | None:
        """The calibration in a file, if it is there and of this version. Raises KVChatError for a damaged one."""
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["kvchat"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            version, recipe = about["version"], about["recipe"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise KVChatError(
                f"{path} cannot be read ({error}); remove it, and another one is found or made where it is needed"
            ) from None
        return cls(tensors, recipe) if version == VERSION else None


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to first, which is gone afterwards. Raises KVChatError where that fails."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield draft
    except OSError as error:
        raise KVChatError(
            f"the calibration cannot be written to {path} ({error.strerror}); make the folder writable"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
