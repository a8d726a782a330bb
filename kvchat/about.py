"""`kvchat models` and `kvchat doctor`: what is here."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

from kvchat import flags, places, steps
from kvchat.errors import KVChatError
from kvchat.kv.format import PRESETS, KVFormat, Ranked
from kvchat.memory import human, usage
from kvchat.models.families import cache_shape, context_length, read_config
from kvchat.models.find import DEFAULT, find, list_local
from kvchat.ui.screen import Screen
from kvchat.ui.tables import table

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numba",
    "triton",
    "pypdf",
    "typer",
    "rich",
    "prompt_toolkit",
)


app = typer.Typer(help="Bring models to this machine and look at them.", no_args_is_help=True)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help=f"{DEFAULT}, smollm2, a hub id or a GGUF file.")] = DEFAULT,
    offline: Annotated[
        bool, typer.Option("--offline", envvar="KVCHAT_OFFLINE", help="Fetch nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the folder alone.")] = False,
) -> None:
    """Download or convert a model, once, and print its folder."""
    from kvchat.models import pull

    screen = Screen(quiet=quiet)
    for line in pull.pull(name, offline):
        screen.say(line)
    print(find(name, offline).folder)


@app.command(name="list")
def list_models() -> None:
    """List the models that are ready on this machine."""
    screen = Screen()
    rows = []
    for found in list_local():
        try:
            config = read_config(found.folder)
            cache_shape(config)
            state = f"{context_length(config):,} tokens"
        except KVChatError as error:
            state = f"cannot be served: {error}"
        rows.append([found.name, config["model_type"], human(found.weight_bytes), state])
    if not rows:
        screen.warn(f"no models yet; run: kvchat models pull {DEFAULT}")
        return
    screen.show(table(["model", "architecture", "weights", "context"], rows))


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="As for --model.")] = DEFAULT,
) -> None:
    """Show a model's shape, its context, and whether kvchat can serve it."""
    screen = Screen()
    found = steps.find_config(flags.ModelFlags(name), screen)
    config = read_config(found.folder)
    shape = cache_shape(config)
    layer = shape.layers[0]
    packed = len(shape.packable)
    rows = [
        ["architecture", config["model_type"]],
        ["folder", str(found.folder)],
        ["weights", human(found.weight_bytes) if found.weight_bytes else "not on this machine"],
        ["context", f"{context_length(config):,} tokens"],
        [
            "layers",
            f"{packed} packed" + (f", {len(shape.layers) - packed} sliding" * (packed < len(shape.layers))),
        ],
        [
            "heads",
            f"{config['num_attention_heads']} query, {layer.kv_heads} key-value, head_dim {layer.head_dim}",
        ],
    ]
    for fmt in PRESETS.values():
        full = usage(shape, fmt, context_length(config), 4)
        rows.append(
            [f"cache, {fmt.name}", f"{human(full.in_use)} at full context ({full.true_bits:.3g} bits)"]
        )
    screen.show(table([found.name, ""], rows))


def doctor() -> None:
    """Show versions, devices, free memory, folders and what is set."""
    import psutil

    screen = Screen()
    rows = [
        ["kvchat", version("kvchat")],
        ["python", f"{platform.python_version()} on {platform.platform()}"],
    ]
    for package in PACKAGES:
        try:
            rows.append([package, version(package)])
        except PackageNotFoundError:
            rows.append([package, "not installed"])
    rows.append(
        [
            "memory free",
            f"{human(psutil.virtual_memory().available)} of {human(psutil.virtual_memory().total)}",
        ]
    )
    rows += _devices()
    rows.append(["attention, cpu", _attention("numba", [fmt for fmt in PRESETS.values() if fmt.fused])])
    kivi = [fmt for fmt in PRESETS.values() if fmt.fused and not isinstance(fmt.keys, Ranked)]
    rows.append(["attention, gpu", _attention("triton", kivi if find_spec("triton") else [])])
    rows.append(["--plot", "ready" if find_spec("matplotlib") else "needs: pip install matplotlib"])
    for name, folder in (
        ("models", places.models()),
        ("caches", places.caches()),
        ("conversations", places.conversations()),
        ("config", places.config_file()),
        ("history", places.history_file()),
    ):
        rows.append([name, f"{folder}{'' if folder.exists() else ' (not there yet)'}"])
    parent = next(p for p in (places.models(), *places.models().parents) if p.exists())
    rows.append(["disk free", human(shutil.disk_usage(parent).free)])
    found = [f.name for f in list_local()]
    rows.append(["models here", ", ".join(found) or f"none; run: kvchat models pull {DEFAULT}"])
    rows += [[name, value] for name, value in flags.environment().items()]
    screen.show(table(["", "doctor"], rows))


def _attention(kernels: str, fused: list[KVFormat]) -> str:
    """What reads the packed rows of each preset."""
    others = ", ".join(fmt.name for fmt in PRESETS.values() if fmt not in fused)
    if not fused:
        return f"tile loop in torch, for every format ({kernels} is not installed)"
    return f"{kernels} over packed rows: {', '.join(fmt.name for fmt in fused)}; tile loop in torch: {others}"


def _devices() -> list[list[str]]:
    import torch

    rows = [["cpu", f"{torch.get_num_threads()} threads, float32"]]
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        rows.append([f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {human(free)} of {human(total)} free"])
    if torch.backends.mps.is_available():
        rows.append(["mps", "available, float16"])
    return rows
