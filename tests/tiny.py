"""Tiny random models, one a family, with weights so large that a wrong rotation shows; a byte tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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


def tiny_calibration(model: Any) -> Any:
    """A calibration of a tiny model on two short pieces of random tokens."""
    from kvchat.kv.calibrate import calibrate
    from kvchat.kv.calibration import Calibration

    steps = calibrate(model, [tokens(120, seed) for seed in (1, 2)])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return Calibration(end.value, {"text": "random tokens"})


CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Tiny.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = [*SPECIAL, "<tool_call>", "<|", "\n\n"]  # the last three aren't special, the very last is white space
VOCABULARY = 256 + len(ADDED)
END = VOCABULARY - 4  # <|im_end|>


def tiny_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> Any:
    """One token a byte, and added tokens of every kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=t in SPECIAL, normalized=False) for t in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


def spelled(tokenizer: Any, text: str | bytes) -> list[int]:
    """The ids of a text's bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    data = text.encode() if isinstance(text, str) else text
    return [tokenizer.convert_tokens_to_ids(names[byte]) for byte in data]


def tiny_loaded(family: str = "llama", context: int = 2048, **settings: Any) -> Any:
    """What `models.load` would give for a tiny model with the tokenizer above."""
    from kvchat.kv import attention
    from kvchat.models.families import cache_shape
    from kvchat.models.load import LoadedModel

    tokenizer = tiny_tokenizer()
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": context, **settings}
    model = tiny_model(family, **settings)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    shape = cache_shape(model.config.to_dict())
    stop_ids = frozenset([tokenizer.eos_token_id])
    return LoadedModel(
        f"tiny {family}",
        model,
        tokenizer,
        shape,
        context,
        model.device,
        model.dtype,
        stop_ids,
        Path("nowhere"),
    )
