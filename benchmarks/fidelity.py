"""How close a model stays to itself when its cache is quantized: perplexity, divergence and choices, by format.

    python benchmarks/fidelity.py [--model NAME] [--text FILE] [--lengths 2048 8192] [--prefill chunked exact]
                                  [--kv kivi2 ...] [--out results.jsonl] [--plot FILE.png] [--report]

The text (by default source code of Python's standard library) is read as a document is: in chunks, each of which reads the
history before it out of the packed cache (`chunked`); or its first half in one piece that sees itself exactly, and only the
second half, which is scored, reads a packed history (`exact`). Each token's prediction is compared with that of the same
model with an unquantized (float32) cache read in the same pieces. `ppl`: change of perplexity. `KL`: mean Kullback-Leibler
divergence in nats, and its mean over the worst 1 % of tokens. `same`: how often both choose the same next token. Results are
appended to --out as they come, and what is there already is not measured again; --plot draws all that is there.

Beside KV formats, --kv takes the names of ABLATIONS and of STOCK: transformers' QuantizedCache (needs optimum-quanto), and 4
bits a token in groups of 32 without anything exact, as llama.cpp has it (q4_0).
"""

import argparse
import hashlib
import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer

from kvchat import calibrations
from kvchat.engine import CHUNK, Engine
from kvchat.kv.format import PRESETS, KVFormat, NonUniform, Quant, parse
from kvchat.memory import true_bits
from kvchat.models.find import find
from kvchat.models.load import LoadedModel, load

EXACT = "fp16:k=32,v=32"
MODULES = ["argparse", "ast", "asyncio/base_events", "datetime", "decimal", "inspect", "statistics", "typing"]


def _ladder(axis: str, pre_rope: bool, uniform: bool, outliers: bool) -> KVFormat:
    """KVQuant at 3 bits, part by part (its figure 1 and appendix)."""
    keys = NonUniform(3, axis, outliers, uniform)  # type: ignore[arg-type]
    values = NonUniform(3, "token", outliers, uniform)
    return replace(PRESETS["kvquant3"], keys=keys, values=values, pre_rope=pre_rope)


OURS = {bits: PRESETS[f"kvchat{bits}"] for bits in (2, 3)}
ABLATIONS = {
    "3 bits a token": _ladder("token", False, True, False),
    "3 bits, keys a channel": _ladder("channel", False, True, False),
    "3 bits, keys before RoPE": _ladder("channel", True, True, False),
    "3 bits, codebooks": _ladder("channel", True, False, False),
    "kvchat2, keys alone": replace(OURS[2], values=Quant(16)),
    "kvchat2, values alone": replace(OURS[2], keys=Quant(16)),
    "kvchat2, KIVI's keys": replace(OURS[2], keys=Quant(2, "channel")),
    "kvchat2, KIVI's values": replace(OURS[2], values=Quant(2)),
    "kvchat2, no sink": replace(OURS[2], sink=0),
    "kvchat2, no window": replace(OURS[2], window=0),
    "kvchat2, keys after RoPE": replace(OURS[2], pre_rope=False),
}


