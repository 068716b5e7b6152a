"""Which storage a path or URL means. What a client needs is imported when it is asked for."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..arguments import check_path, checked_options
from ..errors import InvalidState
from .base import Storage
from .local import LocalStorage
from .urls import local_path


def open_storage(
    url: str | os.PathLike[str] | Storage, storage_options: dict[str, Any] | None = None
) -> Storage:
    """The storage whose root is `url`. Nothing is created, and nothing but a client's login
    contacted yet.

    url: local path (with or without `file://`), any fsspec URL, or a Storage itself.
    storage_options: dict for the filesystem (default None).

    Raises InvalidState for what is no path or URL (an empty one too: a variable that is not set),
    StorageError for a scheme that no installed filesystem knows, and for a URL that has gone
    through pathlib, which leaves one slash of its two.
    """
    options = checked_options("storage_options", storage_options) or {}
    if isinstance(url, Storage):
        return url
    text = check_path("a root", url)
    path = local_path(text)
    if path is None:
        return _remote_storage(text, options)
    try:
        home = Path(path).expanduser()
    except RuntimeError as error:  # of a user that there is not
        raise InvalidState(f"{text}: {error}; write the path in full") from None
    return LocalStorage(
        home,
        direct_io=bool(options.get("direct_io", True)),
        keep_cached=bool(options.get("keep_cached", False)),
    )


def _remote_storage(url: str, options: dict[str, Any]) -> Storage:
    if re.match(r"s3a?://", url):
        with suppress(ImportError):  # without its client: fsspec says what to install
            from .s3 import S3Storage

            return S3Storage(url, options)
    from .remote import FsspecStorage

    return FsspecStorage(url, options)
