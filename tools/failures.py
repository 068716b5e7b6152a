"""Exit codes of `ckpt` (docs/cli.md), and which error gets which."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import ckptcore as engine

GOOD, BAD, USAGE, NOT_FOUND, STORAGE = 0, 1, 2, 3, 4


class Failure(Exception):
    """What `ckpt` could not do: a kind for programs, a message for people, an exit code for
    both, and facts such as a path."""

    def __init__(self, kind: str, exit_code: int, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.kind, self.exit_code, self.facts = kind, exit_code, facts
        self.message = " ".join(message.split())

    def document(self) -> dict[str, Any]:
        """{"error": {"kind", "message", "exit_code", and the facts that are known}}."""
        known = {name: value for name, value in self.facts.items() if value is not None}
        head = {"kind": self.kind, "message": self.message, "exit_code": self.exit_code}
        return {"error": head | known}


def bad(message: str, **facts: Any) -> Failure:
    return Failure("bad", BAD, message, **facts)


def not_found(message: str, **facts: Any) -> Failure:
    return Failure("not_found", NOT_FOUND, message, **facts)


@contextmanager
def writing() -> Iterator[None]:
    """The source was there: a folder that is missing is the target's, which cannot be made."""
    try:
        yield
    except OSError as error:
        if isinstance(error, engine.CheckpointNotFound) or error.errno not in NOWHERE:
            raise
        failure = failure_of(error)
        raise Failure("storage", STORAGE, failure.message, **failure.facts) from None


NOWHERE = (errno.ENOENT, errno.ENOTDIR)

# What `failure_of` explains to a user; anything else is a bug.
EXPECTED = (Failure, engine.CheckpointError, click.ClickException, OSError, ImportError)

KINDS: tuple[tuple[type[Exception], str, int], ...] = (
    (engine.NoUsableCheckpoint, "unusable", BAD),
    (engine.CheckpointNotFound, "not_found", NOT_FOUND),
    (engine.UnknownName, "not_found", NOT_FOUND),
    (engine.CheckpointCorrupt, "damaged", BAD),
    (engine.UnsupportedVersion, "unsupported_version", BAD),
    (engine.InvalidArgument, "usage", USAGE),
    (engine.StorageError, "storage", STORAGE),
    (engine.CheckpointError, "bad", BAD),
    (FileNotFoundError, "not_found", NOT_FOUND),
)


def failure_of(error: Exception) -> Failure:
    """The failure that a user sees for an error of click, of ckptcore or of the operating
    system."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, click.ClickException):
        return Failure("usage", USAGE, error.format_message())
    if isinstance(error, engine.StorageError) and error.errno in NOWHERE:
        return not_found(str(error), path=error.path)
    facts: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, engine.CheckpointError):
        # What kind of damage it is has a name of its own beside the kind of the failure.
        names = {"damage" if name == "kind" else name: name for name in error.facts}
        facts |= {shown: getattr(error, name) for shown, name in names.items()}
    # What a program passes, a user types.
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    message = text.replace("pass overwrite=True", "pass --overwrite")
    for kind, name, code in KINDS:
        if isinstance(error, kind):
            return Failure(name, code, message, **facts)
    # The storage or its client; ImportError: the client is not installed.
    return Failure("storage", STORAGE, message, **facts)
