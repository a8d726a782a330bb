"""How keys and values are stored: `KVFormat`, its presets, and its one-line spelling. Knows no tensors, imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvchat.errors import UsageError

GROUPS = (32, 64, 128)
MIN_BLOCK = 32
LONGEST = 1 << 20
"""Tokens: the longest window and sink."""


@dataclass(frozen=True)
class Quant:
    """How one of keys or values is stored.

    bits: 2, 3 or 4 are packed codes; 16 is the model's own 16-bit type (float16 for a float32 model); 32 is float32.
    axis: "channel" shares a scale and a zero among `group` tokens of a channel, "token" among `group` channels of a token.
    """

    bits: int
    axis: Literal["channel", "token"] = "token"
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 16, 32):
            raise UsageError(f"{self.bits} bits is no storage width; take 2, 3, 4, 16 or 32")
        if self.group not in GROUPS:
            raise UsageError(f"group {self.group} is not supported; take 32, 64 or 128")

    @property
    def packed(self) -> bool:
        return self.bits <= 4

    def true_bits(self, head_dim: int, kv_heads: int) -> float:
        """Bits an element, float16 scale and zero of its group included."""
        if not self.packed:
            return self.bits
        if self.axis == "channel":
            return self.bits + 32 / self.group
        return self.bits + 32 * math.ceil(head_dim / self.group) / head_dim


@dataclass(frozen=True)
class Ranked:
    """Keys whose channels have bits by rank: those that matter most to the queries get most.

    shares: (bits, eighths of the channels), bits falling. Channels are ranked a head, in pairs (c, c + D/2), by the variance
    of the keys times the mean square of the queries. The affine codes of `group` tokens share a scale (8 bits) and a zero.
    """

    shares: tuple[tuple[int, int], ...]
    group: int = 128

    axis: ClassVar[Literal["channel"]] = "channel"
    packed: ClassVar[bool] = True

    def bits_by_rank(self, head_dim: int) -> tuple[int, ...]:
        """Bits of each channel in rank order; shares are rounded to whole pairs."""
        bits: list[int] = []
        eighths = 0
        for own, share in self.shares:
            eighths += share
            until = round(eighths * head_dim / 16) * 2
            bits += [own] * (until - len(bits))
        return tuple(bits)

    def true_bits(self, head_dim: int, kv_heads: int) -> float:
        """Bits an element, scale and zero of its group included."""
        return sum(self.bits_by_rank(head_dim)) / head_dim + 24 / self.group


@dataclass(frozen=True)
class Rotated:
    """Values rotated by a Hadamard matrix, each token's head with one scale (8 bits) and a codebook for normal variables."""

    bits: int

    axis: ClassVar[Literal["token"]] = "token"
    packed: ClassVar[bool] = True

    def true_bits(self, head_dim: int, kv_heads: int) -> float:
        """Bits an element, its token's scale included."""
        return self.bits + 8 / head_dim


@dataclass(frozen=True)
class NonUniform:
    """KVQuant's storage (arXiv:2401.18079): levels of a calibrated codebook, a layer's 1 % outliers a token kept exactly.

    axis: "channel" has calibrated ranges, "token" that of each token over all heads. uniform: evenly spaced levels instead.
    """

    bits: int
    axis: Literal["channel", "token"]
    outliers: bool = True
    uniform: bool = False

    packed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise UsageError(f"{self.bits} bits is no width of a codebook; take 2, 3 or 4")

    def outliers_of(self, elements: int) -> int:
        """Of a token with so many elements over all heads: 1 %, at least one."""
        return max(1, round(elements / 100)) if self.outliers else 0

    def true_bits(self, head_dim: int, kv_heads: int) -> float:
        """Bits an element: outliers with their places, and a token's range where it has one."""
        elements = head_dim * kv_heads
        return self.bits + (32 * self.outliers_of(elements) + 32 * (self.axis == "token")) / elements


@dataclass(frozen=True)
class KVFormat:
    """A whole cache format: `window` newest and `sink` first tokens stay in model precision, the rest is packed in blocks."""

    name: str
    keys: Quant | Ranked | NonUniform
    values: Quant | Rotated | NonUniform
    window: int = 128
    sink: int = 0
    pre_rope: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.window <= LONGEST and 0 <= self.sink <= LONGEST):
            raise UsageError(f"window and sink are numbers of tokens, from 0 to {LONGEST:,}")

    @property
    def block(self) -> int:
        """Tokens packed at once: the smallest number that completes a group of both keys and values."""
        return max(
            [MIN_BLOCK]
            + [
                q.group
                for q in (self.keys, self.values)
                if isinstance(q, Quant | Ranked) and q.packed and q.axis == "channel"
            ]
        )

    @property
    def calibrated(self) -> bool:
        """Whether it needs a calibration of the model."""
        return isinstance(self.keys, NonUniform) or isinstance(self.values, NonUniform)

    @property
    def fused(self) -> bool:
        """Whether there are kernels over packed rows: packed as KIVI does it, or as kvchat's own formats."""
        if isinstance(self.keys, Ranked):
            return isinstance(self.values, Rotated)
        return (
            isinstance(self.keys, Quant)
            and isinstance(self.values, Quant)
            and (self.keys.packed and self.keys.axis == "channel")
            and (self.values.packed and self.values.axis == "token")
        )

    def true_bits(self, head_dim: int, kv_heads: int) -> float:
        """Mean bits an element of packed keys and values, with all that a token needs to be read back."""
        return (self.keys.true_bits(head_dim, kv_heads) + self.values.true_bits(head_dim, kv_heads)) / 2


