"""Tiny random models, one a family, whose weights are large enough that a wrong rotation shows."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "phi3": {"partial_rotary_factor": 0.5},
    "cohere": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "gemma2": SLIDING,
    "gemma3_text": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4": {"head_dim": 16},
    "starcoder2": {},
    "stablelm": {},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def tiny_model(family: str = "llama", **settings: Any) -> Any:
    """A random float32 model of the family, the same at every call, with eager attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES.get(family, {}), **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, BASE["vocab_size"], (count,), generator=generator).tolist()
