"""Checkpoints of the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils.import_utils import is_peft_available

from ..catalog.catalog import scan_root
from ..catalog.retention import KeepBest, KeepLast, RetentionPolicy
from ..errors import (
    CheckpointExists,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    NoUsableCheckpoint,
)
from ..interop.hf_files import hf_files
from ..manager import CheckpointManager
from ..state.component import SharingPattern, StateComponent
from ..state.optimizers import OptimizerState
from ..state.randomness import RNGState
from ..storage.urls import join_url

if is_peft_available():
    from .peft import Adapters

__all__ = ["EngineTrainer"]

START_AGAIN = (
    "EngineTrainer starts again by train() without resume_from_checkpoint, with another root where "
    "there are files in the way; `ckpt import` makes a checkpoint of one of the stock Trainer"
)


class EngineTrainer(Trainer):
    """A Trainer whose checkpoints are written in the background, and resumed to the bit.

    `save_strategy` and `save_steps` say when; `save_total_limit` and `load_best_model_at_end` say
    which stay. `train(resume_from_checkpoint=True)` goes on from the newest checkpoint that is
    whole, or starts fresh; a step or an entry of the root ("checkpoint-500") goes on from that one.
    While `train` runs, `manager` is the CheckpointManager; `resumed` is the step gone on from.

    root: local path or fsspec URL of the run (default None: `output_dir`).
    checkpoints: dict of options for CheckpointManager, such as tiers (default None).
    args, named: as for Trainer.

    Raises InvalidState for `save_only_model`, DeepSpeed, and a limit that `checkpoints` has too.
    `train` raises CheckpointExists before its first step where the root has checkpoints of steps
    to come.
    """

    def __init__(
        self,
        *args: Any,
        root: str | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        if self.args.save_only_model or self.is_deepspeed_enabled:
            raise InvalidState(
                "save_only_model and DeepSpeed are not for checkpoints of ckptcore: use the Trainer"
            )
        self.root = root or str(self.args.output_dir)
        self.checkpoints = dict(checkpoints or {})
        if self.args.save_total_limit is not None:
            if "keep" in self.checkpoints:
                raise InvalidState("save_total_limit and checkpoints['keep'] both say what stays")
            self.checkpoints["keep"] = limit_of(self.args)
            # The Trainer itself is to delete nothing.
            self.args = copy(self.args)
            self.args.save_total_limit = None

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        with (
            CheckpointManager(self.root, **self.checkpoints) as self.manager,
            tempfile.TemporaryDirectory() as folder,
        ):
            self.which = "auto" if resume_from_checkpoint is True else resume_from_checkpoint
            self.resumed: int | None = None
            self.streams, self.prepared = LateStreams(), False
            resumes = self.which is not None and self.which is not False
            # The Trainer reads its progress from a file; `_init_training_state` writes it.
            TrainerState().save_to_json(os.path.join(folder, "trainer_state.json"))
            return super().train(folder if resumes else None, trial, ignore_keys_for_eval)

    def components(self) -> dict[str, Any]:
        """The live objects of a running `train`, for `load` of a CheckpointManager."""
        live: Any = self
        optimizer = OptimizerState(live.optimizer, live.model)
        objects = {**self.weights(), "optimizer": optimizer, "scheduler": self.lr_scheduler}
        scaler = self.accelerator.scaler
        return objects if scaler is None else {**objects, "scaler": scaler}

    def weights(self) -> dict[str, Any]:
        """The model; of one with an adapter the adapter alone."""
        model: Any = self.model
        if len(getattr(model, "peft_config", ())) == 1:
            return {"adapter_model": Adapters(model)}
        return {"model": model}

    def _init_training_state(self, max_steps: Any, *args: Any) -> Any:
        """Prepares what the Trainer would prepare next, and restores all of it at once, so that a
        damaged checkpoint is passed over as a whole."""
        *_, folder, _ = args
        if folder is not None:
            path = os.path.join(folder, "trainer_state.json")
            os.remove(path)
            self._prepare_for_training(max_steps, None, None)
            self.prepared = True
            progress = trainer_state({})
            state = {**self.components(), "trainer_state": progress, "rng": self.streams}
            try:
                self.resumed = self.manager.restore(state, self.which).step
            except NoUsableCheckpoint as error:
                error.add_note(START_AGAIN)
                raise
            if self.resumed is not None:
                with open(path, "w") as file:
                    json.dump(progress.stateful, file)
        self._check_room()
        done = super()._init_training_state(max_steps, *args)
        if best := self.state.best_model_checkpoint:  # where it lay when that was written
            self.state.best_model_checkpoint = join_url(self.root, os.path.basename(best))
        return done

    def _check_room(self) -> None:
        """Says before the first step what would fail at a save. Raises CheckpointExists."""
        step = self.resumed or 0
        if self.args.save_strategy == "no":
            return
        if later := self.manager.conflicts(step):
            raise CheckpointExists(
                f"{self.root} has {', '.join(info.name for info in later)} already, and this run "
                f"begins at step {step}: train(resume_from_checkpoint=True) goes on from the "
                "newest; else give another root, or delete them",
                path=self.root,
                step=later[0].step,
            )
        if not self.is_world_process_zero():
            return
        with suppress(CheckpointNotFound):
            found = scan_root(self.root, self.checkpoints.get("storage_options"))
            others = [i for i in found if i.status == "uncommitted" and (i.step or 0) > step]
            if others:
                warnings.warn(
                    f"{self.root}: {', '.join(info.name for info in others)} are in the way of "
                    f"saves of these steps: {others[0].reason}; give another root",
                    CheckpointWarning,
                    stacklevel=2,
                )

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, _: Any) -> Any:
        if self.prepared:
            self.callback_handler.train_dataloader = train_dataloader
            return self.model_wrapped, train_dataloader
        prepare: Any = super()._prepare_for_training
        return prepare(max_steps, train_dataloader, None)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        """Comes with the training state."""

    def _load_rng_state(self, checkpoint: Any) -> None:
        self.streams.apply()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        if self.state.best_global_step == self.state.global_step:
            name = f"checkpoint-{self.state.global_step}"
            self.state.best_model_checkpoint = join_url(self.root, name)
        keeping = [*self.callback_handler.callbacks, self.control]
        kept: Any = [callback for callback in keeping if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=kept).stateful_callbacks
        step, metrics = self.state.global_step, {}
        for entry in self.state.log_history:
            if entry["step"] == step:
                metrics.update({k: v for k, v in entry.items() if isinstance(v, int | float)})
        progress = trainer_state(json.loads(json.dumps(asdict(self.state))))
        state = {**self.components(), "trainer_state": progress, "rng": RNGState()}
        self.manager.save_async(step, state, metrics=metrics, files=self.files())

    def files(self) -> dict[str, bytes]:
        """What stock readers need beside the weights: configs, and files of the tokenizer."""
        others = [] if self.processing_class is None else [self.processing_class]
        model: Any = self.model
        described = hasattr(getattr(model, "config", None), "save_pretrained")
        return hf_files(model, *others) if described else {}

    def _load_best_model(self) -> None:
        """Of those that were saved: the best evaluation may have been between two saves."""
        best, weights = os.path.basename(self.state.best_model_checkpoint or ""), self.weights()
        self.manager.load(weights, best, keys=[*weights])


def limit_of(args: TrainingArguments) -> RetentionPolicy:
    """What `save_total_limit` and `load_best_model_at_end` say."""
    limit = args.save_total_limit or 1
    if not args.load_best_model_at_end:
        return KeepLast(limit)
    metric = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
    best = KeepBest(metric, "max" if args.greater_is_better else "min")
    return KeepLast(max(1, limit - 1)) | best


class LateStreams(RNGState):
    """Random streams that are set when the Trainer has skipped what was trained on already."""

    saved: Any = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.saved = state_dict

    def apply(self) -> None:
        if self.saved is not None:
            super().load_state_dict(self.saved)


def trainer_state(values: dict[str, Any]) -> StateComponent:
    """The Trainer's progress: ranks have it alike, but for which of them is the first."""
    return StateComponent("trainer_state", values, SharingPattern.GLOBAL)
