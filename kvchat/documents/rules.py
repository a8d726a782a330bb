"""Which files of a folder are worth reading, told by their paths alone."""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kvchat.documents.options import Options
from kvchat.errors import UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

# fmt: off
_SECRETS = (
    ".env", "*.env", ".env.*", ".htpasswd", ".netrc", ".npmrc", ".pypirc", "*.kdbx", "*.key", "*.p12", "*.pem",
    "*.pfx", "credentials", "credentials.*", "secrets.*", "id_dsa", "id_ecdsa", "id_ed25519", "id_rsa",
)
# fmt: on
_GENERATED = ("*.lock", "*.min.css", "*.min.js", "go.sum", "package-lock.json", "pnpm-lock.yaml")


class Rules:
    """The rules that `options` give. Raises UsageError for a pattern that is none."""

    def __init__(self, options: Options) -> None:
        self._include = _spec("--include", options.include)
        self._exclude = _spec("--exclude", options.exclude)
        self._hidden = options.hidden

    def reason(self, path: str) -> str | None:
        """Why to skip `path` (relative, with slashes; a folder ends in one), or None.

        Folders above it are not looked at: ask for each of them first.
        """
        name = path.rstrip("/").rpartition("/")[2]
        if self._exclude and self._exclude.match_file(path):
            return "excluded"
        if _matches(name, _SECRETS) and not path.endswith("/"):
            return "looks like a secret"
        if name.startswith(".") and not self._hidden:
            return "hidden"
        if path.endswith("/"):
            return None
        if self._include and not self._include.match_file(path):
            return "not in --include"
        return "lock file/generated" if _matches(name, _GENERATED) else None


def _spec(flag: str, patterns: tuple[str, ...]) -> "GitIgnoreSpec | None":
    if not patterns:
        return None
    from pathspec import GitIgnoreSpec

    for pattern in patterns:
        try:
            means_something = any(p.regex is not None for p in GitIgnoreSpec.from_lines([pattern]).patterns)
        except Exception:
            means_something = False
        if not means_something:
            raise UsageError(f"{flag} {pattern!r} is no pattern; write it like '*.py'")
    return GitIgnoreSpec.from_lines(patterns)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)
