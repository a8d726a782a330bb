"""The flags that commands share, in groups: a command names a group as one parameter. Flag > KVCHAT_* > config file > default."""

import functools
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvchat import places
from kvchat.documents import Options
from kvchat.errors import UsageError
from kvchat.kv.format import PRESETS, SPELLING
from kvchat.models.find import DEFAULT
from kvchat.passages import Reread
from kvchat.store import Store
from kvchat.ui.screen import Screen

DOCUMENTS, MODEL, CACHE = "Documents", "Model and memory", "Stored caches"
ANSWER, SCREEN = "Answer", "Screen"
MAX_SIZE = "10G"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer the flags of every parameter whose type is one of the groups below, and the command the groups."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += inspect.signature(groups[parameter.name]).parameters.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in keywords}
    return run


@dataclass(frozen=True)
class ModelFlags:
    model: Annotated[
        str,
        typer.Option(
            "-m",
            "--model",
            envvar="KVCHAT_MODEL",
            rich_help_panel=MODEL,
            help=f"{DEFAULT}, smollm2, a folder, a GGUF file or a hub id.",
        ),
    ] = DEFAULT
    device: Annotated[
        str,
        typer.Option(
            "--device", envvar="KVCHAT_DEVICE", rich_help_panel=MODEL, help="auto, cpu, cuda, cuda:N or mps."
        ),
    ] = "auto"
    offline: Annotated[
        bool, typer.Option("--offline", envvar="KVCHAT_OFFLINE", rich_help_panel=MODEL, help="Fetch nothing.")
    ] = False


@dataclass(frozen=True)
class FormatFlags:
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            envvar="KVCHAT_KV",
            rich_help_panel=MODEL,
            help=f"KV format: {', '.join(PRESETS)}, or {SPELLING}.",
        ),
    ] = "kivi4"


@dataclass(frozen=True)
class DocumentFlags:
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include", rich_help_panel=DOCUMENTS, help="In folders, only what matches, as in .gitignore."
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", rich_help_panel=DOCUMENTS, help="In folders, nothing that matches."),
    ] = None
    hidden: Annotated[
        bool, typer.Option("--hidden", rich_help_panel=DOCUMENTS, help="Read hidden files of folders too.")
    ] = False
    no_gitignore: Annotated[
        bool, typer.Option("--no-gitignore", rich_help_panel=DOCUMENTS, help="Read what git ignores too.")
    ] = False
    max_file_size: Annotated[
        str,
        typer.Option(
            "--max-file-size", rich_help_panel=DOCUMENTS, help="Larger files are left out: 500k, 50M."
        ),
    ] = "50M"
    password: Annotated[
        str | None,
        typer.Option(
            "--password",
            envvar="KVCHAT_PDF_PASSWORD",
            rich_help_panel=DOCUMENTS,
            help="Opens encrypted PDFs.",
        ),
    ] = None
    pages: Annotated[
        str | None,
        typer.Option("--pages", rich_help_panel=DOCUMENTS, help="Pages of PDFs by index: 1-20,25."),
    ] = None
    layout: Annotated[
        bool,
        typer.Option("--layout", rich_help_panel=DOCUMENTS, help="Keep a PDF's columns apart with spaces."),
    ] = False

    def options(self) -> Options:
        """Raises UsageError for a size that isn't one."""
        return Options(
            include=tuple(self.include or ()),
            exclude=tuple(self.exclude or ()),
            hidden=self.hidden,
            gitignore=not self.no_gitignore,
            max_file_size=size(self.max_file_size),
            password=self.password,
            pages=self.pages,
            layout=self.layout,
        )


