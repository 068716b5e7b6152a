"""TensorBoard: a writer that goes on in a resumed run's curves, and what fills it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..arguments.exactness import plain
from .logs import AnyPath, KeptLog
from .progress import largest_in_gib, merged
from .protocol import Logs, TrainerCallback, TrainerState


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

    def __init__(self, log_dir: AnyPath | None = None) -> None:
        super().__init__()
        self.given = None if log_dir is None else os.fspath(log_dir)

    def on_init_end(self, args: Any, trainer: Any = None, **_: Any) -> None:
        self._root, self._trainer = getattr(args, "output_dir", None), trainer

    on_train_begin = on_init_end

    def on_train_end(self, **_: Any) -> None:
        self.flush()

    @property
    def log_dir(self) -> str | None:
        """Where it writes, or would."""
        found = self.path or self.given or getattr(self._trainer, "logging_dir", None)
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
        for tag, changes in (scalars or {}).items():
            if unknown := sorted((changes or {}).keys() - {"source", "transform"}):
                may = "it may have 'source' and 'transform'"
                raise ValueError(f"scalars[{tag!r}] has {unknown}; {may}")
        self.writer, self.experiment_info = summary_writer, experiment_info
        self.scalars = merged(DEFAULT_SCALARS, scalars)
        self._written: dict[str, int] = {}  # tag -> step: each step has one value

    def on_train_begin(self, args: Any, state: TrainerState, model: Any = None, **_: Any) -> None:
        self._written.clear()
        # A step that is resumed at has its evaluation in the curves: one at the start is not added.
        goes_on = isinstance(self.writer, ResumableSummaryWriter)
        for entry in state.log_history[-1:] if goes_on else ():
            if entry["step"] == state.global_step:
                sources = {tag: how.get("source", tag) for tag, how in self.scalars.items()}
                there = [tag for tag, source in sources.items() if entry.get(source) is not None]
                self._written |= dict.fromkeys(there, state.global_step)
        if not state.is_world_process_zero:
            return
        if self.experiment_info is not None:
            self._text("experiment", self.experiment_info, state)
        facts = {
            "model": None if model is None else type(model).__name__,
            "max_steps": state.max_steps,
            "args": args.as_dict() if hasattr(args, "as_dict") else vars(args),
        }
        self._text("training_info", facts, state)
        self.writer.flush()

    def _text(self, tag: str, content: Any, state: TrainerState) -> None:
        text = content if isinstance(content, str) else json.dumps(plain(content), indent=2)
        self.writer.add_text(tag, f"```\n{text}\n```", state.global_step)

    def on_log(self, state: TrainerState, logs: Logs, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        step = state.global_step
        for tag, how in self.scalars.items():
            if tag in GROUPS:
                for key, value in logs.items():
                    if key.startswith(tag[:-1]) and value is not None:
                        self.writer.add_scalar(key, float(value), step)
                continue
            value = logs.get(how.get("source", tag))
            if value is not None and how.get("transform") is not None:
                value = how["transform"](value, logs)
            if value is not None and self._written.get(tag) != step:
                self.writer.add_scalar(tag, float(value), step)
                self._written[tag] = step
        self.writer.flush()

    def on_evaluate(self, state: TrainerState, metrics: Logs, **_: Any) -> None:
        self.on_log(state, metrics)

    def on_train_end(self, state: TrainerState, **_: Any) -> None:
        if state.is_world_process_zero:
            if state.log_history:
                self._text("train_results", state.log_history[-1], state)
            self.writer.flush()
