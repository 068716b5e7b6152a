"""Files that the user gives to a save: what other programs need beside the tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..arguments import check_mapping, check_path, shown
from ..catalog.folder import is_ours
from ..errors import InvalidState, UnsafePath
from ..format.manifest import MANIFEST_NAME, SIZE_LIMIT, check_file_name


def read_user_files(given: Any) -> dict[str, bytes]:
    """A private copy of the files, by name. Raises InvalidState for a name that cannot be, or is
    ckptcore's own, and for what cannot be read."""
    found = {name: _content(name, value) for name, value in check_mapping("files", given).items()}
    folded: dict[str, str] = {}
    for name in found:
        if (other := folded.setdefault(name.casefold(), name)) != name:
            raise InvalidState(f"files: {other!r} and {name!r} are one name on some file systems")
    return found


def _content(name: str, value: Any) -> bytes:
    try:
        check_file_name(name)
    except UnsafePath:
        raise InvalidState(
            f"files: {shown(name)} is not a plain file name: up to 255 bytes without '/', '\\\\' "
            f"and ':', and not {MANIFEST_NAME}"
        ) from None
    if is_ours(name):
        raise InvalidState(f"files: {name!r} is a name that ckptcore gives to its own files")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, str | os.PathLike):
        data = _read(name, check_path(f"files[{name!r}]", value))
    else:
        raise InvalidState(
            f"files: {name!r} must be bytes, or the path of a local file, not {shown(value)}"
        )
    if len(data) > SIZE_LIMIT:
        raise InvalidState(
            f"files: {name!r} has {len(data):,} bytes, and at most {SIZE_LIMIT:,} go"
        )
    return data


def _read(name: str, path: str) -> bytes:
    try:
        if (size := os.path.getsize(path)) > SIZE_LIMIT:
            raise InvalidState(f"files: {path} has {size:,} bytes; at most {SIZE_LIMIT:,} go")
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidState(
            f"files: {name!r} is to be {path}, which cannot be read ({error.strerror or error}); "
            "for the content itself give bytes"
        ) from None
