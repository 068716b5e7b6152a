"""Exit codes of `ckpt`, and which error gets which.

0    good
1    bad: damaged, uncommitted, written by a newer format, or problems were found
2    usage: the command line is wrong
3    not found: no checkpoint, component or tensor there
4    storage: permission denied, unreachable, or any other refusal of the storage
130  interrupted (Ctrl-C)
141  the reader of the output went away (`ckpt ls ROOT | head -1`)
"""

from __future__ import annotations

import errno
from typing import Any

import click

GOOD, BAD, USAGE, NOT_FOUND, STORAGE = 0, 1, 2, 3, 4


def expected_errors() -> tuple[type[Exception], ...]:
    """What `failure_of` explains to a user; anything else is a bug."""
    from ckptcore import CheckpointError

    return (Failure, CheckpointError, click.ClickException, OSError, ImportError)


class Failure(Exception):
    """What `ckpt` could not do: a kind for programs, a message for people, an exit code for
    both."""

    def __init__(self, kind: str, exit_code: int, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.exit_code = exit_code
        self.message = " ".join(message.split())
        self.facts = facts

    def document(self) -> dict[str, Any]:
        """{"error": {"kind", "message", "exit_code", and the facts of the error, such as
        "path"}}."""
        known = {name: value for name, value in self.facts.items() if value is not None}
        return {
            "error": {
                "kind": self.kind,
                "message": self.message,
                "exit_code": self.exit_code,
                **known,
            }
        }


def not_found(message: str, **facts: Any) -> Failure:
    return Failure("not_found", NOT_FOUND, message, **facts)


def failure_of(error: Exception) -> Failure:
    """The failure that a user sees for an error of click, of ckptcore or of the operating
    system."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, click.ClickException):
        return Failure("usage", USAGE, error.format_message())

    from ckptcore import (
        CheckpointCorrupt,
        CheckpointError,
        CheckpointNotFound,
        NoUsableCheckpoint,
        StorageError,
        UnsupportedVersion,
    )

    if isinstance(error, StorageError) and error.errno in (errno.ENOENT, errno.ENOTDIR):
        return not_found(str(error), path=error.path)
    facts: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, CheckpointError):
        # What kind of damage it is has a name of its own beside the kind of the failure.
        facts |= {
            "damage" if name == "kind" else name: getattr(error, name) for name in error.facts
        }
    # What a program passes, a user types.
    message = (str(error) or type(error).__name__).replace(
        "pass overwrite=True", "pass --overwrite"
    )
    kinds: list[tuple[type[Exception], str, int]] = [
        (NoUsableCheckpoint, "unusable", BAD),
        (CheckpointNotFound, "not_found", NOT_FOUND),
        (CheckpointCorrupt, "damaged", BAD),
        (UnsupportedVersion, "unsupported_version", BAD),
        (StorageError, "storage", STORAGE),
        (CheckpointError, "bad", BAD),
        (FileNotFoundError, "not_found", NOT_FOUND),
    ]
    for kind, name, code in kinds:
        if isinstance(error, kind):
            return Failure(name, code, message, **facts)
    # The storage or its client; ImportError: the client is not installed.
    return Failure("storage", STORAGE, message, **facts)
