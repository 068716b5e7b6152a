"""What a run measures of itself between two logs, kept so that a resumed run logs the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .arguments import InvalidArgument
from .callbacks.protocol import TrainerState

# Sums over the data-parallel ranks.
Reduce = Callable[[Sequence[Any]], list[float]]


class Meters:
    """Losses, tokens and operations since the last log. They stay on the device and on their rank
    until they are asked for."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.counted = args.include_num_input_tokens_seen  # False, "no", True, "all", "non_padding"
        self.grad_norm: Tensor | None = None
        self.window: list[float] = []  # mean loss of each step since the last log, of all ranks
        self.tokens = self.total_tokens = 0  # of all ranks
        self.total_loss, self.steps = 0.0, 0  # of the run
        self._parameters: int | None = None
        self._begin_window()
        self.start(0)

    def _begin_window(self) -> None:
        self._losses: list[Tensor] = []  # this rank's shares that are not in `window` yet
        self._tokens = self._seen = 0
        self._operations = 0.0

    def start(self, step: int) -> None:
        """A call of train() begins, after so many steps."""
        self.began = self.measured_since = time.perf_counter()
        self.measured_from = step
        self.samples = self.measured_samples = 0  # of this call, on all ranks

    def count(self, group: Sequence[tuple[Any, int, int]], model: nn.Module) -> int:
        """Tokens of a step on this rank."""
        tokens = 0
        for batch, samples, of_all_ranks in group:
            self.samples += of_all_ranks
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            if ids is None or not samples:
                continue
            tokens += ids.numel()
            if self.counted not in (False, "no"):
                mask = batch.get("attention_mask") if self.counted == "non_padding" else None
                self._seen += ids.numel() if mask is None else int(mask.sum())
            # Of a forward and backward pass: 6 per parameter and token, unless the model knows.
            counts = getattr(model, "floating_point_ops", None)
            if counts is None and self._parameters is None:
                self._parameters = sum(p.numel() for p in model.parameters())
            simple = 6.0 * (self._parameters or 0) * ids.numel()
            self._operations += simple if counts is None else float(counts(batch))
        self._tokens += tokens
        return tokens

    def add(self, loss: Tensor, state: TrainerState) -> None:
        """The loss of a step that is done: this rank's share."""
        self._losses.append(loss)
        if state.steps_run == self.args.speed_metrics_start_step:
            self.measured_since = time.perf_counter()
            self.measured_from, self.measured_samples = state.global_step, self.samples

    def settle(self, reduce: Reduce, state: TrainerState) -> None:
        """Let all ranks have the same numbers. On all ranks, at the same steps of any run: rounding
        does not depend on when."""
        if not self._losses:
            return
        mine = torch.stack(self._losses).double().tolist()
        *losses, tokens, seen, operations = reduce(
            [*mine, self._tokens, self._seen, self._operations]
        )
        self._begin_window()
        for loss in losses:
            self.total_loss += loss
        self.steps += len(losses)
        self.window += losses
        self.tokens += int(tokens)
        self.total_tokens += int(tokens)
        state.num_input_tokens_seen += int(seen)
        state.total_flos += operations

    def take(self, reduce: Reduce, state: TrainerState, learning_rate: float) -> dict[str, Any]:
        """The numbers for a log; the next one begins anew."""
        self.settle(reduce, state)
        window = self.window
        if self.args.logging_nan_inf_filter and not all(map(math.isfinite, window)):
            finite = [loss for loss in window if math.isfinite(loss)]
            mean = sum(finite) / len(finite) if finite else 0.0
            window = [loss if math.isfinite(loss) else mean for loss in window]
        found: dict[str, Any] = {"loss": sum(window) / len(window)} if window else {}
        if self.grad_norm is not None:
            found["grad_norm"] = float(self.grad_norm)
        found |= {
            "learning_rate": learning_rate,
            "tokens": self.tokens,
            "total_tokens": self.total_tokens,
            "total_flos": state.total_flos,
        }
        if self.counted not in (False, "no"):
            found["num_input_tokens_seen"] = state.num_input_tokens_seen
        self.window, self.tokens, self.grad_norm = [], 0, None
        return found

    def summary(self, reduce: Reduce, state: TrainerState) -> dict[str, Any]:
        """The final record."""
        self.settle(reduce, state)
        now = time.perf_counter()
        seconds = max(now - self.measured_since, 1e-9)
        return {
            "train_runtime": now - self.began,
            "train_samples": self.samples,
            "train_samples_per_second": (self.samples - self.measured_samples) / seconds,
            "train_steps_per_second": (state.global_step - self.measured_from) / seconds,
            "train_loss": self.total_loss / max(self.steps, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _KEPT}, "window": list(self.window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin_window()
        for name in _KEPT:
            setattr(self, name, state[name])
        self.window = list(state["window"])


_KEPT = ("window", "tokens", "total_tokens", "total_loss", "steps")


def plain_numbers(values: Mapping[str, Any], event: str) -> dict[str, Any]:
    """What callbacks were given and have added to, as numbers that any reader of a log or manifest
    takes: tensors and numpy's of one item become Python's, lists of numbers stay lists.

    event: the one in which callbacks may add, for messages. Raises InvalidArgument for anything
    else, by its name.
    """
    return {name: _plain(name, value, event) for name, value in values.items()}


def _plain(name: str, value: Any, event: str) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item() if np.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, item, event) for item in value]
    if isinstance(value, int | float):  # bool is an int
        return value
    raise InvalidArgument(
        f"metrics[{name!r}]",
        value,
        f"{type(value).__name__} is no number, and what is added in {event} is logged",
        "add a number, or keep it in the callback",
    )
