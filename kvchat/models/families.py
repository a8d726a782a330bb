"""Which models can be served, and the shape of their caches, from config.json alone: no weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat.errors import ModelNotFound, ModelRefused
from kvchat.kv.shape import CacheShape, LayerShape


@dataclass(frozen=True)
class Family:
    """What transformers' configuration class fills in where config.json is silent.

    slides: "never"; "window": every layer when a window is set; and when use_sliding_window is set too, "flag": every layer,
    "later": those from max_window_layers on, "nope": those without RoPE.
    """

    kv_heads: int | None = None  # None: one a query head
    head_dim: int | None = None  # None: hidden_size / heads
    window: int | None = None
    slides: str = "window"
    pattern: int = 0  # every pattern-th layer is full, the others slide
    context: int = 2048

    @property
    def may_slide(self) -> bool:
        return self.slides != "never"

    def layer_types(self, config: dict[str, Any]) -> list[str]:
        count = config["num_hidden_layers"]
        if config.get("layer_types"):
            return list(config["layer_types"])
        if self.pattern:
            pattern = (
                config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or self.pattern
            )
            return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
        windowed = config.get("sliding_window", self.window) is not None
        flagged = windowed and bool(config.get("use_sliding_window"))
        first = config.get("max_window_layers", 28)
        rotated = config.get("no_rope_layers")  # 1 for a layer with RoPE
        interval = config.get("no_rope_layer_interval", 4)
        slides: dict[str, Callable[[int], bool]] = {
            "never": lambda i: False,
            "window": lambda i: windowed,
            "flag": lambda i: flagged,
            "later": lambda i: flagged and i >= first,
            "nope": lambda i: flagged and not (rotated[i] if rotated else (i + 1) % interval),
        }
        return ["sliding_attention" if slides[self.slides](i) else "full_attention" for i in range(count)]


FAMILIES = {
    "cohere": Family(slides="never", context=8192),
    "gemma2": Family(4, 256, 4096, pattern=2, context=8192),
    "gemma3_text": Family(4, 256, 4096, pattern=6, context=131072),
    "glm4": Family(2, 128, slides="never", context=131072),
    "granite": Family(slides="never"),
    "llama": Family(slides="never"),
    "mistral": Family(8, None, 4096, context=131072),
    "olmo2": Family(slides="never"),
    "phi3": Family(context=4096),
    "qwen2": Family(32, None, 4096, slides="later", context=32768),
    "qwen3": Family(32, 128, 4096, slides="later", context=32768),
    "qwen3_moe": Family(4, None, 4096, slides="flag", context=32768),
    "smollm3": Family(4, None, slides="nope", context=32768),
    "stablelm": Family(32, slides="never", context=4096),
    "starcoder2": Family(2, context=4096),
}
"""Every family here runs through kvchat's hooks in the tests, against stock attention."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, or of a path to the file itself. Raises ModelNotFound where there is none."""
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{folder} has no config.json; name a model's folder") from None
    except (ValueError, OSError) as error:
        raise ModelNotFound(f"{file} cannot be read ({error}); name a model's folder") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelNotFound(f"{file} names no model_type; name a model's folder")
    return config


def cache_shape(config: dict[str, Any]) -> CacheShape:
    """Heads, head_dim and windows of every layer that keeps keys and values.

    Raises ModelRefused, by name, for what cannot be served: nothing is guessed for an architecture that isn't listed.
    """
    name = config["model_type"]
    if config.get("kv_lora_rank"):
        raise ModelRefused(
            f"{name} keeps latent keys and values (MLA), which kvchat cannot pack yet; take another model"
        )
    types = set(config.get("layer_types") or ())
    if other := types - {"full_attention", "sliding_attention"}:
        raise ModelRefused(
            f"{name} has layers of type {', '.join(sorted(other))}; kvchat serves full and sliding attention"
        )
    if name not in FAMILIES:
        raise ModelRefused(
            f"the architecture {name!r} is not one that kvchat knows ({', '.join(FAMILIES)}); take one of those"
        )
    family = FAMILIES[name]
    try:
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or family.kv_heads or heads
        head_dim = config.get("head_dim") or family.head_dim or config["hidden_size"] // heads
        layers = family.layer_types(config)
    except KeyError as error:
        raise ModelRefused(
            f"the configuration of this {name} model has no {error}; is its config.json whole?"
        ) from None
    window = config.get("sliding_window", family.window)
    return CacheShape(
        tuple(
            LayerShape(kv_heads, head_dim, window if kind == "sliding_attention" else None) for kind in layers
        )
    )


def context_length(config: dict[str, Any]) -> int:
    """Tokens that the model was made for, RoPE scaling included where config.json says so."""
    family = FAMILIES.get(config.get("model_type", ""), Family())
    length = int(config.get("max_position_embeddings") or family.context)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings")
    if original and rope.get("rope_type", rope.get("type")) == "yarn" and length == original:
        length = int(original * rope["factor"])
    return length
