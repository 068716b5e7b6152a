"""Logs in which a resumed run goes on: where they lie, and records in a JSON file that can be read
at any time and cut back to the step of a checkpoint.

A run writes and cuts only what lies in its own root, or where its user said.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

from ..arguments.exactness import plain
from .protocol import Logs, TrainerCallback, TrainerState

log = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]


def relative_to_root(path: AnyPath, root: AnyPath) -> str | None:
    """How a checkpoint names a log: relative to the root, which may move; None outside of it."""
    absolute, around = Path(path).absolute(), Path(root).absolute()
    return str(absolute.relative_to(around)) if absolute.is_relative_to(around) else None


def path_in_root(named: Any, root: AnyPath, file_name: str | None = None) -> Path | None:
    """The path in `root` of a log that a checkpoint names (a file called `file_name`, or a folder).

    Whoever wrote the checkpoint may have named anything: what is not a plain relative path to
    something in the root, or lies in a checkpoint, is ignored with a warning, and None.
    """
    if isinstance(named, str) and "\0" not in named:
        path, around = Path(named), Path(root)
        fits = file_name in (None, path.name) and not path.is_absolute()
        fits = fits and not any(p == ".." or p.startswith("checkpoint-") for p in path.parts)
        # A link in the root may lead out of it.
        if fits and (around / path).resolve().is_relative_to(around.resolve()):
            return around / path
    text = "the checkpoint names %.200r for its logs: it is no such path in %s, and is ignored"
    log.warning(text, named, root)
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


# JSON files.


def read_json_array(path: AnyPath) -> list[dict[str, Any]]:
    """The records of a file, also of one that is being written or was torn: a last line that is not
    whole is left out.

    Raises ValueError for what was never such a file.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        records = json.loads(text)
    except ValueError:
        records = _records_of_lines([line.strip() for line in text.splitlines()], path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} is not a JSON array of records")
    return records


def _records_of_lines(lines: list[str], path: Any) -> list[Any] | None:
    if lines[:1] != ["["]:
        return None
    found, lines = [], [line for line in lines[1:] if line not in ("", "]", ",")]
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line.removesuffix(",")))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}: record {number} is not JSON") from None
    return found


class JsonArrayFile:
    """A JSON array, a record a line. The closing bracket comes with `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._empty = True

    def create(self) -> None:
        """Start a file; one that is there already is renamed to `<name>.<n>.json`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            number = 1
            while (kept := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
                number += 1
            os.replace(self.path, kept)
        self._file = self.path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._file.flush()
        self._empty = True

    def reopen(self, step: int) -> bool:
        """Go on after `step` without later records; a file that is none is moved aside: False."""
        try:
            records = read_json_array(self.path)
        except ValueError as error:
            log.warning("%s; it is kept as %s.bak", error, self.path.name)
            os.replace(self.path, self.path.with_name(self.path.name + ".bak"))
            return False
        kept = [record for record in records if not _is_later(record.get("global_step"), step)]
        aside = self.path.with_name(self.path.name + ".tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.write("[\n" + ",\n".join(map(_line, kept)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path)
        self._file, self._empty = self.path.open("a", encoding="utf-8"), not kept
        return True

    def append(self, record: Logs) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        self._file.write(("" if self._empty else ",\n") + _line(record))
        self._file.flush()
        self._empty = False

    def close(self) -> None:
        if self._file is not None:
            self._file.write("]\n" if self._empty else "\n]\n")
            self._file.close()
            self._file = None


def _line(record: Logs) -> str:
    return json.dumps(plain(record), allow_nan=False)


def _is_later(at: Any, step: int) -> bool:
    return isinstance(at, int | float) and at > step


class JsonRecords(KeptLog):
    """A base for callbacks that write records to `<logging_dir>/<file_name>`, on rank 0."""

    _file: JsonArrayFile | None = None

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any, **_: Any) -> None:
        if not state.is_world_process_zero or trainer.logging_dir is None:
            return
        self._root = args.output_dir
        path, goes_on = self.find(Path(trainer.logging_dir) / str(self.file_name))
        file = self._file = JsonArrayFile(path)
        if goes_on is None or not file.reopen(state.global_step):
            file.create()
            self.begin_file(file)

    def begin_file(self, file: JsonArrayFile) -> None:
        """What a new file begins with."""

    def write(self, state: TrainerState, values: Logs) -> None:
        """A record of this step, where there is a file."""
        if self._file is not None:
            at = {"global_step": state.global_step, "epoch": state.epoch}
            self._file.append({"timestamp": time.time(), **at, **values})
            self._step = state.global_step

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLogger(JsonRecords):
    """Writes every log and evaluation to `<logging_dir>/trainer_logs.json`.

    info: written as the first record of a new file.
    """

    file_name = "trainer_logs.json"

    def __init__(self, **info: Any) -> None:
        super().__init__()
        self.info = info

    def begin_file(self, file: JsonArrayFile) -> None:
        if self.info:
            file.append({"timestamp": time.time(), "info": self.info})

    def on_log(self, state: TrainerState, logs: Logs, **_: Any) -> None:
        self.write(state, logs)

    def on_evaluate(self, state: TrainerState, metrics: Logs, **_: Any) -> None:
        self.write(state, metrics)