def _kivi(bits: int) -> KVFormat:
    """KIVI as published (arXiv:2402.02750): per-channel keys, per-token values, group 32, residual window 128."""
    return KVFormat(f"kivi{bits}", Quant(bits, "channel"), Quant(bits, "token"))


def _kvquant(bits: int) -> KVFormat:
    """KVQuant as published: per-channel keys before RoPE, per-token values, 1 % outliers, the first token exact."""
    keys, values = NonUniform(bits, "channel"), NonUniform(bits, "token")
    return KVFormat(f"kvquant{bits}", keys, values, window=0, sink=1, pre_rope=True)


def _kvchat(name: str, shares: tuple[tuple[int, int], ...], value_bits: int) -> KVFormat:
    """kvchat's own: what measured best at about 3.3 and 2.3 true bits (benchmarks/fidelity.py)."""
    return KVFormat(name, Ranked(shares), Rotated(value_bits), sink=4, pre_rope=True)


PRESETS = {
    "fp16": KVFormat("fp16", Quant(16), Quant(16), window=0),
    "kivi4": _kivi(4),
    "kvquant4": _kvquant(4),
    "kivi3": _kivi(3),
    "kvquant3": _kvquant(3),
    "kvchat3": _kvchat("kvchat3", ((6, 1), (5, 1), (4, 1), (3, 2), (2, 3)), 3),
    "kivi2": _kivi(2),
    "kvquant2": _kvquant(2),
    "kvchat2": _kvchat("kvchat2", ((5, 1), (4, 1), (3, 1), (2, 2), (1, 3)), 2),
}

SPELLING = "NAME[:k=BITS,v=BITS,group=N,kgroup=N,vgroup=N,window=N,sink=N,rope=pre|post,outliers=0|1]"


def parse(spec: str) -> KVFormat:
    """Read `kivi2` or `kivi2:k=4,sink=4,rope=pre` (see SPELLING).

    Raises UsageError that names the presets or the settings.
    """
    spec = spec.strip().lower()
    name, colon, settings = spec.partition(":")
    if name not in PRESETS:
        raise UsageError(f"unknown KV format {name!r}; take one of {', '.join(PRESETS)}, as {SPELLING}")
    fmt, seen = replace(PRESETS[name], name=spec), set()
    for setting in settings.split(",") if colon else ():
        key, _, value = (part.strip() for part in setting.partition("="))
        takes = _settings(fmt)
        if key and key not in takes:
            raise UsageError(f"{name} has no setting {key!r}; it takes {', '.join(takes)}")
        if key in seen:
            raise UsageError(f"the KV format {spec!r} sets {key} twice; keep one")
        seen.add(key)
        try:
            if not value.isascii():
                raise ValueError
            fmt = _with(fmt, key, value)
        except (KeyError, ValueError):
            raise UsageError(
                f"cannot read {setting!r} in the KV format {spec!r}; it goes {SPELLING}"
            ) from None
    return fmt


def _settings(fmt: KVFormat) -> tuple[str, ...]:
    """What of a preset may be set: how the keys and values of kvchat's own are stored is what they are."""
    common = ("window", "sink", "rope")
    if isinstance(fmt.keys, Quant):
        return ("k", "v", "group", "kgroup", "vgroup", *common)
    return ("k", "v", "outliers", *common) if isinstance(fmt.keys, NonUniform) else common


def _with(fmt: KVFormat, key: str, value: str) -> KVFormat:
    if key == "rope":
        return replace(fmt, pre_rope={"pre": True, "post": False}[value])
    number = int(value)
    if key in ("window", "sink"):
        return replace(fmt, **{key: number})  # type: ignore[arg-type]
    keys, values = fmt.keys, fmt.values
    if isinstance(keys, NonUniform) and isinstance(values, NonUniform):
        match key:
            case "k":
                return replace(fmt, keys=replace(keys, bits=number))
            case "v":
                return replace(fmt, values=replace(values, bits=number))
            case "outliers" if number in (0, 1):
                keys, values = (replace(q, outliers=bool(number)) for q in (keys, values))
                return replace(fmt, keys=keys, values=values)
    if not (isinstance(keys, Quant) and isinstance(values, Quant)):
        raise ValueError(f"{key} cannot be {number}")
    match key:
        case "k":
            keys = replace(keys, bits=number)
        case "v":
            values = replace(values, bits=number)
        case "group":
            keys, values = replace(keys, group=number), replace(values, group=number)
        case "kgroup":
            keys = replace(keys, group=number)
        case "vgroup":
            values = replace(values, group=number)
    return replace(fmt, keys=keys, values=values)
