"""losses.json: the loss of every step, to the last bit, a record a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_trainers.callbacks.logs import JsonArrayFile, read_json_array

LOSSES = "losses.json"


class LossRecord:
    """A callback that writes `losses.json` into output_dir. A resumed run cuts off what was
    written after its checkpoint."""

    _file: JsonArrayFile | None = None

    def on_train_begin(self, args: Any, state: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._file = JsonArrayFile(Path(args.output_dir) / LOSSES)
            if not (self._file.path.exists() and self._file.reopen(state.global_step)):
                self._file.create()

    def on_train_metrics(self, state: Any, metrics: dict[str, Any], trainer: Any, **_: Any) -> None:
        _, ranks = trainer.data_parallel
        loss = trainer.reduce([metrics["loss"]])[0] / ranks  # on all ranks
        if self._file is not None:
            # Before any checkpoint of this step, so that no restored step is ever missing.
            self._file.append({"global_step": state.global_step, "loss": loss, "hex": loss.hex()})

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_losses(folder: Path) -> dict[int, float]:
    """Step -> loss, exact, from the `losses.json` in a folder; empty without one."""
    path = folder / LOSSES
    records = read_json_array(path) if path.exists() else []
    return {record["global_step"]: float.fromhex(record["hex"]) for record in records}
