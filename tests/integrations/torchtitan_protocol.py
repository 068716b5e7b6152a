"""What the tests need of torchtitan where it is not installed: its protocol, as in the source of
0.3, with nothing behind it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

NAMES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")


class ModelWrapper:
    """Several parts of a model as one."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts if isinstance(parts, list) else [parts]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict(state_dict, strict=False)


class BaseCheckpointManager:
    """The calls of the Trainer, each passed on where checkpoints are enabled."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: str = "float32"
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        create_seed_checkpoint: bool = False
        load_only: bool = False

    enable: bool
    save_future: Any

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)  # type: ignore[attr-defined,no-any-return]

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)  # type: ignore[attr-defined,no-any-return]

    def maybe_wait_for_staging(self) -> None:
        if self.enable:
            self._maybe_wait_for_staging()  # type: ignore[attr-defined]

    def maybe_wait_for_saving(self) -> None:
        if self.enable and self.save_future is not None:
            self._wait_for_saving()  # type: ignore[attr-defined]

    def close(self) -> None:
        if getattr(self, "enable", False):
            self._close()  # type: ignore[attr-defined]


def stand_in() -> None:
    """Make it what `import torchtitan.components.checkpointer.base` finds."""
    path = ["torchtitan", "components", "checkpointer", "base"]
    for number in range(1, len(path) + 1):
        sys.modules[".".join(path[:number])] = ModuleType(path[number - 1])
    base: Any = sys.modules[".".join(path)]
    base.BaseCheckpointManager, base.ModelWrapper = BaseCheckpointManager, ModelWrapper
    for name in NAMES:
        setattr(base, name.upper(), name)