@dataclass(frozen=True)
class AnswerFlags:
    system: Annotated[
        str | None,
        typer.Option(
            "-s", "--system", envvar="KVCHAT_SYSTEM", rich_help_panel=ANSWER, help="Another instruction."
        ),
    ] = None
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", envvar="KVCHAT_MAX_TOKENS", min=1, rich_help_panel=ANSWER, help="Longest answer."
        ),
    ] = 512
    temp: Annotated[
        float,
        typer.Option(
            "--temp", envvar="KVCHAT_TEMP", min=0, rich_help_panel=ANSWER, help="Temperature; 0 is greedy."
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            envvar="KVCHAT_TOP_P",
            min=0.001,
            max=1,
            rich_help_panel=ANSWER,
            help="Nucleus sampling.",
        ),
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option(
            "--seed", envvar="KVCHAT_SEED", min=0, rich_help_panel=ANSWER, help="For --temp above 0."
        ),
    ] = 0

    reread: Annotated[
        Reread,
        typer.Option(
            "--reread",
            envvar="KVCHAT_REREAD",
            rich_help_panel=ANSWER,
            help="Ask again, with the likeliest passages before the question: where an answer's quotes fail or it finds "
            "nothing, always, or never.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class ScreenFlags:
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", rich_help_panel=SCREEN, help="Only answers and warnings.")
    ] = False
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", rich_help_panel=SCREEN, help="Say more on stderr.")
    ] = False
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            "--no-color",
            envvar="KVCHAT_PLAIN",
            rich_help_panel=SCREEN,
            help="No colours, no redrawing.",
        ),
    ] = False

    def screen(self) -> Screen:
        return Screen(self.plain, self.quiet)


@dataclass(frozen=True)
class CacheFlags:
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            envvar="KVCHAT_NO_CACHE",
            rich_help_panel=CACHE,
            help="Neither use a stored cache nor keep one.",
        ),
    ] = False
    refresh: Annotated[
        bool, typer.Option("--refresh", rich_help_panel=CACHE, help="Read anew what is stored already.")
    ] = False
    max_size: Annotated[
        str,
        typer.Option(
            "--max-size",
            envvar="KVCHAT_MAX_SIZE",
            rich_help_panel=CACHE,
            help="Most that all stored caches may take; the least recently used go first.",
        ),
    ] = MAX_SIZE

    def store(self) -> Store | None:
        """Raises UsageError for a size that isn't one, and for flags that contradict each other."""
        if self.no_cache and self.refresh:
            raise UsageError("--no-cache and --refresh contradict each other; give one of them")
        return None if self.no_cache else Store(places.caches(), size(self.max_size))


File = Annotated[
    list[str] | None,
    typer.Option(
        "-f", "--file", rich_help_panel=DOCUMENTS, help="A file or folder, again for more; - is stdin."
    ),
]
Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH]...", help="Files and folders; - is stdin.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=SCREEN, help="One JSON object on stdout.")]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def size(text: str) -> int:
    """Bytes of `500k`, `50M` or `1G`. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if not match:
        raise UsageError(f"{text!r} is no size; write 500k, 50M, 1G or 1T")
    return int(float(match[1]) * UNITS[match[2]])


def defaults(commands: Mapping[str, Any], context: Any) -> dict[str, dict[str, Any]]:
    """The config file as typer's default_map: a setting is a long flag without its dashes (`max-tokens = 200`).

    Raises UsageError, which names the file, for what isn't TOML, for what is no flag, and for values that a flag refuses.
    """
    path = places.config_file()
    settings = _config(path)
    found: dict[str, dict[str, Any]] = {name: {} for name in commands}
    unknown = set(settings)
    for name, command in commands.items():
        for parameter in command.params:
            flag = max((o.lstrip("-") for o in parameter.opts if o.startswith("--")), key=len, default="")
            if flag not in settings:
                continue
            unknown.discard(flag)
            if (name, flag) == ("compare-memory", "kv"):
                continue  # it compares all formats unless it is told otherwise on the spot
            value = settings[flag]
            if parameter.multiple and isinstance(value, str):
                value = [value]
            try:
                parameter.process_value(context, value)
            except Exception as error:  # typer carries its own copy of click, whose errors are not importable
                reason = getattr(error, "message", None) or str(error)
                raise UsageError(f"{path} sets {flag} to {value!r}: {reason.rstrip('.')}; mend it") from None
            found[name][parameter.name] = value
    if unknown:
        raise UsageError(f"{path} sets {min(unknown)!r}, which is no flag of kvchat; remove it")
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); mend or remove it") from None
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} cannot be read ({error}); mend or remove it") from None
    settings: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("_", "-")
        if name in settings:
            raise UsageError(f"{path} sets {name} twice; keep one")
        settings[name] = value
    return settings


def environment() -> dict[str, str]:
    """The variables that are set and matter to kvchat, for `doctor`."""
    names = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "NO_COLOR")
    shown = {name: os.environ[name] for name in names if name in os.environ}
    secret = "KVCHAT_PDF_PASSWORD"
    for name, value in sorted(os.environ.items()):
        if name.startswith("KVCHAT_"):
            shown[name] = "(set)" if name == secret else value
    return shown
