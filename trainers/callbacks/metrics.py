"""Numbers that are worked out from others: speed, use of the hardware, and what checkpoints
cost."""

from __future__ import annotations

import time
from typing import Any

from .protocol import TrainerCallback, TrainerState


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
        self._begin(0.0)
        self._logged_at: float | None = None

    def _begin(self, total_flos: float) -> None:
        self._flos = total_flos
        self._in_steps = 0.0  # seconds
        self._step_began: float | None = None

    def on_train_begin(self, state: TrainerState, **kwargs: Any) -> None:
        self._begin(state.total_flos)
        self._logged_at = None

    def on_step_begin(self, **kwargs: Any) -> None:
        self._step_began = self.clock()

    def on_step_end(self, **kwargs: Any) -> None:
        if self._step_began is not None:
            self._in_steps += self.clock() - self._step_began
            self._step_began = None

    def on_log_step(self, state: TrainerState, logs: dict[str, Any], **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if logs.get("peak_mem_allocated") is not None:
            logs["peak_mem"] = logs["peak_mem_allocated"]
        if "tokens" not in logs:
            return  # not a log of training: the interval goes on
        now = self.clock()
        if self._logged_at is not None and now > self._logged_at:
            logs["tok_per_sec"] = round(logs["tokens"] / (now - self._logged_at))
        if self.peak_hardware_flops and self._in_steps > 0:
            logs["mfu"] = (
                (state.total_flos - self._flos) / self._in_steps / self.peak_hardware_flops
            )
        self._logged_at = now
        self._begin(state.total_flos)


class CheckpointMetrics(TrainerCallback):
    """Logs what each checkpoint cost, when all ranks know that it is committed, or has failed.

    The keys are the same for saves in the background and others. stall_ms: how long training stood
    still; save_s: from the request to the commit; both the longest of all ranks. bytes: of all
    ranks together.
    """

    def on_checkpoint_commit(self, record: Any, trainer: Any, **kwargs: Any) -> None:
        known = record if isinstance(record, dict) else vars(record)
        values = {name: known[name] for name in ("step", "stall_ms", "save_s", "bytes")}
        seconds = values["save_s"]
        values["gb_per_s"] = values["bytes"] / 1e9 / seconds if seconds > 0 else 0.0
        if not known["ok"]:
            values = {"step": known["step"], "failed": 1}
        trainer.log({f"checkpoint/{name}": value for name, value in values.items()})
