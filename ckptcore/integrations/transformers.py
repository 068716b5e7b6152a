"""Checkpoints of the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from ..errors import InvalidState
from ..manager import CheckpointManager
from ..state.component import SharingPattern, StateComponent
from ..state.randomness import RNGState

__all__ = ["EngineTrainer"]


class EngineTrainer(Trainer):
    """A Trainer whose checkpoints are written in the background, and resumed to the bit.

    `save_strategy` and `save_steps` say when. `train(resume_from_checkpoint=True)` goes on from the
    newest checkpoint, or starts fresh; a step or an entry of the root ("checkpoint-500") goes on
    from that one. While `train` runs, `manager` is the CheckpointManager.

    root: local path or fsspec URL of the run (default None: `output_dir`).
    checkpoints: dict of options for CheckpointManager, such as keep (default None).
    args, named: as for Trainer.

    Raises InvalidState for `save_total_limit` and `load_best_model_at_end`.
    """

    def __init__(
        self,
        *args: Any,
        root: str | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        if self.args.save_total_limit is not None or self.args.load_best_model_at_end:
            raise InvalidState(
                "save_total_limit and load_best_model_at_end are not for checkpoints of ckptcore: "
                "give checkpoints={'keep': KeepLast(3) | KeepBest('eval_loss', 'min')}, and load "
                "the best model by a CheckpointManager"
            )
        self.root = root or str(self.args.output_dir)
        self.checkpoints = dict(checkpoints or {})
        self.resumed: int | None = None

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        which = "auto" if resume_from_checkpoint is True else resume_from_checkpoint
        with (
            CheckpointManager(self.root, **self.checkpoints) as self.manager,
            tempfile.TemporaryDirectory() as folder,
        ):
            self.resumed = None
            if which is not None and which is not False:
                # The Trainer asks for its progress before there is an optimizer, by a file.
                progress = trainer_state({})
                found = self.manager.restore([progress], which, keys="trainer_state")
                self.resumed = found.step
                with open(os.path.join(folder, "trainer_state.json"), "w") as file:
                    json.dump(progress.stateful, file)
            path = None if self.resumed is None else folder
            return super().train(path, trial, ignore_keys_for_eval)

    def components(self) -> dict[str, Any]:
        """The live objects of a running `train`, for `load` of a CheckpointManager."""
        scaler = self.accelerator.scaler
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        return objects if scaler is None else {**objects, "scaler": scaler}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        keeping = [*self.callback_handler.callbacks, self.control]
        kept: Any = [callback for callback in keeping if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=kept).stateful_callbacks
        step, metrics = self.state.global_step, {}
        for entry in self.state.log_history:
            if entry["step"] == step:
                metrics.update({k: v for k, v in entry.items() if isinstance(v, int | float)})
        progress = trainer_state(json.loads(json.dumps(asdict(self.state))))
        state = {**self.components(), "trainer_state": progress, "rng": RNGState()}
        self.manager.save_async(step, state, metrics=metrics)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        """Comes with the optimizer."""

    def _load_scaler(self, checkpoint: Any) -> None:
        """Comes with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self.resumed is not None:
            self.manager.load(self.components(), self.resumed)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self.resumed is not None:
            self.manager.load({"rng": RNGState()}, self.resumed, keys="rng")


def trainer_state(values: dict[str, Any]) -> StateComponent:
    """The Trainer's progress: ranks have it alike, but for which of them is the first."""
    return StateComponent("trainer_state", values, SharingPattern.GLOBAL)
