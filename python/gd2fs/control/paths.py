"""Paths of the namespace: absolute, normal, bounded."""

from __future__ import annotations

from gd2fs import errors

PATH_BYTES_MAX = 1024
SESSIONS_ROOT = "/.kv"
"""Files of sessions live below it; only sessions create, change or delete anything there."""


def normal(path: str, field: str = "path") -> str:
    """`path` without a trailing slash. Raises Invalid naming `field` for anything that is not absolute and
    normal."""
    if not path.startswith("/"):
        raise errors.Invalid(f"{field}: {path!r:.200} must begin with '/'")
    if len(path.encode(errors="surrogatepass")) > PATH_BYTES_MAX:
        raise errors.Invalid(f"{field}: longer than {PATH_BYTES_MAX} bytes")
    if "\0" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise errors.Invalid(f"{field}: holds a NUL or a half of a surrogate pair")
    if path == "/":
        return path
    path = path.removesuffix("/")
    for part in path[1:].split("/"):
        if part in ("", ".", ".."):
            raise errors.Invalid(
                f"{field}: {path!r:.200} has the component {part!r}; write the path without it"
            )
    return path


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def is_reserved(path: str) -> bool:
    return path == SESSIONS_ROOT or path.startswith(SESSIONS_ROOT + "/")


def refuse_reserved(path: str, field: str = "path") -> None:
    if is_reserved(path):
        raise errors.Forbidden(
            f"{field}: {path} belongs to the sessions (/v1/kv/sessions); create, change or delete the session"
        )


def session_directory(session: str) -> str:
    return f"{SESSIONS_ROOT}/{session}"


def tokens_path(kv_path: str) -> str:
    """The token ids beside a KV file."""
    return kv_path + ".tokens"
