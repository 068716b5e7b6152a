"""URLs and paths of storages: which text is which, what lies below what, and what of them is a
secret.

A chained URL of fsspec (`simplecache::s3://bucket/run`, `zip://run::/x/archive.zip`) says in its
first part that has a `://` what lies where; the rest says what that is in.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any

from ..errors import StorageError

_NAME = r"[A-Za-z][A-Za-z0-9+.-]*"
_URL = re.compile(rf"(?:{_NAME}::)*({_NAME})://")
_EATEN = re.compile(rf"((?:{_NAME}::)*)({_NAME[:-1]}+):/(?!/)")  # not one letter, which is a drive
# Up to the last @ before the path, since a password may have one, too.
_PASSWORD = re.compile(r"://([^/:]*):([^/]*)@")


def local_path(text: str) -> str | None:
    """The path on this machine that a text means; None when it is a URL of something else. Raises
    StorageError for what has been a URL (`mistaken_url`)."""
    found = _URL.match(text)
    if found is None:
        if (meant := mistaken_url(text)) is not None:
            what = (
                f"{text} is no path but a URL that has lost a slash, in pathlib perhaps; pass the "
                f"text {meant!r}"
            )
            raise StorageError(what, path=text, errno=errno.EINVAL)
        return text
    if not _is_file(found):
        return None
    rest = text[found.end() :]
    return rest.removeprefix("localhost") if rest.startswith("localhost/") else rest


def _is_file(url: re.Match[str]) -> bool:
    """Whether the URL is one of this machine: of no chain, so that `::` in it is of a name."""
    return url.start(1) == 0 and url.group(1) in ("file", "local")


def mistaken_url(text: str) -> str | None:
    """The URL that a path was, before something that normalizes paths took it for one; None when it
    was none.

    `str(Path("s3://bucket/run"))` is `s3:/bucket/run`, which is a fine name for a local folder that
    nobody wants.
    """
    found = _EATEN.match(text)
    if found is None:
        return None
    before, scheme = found.groups()
    top = "/" if scheme in ("file", "local") else ""
    if not top:
        from fsspec.registry import available_protocols

        if scheme not in available_protocols():
            return None
    return f"{before}{scheme}://{top}{text[found.end() :]}"


def join_url(url: str, path: str) -> str:
    """The URL, or local path, of what lies below another.

    url: local path or URL.
    path: text, relative to it, with `/` between names.
    """
    if not path:
        return url
    before, part, after = _parted(url)
    scheme, mark, rest = part.rpartition("://")
    top = "/" if rest.startswith("/") else ""
    around = rest.rstrip("/") + "/" if rest.rstrip("/") else top
    return f"{before}{scheme}{mark}{around}{path}{after}"


def split_url(url: str) -> tuple[str, str]:
    """What lies around a folder, and its name there; a local path becomes absolute. The name is
    empty at the top.

    url: local path or URL.
    """
    if local_path(url) == url:
        parent, _, name = os.path.abspath(os.path.expanduser(url)).rpartition("/")
        return parent or "/", name
    before, part, after = _parted(url)
    scheme, mark, rest = part.rpartition("://")
    parent, slash, name = rest.rstrip("/").rpartition("/")
    if not slash and "@" in name:  # a host, with who asks it
        return url, ""
    return f"{before}{scheme}{mark}{parent or slash}{after}", name


def masked_url(url: str) -> str:
    """A URL as messages may show it: without the password in it.

    url: text.
    """
    return _PASSWORD.sub(r"://\1:***@", url)


def secrets_of(url: str, options: Any) -> set[str]:
    """What must be in no message: a password in the URL, and what is given as a credential among
    storage options."""
    return _secrets_in(options) | {password for _, password in _PASSWORD.findall(url) if password}


# Options that are no secret, and would make messages poorer if they went.
_PLAIN = frozenset(
    {
        "account_name",
        "addressing_style",
        "auto_mkdir",
        "endpoint_url",
        "fo",
        "fs",
        "host",
        "location",
        "path",
        "profile",
        "project",
        "protocol",
        "region",
        "region_name",
        "signature_version",
        "target_protocol",
    }
)


def _secrets_in(options: Any, name: str = "") -> set[str]:
    """Strings among storage options that are in no message: all that are not plainly something
    else."""
    if name.lower() in _PLAIN:
        return set()
    if isinstance(options, dict):
        return set().union(*(_secrets_in(value, str(key)) for key, value in options.items()))
    if isinstance(options, list | tuple):
        return set().union(*(_secrets_in(value) for value in options))
    return {options} if isinstance(options, str) and len(options) >= 6 else set()


def _parted(url: str) -> tuple[str, str, str]:
    """A chained URL around the part that says what lies where."""
    found = _URL.match(url)
    if found is None or _is_file(found):
        return "", url, ""
    parts = url.split("::")
    number = next(n for n, part in enumerate(parts) if "://" in part)
    return (
        "".join(f"{p}::" for p in parts[:number]),
        parts[number],
        "".join(f"::{p}" for p in parts[number + 1 :]),
    )
