"""Whole models on a GPU, with random weights in the shapes of real ones: decode and prefill against stock transformers.

    python benchmarks/gpu_model.py [decode] [prefill] [million] [--kv kivi4 kivi2] [--tokens N]

decode   one token after another behind `--tokens` (131,072) tokens, Llama-3.1-8B's shape; what lies in the caches is random
prefill  32,768 tokens in chunks of 2,048, the same shape
million  Llama-2-7B's shape, 1,048,576 tokens of cache and the weights in 80 GiB, which the process may not pass; and as
         many tokens really read with the default model's shape

Stock is transformers' DynamicCache with SDPA, in the same chunks. Prints one JSON line a measurement; times are medians.
Needs one GPU with room for it all, no model and no network.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvchat.engine import GPU_CHUNK, Engine, Sampling
from kvchat.kv import attention
from kvchat.kv.calibration import Calibration
from kvchat.kv.format import KVFormat, parse
from kvchat.kv.layer import PackedLayer

SHAPES = {
    "llama-3.1-8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "llama-2-7b": dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000,
    ),
    "smollm2-135m": dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    ),
}  # fmt: skip
MILLION = 1 << 20
STEPS = 48


def open_model(name: str, device: str = "cuda") -> Any:
    torch.manual_seed(0)
    attention.register()
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=2 * MILLION)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.NAME
        ).eval()


@contextmanager
def stock(model: Any) -> Iterator[None]:
    model.set_attn_implementation("sdpa")
    yield
    model.set_attn_implementation(attention.NAME)


def ids(count: int) -> list[int]:
    return torch.randint(0, 30000, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def fill(engine: Engine, tokens: int) -> None:
    """Put `tokens` random tokens into the cache, in place: nothing is ever held twice."""
    fmt = engine.fmt
    config = engine.model.config
    like = torch.empty(
        1, config.num_key_value_heads, 0, config.head_dim, device=engine.model.device, dtype=torch.bfloat16
    )
    packed = (tokens - fmt.window - fmt.sink) // fmt.block * fmt.block
    for layer in engine.cache.layers:
        assert isinstance(layer, PackedLayer)
        layer.lazy_initialization(like, like)
        layer.reserve(packed + 1024)
        for rows in layer.rows:
            for field in rows.stored(0, packed):
                _randomize(field)
        layer.packed_tokens, layer.next_position = packed, tokens
        layer.starts = list(range(fmt.sink, fmt.sink + packed, fmt.block))
        sink, window = (
            tuple(like.new_empty(1, like.shape[1], count, like.shape[3]).normal_() for _ in range(2))
            for count in (fmt.sink, tokens - fmt.sink - packed)
        )
        layer.sink = sink
        layer.keys, layer.values = window


def _randomize(field: Tensor) -> None:
    for head in field:  # one head at a time: random numbers of a whole field would be another field
        if field.is_floating_point():
            head.uniform_(-1, 1) if field.dtype != torch.float16 else head.uniform_(0.2, 0.8)
        else:
            head.random_(0, 256)


def seconds_a_token(step: Callable[[], object], steps: int = STEPS) -> float:
    """Median, each until its result is there, as a chat waits for it."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[steps // 6 :])


def report(**line: Any) -> None:
    line |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def calibration(config: Any) -> Calibration:
    """Of normal keys and values, for formats that need one."""
    ends = torch.tensor([-2.6, 2.6, -4.0, 4.0])[:, None, None]
    ends = ends.expand(4, config.num_key_value_heads, config.head_dim)
    tensors = {}
    for i in range(config.num_hidden_layers):
        tensors |= {f"{i}.keys.pre": ends, f"{i}.keys.post": ends}
        for what in ("keys", "values"):
            tensors[f"{i}.{what}.levels"] = torch.cat(
                [torch.linspace(-1, 1, 2**b) for b in (2, 3, 4)]
            ).expand(2, -1)
    return Calibration(tensors, {})


