"""TensorBoard: a writer that goes on in the curves of a resumed run, and the callback that fills
it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..arguments.exactness import plain
from .log_paths import KeptLog
from .metrics import largest_in_gib
from .protocol import TrainerCallback, TrainerState

log = logging.getLogger(__name__)


def _summary_writer() -> Any:
    """The class: a second of imports, only for who wants it."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        text = "ResumableSummaryWriter needs tensorboard: pip install tensorboard"
        raise ImportError(text) from error


class ResumableSummaryWriter(KeptLog):
    """Torch's SummaryWriter, made when it is first used. In the callback list its directory is kept
    in checkpoints.

    A resumed run writes into the same directory, and what an earlier process logged after the step
    of the checkpoint is hidden: one curve, no zig-zag. That is so where the directory lies in
    output_dir, or is given again; what another run wrote is never hidden.

    log_dir: where to write (default: the trainer's logging_dir).
    """

    _writer: Any = None
    _trainer: Any = None

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.given = None if log_dir is None else os.fspath(log_dir)

    # The trainer.

    def on_init_end(self, args: Any, trainer: Any = None, **kwargs: Any) -> None:
        self._root, self._trainer = getattr(args, "output_dir", None), trainer

    on_train_begin = on_init_end

    def on_train_end(self, **kwargs: Any) -> None:
        self.flush()

    # The writer.

    @property
    def log_dir(self) -> str | None:
        """Where it writes, or would."""
        if self.path is not None:
            return str(self.path)
        found = self.given or getattr(self._trainer, "logging_dir", None)
        return None if found is None else os.fspath(found)

    def writer(self) -> Any:
        """The SummaryWriter."""
        if self._writer is None:
            make, where = _summary_writer(), self.log_dir
            if where is None:
                text = "ResumableSummaryWriter: no log_dir, and the trainer has no logging_dir"
                raise ValueError(text)
            path, step = self.find(Path(where))
            # Events of the step itself were there when the checkpoint was made.
            self._writer = make(str(path), purge_step=step + 1 if step else None)
        return self._writer

    def __getattr__(self, name: str) -> Any:
        # Trainers look for handlers and more on every callback, and must not make a writer.
        if not name.startswith(("_", "on_", "run_is_over")) and hasattr(_summary_writer(), name):
            return getattr(self.writer(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def flush(self) -> None:
        """Write what is pending, if anything was ever logged."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is pending and close the file, if anything was ever logged."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        state = getattr(self._trainer, "state", None)
        self._step = 0 if state is None else state.global_step
        return super().state_dict()


# All keys of a record that begin so, each under its name.
GROUPS = ("checkpoint/*", "diloco/*")

# tag -> where its value comes from, and what becomes of it.
DEFAULT_SCALARS: dict[str, dict[str, Any]] = {
    "train-loss": {"source": "loss"},
    "eval-loss": {"source": "eval_loss"},
    "grad-norm": {"source": "grad_norm"},
    "learning-rate": {"source": "learning_rate"},
    "epoch": {"source": "epoch"},
    "tokens/s": {"source": "tok_per_sec"},
    "mfu": {"source": "mfu"},
    "peak-mem": {"source": "peak_mem", "transform": lambda value, _: largest_in_gib(value)},
    "weight-norm": {"source": "weight_norm"},
    **{group: {} for group in GROUPS},
}


class TBLogger(TrainerCallback):
    """Writes logs and evaluations to a SummaryWriter, on rank 0.

    scalars: tag -> {"source": key in the record, by default the tag; "transform": function (value,
    record) -> value, None to skip}, merged into DEFAULT_SCALARS; None instead removes a tag.
    experiment_info: a text or a dict to begin with.
    """

    def __init__(
        self,
        summary_writer: Any,
        scalars: Mapping[str, Mapping[str, Any] | None] | None = None,
        experiment_info: Any = None,
    ) -> None:
        self.writer = summary_writer
        self.experiment_info = experiment_info
        self.scalars: dict[str, dict[str, Any]] = {
            tag: dict(entry) for tag, entry in DEFAULT_SCALARS.items()
        }
        for tag, changes in (scalars or {}).items():
            if changes is None:
                self.scalars.pop(tag, None)
            else:
                if unknown := sorted(changes.keys() - {"source", "transform"}):
                    may = "it may have 'source' and 'transform'"
                    raise ValueError(f"scalars[{tag!r}] has {unknown}; {may}")
                self.scalars[tag] = {**self.scalars.get(tag, {}), **changes}
        self._written: dict[str, int] = {}  # tag -> step: each step has one value

    def on_train_begin(
        self, args: Any, state: TrainerState, model: Any = None, **kwargs: Any
    ) -> None:
        self._written.clear()
        # What the step that a run is resumed at has in its curves: an evaluation at the start is
        # not added again.
        goes_on = isinstance(self.writer, ResumableSummaryWriter)
        for entry in state.log_history if goes_on else ():
            if entry["step"] == state.global_step:
                sources = {tag: how.get("source", tag) for tag, how in self.scalars.items()}
                there = {tag for tag, source in sources.items() if entry.get(source) is not None}
                self._written |= dict.fromkeys(there, state.global_step)
        if not state.is_world_process_zero:
            return
        if self.experiment_info is not None:
            self._text("experiment", self.experiment_info, state)
        as_dict = getattr(args, "as_dict", None)
        facts = {
            "model": None if model is None else type(model).__name__,
            "max_steps": state.max_steps,
            "args": as_dict() if as_dict is not None else vars(args),
        }
        self._text("training_info", facts, state)
        self.writer.flush()

    def _text(self, tag: str, content: Any, state: TrainerState) -> None:
        text = content if isinstance(content, str) else json.dumps(plain(content), indent=2)
        self.writer.add_text(tag, f"```\n{text}\n```", state.global_step)

    def _scalars(self, record: Mapping[str, Any], step: int) -> None:
        for tag, entry in self.scalars.items():
            if tag in GROUPS:
                for key, value in record.items():
                    if key.startswith(tag[:-1]) and value is not None:
                        self.writer.add_scalar(key, _number(value), step)
                continue
            value = record.get(entry.get("source", tag))
            transform: Callable[..., Any] | None = entry.get("transform")
            if value is not None and transform is not None:
                value = transform(value, record)
            if value is not None and self._written.get(tag) != step:
                self.writer.add_scalar(tag, _number(value), step)
                self._written[tag] = step

    def on_log(self, state: TrainerState, logs: Mapping[str, Any], **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._scalars(logs, state.global_step)
            self.writer.flush()

    def on_evaluate(self, state: TrainerState, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        self.on_log(state, metrics)

    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            if state.log_history:
                self._text("train_results", state.log_history[-1], state)
            self.writer.flush()


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)
