"""`compare-memory --measure`: a document read in each format, each in a process of its own so that its peak is its own."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat import calibrations
from kvchat.documents import Reading
from kvchat.errors import DoesNotFit
from kvchat.kv.format import PRESETS, KVFormat
from kvchat.models.find import Found

if TYPE_CHECKING:
    from kvchat.session import Session

COMPARED = 256
"""Last tokens of the document whose next-token choices are compared, history packed."""
ANSWER = 48


@dataclass(frozen=True)
class Run:
    """What one format did with the document."""

    format_name: str
    tokens: int
    in_use: int  # bytes of the cache after reading
    peak: int  # bytes: of the whole process on a CPU, of the allocator on CUDA
    read_speed: float  # tokens/s
    decode_speed: float  # tokens/s
    choices: tuple[int, ...]  # likeliest next token after each of the last COMPARED tokens
    answer: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Measured:
    """A run beside the unquantized one."""

    format_name: str
    tokens: int
    in_use: int
    peak: int
    read_speed: float
    decode_speed: float
    agreement: float  # share of next-token choices that are the unquantized model's
    same_tokens: int  # tokens of the answer before the first difference
    answer_tokens: int
    answer: str


def measure(
    found: Found, device: str, reading: Reading, formats: Sequence[KVFormat], question: str
) -> Iterator[Measured]:
    """Run fp16 first, then every other format, and compare. Raises DoesNotFit where a process was killed for its memory."""
    reference = _in_process(found, device, reading, PRESETS["fp16"], question)
    yield _compare(reference, reference)
    for fmt in formats:
        if fmt != PRESETS["fp16"]:
            yield _compare(_in_process(found, device, reading, fmt, question), reference)


def _in_process(found: Found, device: str, reading: Reading, fmt: KVFormat, question: str) -> Run:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(_run, found, device, reading, fmt, question).result()
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        except BrokenProcessPool:
            raise DoesNotFit(
                f"the process that measured {fmt.name} died, most likely for want of memory; give a smaller document"
            ) from None


def _compare(run: Run, reference: Run) -> Measured:
    same = [a == b for a, b in zip(run.choices, reference.choices, strict=True)]
    first_difference = next(
        (i for i, (a, b) in enumerate(zip(run.answer, reference.answer, strict=False)) if a != b),
        min(len(run.answer), len(reference.answer)),
    )
    return Measured(
        run.format_name,
        run.tokens,
        run.in_use,
        run.peak,
        run.read_speed,
        run.decode_speed,
        sum(same) / max(1, len(same)),
        first_difference,
        len(run.answer),
        run.text,
    )


def _run(found: Found, device: str, reading: Reading, fmt: KVFormat, question: str) -> Run:
    from kvchat.engine import Sampling
    from kvchat.models.load import load
    from kvchat.session import Session

    loaded = load(found, device)
    calibration = calibrations.find(loaded) if fmt.calibrated else None
    session = Session(loaded, fmt, reading.documents, calibration=calibration)
    usage = session.usage()
    for usage in session.read():  # noqa: B007  # the last one counts
        pass
    list(session.ask(question, Sampling(max_tokens=ANSWER)))
    turn = session.turns[-1]
    backend = loaded.tokenizer.backend_tokenizer
    return Run(
        fmt.name,
        usage.tokens,
        usage.in_use,
        _peak(loaded.device.type),
        usage.tokens / session.read_seconds,
        turn.tokens_per_second,
        _choices(session),
        tuple(backend.encode(turn.answer, add_special_tokens=False).ids),
        turn.answer,
    )


def _choices(session: Session) -> tuple[int, ...]:
    """Greedy choices over the last tokens of the documents, read as one chunk over the packed rest."""
    from kvchat.engine import Engine

    ids = session.prefix
    compared = min(COMPARED, len(ids) // 4)
    engine = Engine(session.loaded.model, session.fmt, session.engine.chunk, calibration=session.calibration)
    for _ in engine.prefill(ids[:-compared]):
        pass
    engine.cache.seal()
    return tuple(engine.choices(ids[-compared:]))


def _peak(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