def packed_decode(model: Any, fmt: KVFormat, tokens: int, steps: int = STEPS) -> float:
    """Tokens a second."""
    engine = Engine(model, fmt, calibration=calibration(model.config) if fmt.calibrated else None)
    fill(engine, tokens)
    answer = engine.generate(ids(1), Sampling(max_tokens=steps + 1), frozenset())
    next(answer)
    return 1 / seconds_a_token(lambda: next(answer), steps)


@torch.no_grad()
def stock_decode(model: Any, tokens: int) -> float:
    cache, config = DynamicCache(config=model.config), model.config
    for i in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, tokens, config.head_dim)
        keys, values = (
            torch.empty(shape, device=model.device, dtype=torch.bfloat16).normal_() for _ in range(2)
        )
        cache.update(keys, values, i)
    token = torch.tensor([[5]], device=model.device)

    def step() -> None:
        nonlocal token
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[0, -1:].argmax(-1, keepdim=True)

    return 1 / seconds_a_token(step)


def decode(options: argparse.Namespace) -> None:
    model = open_model("llama-3.1-8b")
    clear()
    with stock(model):
        base = stock_decode(model, options.tokens)
    report(measure="decode", tokens=options.tokens, format="stock", tokens_a_second=base)
    for name in options.kv:
        clear()
        speed = packed_decode(model, parse(name), options.tokens)
        report(
            measure="decode", tokens=options.tokens, format=name, tokens_a_second=speed, times=speed / base
        )


@torch.no_grad()
def stock_prefill(model: Any, prompt: list[int]) -> float:
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    for at in range(0, len(prompt), GPU_CHUNK):
        batch = torch.tensor([prompt[at : at + GPU_CHUNK]], device=model.device)
        model(batch, past_key_values=cache, use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize()
    return len(prompt) / (time.perf_counter() - start)


def packed_prefill(model: Any, fmt: KVFormat, prompt: list[int]) -> float:
    engine = Engine(model, fmt)
    engine.cache.reserve(len(prompt))
    start = time.perf_counter()
    for _ in engine.prefill(prompt):
        pass
    torch.cuda.synchronize()
    return len(prompt) / (time.perf_counter() - start)


def prefill(options: argparse.Namespace) -> None:
    model, prompt = open_model("llama-3.1-8b"), ids(32768)
    speeds: dict[str, list[float]] = {}
    for _ in range(3):  # the first round compiles
        for name in ("stock", *options.kv):
            clear()
            if name == "stock":
                with stock(model):
                    speed = stock_prefill(model, prompt)
            else:
                speed = packed_prefill(model, parse(name), prompt)
            speeds.setdefault(name, []).append(speed)
            times = statistics.median(speeds[name][1:] or [0.0]) / statistics.median(
                speeds["stock"][1:] or [1.0]
            )
            report(
                measure="prefill", tokens=len(prompt), format=name, tokens_a_second=speed, median_times=times
            )


def million(options: argparse.Namespace) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(80 * 2**30 / total)
    model = open_model("llama-2-7b")
    clear()
    name = "kvquant2:outliers=0"  # every other format is larger than what the weights leave
    speed = packed_decode(model, parse(name), MILLION, steps=4)
    report(measure="million, decode", shape="llama-2-7b", format=name, tokens_a_second=speed, cap_gib=80)
    del model
    model = open_model("smollm2-135m")
    for name in options.kv[-1:]:
        clear()
        speed = packed_prefill(model, parse(name), ids(MILLION))
        report(measure="million, prefill", shape="smollm2-135m", format=name, tokens_a_second=speed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measures = {"decode": decode, "prefill": prefill, "million": million}
    parser.add_argument("measures", nargs="*", choices=[*measures, []], default=list(measures))
    parser.add_argument("--kv", nargs="+", default=["kivi4", "kivi2"])
    parser.add_argument("--tokens", type=int, default=131072)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU; benchmarks/cpu.py measures without one")
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for name in options.measures:
        measures[name](options)
        clear()


if __name__ == "__main__":
    main()
