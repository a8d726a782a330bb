"""Plans from a model's configuration alone: what a document costs, and formats side by side. No torch, no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
from rich.console import RenderableType
from rich.text import Text

from kvchat.documents import Reading, Skipped
from kvchat.kv.format import PRESETS, KVFormat
from kvchat.measure import Measured
from kvchat.memory import Usage, fits, human, usage
from kvchat.models.families import cache_shape, context_length, read_config
from kvchat.models.find import Found
from kvchat.models.tokenizer import FolderTokenizer
from kvchat.models.tokens import ANSWER_ROOM, count_tokens
from kvchat.ui.tables import bar, table

LENGTHS = {"32k": 32 << 10, "128k": 128 << 10, "1M": 1 << 20}
DENSE_BYTES = 4
"""Model precision on a CPU; on a GPU the window takes half."""


@dataclass(frozen=True)
class FilePlan:
    name: str
    tokens: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What reading some documents would mean."""

    model: str
    context: int
    files: tuple[FilePlan, ...]
    skipped: tuple[Skipped, ...]
    tokens: int  # of all files with the prompt around them
    fits: bool  # and leaves room for an answer
    usages: tuple[Usage, ...]  # the chosen format, then the presets


def plan(found: Found, fmt: KVFormat, reading: Reading) -> Plan:
    """Count and plan, with the prompt as `ask` would build it."""
    config = read_config(found.folder)
    shape, context = cache_shape(config), context_length(config)
    counts, tokens = count_tokens(FolderTokenizer(found.folder), reading.documents)
    formats = [fmt, *(preset for preset in PRESETS.values() if preset != fmt)]
    return Plan(
        found.name,
        context,
        tuple(FilePlan(d.name, n, d.notes) for d, n in zip(reading.documents, counts, strict=True)),
        reading.skipped,
        tokens,
        tokens + ANSWER_ROOM <= context,
        tuple(usage(shape, f, tokens, DENSE_BYTES) for f in formats),
    )


def plan_views(plan: Plan) -> Iterator[RenderableType]:
    rows = [[file.name, f"{file.tokens:,}"] for file in plan.files]
    around = plan.tokens - sum(file.tokens for file in plan.files)
    yield table(["file", "tokens"], [*rows, ["(the prompt around them)", f"{around:,}"]])
    yield table(
        ["KV format", "cache", "true bits", "beside fp16"],
        [[u.format_name, human(u.in_use), f"{u.true_bits:.3g}", _beside(u)] for u in plan.usages],
    )
    verdict = "fits" if plan.fits else "does NOT fit"
    yield Text(
        f"{plan.tokens:,} tokens: {verdict} the {plan.context:,} that {plan.model} reads "
        f"({ANSWER_ROOM} are kept for an answer)"
    )


def _beside(usage: Usage) -> str:
    if usage.ratio >= 1:
        return f"{usage.ratio:.1f}x less"
    return (
        f"{1 / usage.ratio:.1f}x more"  # short texts on a CPU: nothing is packed, and the window is float32
    )


@dataclass(frozen=True)
class Row:
    """One format: planned usage for the tokens asked about and for each of LENGTHS, and the most tokens that fit."""

    now: Usage
    lengths: tuple[Usage, ...]
    fits: int


@dataclass(frozen=True)
class Comparison:
    model: str
    context: int
    tokens: int
    free: int  # bytes that this machine has free, before the model's weights
    weights: int  # bytes of the weights on disk, 0 when only the configuration is here
    rows: tuple[Row, ...]
    measured: tuple[Measured, ...] = ()


def compare(
    found: Found, formats: Sequence[KVFormat], reading: Reading | None, tokens: int | None
) -> Comparison:
    """Formats side by side for the tokens of a reading, or for `tokens`. Raises ModelRefused for what is unknown."""
    config = read_config(found.folder)
    shape = cache_shape(config)
    if reading is not None:
        _, tokens = count_tokens(FolderTokenizer(found.folder), reading.documents)
    assert tokens is not None
    weights, free = found.weight_bytes, psutil.virtual_memory().available
    rows = tuple(
        Row(
            usage(shape, fmt, tokens, DENSE_BYTES),
            tuple(usage(shape, fmt, length, DENSE_BYTES) for length in LENGTHS.values()),
            fits(shape, fmt, DENSE_BYTES, max(0, free - weights)),
        )
        for fmt in formats
    )
    return Comparison(found.name, context_length(config), tokens, free, weights, rows)


def comparison_views(comparison: Comparison) -> Iterator[RenderableType]:
    most = max(max(row.now.in_use, row.now.fp16) for row in comparison.rows)
    yield table(
        ["KV format", "bits", f"{comparison.tokens:,}", "", *LENGTHS, "fits"],
        [
            [
                row.now.format_name,
                f"{row.now.true_bits:.3g}",
                human(row.now.in_use),
                bar(row.now.in_use / most, 8),
                *(human(u.in_use) for u in row.lengths),
                _short(row.fits),
            ]
            for row in comparison.rows
        ],
    )
    room = comparison.free - comparison.weights
    weights = (
        f" less {human(comparison.weights)} of weights" if comparison.weights else ", weights not counted"
    )
    yield Text(
        f"{comparison.model}: bits are true bits (scales and zeros included); columns are tokens.\n"
        f"fits: tokens for which {human(max(0, room))} suffice ({human(comparison.free)} free{weights}); "
        f"the model itself reads {comparison.context:,}."
    )
    if comparison.measured:
        yield from _measured_views(comparison.measured)


def _measured_views(measured: Sequence[Measured]) -> Iterator[RenderableType]:
    yield table(
        ["measured", "cache", "peak", "read/s", "answer/s", "choices", "answer"],
        [
            [
                m.format_name,
                human(m.in_use),
                human(m.peak),
                f"{m.read_speed:,.0f}",
                f"{m.decode_speed:.1f}",
                f"{m.agreement:.1%}",
                f"{m.same_tokens}/{m.answer_tokens}",
            ]
            for m in measured
        ],
    )
    yield Text(
        "peak: the whole process, weights included. choices: next tokens over the document's end that are the same as\n"
        "fp16's. answer: tokens of a greedy answer before the first difference from fp16's."
    )


def _short(tokens: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)
