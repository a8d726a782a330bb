"""`kvchat calibrate`, and the calibration that a format finds: beside the model, or in this package for the default model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from kvchat.errors import InputError, UsageError
from kvchat.kv.format import KVFormat
from kvchat.models.find import DEFAULT, Found
from kvchat.ui.screen import Screen

if TYPE_CHECKING:
    from kvchat.kv.calibration import Calibration
    from kvchat.models.load import LoadedModel

PIECES, PIECE = 16, 2048
"""Pieces of text and tokens a piece, as KVQuant has it."""


BUILTIN = "Python's language reference"


def builtin_text() -> str:
    """English prose that every Python brings along: its language reference. Raises InputError where it was taken out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(
            "this Python lacks the text for a calibration; name one: kvchat calibrate MODEL TEXT"
        ) from None
    return "\n".join(topics.values())


def find(model: LoadedModel | Found) -> Calibration | None:
    """Raises KVChatError for one that is damaged."""
    from kvchat.kv.calibration import NAME, Calibration

    calibration = Calibration.read(model.folder / NAME)
    if calibration is None and model.name == DEFAULT:
        with as_file(files("kvchat.models") / "recall.calibration") as path:
            calibration = Calibration.read(path)
    return calibration


def ensure(loaded: LoadedModel, fmt: KVFormat, screen: Screen) -> Calibration | None:
    """The calibration that `fmt` needs, made now from the built-in text if there is none; None where it needs none.

    Raises InputError, KVChatError.
    """
    if not fmt.calibrated:
        return None
    found = find(loaded)
    if found is not None:
        return found
    screen.say(
        f"{fmt.name} needs a calibration of {loaded.name}; making one from a built-in text, once "
        "(kvchat calibrate takes a text of yours)"
    )
    return make(loaded, builtin_text(), BUILTIN, screen, PIECES, min(PIECE, loaded.context))


def make(
    loaded: LoadedModel,
    text: str,
    source: str,
    screen: Screen,
    pieces: int,
    piece: int = PIECE,
    seed: int = 0,
) -> Calibration:
    """Calibrate and keep the result beside the model.

    Raises UsageError for a piece beyond the model's context, InputError for a text that is too short, KVChatError.
    """
    from kvchat.kv.calibrate import calibrate
    from kvchat.kv.calibration import NAME, Calibration

    if piece > loaded.context:
        raise UsageError(
            f"{piece:,} tokens a piece are more than {loaded.name} takes ({loaded.context:,}); give fewer --tokens"
        )
    Calibration.check_writable(loaded.folder / NAME)
    ids = loaded.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    steps = calibrate(loaded.model, choose(ids, pieces, piece, seed))
    if pieces * piece < PIECES * PIECE // 4:
        screen.warn(f"{pieces * piece:,} tokens are few to calibrate on; KVQuant takes {PIECES * PIECE:,}")
    with screen.status(f"calibrating: 0 of {2 * pieces} passes") as show:
        while True:
            try:
                show(f"calibrating: {next(steps)} of {2 * pieces} passes")
            except StopIteration as end:
                tensors = end.value
                break
    recipe = {
        "model": loaded.name,
        "text": source,
        "pieces": str(pieces),
        "tokens": str(piece),
        "seed": str(seed),
    }
    calibration = Calibration(tensors, recipe)
    calibration.write(loaded.folder / NAME)
    if loaded.name == DEFAULT:
        screen.say(
            f"it goes before the one that comes with kvchat, which counts again without {loaded.folder / NAME}"
        )
    return calibration


def choose(ids: Sequence[int], pieces: int, piece: int, seed: int) -> list[Sequence[int]]:
    """Pieces of `piece` tokens, anywhere in the text. Raises InputError."""
    import torch

    if len(ids) < 2 * piece:
        raise InputError(
            f"the text has {len(ids):,} tokens, and a calibration takes {pieces} pieces of {piece:,}; give a longer text"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - piece + 1, (pieces,), generator=generator).tolist()
    return [ids[start : start + piece] for start in starts]
