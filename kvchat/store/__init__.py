"""Prefilled caches on disk: one folder a cache, safetensors and JSON, checked before anything of it is used.

store = Store(places.caches(), max_bytes)
entry = Entry(store, key, ids, ends, documents, ...)      # the best that is there, and where the rest will go
tokens = entry.restore(cache, shape, fmt, dtype)          # 0 where nothing can be used
entry.append(cache, start, stop)                          # a segment's file, then the manifest that names it
"""

from kvchat.store.entry import Entry
from kvchat.store.key import Key
from kvchat.store.store import Store, Stored

__all__ = ["Entry", "Key", "Store", "Stored"]
