"""Prefill, decode and peak memory against stock transformers, in one run: ratios, and one JSON line a case.

    python benchmarks/cpu.py [--tokens 4096] [--model smollm2-recall] [--rounds 3] [--kv fp16 kivi2 ...]

Every case is a process of its own, so that its memory peak is its own; rounds alternate the cases, and medians are compared.
`stock` is transformers with SDPA and DynamicCache, the prompt in one pass; `stock-chunked` reads it in kvchat's chunks.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

DECODED = 24


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model", default="smollm2-recall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", nargs="+", default=["fp16", "kivi4", "kivi3", "kivi2"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.model, options.tokens)))
        return
    cases = ["stock", "stock-chunked", *options.kv]
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            command = [sys.executable, __file__, "--case", case, "--model", options.model]
            command += ["--tokens", str(options.tokens)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[case].append(json.loads(out.splitlines()[-1]))
    medians = {
        case: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for case, rs in runs.items()
    }
    stock = medians["stock"]
    print(
        f"{options.model}, {options.tokens} tokens, medians of {options.rounds}; x: times stock transformers"
    )
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
        print(json.dumps({"case": case, "model": options.model, "tokens": options.tokens, **m}))


if __name__ == "__main__":
    main()
