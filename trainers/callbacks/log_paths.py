"""Log files that a checkpoint names: a run writes and cuts only what lies in its own root, or where
its user said."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["choose_logging_dir", "path_in_root", "relative_to_root"]

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
    chosen = os.path.join("runs", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{env.host}")
    stored = metadata.get("logging_dir")
    if env.rank == 0 and stored is not None and path_in_root(stored, args.output_dir) is not None:
        chosen = stored
    return os.path.join(args.output_dir, str(env.broadcast_object(chosen)))
