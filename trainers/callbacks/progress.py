"""What a run shows of itself: facts when it begins, a bar or lines while it goes on, and numbers
that are worked out from others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from operator import length_hint
from typing import Any, TextIO

from tqdm import tqdm

from ..arguments import InvalidArgument
from ..arguments.exactness import plain
from .protocol import Logs, TrainerCallback, TrainerState

Table = Mapping[str, Mapping[str, Any] | None]


def merged(defaults: Table, changes: Table | None, blank: Logs | None = None) -> dict[str, Any]:
    """A table of entries with changes merged in field by field; None removes an entry, and a new
    one is made of `blank`."""
    found = {name: dict(entry or {}) for name, entry in defaults.items()}
    for name, entry in (changes or {}).items():
        if entry is None:
            found.pop(name, None)
        else:
            start = {} if blank is None else {"label": name, **blank}
            found[name] = {**start, **found.get(name, {}), **entry}
    return found


def largest_in_gib(value: Any) -> float:
    """The largest of some numbers of bytes, or the one that there is."""
    return float(max(value) if isinstance(value, list | tuple) else value) / 2**30


class DefaultMetrics(TrainerCallback):
    """Adds tok_per_sec, mfu and peak_mem to the logs of training, on rank 0.

    peak_hardware_flops: dense BF16 operations per second of all GPUs of the run together, for mfu.
    Of one: RTX 3090
    71.2e12, RTX 4090 165.2e12, A100 SXM 312e12, H100 SXM 989e12.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        self.peak_hardware_flops = peak_hardware_flops
        self._begin(0.0, None)

    def _begin(self, total_flos: float, logged_at: float | None) -> None:
        """An interval between two logs."""
        self._flos, self._logged_at = total_flos, logged_at
        self._in_steps = 0.0  # seconds
        self._step_began: float | None = None

    def on_train_begin(self, state: TrainerState, **_: Any) -> None:
        self._begin(state.total_flos, None)

    def on_step_begin(self, **_: Any) -> None:
        self._step_began = self.clock()

    def on_step_end(self, **_: Any) -> None:
        if self._step_began is not None:
            self._in_steps += self.clock() - self._step_began
            self._step_began = None

    def on_log_step(self, state: TrainerState, logs: dict[str, Any], **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if logs.get("peak_mem_allocated") is not None:
            logs["peak_mem"] = logs["peak_mem_allocated"]
        if "tokens" not in logs:
            return  # not a log of training: the interval goes on
        now, flos = self.clock(), state.total_flos - self._flos
        if self._logged_at is not None and now > self._logged_at:
            logs["tok_per_sec"] = round(logs["tokens"] / (now - self._logged_at))
        if self.peak_hardware_flops and self._in_steps > 0:
            logs["mfu"] = flos / self._in_steps / self.peak_hardware_flops
        self._begin(state.total_flos, now)


class CheckpointMetrics(TrainerCallback):
    """Logs what each checkpoint cost, when all ranks know that it is committed, or has failed.

    The keys are the same for saves in the background and others. stall_ms: how long training stood
    still; save_s: from the request to the commit; both the longest of all ranks. bytes: of all
    ranks together.
    """

    def on_checkpoint_commit(self, record: Any, trainer: Any, **_: Any) -> None:
        known = record if isinstance(record, dict) else vars(record)
        values = {name: known[name] for name in ("step", "stall_ms", "save_s", "bytes")}
        seconds = values["save_s"]
        values["gb_per_s"] = values["bytes"] / 1e9 / seconds if seconds > 0 else 0.0
        if not known["ok"]:
            values = {"step": known["step"], "failed": 1}
        trainer.log({f"checkpoint/{name}": value for name, value in values.items()})


class InfoCallback(TrainerCallback):
    """Prints the facts of the run to stdout when training begins, on rank 0.

    verbose: all arguments, the model and the optimizer as text, too.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose

    def on_train_begin(self, args: Any, state: TrainerState, **parts: Any) -> None:
        if not state.is_world_process_zero:
            return
        model = parts.get("model")
        lines = self.facts(args, state, model, parts.get("trainer"))
        if self.verbose:
            arguments = args.as_dict() if hasattr(args, "as_dict") else vars(args)
            lines += [f"arguments: {json.dumps(plain(arguments), indent=2)}", f"model: {model}"]
            lines.append(f"optimizer: {parts.get('optimizer')}")
        # To stdout, whatever the program does with logs.
        for line in lines:
            print(f"[INFO|info_logger] {line}", flush=True)

    def facts(self, args: Any, state: TrainerState, model: Any, trainer: Any) -> list[str]:
        """The lines."""
        parameters = list(model.parameters()) if model is not None else []
        count = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
        step, root = state.global_step, getattr(args, "output_dir", None)
        start = f"resumed at step {step}" if step else "from the beginning"
        run_name = getattr(args, "run_name", None)
        named = f", run: {run_name}" if run_name not in (None, root) else ""
        return [
            f"model: {type(model).__name__}, {count:,} parameters ({trained:,} trained), "
            f"{size:,.1f} MiB",
            f"batches: {getattr(args, 'per_device_train_batch_size', '?')} per device, "
            f"{getattr(args, 'gradient_accumulation_steps', 1)} accumulated, "
            f"{state.train_batch_size} samples for a step",
            f"steps: {state.max_steps:,}, {start}",
            f"world size: {getattr(trainer, 'world_size', 1)}, "
            f"device: {getattr(trainer, 'device', 'cpu')}, "
            f"precision: {getattr(args, 'mixed_precision', None) or 'full'}",
            f"output_dir: {root}{named}",
        ]


def _in_gib(value: Any) -> str:
    return f"{largest_in_gib(value):.2f} GiB"


# metric -> label, width, fmt: a format specification or a function.
STEP_COLUMNS: dict[str, dict[str, Any]] = {
    "step": {"label": "step", "width": 8, "fmt": "d"},
    "epoch": {"label": "epoch", "width": 8, "fmt": ".3f"},
    "loss": {"label": "loss", "width": 10, "fmt": ".5f"},
    "grad_norm": {"label": "grad norm", "width": 10, "fmt": ".3f"},
    "learning_rate": {"label": "lr", "width": 10, "fmt": ".2e"},
    "tok_per_sec": {"label": "tok/s", "width": 11, "fmt": ",.0f"},
    "mfu": {"label": "mfu", "width": 7, "fmt": ".1%"},
    "peak_mem": {"label": "peak mem", "width": 11, "fmt": _in_gib},
}

FINAL_METRICS: dict[str, dict[str, Any]] = {
    "train_runtime": {"label": "runtime", "fmt": ".1f", "suffix": " s"},
    "train_samples": {"label": "samples", "fmt": ",d", "suffix": ""},
    "train_samples_per_second": {"label": "samples/s", "fmt": ",.2f", "suffix": ""},
    "train_steps_per_second": {"label": "steps/s", "fmt": ",.3f", "suffix": ""},
    "train_loss": {"label": "mean loss", "fmt": ".5f", "suffix": ""},
}

_EVERY_RECORD = {"step", "epoch"}  # in themselves nothing to show


def _shown(value: Any, fmt: Any) -> str:
    if value is None or callable(fmt):
        return "-" if value is None else str(fmt(value))
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
        step_columns: Table | None = None,
        final_metrics: Table | None = None,
        header_interval: int = 20,
    ) -> None:
        if isinstance(output_stream, str) and output_stream not in ("stdout", "stderr"):
            instead = "'stdout', 'stderr' or a stream"
            raise InvalidArgument("output_stream", output_stream, "no such stream", instead)
        self.use_tqdm, self.output_stream = use_tqdm, output_stream
        self.columns = merged(STEP_COLUMNS, step_columns, {"width": 12, "fmt": ""})
        self.final_metrics = merged(FINAL_METRICS, final_metrics, {"fmt": "", "suffix": ""})
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

    def _bar(self, args: Any, **how: Any) -> Any:
        """None where lines are wanted."""
        wanted = self.use_tqdm
        if wanted is None:
            on_terminal = getattr(self.stream, "isatty", bool)()
            wanted = on_terminal and not getattr(args, "disable_tqdm", None)
        return tqdm(file=self.stream, dynamic_ncols=True, **how) if wanted else None

    def on_train_begin(self, args: Any, state: TrainerState, **_: Any) -> None:
        self.close()
        self._names, self._rows = [], 0
        if state.is_world_process_zero:
            total, done = state.max_steps, state.global_step
            self._train_bar = self._bar(args, total=total, initial=done, unit="step", desc="train")

    def on_step_end(self, state: TrainerState, **_: Any) -> None:
        bar = self._train_bar
        if bar is not None:
            if bar.total != state.max_steps:
                bar.total = state.max_steps
                bar.refresh()
            bar.update(state.global_step - bar.n)

    def on_log(self, state: TrainerState, logs: Logs, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            facts = [
                f"{entry['label']} {_shown(logs[name], entry['fmt'])}{entry['suffix']}"
                for name, entry in self.final_metrics.items()
                if name in logs
            ]
            if facts:
                self._write("finished: " + ", ".join(facts))
            return
        record = {"epoch": state.epoch, **logs, "step": state.global_step}
        names = [name for name in self.columns if name in record]
        if _EVERY_RECORD.issuperset(names):
            return
        columns = [self.columns[name] for name in names]
        if names != self._names or self._rows >= self.header_interval:
            self._write(" ".join(str(column["label"]).rjust(column["width"]) for column in columns))
            self._names, self._rows = names, 0
        pairs = zip(names, columns, strict=True)
        cells = (_shown(record[name], how["fmt"]).rjust(how["width"]) for name, how in pairs)
        self._write(" ".join(cells))
        self._rows += 1

    # Evaluations.

    def on_prediction_step(
        self, state: TrainerState, args: Any = None, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._eval_bar is None:
            total = self._eval_batches
            if total is None and (length := length_hint(eval_dataloader, -1)) >= 0:
                total = min(length, state.max_eval_steps if state.max_eval_steps > 0 else length)
            self._eval_bar = self._bar(args, total=total, unit="batch", desc="eval", leave=False)
        if self._eval_bar is not None:
            self._eval_bar.update()

    def on_evaluate(self, state: TrainerState, metrics: Logs, **_: Any) -> None:
        if self._eval_bar is not None:
            self._eval_batches = self._eval_bar.n
        self._summary("eval", state, metrics)

    def on_predict(self, state: TrainerState, metrics: Logs, **_: Any) -> None:
        self._summary("predict", state, metrics)

    def _summary(self, what: str, state: TrainerState, metrics: Logs) -> None:
        if not state.is_world_process_zero:
            return
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        facts = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        self._write(f"{what} at step {state.global_step}: {facts}")
        if self._eval_bar is not None:
            self._eval_bar.close()
            self._eval_bar = None

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the bars."""
        for bar in (self._eval_bar, self._train_bar):
            if bar is not None:
                bar.close()
        self._eval_bar = self._train_bar = None
