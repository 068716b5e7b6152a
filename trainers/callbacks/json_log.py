"""Records in a JSON file that can be read at any time and cut back to the step of a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..arguments.exactness import plain
from .log_paths import KeptLog
from .protocol import TrainerState

log = logging.getLogger(__name__)


def read_json_array(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file, also of one that is being written or was torn: a last line that is not
    whole is left out.

    Raises ValueError for what was never such a file.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        records = json.loads(text)
    except ValueError:
        records = _lines(text, path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} is not a JSON array of records")
    return records


def _lines(text: str, path: Any) -> list[Any]:
    opening, *lines = [line.strip() for line in text.splitlines()] or [""]
    if opening != "[":
        raise ValueError(f"{path} is not a JSON array of records")
    found = []
    lines = [line for line in lines if line not in ("", "]", ",")]
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
        """Go on after `step`: later records are dropped. False for a file that cannot be read: it
        is moved aside."""
        try:
            records = read_json_array(self.path)
        except ValueError as error:
            log.warning("%s; it is kept as %s.bak", error, self.path.name)
            os.replace(self.path, self.path.with_name(self.path.name + ".bak"))
            return False
        kept = [record for record in records if not _later(record, step)]
        aside = self.path.with_name(self.path.name + ".tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.write("[\n" + ",\n".join(map(_line, kept)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._empty = not kept
        return True

    def append(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        self._file.write(("" if self._empty else ",\n") + _line(record))
        self._file.flush()
        self._empty = False

    def close(self) -> None:
        if self._file is not None:
            self._file.write("\n]\n" if not self._empty else "]\n")
            self._file.close()
            self._file = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(plain(record), allow_nan=False)


def _later(record: Mapping[str, Any], step: int) -> bool:
    at = record.get("global_step")
    return isinstance(at, int | float) and at > step


class JsonRecords(KeptLog):
    """A base for callbacks that write records to `<logging_dir>/<file_name>`, on rank 0."""

    _file: JsonArrayFile | None = None

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any, **kwargs: Any) -> None:
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

    def write(self, state: TrainerState, values: Mapping[str, Any]) -> None:
        """A record of this step, where there is a file."""
        if self._file is not None:
            at = {"global_step": state.global_step, "epoch": state.epoch}
            self._file.append({"timestamp": time.time(), **at, **values})
            self._step = state.global_step

    def on_train_end(self, **kwargs: Any) -> None:
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

    def on_log(self, state: TrainerState, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self.write(state, logs)

    def on_evaluate(self, state: TrainerState, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        self.write(state, metrics)
