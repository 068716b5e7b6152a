"""What a run shows of itself while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from operator import length_hint
from typing import Any, TextIO

from tqdm import tqdm

from ..arguments import InvalidArgument
from .metrics import largest_in_gib
from .protocol import TrainerCallback, TrainerState

# metric -> label, width, fmt: a format specification or a function.
STEP_COLUMNS: dict[str, dict[str, Any]] = {
    "step": {"label": "step", "width": 8, "fmt": "d"},
    "epoch": {"label": "epoch", "width": 8, "fmt": ".3f"},
    "loss": {"label": "loss", "width": 10, "fmt": ".5f"},
    "grad_norm": {"label": "grad norm", "width": 10, "fmt": ".3f"},
    "learning_rate": {"label": "lr", "width": 10, "fmt": ".2e"},
    "tok_per_sec": {"label": "tok/s", "width": 11, "fmt": ",.0f"},
    "mfu": {"label": "mfu", "width": 7, "fmt": ".1%"},
    "peak_mem": {
        "label": "peak mem",
        "width": 11,
        "fmt": lambda value: f"{largest_in_gib(value):.2f} GiB",
    },
}

FINAL_METRICS: dict[str, dict[str, Any]] = {
    "train_runtime": {"label": "runtime", "fmt": ".1f", "suffix": " s"},
    "train_samples": {"label": "samples", "fmt": ",d", "suffix": ""},
    "train_samples_per_second": {"label": "samples/s", "fmt": ",.2f", "suffix": ""},
    "train_steps_per_second": {"label": "steps/s", "fmt": ",.3f", "suffix": ""},
    "train_loss": {"label": "mean loss", "fmt": ".5f", "suffix": ""},
}

_EVERY_RECORD = {"step", "epoch"}  # in themselves nothing to show

Columns = Mapping[str, Mapping[str, Any] | None]


def _merged(
    defaults: dict[str, dict[str, Any]], changes: Columns | None, blank: dict[str, Any]
) -> dict[str, Any]:
    found = {name: dict(entry) for name, entry in defaults.items()}
    for name, entry in (changes or {}).items():
        if entry is None:
            found.pop(name, None)
        else:
            found[name] = {"label": name, **blank, **found.get(name, {}), **entry}
    return found


def _shown(value: Any, fmt: Any) -> str:
    if value is None:
        return "-"
    if callable(fmt):
        return str(fmt(value))
    try:
        return format(value.item() if hasattr(value, "item") else value, fmt)
    except (ValueError, TypeError):
        return str(value)


class ProgressCallback(TrainerCallback):
    """A bar, or lines with the time, and a table of the logs; on rank 0.

    use_tqdm: by default a bar on a terminal unless args.disable_tqdm, lines elsewhere.
    output_stream: "stdout", "stderr" or a text stream. step_columns, final_metrics: merged into
    STEP_COLUMNS and FINAL_METRICS field by field; None removes one. header_interval: rows between
    two headers.
    """

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: str | TextIO | None = None,
        step_columns: Columns | None = None,
        final_metrics: Columns | None = None,
        header_interval: int = 20,
    ) -> None:
        if isinstance(output_stream, str) and output_stream not in ("stdout", "stderr"):
            instead = "'stdout', 'stderr' or a stream"
            raise InvalidArgument("output_stream", output_stream, "no such stream", instead)
        self.use_tqdm, self.output_stream = use_tqdm, output_stream
        self.columns = _merged(STEP_COLUMNS, step_columns, {"width": 12, "fmt": ""})
        self.final_metrics = _merged(FINAL_METRICS, final_metrics, {"fmt": "", "suffix": ""})
        self.header_interval = header_interval
        self._train_bar: Any = None
        self._eval_bar: Any = None
        self._eval_batches: int | None = None  # of the last evaluation
        self._names: list[str] = []  # of the last row
        self._rows = 0  # since the header

    @property
    def stream(self) -> TextIO:
        """As it is now: tests and notebooks replace sys.stdout."""
        if self.output_stream is None or isinstance(self.output_stream, str):
            return sys.stderr if self.output_stream == "stderr" else sys.stdout
        return self.output_stream

    def _write(self, message: str) -> None:
        bar = self._train_bar if self._eval_bar is None else self._eval_bar
        if bar is not None:
            bar.write(message, file=self.stream)
        else:
            self.stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            self.stream.flush()

    def _bar(self, **kwargs: Any) -> Any:
        return tqdm(file=self.stream, dynamic_ncols=True, **kwargs)

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        self.close()
        self._names, self._rows = [], 0
        if self._wants_bars(args) and state.is_world_process_zero:
            self._train_bar = self._bar(
                total=state.max_steps, initial=state.global_step, unit="step", desc="train"
            )

    def _wants_bars(self, args: Any) -> bool:
        if self.use_tqdm is not None:
            return self.use_tqdm
        on_terminal = getattr(self.stream, "isatty", bool)()
        return bool(on_terminal and not getattr(args, "disable_tqdm", None))

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        bar = self._train_bar
        if bar is not None:
            if bar.total != state.max_steps:
                bar.total = state.max_steps
                bar.refresh()
            bar.update(state.global_step - bar.n)

    def on_log(self, state: TrainerState, logs: Mapping[str, Any], **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            self._final(logs)
            return
        record = {"epoch": state.epoch, **logs, "step": state.global_step}
        names = [name for name in self.columns if name in record]
        if not _EVERY_RECORD.issuperset(names):
            self._row(names, record)

    def _row(self, names: list[str], record: Mapping[str, Any]) -> None:
        columns = [self.columns[name] for name in names]
        if names != self._names or self._rows >= self.header_interval:
            self._write(" ".join(str(column["label"]).rjust(column["width"]) for column in columns))
            self._names, self._rows = names, 0
        cells = (
            _shown(record[n], c["fmt"]).rjust(c["width"])
            for n, c in zip(names, columns, strict=True)
        )
        self._write(" ".join(cells))
        self._rows += 1

    def _final(self, logs: Mapping[str, Any]) -> None:
        facts = [
            f"{entry['label']} {_shown(logs[name], entry['fmt'])}{entry['suffix']}"
            for name, entry in self.final_metrics.items()
            if name in logs
        ]
        if facts:
            self._write("finished: " + ", ".join(facts))

    # Evaluations.

    def on_prediction_step(
        self, state: TrainerState, args: Any = None, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._eval_bar is None and self._wants_bars(args):
            total = self._eval_batches
            if total is None and (length := length_hint(eval_dataloader, -1)) >= 0:
                total = min(length, state.max_eval_steps if state.max_eval_steps > 0 else length)
            self._eval_bar = self._bar(total=total, unit="batch", desc="eval", leave=False)
        if self._eval_bar is not None:
            self._eval_bar.update()

    def on_evaluate(self, state: TrainerState, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        if self._eval_bar is not None:
            self._eval_batches = self._eval_bar.n
        self._summary("eval", state, metrics)

    def on_predict(self, state: TrainerState, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        self._summary("predict", state, metrics)

    def _summary(self, what: str, state: TrainerState, metrics: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        facts = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        self._write(f"{what} at step {state.global_step}: {facts}")
        if self._eval_bar is not None:
            self._eval_bar.close()
            self._eval_bar = None

    def on_train_end(self, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the bars."""
        for bar in (self._eval_bar, self._train_bar):
            if bar is not None:
                bar.close()
        self._eval_bar = self._train_bar = None
