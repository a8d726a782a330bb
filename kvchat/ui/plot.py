"""compare-memory as a picture: bytes over tokens for each format, on logarithmic axes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.errors import UsageError

if TYPE_CHECKING:
    from kvchat.planning import Comparison

GIB = 1 << 30


def check(path: Path) -> None:
    """Fail before any work is done. Raises UsageError."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot writes a PNG, and {path} does not end in .png")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib; run: pip install matplotlib") from None


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture; whole or not at all."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for row in comparison.rows:
        points = sorted((u.tokens, u.in_use / GIB) for u in (row.now, *row.lengths))
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            label=f"{row.now.format_name}, {row.now.true_bits:.3g} bits",
        )
    axes.axhline(
        (comparison.free - comparison.weights) / GIB, color="black", linestyle=":", label="free memory"
    )
    axes.axvline(comparison.context, color="gray", linestyle="--", label="the model's context")
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="GiB of keys and values", title=comparison.model
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    unfinished = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(unfinished, format="png", dpi=150)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from None
    finally:
        pyplot.close(figure)
        unfinished.unlink(missing_ok=True)
