"""`kvchat cache`: the stored caches: list, show, remove."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from kvchat import flags, places
from kvchat.errors import KVChatError, UsageError
from kvchat.memory import human
from kvchat.store import Store, Stored
from kvchat.store.manifest import Unusable
from kvchat.ui.screen import Screen
from kvchat.ui.tables import table

app = typer.Typer(help="Look at the stored caches and remove them.", no_args_is_help=True)

SHOWN = 8
"""Characters of an id that are shown, and the fewest that name a cache."""

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="As `kvchat cache list` shows them.")
]


def _store(max_size: str = flags.MAX_SIZE) -> Store:
    return Store(places.caches(), flags.size(max_size))


@app.command(name="list")
def list_caches(as_json: flags.Json = False) -> None:
    """List the stored caches, the last used first."""
    store, screen = _store(), Screen()
    shelf = store.shelf()[::-1]
    if as_json:
        print(json.dumps([_description(stored) for stored in shelf], ensure_ascii=False))
        return
    if not shelf:
        screen.warn(f"no stored caches in {store.folder}; kvchat ask and kvchat ingest keep them there")
        return
    screen.show(
        table(["id", "documents", "model", "KV format", "tokens", "size", "used"], [*map(_row, shelf)])
    )
    shared = sum(stored.bytes for stored in shelf) > store.bytes
    screen.say(f"{human(store.bytes)} in {store.folder}" + ", what caches share counted once" * shared)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Show what a stored cache holds and depends on, and check every byte of it."""
    stored, screen = _find(_store(), name), Screen()
    rows = [["folder", str(stored.folder)], ["size", human(stored.bytes)], ["used", _ago(stored.used)]]
    if manifest := stored.manifest:
        rows += [
            ["model", manifest.model],
            ["KV format", manifest.format],
            ["tokens", f"{manifest.stored_tokens:,} of {manifest.tokens:,}"],
            ["written", manifest.created],
        ]
        rows += [[f"depends on: {part}", value] for part, value in manifest.key.parts.items()]
    try:
        stored.check()
        rows += [["document", f"{d.name}, {len(d.text):,} characters"] for d in stored.documents()]
        rows.append(["checked", "every byte is as it was written"])
    except Unusable as reason:
        screen.show(table([stored.id, ""], rows))
        raise KVChatError(
            f"it cannot be used: {reason}; it is read anew when it is asked about, or: kvchat cache rm {stored.id[:SHOWN]}"
        ) from None
    screen.show(table([stored.id, ""], rows))


@app.command()
def rm(
    names: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every stored cache.")] = False,
) -> None:
    """Remove stored caches; their documents are read again when they are asked about."""
    if names and everything:
        raise UsageError("--all removes every cache; give it, or name some")
    if not names and not everything:
        raise UsageError("name the caches to remove, or give --all")
    store, screen = _store(), Screen()
    found = store.shelf() if everything else [_find(store, name) for name in names or []]
    chosen = {stored.id: stored for stored in found}
    busy = [stored.id[:SHOWN] for stored in chosen.values() if not store.remove(stored)]
    if everything:
        store.sweep()
    screen.say(f"removed {len(chosen) - len(busy)} of {len(chosen)}")
    if busy:
        raise KVChatError(f"another kvchat uses {', '.join(busy)}; close it and try again")


@app.command()
def prune(
    max_size: Annotated[
        str, typer.Option("--max-size", envvar="KVCHAT_MAX_SIZE", help="Keep at most this much.")
    ] = flags.MAX_SIZE,
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, metavar="DAYS", help="Not used for so many days.")
    ] = None,
) -> None:
    """Remove what cannot be used, then the least recently used until the rest takes at most --max-size."""
    store, screen = _store(max_size), Screen()
    odd = store.sweep()
    chosen = [s for s in store.shelf() if _prunable(s, older_than)]
    gone = [s for s in chosen if store.remove(s)]
    gone += store.make_room()
    others = f" and {odd} files that belong to none" if odd else ""
    screen.say(
        f"removed {len(gone)} cache{'s' * (len(gone) != 1)}{others}, {human(store.bytes)} are left in {store.folder}"
    )
    if store.bytes > store.max_bytes or len([s for s in chosen if s not in gone]):
        raise KVChatError("another kvchat uses some of them, which stay; close it and try again")


def _prunable(stored: Stored, days: float | None) -> bool:
    return stored.manifest is None or (days is not None and time.time() - stored.used > days * 86_400)


def _find(store: Store, name: str) -> Stored:
    found = [stored for stored in store.shelf() if name and stored.id.startswith(name)]
    if len(found) != 1:
        how_many = "no stored cache" if not found else f"{len(found)} stored caches"
        raise UsageError(f"{how_many} with the id {name!r}; see kvchat cache list")
    return found[0]


def _row(stored: Stored) -> list[str]:
    manifest = stored.manifest
    if manifest is None:
        return [
            stored.id[:SHOWN],
            f"unusable: {stored.problem}",
            "",
            "",
            "",
            human(stored.bytes),
            _ago(stored.used),
        ]
    tokens = f"{manifest.stored_tokens:,}" + ("" if manifest.whole else f" of {manifest.tokens:,}")
    names = ", ".join(manifest.documents[:3]) + (", ..." if len(manifest.documents) > 3 else "")
    return [
        stored.id[:SHOWN],
        names,
        manifest.model,
        manifest.format,
        tokens,
        human(stored.bytes),
        _ago(stored.used),
    ]


def _description(stored: Stored) -> dict[str, Any]:
    manifest = stored.manifest
    common = {"id": stored.id, "bytes": stored.bytes, "used": stored.used, "problem": stored.problem or None}
    if manifest is None:
        return common
    return common | {
        "documents": manifest.documents,
        "model": manifest.model,
        "format": manifest.format,
        "tokens": manifest.tokens,
        "stored_tokens": manifest.stored_tokens,
        "created": manifest.created,
    }


def _ago(used: float) -> str:
    seconds = max(0.0, time.time() - used)
    for size, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "just now"
