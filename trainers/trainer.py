"""The training loop: train, look, save; and go on from any checkpoint bit for bit."""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from tqdm import tqdm

from ckptcore import CheckpointExists, CheckpointManager, KeepLast, RNGState, StateComponent

from .arguments import InvalidArgument, TrainingArguments
from .data import ResumableLoader, SizedDataset, read_corpus, split_corpus
from .model import ByteGPT
from .progress import LossFile, Progress, choose_logging_dir, open_scalar_writer, stored_logging_dir
from .schedule import warmup_cosine

__all__ = ["TrainResult", "Trainer"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    global_step: int
    steps_run: int  # by this call; 0 when the run was finished already
    resumed_from: int | None  # step of the checkpoint that was restored
    losses: list[float]  # of the steps that this call ran
    log_history: list[dict[str, Any]]  # of the whole run


class Trainer:
    """Trains `model_init()` on `train_dataset`; by default a byte-level GPT on the text of `args.data`.

    A trainer is a `StatefulProvider`: it can itself be given to a CheckpointManager. Subclasses change how the model
    is prepared, how a batch reaches it, and who shares which state.
    """

    def __init__(
        self,
        args: TrainingArguments,
        *,
        model_init: Callable[[], nn.Module] | None = None,
        train_dataset: SizedDataset | None = None,
        eval_dataset: SizedDataset | None = None,
    ) -> None:
        self.args = args
        self.device = self.choose_device()
        if args.seed >= 0:
            random.seed(args.seed)
            np.random.seed(args.seed)
            torch.manual_seed(args.seed)
        if train_dataset is None:
            corpus = read_corpus(args.data, args.max_data_bytes)
            train_dataset, eval_dataset = split_corpus(corpus, args.model.block_size)
        if eval_dataset is None and args.eval_strategy != "no":
            raise InvalidArgument("eval_strategy", args.eval_strategy, "no eval_dataset", "give one or use 'no'")
        self.eval_dataset = eval_dataset
        data_seed = args.seed if args.seed >= 0 else secrets.randbits(32)
        self.loader = ResumableLoader(
            train_dataset, args.per_device_train_batch_size, data_seed, args.dataloader_drop_last
        )
        self.total_steps = self.count_steps()
        self.model = self.prepare_model(model_init() if model_init else ByteGPT(args.model))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, warmup_cosine(args.warmup_steps, self.total_steps)
        )
        self.progress = Progress()

    # What subclasses change.

    def choose_device(self) -> torch.device:
        if self.args.use_cpu:
            return torch.device("cpu")
        name = self.args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no one type for this
            reason = str(error).splitlines()[0]
            raise InvalidArgument("device", name, reason, "give one that this machine has, such as cpu") from None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def move_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def get_state_components(self) -> list[StateComponent]:
        """Everything that a run needs to go on as if it had never stopped; one process holds all of it."""
        return [
            StateComponent("model", self.model),
            StateComponent("optimizer", self.optimizer),
            StateComponent("scheduler", self.scheduler),
            StateComponent("loader", self.loader),
            StateComponent("progress", self.progress),
            StateComponent("rng", RNGState()),
        ]

    def get_process_groups(self) -> dict[str, Any]:
        return {}

    # The run.

    def train(self) -> TrainResult:
        args, progress = self.args, self.progress
        keep = KeepLast(args.save_total_limit) if args.save_total_limit is not None else None
        losses: list[float] = []
        with ExitStack() as open_until_the_end:
            checkpoints = open_until_the_end.enter_context(CheckpointManager(args.root, keep=keep))
            resumed_from, metadata = self.restore(checkpoints)
            if progress.step >= self.total_steps:
                log.info("nothing to do: step %d of %d is reached", progress.step, self.total_steps)
                return TrainResult(progress.step, 0, resumed_from, losses, progress.log_history)

            loss_file = LossFile(args.root, progress.step)
            open_until_the_end.callback(loss_file.close)
            logging_dir = choose_logging_dir(args, metadata)
            writer = None
            if args.report_to == "tensorboard":
                writer = open_scalar_writer(logging_dir, progress.step)
                open_until_the_end.callback(writer.close)
            bar = open_until_the_end.enter_context(
                tqdm(total=self.total_steps, initial=progress.step, disable=args.disable_tqdm, unit="step")
            )
            first = progress.step + 1
            for step in range(first, self.total_steps + 1):
                loss, grad_norm = self.training_step()
                progress.step = step
                progress.losses.append(loss)
                losses.append(loss)
                loss_file.append(step, loss)
                bar.update()

                last = step == self.total_steps
                if step % args.logging_steps == 0 or last:
                    mean = sum(progress.losses) / len(progress.losses)
                    progress.losses.clear()
                    progress.log(loss=mean, learning_rate=float(self.scheduler.get_last_lr()[0]))
                    if grad_norm is not None:
                        progress.log(grad_norm=grad_norm)
                if args.eval_strategy == "steps" and (step % args.eval_steps == 0 or last):
                    progress.log(eval_loss=self.evaluate())
                if progress.log_history and progress.log_history[-1]["step"] == step:
                    self.report(progress.log_history[-1], bar, writer)
                if step % args.save_steps == 0 or last:
                    # The records first: a restored step is then never missing in them.
                    loss_file.sync()
                    if writer is not None:
                        writer.flush()
                    self.save(checkpoints, stored_logging_dir(args, logging_dir))
        return TrainResult(progress.step, len(losses), resumed_from, losses, progress.log_history)

    def training_step(self) -> tuple[float, float | None]:
        """One optimizer step: mean loss over its samples, and the norm of its gradient before clipping."""
        self.model.train()
        # An epoch ends with a step of its own, shorter if need be, so that epochs have whole steps.
        count = min(self.args.gradient_accumulation_steps, self.loader.left_in_epoch)
        batches = [self.move_batch(self.loader.next_batch()) for _ in range(count)]
        sizes = [len(batch["labels"]) for batch in batches]
        loss = 0.0
        for batch, size in zip(batches, sizes, strict=True):
            share = self.compute_loss(batch) * (size / sum(sizes))
            torch.autograd.backward(share)
            loss += share.item()
        grad_norm = None
        if self.args.max_grad_norm is not None:
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        return loss, grad_norm

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation data, always the same ones in the same order."""
        assert self.eval_dataset is not None
        self.model.eval()
        size, samples = self.args.per_device_eval_batch_size, len(self.eval_dataset)
        starts = range(0, samples, size)
        if self.args.max_eval_steps > 0:
            starts = starts[: self.args.max_eval_steps]
        total, seen = 0.0, 0
        for start in starts:
            items = [self.eval_dataset[i] for i in range(start, min(start + size, samples))]
            loss = self.compute_loss(self.move_batch(default_collate(items))).item()
            total, seen = total + loss * len(items), seen + len(items)
        return total / seen

    def count_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        per_epoch = math.ceil(len(self.loader) / self.args.gradient_accumulation_steps)
        return math.ceil(self.args.num_train_epochs * per_epoch)

    def report(self, entry: dict[str, Any], bar: Any, writer: Any) -> None:
        shown = {name: f"{value:.4g}" for name, value in entry.items() if name != "step"}
        bar.set_postfix(shown)
        if bar.disable:
            log.info(
                "step %d/%d  %s",
                entry["step"],
                self.total_steps,
                "  ".join(f"{name} {value}" for name, value in shown.items()),
            )
        if writer is not None:
            for name, value in entry.items():
                if name.startswith("eval_"):
                    writer.add_scalar(f"eval/{name.removeprefix('eval_')}", value, entry["step"])
                elif name != "step":
                    writer.add_scalar(f"train/{name}", value, entry["step"])

    # Checkpoints.

    def restore(self, checkpoints: CheckpointManager) -> tuple[int | None, dict[str, Any]]:
        """Step that was restored, if any, and the metadata of its checkpoint."""
        args, wanted = self.args, self.args.resume_from_checkpoint
        if wanted is False:
            present = checkpoints.latest()
            if present is not None and not args.overwrite_output_dir:
                raise CheckpointExists(
                    f"{args.output_dir} holds checkpoints up to step {present.step} and the run is not to "
                    "resume from them: give another output_dir, or overwrite_output_dir to replace them",
                    path=args.output_dir,
                    step=present.step,
                )
            return None, {}
        report = checkpoints.restore(self, "auto" if wanted is True else wanted)
        if report.fresh or report.manifest is None:
            return None, {}
        metadata = report.manifest.metadata
        log.info("resumed from step %d (%s)", self.progress.step, report.path)
        changed = args.differences(metadata.get("training_args", {}))
        if changed:
            log.warning(
                "arguments that are not those of the checkpoint: %s. The states of optimizer, schedule and "
                "data position come from the checkpoint all the same",
                ", ".join(changed),
            )
        return self.progress.step, metadata

    def save(self, checkpoints: CheckpointManager, logging_dir: str) -> None:
        args, metrics = self.args, {}
        for entry in self.progress.log_history[-1:]:
            if entry["step"] == self.progress.step:  # else they were measured on other weights
                metrics = {name: value for name, value in entry.items() if name != "step"}
        checkpoints.save(
            self.progress.step,
            self,
            metrics=metrics,
            metadata={"training_args": args.as_dict(), "logging_dir": logging_dir},
            training_args_hash=args.digest(),
            overwrite=args.overwrite_output_dir,
        )
