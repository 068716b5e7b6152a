"""What a run is, told when it begins."""

from __future__ import annotations

import json
from typing import Any

from ..arguments.exactness import plain
from .protocol import TrainerCallback, TrainerState


class InfoCallback(TrainerCallback):
    """Prints the facts of the run to stdout when training begins, on rank 0.

    verbose: all arguments, the model and the optimizer as text, too.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        model: Any = None,
        optimizer: Any = None,
        trainer: Any = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        lines = self.facts(args, state, model, trainer)
        if self.verbose:
            as_dict = getattr(args, "as_dict", None)
            arguments = as_dict() if as_dict is not None else vars(args)
            lines += [f"arguments: {json.dumps(plain(arguments), indent=2)}", f"model: {model}"]
            lines.append(f"optimizer: {optimizer}")
        # To stdout, whatever the program does with logs.
        for line in lines:
            print(f"[INFO|info_logger] {line}", flush=True)

    def facts(self, args: Any, state: TrainerState, model: Any, trainer: Any) -> list[str]:
        """The lines."""
        parameters = list(model.parameters()) if model is not None else []
        count = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
        world_size = getattr(trainer, "world_size", 1)
        start = (
            f"resumed at step {state.global_step}" if state.global_step else "from the beginning"
        )
        run_name, root = (getattr(args, name, None) for name in ("run_name", "output_dir"))
        named = f", run: {run_name}" if run_name not in (None, root) else ""
        return [
            f"model: {type(model).__name__}, {count:,} parameters ({trained:,} trained), "
            f"{size:,.1f} MiB",
            f"batches: {getattr(args, 'per_device_train_batch_size', '?')} per device, "
            f"{getattr(args, 'gradient_accumulation_steps', 1)} accumulated, "
            f"{state.train_batch_size} samples for a step",
            f"steps: {state.max_steps:,}, {start}",
            f"world size: {world_size}, device: {getattr(trainer, 'device', 'cpu')}, "
            f"precision: {getattr(args, 'mixed_precision', None) or 'full'}",
            f"output_dir: {root}{named}",
        ]
