"""How far a run has come, and the records of it outside the checkpoints: losses.jsonl, TensorBoard, progress bar."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .arguments import TrainingArguments

__all__ = [
    "LossFile",
    "Progress",
    "Records",
    "choose_logging_dir",
    "open_scalar_writer",
    "read_losses",
    "stored_logging_dir",
]

LOSSES = "losses.jsonl"

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The trainer's own numbers; a component of every checkpoint."""

    step: int = 0  # completed optimizer steps
    log_history: list[dict[str, Any]] = field(default_factory=list)  # one entry per logged step
    losses: list[float] = field(default_factory=list)  # of the steps since the last logged one

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.log_history = [dict(entry) for entry in state["log_history"]]
        self.losses = list(state["losses"])

    def log(self, **values: float) -> None:
        """Add to the entry of the current step."""
        if not self.log_history or self.log_history[-1]["step"] != self.step:
            self.log_history.append({"step": self.step})
        self.log_history[-1].update(values)


class LossFile:
    """`losses.jsonl`: the loss of every step, to the last bit, one line each.

    Opening it cuts off what a killed run wrote after the step that was restored.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOSSES
        kept = b"".join(line for line, number in _lines(path) if number <= step)
        self._file = path.open("r+b" if path.exists() else "wb")
        self._file.truncate(len(kept))
        self._file.seek(len(kept))

    def append(self, step: int, loss: float) -> None:
        # JSON has no NaN; the exact form is the one in hexadecimal in any case.
        entry = {"step": step, "loss": loss if math.isfinite(loss) else None, "hex": loss.hex()}
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Before a checkpoint is committed, so that no restored step is ever missing here."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_losses(folder: Path) -> dict[int, float]:
    """Step -> loss, exact, from the `losses.jsonl` in a folder."""
    return {number: float.fromhex(json.loads(line)["hex"]) for line, number in _lines(folder / LOSSES)}


def _lines(path: Path) -> list[tuple[bytes, int]]:
    """Whole lines in order of their steps; what follows a torn or foreign line was never confirmed."""
    found: list[tuple[bytes, int]] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith(b"\n") or not isinstance(number, int) or (found and number <= found[-1][1]):
            break
        found.append((line, number))
    return found


def choose_logging_dir(args: TrainingArguments, metadata: dict[str, Any]) -> Path:
    """As given; else that of the run which is resumed, wherever its root is by now; else a new one."""
    if args.logging_dir is not None:
        return Path(args.logging_dir)
    stored = metadata.get("logging_dir")
    if isinstance(stored, str):
        return args.root / stored
    return args.root / "runs" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{socket.gethostname()}"


def stored_logging_dir(args: TrainingArguments, folder: Path) -> str:
    """As a checkpoint's metadata holds it: relative where it lies in the root, which may be moved."""
    return str(folder.relative_to(args.root) if folder.is_relative_to(args.root) else folder.absolute())


def open_scalar_writer(folder: Path, step: int) -> Any:
    """A TensorBoard writer that hides what an earlier process logged after `step`: one curve, no zig-zag."""
    from torch.utils.tensorboard import SummaryWriter  # a second of imports, only for who wants it

    return SummaryWriter(str(folder), purge_step=step + 1)


class Records:
    """Writes and shows how a run goes on after `step`: losses.jsonl, TensorBoard, progress bar or plain lines.

    Of the ranks of a job one does so; `silent` is for the others.
    """

    def __init__(
        self, args: TrainingArguments, step: int, total_steps: int, logging_dir: Path, *, silent: bool = False
    ) -> None:
        self.total_steps = total_steps
        self.losses = None if silent else LossFile(args.root, step)
        report = args.report_to == "tensorboard" and not silent
        self.scalars = open_scalar_writer(logging_dir, step) if report else None
        self.bar: tqdm[Any] = tqdm(
            total=total_steps, initial=step, disable=True if silent else args.disable_tqdm, unit="step"
        )

    def step(self, step: int, loss: float) -> None:
        if self.losses is not None:
            self.losses.append(step, loss)
        self.bar.update()

    def entry(self, entry: dict[str, Any]) -> None:
        """An entry of the log that is complete."""
        if self.losses is None:
            return
        shown = {name: f"{value:.4g}" for name, value in entry.items() if name != "step"}
        self.bar.set_postfix(shown)
        if self.bar.disable:
            facts = "  ".join(f"{name} {value}" for name, value in shown.items())
            log.info("step %d/%d  %s", entry["step"], self.total_steps, facts)
        if self.scalars is not None:
            for name, value in entry.items():
                if name.startswith("eval_"):
                    self.scalars.add_scalar(f"eval/{name.removeprefix('eval_')}", value, entry["step"])
                elif name != "step":
                    self.scalars.add_scalar(f"train/{name}", value, entry["step"])

    def sync(self) -> None:
        """Before a checkpoint is committed, so that no restored step is ever missing here."""
        if self.losses is not None:
            self.losses.sync()
        if self.scalars is not None:
            self.scalars.flush()

    def close(self) -> None:
        self.bar.close()
        if self.losses is not None:
            self.losses.close()
        if self.scalars is not None:
            self.scalars.close()
