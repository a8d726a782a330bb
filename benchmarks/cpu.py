"""Prefill, decode, peak memory and attention alone against stock transformers, in one run: ratios, and one JSON line a case.

    python benchmarks/cpu.py [--tokens 1024 8192 ...] [--model smollm2-recall] [--rounds 3] [--kv fp16 kivi2 ...]

Every case is a process of its own, so that its memory peak is its own; rounds alternate the cases, and medians are compared.
`stock` is transformers with SDPA and DynamicCache, the prompt in one pass; `stock-chunked` reads it in kvchat's chunks.
Attention alone is one token over one layer, against the faster of torch's two ways in float32.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvchat.__main__ import ENVIRONMENT

DECODED = 24
SHAPES = {"9/3 heads": (9, 3, 64), "14/2 heads": (14, 2, 64)}
"""Query heads, key heads, head_dim: SmolLM2-135M's and Qwen2.5-0.5B's."""
CALLS = 40
"""Calls of a kernel in a row; the first quarter isn't counted."""


def run_case(case: str, model: str, tokens: int) -> dict[str, float]:
    """Measure one case in this process: tokens/s of prefill and decode, peak bytes."""
    import torch
    from transformers import DynamicCache

    from kvchat.engine import CHUNK, Engine, Sampling
    from kvchat.kv.format import parse
    from kvchat.models.find import find
    from kvchat.models.load import load

    torch.set_grad_enabled(False)
    loaded = load(find(model, offline=True), "cpu")
    ids = torch.randint(100, 40_000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    if case.startswith("stock"):
        loaded.model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=loaded.model.config)
        chunk = CHUNK if case == "stock-chunked" else tokens

        def forward(some: list[int]) -> None:
            loaded.model(torch.tensor([some]), cache=cache, use_cache=True, logits_to_keep=1)

        started = time.perf_counter()
        for i in range(0, tokens, chunk):
            forward(ids[i : i + chunk])
        read = time.perf_counter() - started
        forward([7])
        started = time.perf_counter()
        for _ in range(DECODED):
            forward([7])
        decode = time.perf_counter() - started
        in_use = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        engine = Engine(loaded.model, parse(case))
        engine.cache.reserve(tokens)
        started = time.perf_counter()
        for _ in engine.prefill(ids):
            pass
        engine.cache.seal()
        read = time.perf_counter() - started
        answer = engine.generate([7], Sampling(max_tokens=DECODED + 1), frozenset())
        next(answer)
        started = time.perf_counter()
        for _ in answer:
            pass
        decode = time.perf_counter() - started
        in_use = engine.cache.nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"prefill": tokens / read, "decode": DECODED / decode, "peak": peak, "cache": in_use}


def attention_cases(heads: int, kv_heads: int, dim: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """One token's attention over random keys and values: dense in torch's two ways, and packed."""
    import torch
    import torch.nn.functional as F

    from kvchat.kv import ops

    query, scaling = torch.randn(heads, 1, dim), dim**-0.5
    key, value = torch.randn(2, kv_heads, tokens, dim)

    def products() -> Any:
        scores = (query.view(kv_heads, -1, dim) * scaling) @ key.transpose(1, 2)
        return scores.softmax(-1) @ value

    def sdpa() -> Any:
        return F.scaled_dot_product_attention(query[None], key[None], value[None], enable_gqa=True)

    def over(bits: int) -> Callable[[], Any]:
        k = ops.Packed(*ops.quantize(key, bits, "channel", 32), bits, "channel", 32)
        v = ops.Packed(*ops.quantize(value, bits, "token", 32), bits, "token", 32)
        return lambda: ops.attention_packed(query, k, v, scaling)

    return {"products": products, "sdpa": sdpa, **{f"kivi{bits}": over(bits) for bits in (2, 3, 4)}}


def run_attention(tokens: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each shape and length: milliseconds, medians."""
    rows = []
    for name, shape in SHAPES.items():
        for total in tokens:
            cases = attention_cases(*shape, total)
            times: dict[str, list[float]] = {case: [] for case in cases}
            for _ in range(rounds):
                for case, call in cases.items():
                    for i in range(CALLS):
                        started = time.perf_counter()
                        call()
                        if i >= CALLS // 4:
                            times[case].append(1e3 * (time.perf_counter() - started))
            medians = {case: statistics.median(own) for case, own in times.items()}
            rows.append({"shape": name, "tokens": total, **medians})
    return rows


def in_process(arguments: list[str], environment: dict[str, str]) -> Any:
    command = [sys.executable, __file__, *arguments]
    env = {**os.environ, **environment}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


def show_model(model: str, tokens: int, kv: list[str], rounds: int) -> None:
    cases = ["stock", "stock-chunked", *kv]
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            environment = {} if case.startswith("stock") else ENVIRONMENT
            arguments = ["--case", case, "--model", model, "--tokens", str(tokens)]
            runs[case].append(in_process(arguments, environment))
    medians = {
        case: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for case, rs in runs.items()
    }
    stock = medians["stock"]
    print(f"\n{model}, {tokens} tokens, medians of {rounds}; x: times stock transformers")
    print(
        f"{'':14} {'prefill/s':>10} {'x':>6} {'decode/s':>9} {'x':>6} {'cache MiB':>10} {'peak MiB':>9} {'x':>6}"
    )
    for case, m in medians.items():
        print(
            f"{case:14} {m['prefill']:10.1f} {m['prefill'] / stock['prefill']:6.2f} {m['decode']:9.2f} "
            f"{m['decode'] / stock['decode']:6.2f} {m['cache'] / 2**20:10.1f} {m['peak'] / 2**20:9.0f} "
            f"{m['peak'] / stock['peak']:6.2f}"
        )
    for case, m in medians.items():
        print(json.dumps({"case": case, "model": model, "tokens": tokens, **m}), flush=True)


def show_attention(tokens: list[int], rounds: int) -> None:
    # both sides with the same idle threads
    rows = in_process(
        ["--case", "attention", "--rounds", str(rounds), "--tokens", *map(str, tokens)], ENVIRONMENT
    )
    print(
        "attention alone, one token over one layer, medians in ms; x: times the faster of torch's two in float32"
    )
    print(
        f"{'':10} {'tokens':>7} {'products':>9} {'sdpa':>7} "
        + f"{'kivi2':>7} {'x':>6} {'kivi3':>7} {'x':>6} {'kivi4':>7} {'x':>6}"
    )
    for row in rows:
        best = min(row["products"], row["sdpa"])
        packed = " ".join(f"{row[f'kivi{b}']:7.3f} {best / row[f'kivi{b}']:6.2f}" for b in (2, 3, 4))
        print(f"{row['shape']:10} {row['tokens']:7} {row['products']:9.3f} {row['sdpa']:7.3f} {packed}")
    for row in rows:
        print(json.dumps({"case": "attention", **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--model", default="smollm2-recall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", nargs="*", default=["fp16", "kivi4", "kivi3", "kivi2"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case == "attention":
        print(json.dumps(run_attention(options.tokens, options.rounds)))
    elif options.case:
        print(json.dumps(run_case(options.case, options.model, options.tokens[0])))
    else:
        show_attention(options.tokens, options.rounds)
        for tokens in options.tokens:
            show_model(options.model, tokens, options.kv, options.rounds)


if __name__ == "__main__":
    main()
