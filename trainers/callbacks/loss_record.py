"""losses.jsonl: the loss of every step, to the last bit, one line each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["LOSSES", "LossRecord", "read_losses"]

LOSSES = "losses.jsonl"


class LossRecord:
    """A callback that writes `losses.jsonl` into output_dir. A resumed run cuts off what was
    written after its checkpoint."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def on_train_begin(self, args: Any, state: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / LOSSES
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = b"".join(line for line, number in _lines(path) if number <= state.global_step)
        self._file = path.open("r+b" if path.exists() else "wb")
        self._file.truncate(len(kept))
        self._file.seek(len(kept))

    def on_train_metrics(self, state: Any, metrics: dict[str, Any], trainer: Any, **_: Any) -> None:
        _, ranks = trainer.data_parallel
        loss = trainer.reduce([metrics["loss"]])[0] / ranks  # on all ranks
        if self._file is not None:
            # JSON has no NaN; the exact form is the one in hexadecimal in any case.
            entry = {
                "step": state.global_step,
                "loss": loss if math.isfinite(loss) else None,
                "hex": loss.hex(),
            }
            self._file.write(json.dumps(entry).encode() + b"\n")
            # before any checkpoint of this step, so that no restored step is ever missing
            self._file.flush()

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_losses(folder: Path) -> dict[int, float]:
    """Step -> loss, exact, from the `losses.jsonl` in a folder."""
    return {
        number: float.fromhex(json.loads(line)["hex"]) for line, number in _lines(folder / LOSSES)
    }


def _lines(path: Path) -> list[tuple[bytes, int]]:
    """Whole lines in order of their steps; what follows a torn or foreign line was never
    confirmed."""
    found: list[tuple[bytes, int]] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if (
            not line.endswith(b"\n")
            or not isinstance(number, int)
            or (found and number <= found[-1][1])
        ):
            break
        found.append((line, number))
    return found
