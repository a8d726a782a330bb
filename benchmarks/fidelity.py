"""How close the model stays to itself when its cache is quantized: perplexity, divergence and choices, by format.

    python benchmarks/fidelity.py [--text FILE] [--lengths 2048 8192] [--kv fp16 kivi2 ...] [--out results.jsonl]

The text (by default source code of Python's standard library) is read in chunks, as a document is: every chunk reads the
history before it out of the packed cache. Each token's prediction is compared with that of the same model with an
unquantized (float32) cache. `ppl`: change of perplexity. `KL`: mean Kullback-Leibler divergence in nats, and its mean over
the worst 1 % of tokens. `same`: how often both choose the same next token. Results are appended to --out as they come, and
what is there already is not measured again.
"""

import argparse
import hashlib
import json
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine import Engine
from kvchat.kv.format import KVFormat, parse
from kvchat.memory import true_bits
from kvchat.models.find import find
from kvchat.models.load import LoadedModel, load

EXACT = "fp16:k=32,v=32"
FORMATS = ["fp16", "kivi4", "kivi3", "kivi2", "kivi2:rope=pre,sink=4", "kvchat3", "kvchat2"]
MODULES = ["argparse", "ast", "asyncio/base_events", "datetime", "decimal", "inspect", "statistics", "typing"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-recall")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--kv", nargs="+", default=FORMATS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loaded = load(find(options.model, offline=True))
    text = options.text.read_text("utf-8") if options.text else library()
    ids = loaded.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    key = {
        "model": loaded.name,
        "text": options.text.name if options.text else "Python's standard library",
        "sha256": hashlib.sha256(text.encode()).hexdigest()[:12],
    }
    done = known(options.out)
    print(f"{loaded.name}, {key['text']}")
    print(f"{'tokens':>7} {'KV format':24} {'bits':>5} {'ppl':>9} {'KL':>8} {'worst 1 %':>9} {'same':>7}")
    for length in options.lengths:
        # the middle of the text: its beginning is often a licence or a table of contents
        piece = ids[len(ids) // 2 :][:length]
        if len(piece) < length:
            raise SystemExit(f"the text has fewer than {2 * length:,} tokens; give a longer one")
        reference: list[Tensor] = []
        for spec in options.kv:
            row = key | {"tokens": length, "kv": spec}
            result = done.get(json.dumps(row, sort_keys=True))
            if result is None:
                if not reference:
                    reference = [chunk.half() for chunk in predictions(loaded, parse(EXACT), piece)]
                result = row | compare(loaded, parse(spec), piece, reference)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            print(
                f"{length:7,} {spec:24} {result['bits']:5.2f} {result['ppl_change']:+9.2%} {result['kl']:8.4f} "
                f"{result['kl_worst']:9.3f} {result['same']:7.1%}",
                flush=True,
            )


def library() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((folder / f"{module}.py").read_text("utf-8") for module in MODULES)


def known(out: Path | None) -> dict[str, Any]:
    if out is None or not out.exists():
        return {}
    results = [json.loads(line) for line in out.read_text().splitlines()]
    names = ("model", "text", "sha256", "tokens", "kv")
    return {json.dumps({n: r[n] for n in names}, sort_keys=True): r for r in results}


@torch.no_grad()
def predictions(loaded: LoadedModel, fmt: KVFormat, ids: list[int]) -> Iterator[Tensor]:
    """Log probabilities [chunk, vocabulary] of what follows each token, chunk by chunk, as a document is read."""
    engine = Engine(loaded.model, fmt)
    for end in engine.ends(len(ids)):
        for start in range(engine.tokens, end, engine.chunk):
            chunk = ids[start : min(start + engine.chunk, end)]
            engine._forward(chunk, keep=len(chunk))
            assert engine._logits is not None
            yield engine._logits.float().log_softmax(-1)
        if end < len(ids):
            engine.cache.close()


def compare(loaded: LoadedModel, fmt: KVFormat, ids: list[int], reference: list[Tensor]) -> dict[str, float]:
    following = torch.tensor([*ids[1:], 0])
    divergence, losses, exact_losses, same = [], [], [], []
    start = 0
    for ours, exact in zip(regrouped(predictions(loaded, fmt, ids), reference), reference, strict=True):
        ours, exact = ours.cpu(), exact.float().cpu()
        divergence.append((exact.exp() * (exact - ours)).sum(-1))
        same.append(ours.argmax(-1) == exact.argmax(-1))
        target = following[start : start + len(exact)]
        losses.append(F.nll_loss(ours, target, reduction="none"))
        exact_losses.append(F.nll_loss(exact, target, reduction="none"))
        start += len(exact)
    kl = torch.cat(divergence)
    change = torch.cat(losses)[:-1].mean() - torch.cat(exact_losses)[:-1].mean()
    return {
        "bits": true_bits(loaded.shape, fmt),
        "ppl_change": math.expm1(change),
        "kl": float(kl.mean()),
        "kl_worst": float(kl.topk(max(1, len(kl) // 100)).values.mean()),
        "same": float(torch.cat(same).float().mean()),
    }


def regrouped(chunks: Iterator[Tensor], like: list[Tensor]) -> Iterator[Tensor]:
    """The same rows in pieces as long as those of `like`: a format with a sink has its segments end elsewhere."""
    rest = torch.empty(0)
    for piece in like:
        while len(rest) < len(piece):
            chunk = next(chunks)
            rest = chunk if not len(rest) else torch.cat([rest, chunk])
        yield rest[: len(piece)]
        rest = rest[len(piece) :]


if __name__ == "__main__":
    main()
