"""Which model a name means, and where it lies: a built-in name, a local folder, a GGUF file, or a hub id. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvchat import places
from kvchat.errors import KVChatError, ModelNotFound, ModelRefused

BUILT_IN = ("smollm2-recall", "smollm2")
"""The default, SmolLM2-135M-Instruct with kvchat's recall adapter merged in, and the same model as it comes."""

DEFAULT = BUILT_IN[0]

CONFIG_FILES = ["config.json", "tokenizer*.json", "special_tokens_map.json", "chat_template*"]
MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True)
class Found:
    """A model on this disk: `name` for people, `folder` with config.json, tokenizer and safetensors."""

    name: str
    folder: Path

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk; 0 where only the configuration is here."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))


def built_in_folder(name: str) -> Path:
    return places.models() / name


def converted_folder(gguf: Path) -> Path:
    """Where the conversion of a GGUF file is kept: a folder named after the file and what tells one version from another."""
    stat = gguf.stat()
    key = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return places.models() / f"{gguf.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def find_config(name: str, offline: bool) -> Found:
    """As `find`, for what needs no weights: a folder with a config.json will do, and so will the path of that file.

    Of a hub id that is not here, config.json and the tokenizer are fetched, unless `offline`. The default's configuration
    comes with kvchat.
    """
    if name == DEFAULT and not built_in_folder(name).is_dir():
        return Found(name, Path(__file__).with_name("recall.json"))
    if not name.strip():
        return find(name, offline)
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return Found(path.absolute().parent.name, path.absolute().parent)
    if path.is_dir() and (path / "config.json").is_file():
        return Found(path.absolute().name, path)
    if offline or name in BUILT_IN or is_gguf(name) or path.exists() or not _is_hub_id(name):
        return find(name, offline)
    try:
        return find(name, offline=True)
    except ModelNotFound:
        return Found(name, download(name, CONFIG_FILES))


def find(name: str, offline: bool) -> Found:
    """Find a model that is here already; fetches nothing. `offline` only changes the advice.

    Raises ModelNotFound with the command that brings it, ModelRefused for pickled weights.
    """
    if not name.strip():
        raise ModelNotFound(
            f"the name of the model is empty; give {DEFAULT}, a folder, a GGUF file or a hub id"
        )
    if "/" not in name and (places.models() / name / "config.json").is_file():
        return Found(name, places.models() / name)  # built in, or what `list_local` calls a converted file
    if name in BUILT_IN:
        raise ModelNotFound(_missing(name, offline))
    path = Path(name).expanduser()
    if is_gguf(name):
        if not path.is_file():
            raise ModelNotFound(f"no such file: {name}; give the path of a GGUF file")
        folder = converted_folder(path)
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{name} has not been converted yet; run: kvchat models pull {name}")
        return Found(path.stem, folder)
    if path.is_dir():
        _only_safetensors(path)
        return Found(path.absolute().name, path)
    if not _is_hub_id(name) or path.exists():
        raise ModelNotFound(
            f"no model called {name!r}; give {DEFAULT}, a folder, a GGUF file or a hub id such as ORG/NAME"
        )
    return Found(name, _in_hub_cache(name, offline))


def download(name: str, patterns: list[str]) -> Path:
    """Fetch files of a hub id; returns the folder. Raises ModelNotFound, with the hub's reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError:
        raise ModelNotFound(f"{name!r} is not a hub id; those look like ORG/NAME") from None
    except HfHubHTTPError as error:
        raise ModelNotFound(
            f"the hub refused {name} ({_first_line(error)}); check the name and your HF_TOKEN"
        ) from None
    except Exception as error:  # the hub's client raises its transport's own errors when there is no network
        reason = _first_line(error)
        raise ModelNotFound(
            f"the hub cannot be reached ({reason}); check the network or give a folder"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _in_hub_cache(name: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ModelNotFound(_missing(name, offline)) from None
    except HFValidationError:
        raise ModelNotFound(
            f"{name!r} is neither a folder nor a hub id; hub ids look like ORG/NAME"
        ) from None
    _only_safetensors(folder)
    return folder


def _missing(name: str, offline: bool) -> str:
    online = " while online" if offline else ""
    return f"the model {name} is not on this machine; run{online}: kvchat models pull {name}"


def _only_safetensors(folder: Path) -> None:
    """A pickle can run code when it is opened, so kvchat opens none."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json; name a model's folder")
    if any(folder.glob("*.safetensors")):
        return
    if pickled := sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern)):
        raise ModelRefused(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code; convert them to safetensors"
        )
    raise ModelNotFound(f"{folder} has no *.safetensors; download the model again")


def list_local() -> list[Found]:
    """Every model that is ready on this machine: converted ones, then the hub's cache."""
    found = [
        Found(folder.name, folder)
        for folder in sorted(places.models().glob("*"))
        if (folder / "config.json").is_file()
    ]
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return found
    for repo in repos:
        if repo.repo_type == "model":
            try:
                found.append(Found(repo.repo_id, _in_hub_cache(repo.repo_id, offline=True)))
            except KVChatError:
                continue  # not a whole model that could be served
    return found
