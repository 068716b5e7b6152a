"""What an Accelerator of Hugging Face's accelerate has prepared, as a state to save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator

from ..errors import InvalidState
from ..state.component import OnResize, SharingPattern
from ..state.randomness import RNGState

__all__ = ["state_of"]


def state_of(accelerator: Accelerator, on_resize: OnResize = "error") -> dict[str, Any]:
    """Everything that the Accelerator has prepared or registered, its step, and the random streams,
    for `save` and `restore`.

    Call it after `prepare` and `register_for_checkpointing`. The parts are called "model",
    "optimizer", "scheduler", "loader" and "custom", a second one "model_1" and so on; and "scaler",
    "accelerator" and "rng".

    accelerator: Accelerator that has prepared something.
    on_resize: what happens to loaders and random streams on another number of ranks: "error"
        (default), "keep", or a function, as for StateComponent.

    Raises InvalidState where nothing was prepared.
    """
    if not accelerator._models:
        raise InvalidState("the Accelerator has prepared no model; call it after prepare")
    loaders = [LoaderPosition(loader, on_resize) for loader in accelerator._dataloaders]
    state = {
        **numbered("model", accelerator._models),
        **numbered("optimizer", accelerator._optimizers),
        **numbered("scheduler", accelerator._schedulers),
        **numbered("loader", loaders),
        **numbered("custom", accelerator._custom_objects),
        "accelerator": Progress(accelerator),
        "rng": RNGState(on_resize),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def numbered(name: str, parts: Iterable[Any]) -> dict[str, Any]:
    """Named as in the folders of `save_state`: the first without a number."""
    return {f"{name}_{n}" if n else name: part for n, part in enumerate(parts)}


class Progress:
    """How many micro-batches the Accelerator has counted.

    Raises InvalidState in the middle of an accumulation, since gradients are no part of the state.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        if not self.accelerator.sync_gradients:
            raise InvalidState(
                "gradients are being accumulated, and a checkpoint does not have them: save where "
                "accelerator.sync_gradients is True, after the optimizer's step"
            )
        return {"step": self.accelerator.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.accelerator.step = state_dict["step"]


class LoaderPosition:
    """The epoch of a prepared loader, and its position in it where the loader is a stateful one.
    Each rank has its own."""

    sharing_pattern = SharingPattern.PER_RANK

    def __init__(self, loader: Any, on_resize: OnResize) -> None:
        self.loader, self.on_resize = loader, on_resize

    def state_dict(self) -> dict[str, Any]:
        loader = self.loader
        stateful = getattr(loader, "use_stateful_dataloader", False)
        inside = any(active is loader for active in loader.gradient_state.dataloader_references)
        # At the last batch the loader still counts the epoch that has just ended.
        ended = inside and loader.end_of_dataloader
        position = loader.state_dict() if stateful else None
        return {"epoch": loader.iteration + ended, "position": position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.set_epoch(state_dict["epoch"])
        if state_dict["position"] is not None:
            self.loader.load_state_dict(state_dict["position"])
            # Makes the iterator now, which draws a seed: later that would come out of the random
            # streams, which are restored last.
            self.loader.base_dataloader.state_dict()
