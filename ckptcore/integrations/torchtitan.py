"""A checkpoint manager for torchtitan's Trainer, by its protocol BaseCheckpointManager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)

from ..catalog.retention import KeepLast
from ..errors import InvalidState
from ..interop.exporting import export_checkpoint
from ..manager import CheckpointCoordinator, CheckpointManager
from ..state.component import SharingPattern, StateComponent
from ..state.randomness import RNGState
from ..storage.urls import join_url
from ..upkeep import delete_checkpoint

__all__ = ["EngineCheckpointManager"]

SHARDED, REPLICATED = SharingPattern.SHARDED, SharingPattern.REPLICATED


class EngineCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Takes the place of torchtitan's CheckpointManager, by its Config in the place of that one's.
    It saves in the background, and goes on from the newest checkpoint that is whole.

    Its parameters are those that torchtitan's Trainer gives; `manager` is the CheckpointManager.

    Raises InvalidState for `initial_load_in_hf`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The settings that torchtitan's managers share, and one more."""

        options: dict[str, Any] = field(default_factory=dict)
        """Options for ckptcore's CheckpointManager, such as `tiers`."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Any = None
        if not config.enable:
            return
        if config.initial_load_in_hf:
            raise InvalidState(
                "initial_load_in_hf is not for checkpoints of ckptcore: import_checkpoint makes "
                "one of a Hugging Face folder, for initial_load_path"
            )
        self.config, self.sd_adapter = config, sd_adapter
        self.folder = join_url(base_folder, config.folder) if base_folder else config.folder
        self.model = ModelWrapper(model_parts)
        # Pipeline stages have their own names, and loaders one for each rank of the data.
        loader = None if dataloader is None else Loader(dataloader)
        parts = {MODEL: self.model, OPTIMIZER: optimizers, DATALOADER: loader}
        others = {LR_SCHEDULER: lr_schedulers, **states}
        self.components = {
            **{k: StateComponent(k, v, SHARDED) for k, v in parts.items() if v is not None},
            **{k: StateComponent(k, v, REPLICATED) for k, v in others.items()},
            "rng": StateComponent("rng", RNGState(), SharingPattern.PER_RANK, on_resize="keep"),
        }
        keep = KeepLast(config.keep_latest_k) if config.keep_latest_k else None
        self.manager = CheckpointManager(self.folder, **{"keep": keep, **config.options})

    def _load(self, step: int = -1) -> bool:
        left = set(self.config.exclude_from_loading)
        if unknown := left - self.components.keys():
            raise InvalidState(f"exclude_from_loading names {sorted(unknown)}, which is no state")
        newest, path = self.manager.latest(), self.config.initial_load_path
        if step == -1 and newest is None:
            wanted = (
                [MODEL] if self.config.initial_load_model_only else self.components.keys() - left
            )
            if path is not None:
                self.manager.load([self.components[k] for k in wanted], path, keys=list(wanted))
            return path is not None
        seed = step == 0 or (step == -1 and newest is not None and newest.step == 0)
        state = [c for k, c in self.components.items() if k == MODEL or not (seed or k in left)]
        keys = [c.key for c in state] if seed or left else None
        self.manager.restore(state, "auto" if step == -1 else step, keys=keys)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:
            self._save_model(curr_step)
        else:
            self.save_future = self.manager.save_async(curr_step, [*self.components.values()])
            if last_step:
                self.maybe_wait_for_saving()
        return True

    def _save_model(self, step: int) -> None:
        dtype = getattr(torch, self.config.export_dtype)
        weights = {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in self.model.state_dict().items()
        }
        if not self.config.last_save_in_hf:
            self.manager.save(step, [StateComponent(MODEL, weights, SHARDED)])
            return
        self.manager.wait()
        target = join_url(self.folder, f"step-{step}")
        state = [StateComponent(MODEL, self.sd_adapter.to_hf(weights), SHARDED)]
        info = CheckpointCoordinator(state).save_checkpoint(f"{target}.sharded", step=step)
        if self.manager.comm.rank == 0:
            export_checkpoint(info.url, target)
            delete_checkpoint(info.url)

    def _wait_for_saving(self) -> None:
        self.manager.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """The engine itself keeps the optimizer from changing what is still to be copied."""

    def _close(self) -> None:
        self.manager.close()


class Loader:
    """The loader of a Trainer, which iterates anew after the load."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)
        # Makes the iterator now, which draws a seed: later that would come out of the random
        # streams, which are restored last.
        self.loader.state_dict()
