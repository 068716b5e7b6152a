"""What a run measures of itself between two logs, kept so that a resumed run logs the same
numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["Meters"]


class Meters:
    """Losses, tokens and operations since the last log. They stay on the device and on their rank
    until they are asked for."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.grad_norm: Tensor | None = None
        self.window: list[float] = []  # mean loss of each step since the last log, of all ranks
        self.tokens = self.total_tokens = 0  # of all ranks
        self.total_loss, self.steps = 0.0, 0  # of the run
        self._losses: list[Tensor] = []  # this rank's shares that are not in `window` yet
        self._tokens = self._seen = 0
        self._operations = 0.0
        self._parameters: int | None = None
        self.began = self.measured_since = time.perf_counter()
        self.samples = self.measured_from = self.measured_samples = 0  # of this call, on all ranks

    def start(self, step: int) -> None:
        self.began = self.measured_since = time.perf_counter()
        self.measured_from = step
        self.samples = self.measured_samples = 0

    def count(self, group: Sequence[tuple[Any, int, int]], model: nn.Module) -> int:
        """Tokens of a step on this rank."""
        tokens = 0
        for batch, samples, of_all_ranks in group:
            self.samples += of_all_ranks
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            if ids is None or not samples:
                continue
            tokens += ids.numel()
            mask = batch.get("attention_mask")
            kind = self.args.include_num_input_tokens_seen
            if kind and kind != "no":
                self._seen += (
                    int(mask.sum()) if kind == "non_padding" and mask is not None else ids.numel()
                )
            self._operations += self.operations(model, batch, ids.numel())
        self._tokens += tokens
        return tokens

    def operations(self, model: nn.Module, batch: Any, tokens: int) -> float:
        """Floating-point operations of a forward and backward pass: 6 per parameter and token,
        unless the model knows."""
        own = getattr(model, "floating_point_ops", None)
        if own is not None:
            return float(own(batch))
        if self._parameters is None:
            self._parameters = sum(p.numel() for p in model.parameters())
        return 6.0 * self._parameters * tokens

    def add(self, loss: Tensor, steps_run: int, global_step: int) -> None:
        self._losses.append(loss)
        if steps_run == self.args.speed_metrics_start_step:
            self.measured_since = time.perf_counter()
            self.measured_from, self.measured_samples = global_step, self.samples

    def settle(self, trainer: TrainerParts) -> None:
        """Let all ranks have the same numbers. On all ranks, at the same steps of any run: rounding
        depends on it not."""
        if not self._losses:
            return
        mine = torch.stack(self._losses).double().tolist()
        *losses, tokens, seen, operations = trainer.reduce(
            [*mine, self._tokens, self._seen, self._operations]
        )
        self._losses, self._tokens, self._seen, self._operations = [], 0, 0, 0.0
        for loss in losses:
            self.total_loss += loss
        self.steps += len(losses)
        self.window += losses
        self.tokens += int(tokens)
        self.total_tokens += int(tokens)
        trainer.state.num_input_tokens_seen += int(seen)
        trainer.state.total_flos += operations

    def take(self, trainer: TrainerParts) -> dict[str, Any]:
        """The numbers for a log; the next one begins anew."""
        self.settle(trainer)
        window = self.window
        if self.args.logging_nan_inf_filter and not all(map(math.isfinite, window)):
            finite = [loss for loss in window if math.isfinite(loss)]
            mean = sum(finite) / len(finite) if finite else 0.0
            window = [loss if math.isfinite(loss) else mean for loss in window]
        found: dict[str, Any] = {"loss": sum(window) / len(window)} if window else {}
        if self.grad_norm is not None:
            found["grad_norm"] = float(self.grad_norm)
        found["learning_rate"] = trainer.learning_rate()
        found |= {
            "tokens": self.tokens,
            "total_tokens": self.total_tokens,
            "total_flos": trainer.state.total_flos,
        }
        if self.args.include_num_input_tokens_seen not in (False, "no"):
            found["num_input_tokens_seen"] = trainer.state.num_input_tokens_seen
        if trainer.device.type == "cuda":
            found["peak_mem_allocated"] = trainer.env.gather_objects(
                torch.cuda.max_memory_allocated(trainer.device)
            )
        self.window, self.tokens, self.grad_norm = [], 0, None
        return found

    def summary(self, trainer: TrainerParts) -> dict[str, Any]:
        """The final record."""
        self.settle(trainer)
        state, now = trainer.state, time.perf_counter()
        seconds = max(now - self.measured_since, 1e-9)
        steps = state.global_step - self.measured_from
        return {
            "train_runtime": now - self.began,
            "train_samples": self.samples,
            "train_samples_per_second": (self.samples - self.measured_samples) / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.total_loss / max(self.steps, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": list(self.window),
            "tokens": self.tokens,
            "total_tokens": self.total_tokens,
            "total_loss": self.total_loss,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses, self._tokens, self._seen, self._operations = [], 0, 0, 0.0
        self.window, self.tokens, self.total_tokens = (
            list(state["window"]),
            state["tokens"],
            state["total_tokens"],
        )
        self.total_loss, self.steps = state["total_loss"], state["steps"]
