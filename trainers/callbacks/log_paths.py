"""Log files that a checkpoint names: a run writes and cuts only what lies in its own root, or where
its user said."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from .protocol import TrainerCallback

log = logging.getLogger(__name__)


def relative_to_root(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> str | None:
    """How a checkpoint names a log: relative to the root, which may be moved. None for what lies
    outside."""
    absolute, around = Path(path).absolute(), Path(root).absolute()
    return str(absolute.relative_to(around)) if absolute.is_relative_to(around) else None


def path_in_root(
    named: Any, root: str | os.PathLike[str], file_name: str | None = None
) -> Path | None:
    """The path in `root` of a log that a checkpoint names (a file called `file_name`, or a folder).

    Whoever wrote the checkpoint may have named anything: what is not a plain relative path to
    something in the root, or lies in a checkpoint, is ignored with a warning, and None.
    """
    if isinstance(named, str) and "\0" not in named:
        path = Path(named)
        parts = path.parts
        plain = not path.is_absolute() and ".." not in parts
        fits = not any(part.startswith("checkpoint-") for part in parts) and file_name in (
            None,
            path.name,
        )
        # A link in the root may lead out of it.
        if plain and fits and (Path(root) / path).resolve().is_relative_to(Path(root).resolve()):
            return Path(root) / path
    log.warning(
        "the checkpoint names %.200r for its logs: it is no such path in %s, and is ignored",
        named,
        root,
    )
    return None


def choose_logging_dir(args: Any, env: Any, metadata: Mapping[str, Any]) -> str:
    """As given; else that of the run which is resumed, where it lies in this root; else a new one.
    The same on all ranks."""
    if args.logging_dir is not None:
        return str(args.logging_dir)
    chosen = os.path.join("runs", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{socket.gethostname()}")
    stored = metadata.get("logging_dir")
    if env.rank == 0 and stored is not None and path_in_root(stored, args.output_dir) is not None:
        chosen = stored
    return os.path.join(args.output_dir, str(env.broadcast_object(chosen)))


class KeptLog(TrainerCallback):
    """A base for logs in which a resumed run goes on, after the step of its checkpoint.

    A checkpoint names the log relative to output_dir, or says that it lay outside: then it is
    looked for where the user says again. Nothing else that a checkpoint says is believed.
    """

    file_name: ClassVar[str | None] = None  # None: the log is a folder
    _root: str | None = None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new: nothing is open, nothing is to be found again."""
        self.close()
        self.path: Path | None = None  # once it is written
        self._step = 0
        self._held: dict[str, Any] | None = None  # the state of a checkpoint, until it is used

    def close(self) -> None:
        """Close the log."""

    def find(self, default: Path) -> tuple[Path, int | None]:
        """Where to write, and after which step of the checkpoint's log; None for a new one."""
        held, self._held = self._held, None
        self.path = default.absolute()
        if held is None:
            return self.path, None
        if held["place"] is not None:  # in the root, which may have been moved or copied
            found = path_in_root(held["place"], self._root or "", self.file_name)
            if found is None:
                return self.path, None
            if not found.exists():
                log.warning("the log %s is gone; a new one is started: %s", found, default)
                return self.path, None
            self.path = found.absolute()
        return self.path, held["step"] if self.path.exists() else None

    def state_dict(self) -> dict[str, Any]:
        if self._held is not None:
            return dict(self._held)
        known = self.path is not None and self._root is not None
        place = relative_to_root(self.path, self._root) if known else None  # type: ignore[arg-type]
        return {"place": place, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        step = state.get("step")
        self._held = {"place": state.get("place"), "step": step if type(step) is int else 0}

    def resumed_elsewhere(self) -> None:
        """The checkpoint is one of another root: its log is not this run's."""
        self._held = None
