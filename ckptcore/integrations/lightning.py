"""Checkpoints of a Trainer of Lightning: a callback that saves and restores its live objects."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from ..errors import CheckpointWarning, InvalidState
from ..manager import CheckpointManager
from ..state.component import OnResize, SharingPattern
from ..state.randomness import RNGState

__all__ = ["EngineCheckpoint"]

WRAPPED = (
    "Lightning spreads what the {} of a loader draws over the processes, and keeps no state of it: "
    "a resumed run takes the samples in another order; give the loader a sampler of several "
    "processes, such as torchdata's StatefulDistributedSampler"
)


BEST = (
    "Lightning reads no checkpoints of ckptcore: EngineCheckpoint(which='best') goes on from the "
    "best; to evaluate, ckpt.load({'model': module}, 'best') of a CheckpointManager, and give the "
    "Trainer that module"
)
LEAVE_OUT = (
    "EngineCheckpoint itself restores the newest checkpoint of its root, or that of which=...; "
    "leave ckpt_path out, which is for a checkpoint of Lightning to begin a new run with"
)


class EngineCheckpoint(Checkpoint):
    """Restores the newest checkpoint when `fit` begins, and saves in the background. It takes the
    place of ModelCheckpoint and of `ckpt_path`.

    The manager is made when `fit` begins, where the processes know of each other, and closed when
    it ends: `manager`. `report` is what it restored.

    root: local path or fsspec URL of the run.
    every_n_steps: int >= 1, optimizer steps between two saves.
    which: the checkpoint to go on from: "auto" (default): the newest that is whole, or a fresh
        start; or what `CheckpointManager.load` takes as its step.
    on_resize: what happens to loaders and random streams on another number of ranks: "error"
        (default), "keep", or a function, as for StateComponent.
    options: as for CheckpointManager.

    Raises InvalidState for a `ckpt_path` where the root has a checkpoint.
    """

    def __init__(
        self,
        root: str,
        every_n_steps: int,
        *,
        which: int | str = "auto",
        on_resize: OnResize = "error",
        **options: Any,
    ) -> None:
        self.root, self.every_n_steps, self.options = root, every_n_steps, options
        self.which, self.on_resize = which, on_resize
        self.sources: list[str] = []
        self.saved = 0

    def state(self, trainer: Any) -> dict[str, Any]:
        """The components of a running `fit`, for `save` and `load` of a CheckpointManager."""
        configs = trainer.lr_scheduler_configs
        parts: dict[str, Any] = {
            "model": trainer.lightning_module,
            **{f"optimizer_{n}" if n else "optimizer": o for n, o in enumerate(trainer.optimizers)},
            **{f"scheduler_{n}" if n else "scheduler": c.scheduler for n, c in enumerate(configs)},
            "callbacks": CallbackStates(trainer, self),
            "precision": trainer.precision_plugin,
            "loops": Loops(trainer, self.on_resize),
            "rng": RNGState(self.on_resize),
        }
        if trainer.datamodule is not None:
            parts["datamodule"] = trainer.datamodule
        return parts

    @property
    def best_model_path(self) -> str:
        """What Lightning asks for where ckpt_path is "best". Raises InvalidState."""
        raise InvalidState(BEST)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._goes_on_from("that of ckpt_path")

    def _goes_on_from(self, source: str) -> None:
        self.sources.append(source)
        if len(self.sources) > 1:
            raise InvalidState(f"two checkpoints, {' and '.join(self.sources)}: {LEAVE_OUT}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.sources = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.manager = CheckpointManager(self.root, **self.options)
        trainer.fit_loop.setup_data()  # makes the loaders, which Lightning would do later
        for loader in getattr(trainer.fit_loop._combined_loader, "flattened", ()):
            by: Any = getattr(getattr(loader, "batch_sampler", loader), "sampler", None)
            if trainer.is_global_zero and isinstance(by, DistributedSamplerWrapper):
                kind = type(vars(by.dataset)["_sampler"]).__name__
                warnings.warn(WRAPPED.format(kind), CheckpointWarning)
        self.report = self.manager.restore(self.state(trainer), self.which)
        if self.report.path is not None:
            self._goes_on_from(self.report.path)
        self.saved = self.report.step or 0
        if not self.report.fresh:
            # The random streams are as they were: what the loaders draw now is what the run drew.
            fetcher: Any = trainer.fit_loop._data_fetcher
            iter(fetcher)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        # While gradients are accumulated the step stays what it was.
        if step % self.every_n_steps == 0 and step != self.saved:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.manager.save_async(step, self.state(trainer), metrics=metrics)
            self.saved = step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.manager.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, IsADirectoryError):  # a ckpt_path, which Lightning opens
            exception.add_note(LEAVE_OUT)
        if hasattr(self, "manager"):
            self.manager.__exit__(type(exception), exception, None)


class Loops:
    """The progress of the loops, and the positions of loaders that have one; each rank's own."""

    sharing_pattern = SharingPattern.PER_RANK

    def __init__(self, trainer: Trainer, on_resize: OnResize) -> None:
        self.loop, self.on_resize = trainer.fit_loop, on_resize

    def state_dict(self) -> dict[str, Any]:
        return self.loop.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        positions = state_dict["state_dict"].pop("combined_loader", [])
        self.loop.load_state_dict(state_dict)
        loader: Any = self.loop._combined_loader
        if positions:
            # The loaders make their iterators now, which draw seeds: later those would come out of
            # the random streams, which are restored last.
            loader._load_state_dicts(positions)
            epoch: Any = self.loop.epoch_progress.current
            for part in loader.flattened:
                _set_sampler_epoch(part, epoch.processed)
            if state_dict["epoch_loop.batch_progress"]["is_last_batch"]:
                iter(loader)  # of the epoch that has ended; the next iterator begins another one
            else:
                loader._state_dicts()


class CallbackStates:
    """What the other callbacks keep, by the keys that Lightning gives them."""

    def __init__(self, trainer: Any, without: Checkpoint) -> None:
        self.callbacks = [c for c in trainer.callbacks if c is not without]

    def state_dict(self) -> dict[str, Any]:
        return {callback.state_key: callback.state_dict() for callback in self.callbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for callback in self.callbacks:
            if saved := state_dict.get(callback.state_key):
                callback.load_state_dict(saved)