class Q4Layer(DynamicLayer):
    """A dense layer whose tokens went through llama.cpp's q4_0: 32 channels share a float16 scale, of the largest / -8."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(q4_0(key_states), q4_0(value_states), *args, **kwargs)


def q4_0(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    codes = (groups / torch.where(scale == 0, 1, scale) + 8.5).floor().clamp(0, 15) - 8
    return (codes * scale).flatten(-2).to(x.dtype)


def _quantized(bits: int) -> Callable[[Any], Cache]:
    return lambda config: QuantizedCache("quanto", config, nbits=bits)


STOCK: dict[str, tuple[float, Callable[[Any], Cache]]] = {
    "QuantizedCache, 4 bits": (4 + 32 / 64, _quantized(4)),
    "QuantizedCache, 2 bits": (2 + 32 / 64, _quantized(2)),
    "q4_0 as llama.cpp": (
        4.5,
        lambda config: Cache(layers=[Q4Layer() for _ in range(config.num_hidden_layers)]),
    ),
}
"""True bits, and the cache that transformers' own attention reads."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-recall")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--prefill", nargs="+", choices=["chunked", "exact"], default=["chunked", "exact"])
    parser.add_argument("--kv", nargs="+", default=[*PRESETS, "kivi2:rope=pre,sink=4", *ABLATIONS, *STOCK])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--report", action="store_true", help="print what is in --out as Markdown, and no more"
    )
    options = parser.parse_args()
    if options.report:
        report(list(known(options.out).values()))
        return
    loaded = load(find(options.model, offline=True))
    text = options.text.read_text("utf-8") if options.text else library()
    ids = loaded.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    key = {
        "model": loaded.name,
        "text": options.text.name if options.text else "Python's standard library",
        "sha256": hashlib.sha256(text.encode()).hexdigest()[:12],
    }
    print(f"{loaded.name}, {key['text']}")
    print(
        f"{'tokens':>7} {'prefill':8} {'cache':24} {'bits':>5} {'ppl':>8} {'KL':>8} {'worst 1 %':>9} {'same':>6}"
    )
    for length in options.lengths:
        # the middle of the text: its beginning is often a licence or a table of contents
        piece = ids[len(ids) // 2 :][:length]
        if len(piece) < length:
            raise SystemExit(f"the text has fewer than {2 * length:,} tokens; give a longer one")
        for prefill in options.prefill:
            measure(loaded, piece, prefill, options.kv, key | {"tokens": length}, options.out)
    if options.plot:
        draw(list(known(options.out).values()), options.plot)


def measure(
    loaded: LoadedModel, ids: list[int], prefill: str, specs: list[str], key: dict[str, Any], out: Path | None
) -> None:
    done, reference = known(out), []
    scored = 0 if prefill == "chunked" else len(ids) // 2
    for spec in specs:
        row = key | {"prefill": prefill, "kv": spec}
        result = done.get(identity(row))
        if result is None:
            if not reference:
                reference = [chunk.half() for chunk in predictions(loaded, EXACT, ids, scored)]
            try:
                result = row | compare(loaded, spec, ids, scored, reference)
            except ImportError as error:
                print(f"{spec}: left out, {error}")
                continue
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        print(
            f"{len(ids):7,} {prefill:8} {spec:24} {result['bits']:5.2f} {result['ppl_change']:+8.2%} "
            f"{result['kl']:8.4f} {result['kl_worst']:9.3f} {result['same']:6.1%}",
            flush=True,
        )


def library() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((folder / f"{module}.py").read_text("utf-8") for module in MODULES)


def identity(row: dict[str, Any]) -> str:
    names = ("model", "text", "sha256", "tokens", "prefill", "kv")
    return json.dumps({name: row[name] for name in names})


def known(out: Path | None) -> dict[str, Any]:
    if out is None or not out.exists():
        return {}
    return {identity(row): row for row in map(json.loads, out.read_text().splitlines())}


@torch.no_grad()
def predictions(loaded: LoadedModel, spec: str, ids: list[int], scored: int) -> Iterator[Tensor]:
    """Log probabilities [chunk, vocabulary] of what follows each token from `scored` on, chunk by chunk."""
    if spec in STOCK:
        yield from stock_predictions(loaded, STOCK[spec][1], ids, scored)
        return
    fmt = ABLATIONS.get(spec) or parse(spec)
    calibration = calibrations.find(loaded) if fmt.calibrated else None
    engine = Engine(loaded.model, fmt, CHUNK, calibration=calibration)
    if scored:
        engine._forward(ids[:scored])
        engine.cache.seal()
    for end in [len(ids)] if scored else engine.ends(len(ids)):
        for start in range(engine.tokens, end, engine.chunk):
            chunk = ids[start : min(start + engine.chunk, end)]
            engine._forward(chunk, keep=len(chunk))
            assert engine._logits is not None
            yield engine._logits.float().log_softmax(-1)
        if end < len(ids):
            engine.cache.close()


def stock_predictions(
    loaded: LoadedModel, new_cache: Callable[[Any], Cache], ids: list[int], scored: int
) -> Iterator[Tensor]:
    model = loaded.model
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        cache, start = new_cache(model.config), 0
        for stop in [*([scored] if scored else ()), *range(scored + CHUNK, len(ids), CHUNK), len(ids)]:
            batch = torch.tensor([ids[start:stop]], device=model.device)
            logits = model(batch, cache=cache, use_cache=True, logits_to_keep=stop - start).logits[0]
            if start >= scored:
                yield logits.float().log_softmax(-1)
            start = stop
    finally:
        model.set_attn_implementation(attention)


def compare(
    loaded: LoadedModel, spec: str, ids: list[int], scored: int, reference: list[Tensor]
) -> dict[str, float]:
    following = torch.tensor([*ids[1:], 0])
    divergence, losses, exact_losses, same = [], [], [], []
    start = scored
    pieces = regrouped(predictions(loaded, spec, ids, scored), reference)
    for ours, exact in zip(pieces, reference, strict=True):
        exact = exact.float()
        divergence.append((exact.exp() * (exact - ours)).sum(-1).cpu())
        same.append((ours.argmax(-1) == exact.argmax(-1)).cpu())
        target = following[start : start + len(exact)].to(exact.device)
        losses.append(F.nll_loss(ours, target, reduction="none").cpu())
        exact_losses.append(F.nll_loss(exact, target, reduction="none").cpu())
        start += len(exact)
    kl = torch.cat(divergence)
    change = torch.cat(losses)[:-1].mean() - torch.cat(exact_losses)[:-1].mean()
    fmt = ABLATIONS.get(spec)
    return {
        "bits": STOCK[spec][0] if spec in STOCK else true_bits(loaded.shape, fmt or parse(spec)),
        "ppl_change": math.expm1(change),
        "kl": float(kl.mean()),
        "kl_worst": float(kl.topk(max(1, len(kl) // 100)).values.mean()),
        "same": float(torch.cat(same).float().mean()),
    }


def regrouped(chunks: Iterator[Tensor], like: list[Tensor]) -> Iterator[Tensor]:
    """The same rows in pieces as long as those of `like`: a format with a sink has its segments end elsewhere."""
    rest: Tensor | None = None
    for piece in like:
        while rest is None or len(rest) < len(piece):
            chunk = next(chunks)
            rest = chunk if rest is None else torch.cat([rest, chunk])
        yield rest[: len(piece)]
        rest = rest[len(piece) :]


def report(rows: list[dict[str, Any]]) -> None:
    """Markdown: a table for each model, text and prefill, with columns for each length."""
    groups: dict[tuple[str, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        group = groups.setdefault((row["model"], row["text"], row["prefill"]), {})
        group.setdefault(row["kv"], {})[row["tokens"]] = row
    for (model, text, prefill), table in sorted(groups.items()):
        lengths = sorted({length for cells in table.values() for length in cells})
        print(f"\n### {model}, {text}, {prefill} prefill\n")
        print("| cache | bits | " + " | ".join(f"{n:,}: ppl | KL | worst 1 % | same" for n in lengths) + " |")
        print("| --- | --- |" + " --- | --- | --- | --- |" * len(lengths))
        for kv, cells in table.items():
            bits = next(iter(cells.values()))["bits"]
            parts = [f"`{kv}`" if kv.split(":")[0] in PRESETS else kv, f"{bits:.2f}"]
            for length in lengths:
                r = cells.get(length)
                parts += (
                    ["", "", "", ""]
                    if r is None
                    else [
                        f"{r['ppl_change']:+.2%}",
                        f"{r['kl']:.4f}",
                        f"{r['kl_worst']:.3f}",
                        f"{r['same']:.1%}",
                    ]
                )
            print("| " + " | ".join(parts) + " |")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bits against divergence, a panel for each model, text and length; published settings beside ours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["prefill"] == "chunked" and row["kv"] not in ABLATIONS]
    names = ("model", "text", "tokens")
    panels = sorted({tuple(row[n] for n in names) for row in rows}, key=str)
    columns = math.ceil(math.sqrt(len(panels)))
    figure, axes = plt.subplots(
        math.ceil(len(panels) / columns), columns, figsize=(6 * columns, 4.5 * columns), squeeze=False
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        for family, marker in (("kvchat", "o"), ("kivi", "s"), ("kvquant", "^"), ("", "x")):
            mine = [r for r in rows if tuple(r[n] for n in names) == panel and r["kv"] != "fp16"]
            mine = (
                [r for r in mine if r["kv"].startswith(family)]
                if family
                else [r for r in mine if not r["kv"].startswith("k")]
            )
            axis.scatter(
                [r["bits"] for r in mine], [r["kl"] for r in mine], marker=marker, label=family or "others"
            )
            for r in mine:
                axis.annotate(r["kv"], (r["bits"], r["kl"]), (5, 3), textcoords="offset points", fontsize=7)
        axis.set(
            yscale="log", xlabel="true bits", ylabel="KL, nats", title=f"{panel[0]}, {panel[1]}, {panel[2]:,}"
        )
    figure.tight_layout()
    figure.savefig(path, dpi=60)


if __name__ == "__main__":
    main()
