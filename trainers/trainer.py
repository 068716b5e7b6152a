"""The training loop: train, look, save; and go on from any checkpoint bit for bit."""

from __future__ import annotations

import logging
import math
import random
import secrets
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    KeepLast,
    PreemptionGuard,
    RNGState,
    SharingPattern,
    StateComponent,
)

from .arguments import InvalidArgument, TrainingArguments
from .data import ResumableLoader, SizedDataset, read_corpus, split_corpus
from .model import ByteGPT
from .progress import Progress, Records, choose_logging_dir, stored_logging_dir
from .schedule import warmup_cosine

__all__ = ["TrainResult", "Trainer", "seed_everything"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    global_step: int
    steps_run: int  # by this call; 0 when the run was finished already
    resumed_from: int | None  # step of the checkpoint that was restored
    losses: list[float]  # of the steps that this call ran
    log_history: list[dict[str, Any]]  # of the whole run
    stop_reason: str | None = None  # "sigterm" where one stopped the run, else None


class Trainer:
    """Trains `model_init()` on `train_dataset`; by default a byte-level GPT on the text of `args.data`.

    A trainer is a `StatefulProvider`: it can itself be given to a CheckpointManager. Subclasses change how the model
    is prepared, how a batch reaches it, and who shares which state.
    """

    rank = 0
    world_size = 1

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
            seed_everything(args.seed)
        if train_dataset is None:
            corpus = read_corpus(args.data, args.max_data_bytes)
            train_dataset, eval_dataset = split_corpus(corpus, args.model.block_size)
        if eval_dataset is None and args.eval_strategy != "no":
            raise InvalidArgument("eval_strategy", args.eval_strategy, "no eval_dataset", "give one or use 'no'")
        self.eval_dataset = eval_dataset
        self.loader = ResumableLoader(
            train_dataset,
            args.per_device_train_batch_size,
            self.choose_data_seed(),
            args.dataloader_drop_last,
            rank=self.rank,
            world_size=self.world_size,
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

    def choose_data_seed(self) -> int:
        return self.args.seed if self.args.seed >= 0 else secrets.randbits(32)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def move_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def get_state_components(self) -> list[StateComponent]:
        """Everything that a run needs to go on as if it had never stopped."""
        return self.components(SharingPattern.GLOBAL)

    def components(self, shared: SharingPattern) -> list[StateComponent]:
        """`shared`: the pattern of what all ranks have in common."""
        go_on = self.args.on_world_size_change == "continue"
        own = SharingPattern.PER_RANK  # of one process too: its random streams are not those of several
        return [
            StateComponent("model", self.model, shared),
            StateComponent("optimizer", self.optimizer, shared),
            StateComponent("scheduler", self.scheduler, shared),
            StateComponent("progress", self.progress, shared),
            # A position in the data means the same on every rank and for any number of ranks; a random stream does not.
            StateComponent("loader", self.loader, own, on_resize=(lambda *_: 0) if go_on else "error"),
            StateComponent("rng", RNGState(), own, on_resize="keep" if go_on else "error"),
        ]

    def get_process_groups(self) -> dict[str, Any]:
        return {}

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around each batch of a step; `last`: the gradient is complete after it."""
        return nullcontext()

    def sum_over_ranks(self, *values: float) -> list[float]:
        return list(values)

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

            logging_dir = choose_logging_dir(args, metadata)
            records = open_until_the_end.enter_context(
                closing(Records(args, progress.step, self.total_steps, logging_dir, silent=self.rank != 0))
            )
            guard = (
                open_until_the_end.enter_context(PreemptionGuard(checkpoints, [signal.SIGTERM]))
                if args.enable_jit_checkpoint
                else None
            )
            stopping = False
            first = progress.step + 1
            for step in range(first, self.total_steps + 1):
                loss, grad_norm = self.training_step()
                progress.step = step
                progress.losses.append(loss)
                losses.append(loss)
                records.step(step, loss)

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
                    records.entry(progress.log_history[-1])
                stopping = guard is not None and guard.should_stop(step)
                if step % args.save_steps == 0 or last or stopping:
                    records.sync()
                    wait = not args.save_async or last or stopping
                    self.save(checkpoints, stored_logging_dir(args, logging_dir), wait)
                if stopping:
                    break
        return TrainResult(
            progress.step, len(losses), resumed_from, losses, progress.log_history, "sigterm" if stopping else None
        )

    def training_step(self) -> tuple[float, float | None]:
        """One optimizer step: mean loss over its samples, and the norm of its gradient before clipping."""
        self.model.train()
        # An epoch ends with a step of its own, shorter if need be, so that epochs have whole steps.
        count = min(self.args.gradient_accumulation_steps, self.loader.left_in_epoch)
        sizes = self.loader.next_sizes(count)
        samples = sum(of_all_ranks for _, of_all_ranks in sizes)
        batches = [self.move_batch(self.loader.next_batch()) for _ in range(count)]
        loss = 0.0
        for number, (batch, (size, _)) in enumerate(zip(batches, sizes, strict=True), start=1):
            with self.accumulating(last=number == count):
                # Times the ranks, since the gradient of a step is the mean of theirs.
                share = self.compute_loss(batch) * (size / samples * self.world_size)
                torch.autograd.backward(share)
            loss += share.item()
        (loss,) = self.sum_over_ranks(loss / self.world_size)
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
        for start in starts[self.rank :: self.world_size]:
            items = [self.eval_dataset[i] for i in range(start, min(start + size, samples))]
            loss = self.compute_loss(self.move_batch(default_collate(items))).item()
            total, seen = total + loss * len(items), seen + len(items)
        total_of_all, seen_by_all = self.sum_over_ranks(total, seen)
        return total_of_all / seen_by_all

    def count_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        per_epoch = math.ceil(len(self.loader) / self.args.gradient_accumulation_steps)
        return math.ceil(self.args.num_train_epochs * per_epoch)

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
        if report.manifest.world_size != self.world_size:
            log.warning(
                "saved on %d ranks and resumed on %d: a step now takes %d samples, and random streams start anew",
                report.manifest.world_size,
                self.world_size,
                args.train_batch_size * self.world_size,
            )
        changed = args.differences(metadata.get("training_args", {}))
        if changed:
            log.warning(
                "arguments that are not those of the checkpoint: %s. The states of optimizer, schedule and "
                "data position come from the checkpoint all the same",
                ", ".join(changed),
            )
        return self.progress.step, metadata

    def save(self, checkpoints: CheckpointManager, logging_dir: str, wait: bool) -> None:
        """wait: until the checkpoint is committed; else it is written in the background."""
        args, metrics = self.args, {}
        for entry in self.progress.log_history[-1:]:
            if entry["step"] == self.progress.step:  # else they were measured on other weights
                metrics = {name: value for name, value in entry.items() if name != "step"}
        save = checkpoints.save if wait else checkpoints.save_async
        save(
            self.progress.step,
            self,
            metrics=metrics,
            metadata={"training_args": args.as_dict(), "logging_dir": logging_dir},
            training_args_hash=args.digest(),
            overwrite=args.overwrite_output_dir,
        )


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
