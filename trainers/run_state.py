"""What of a run a checkpoint holds besides model and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptcore import RNGState, SharingPattern, StateComponent

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["run_components"]


class Part:
    """A component that any checkpoint of a trainer has, used here or not.

    of: what it holds (None: nothing, in this run). restored: whether a load brings it back.
    """

    def __init__(self, of: Any, restored: bool = True) -> None:
        self.of, self.restored = of, restored

    def state_dict(self) -> Any:
        return {} if self.of is None else self.of.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self.restored and self.of is not None and state:
            self.of.load_state_dict(state)


class EpochAlone(Part):
    """The loader of a run that goes on, where the data of the epoch are to start over."""

    def load_state_dict(self, state: Any) -> None:
        self.of.go_to_epoch(state["epoch"])


class Progress:
    """The trainer's own numbers."""

    def __init__(self, trainer: TrainerParts) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": self.trainer.state.state_dict(),
            "meters": self.trainer.meters.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.state.load_state_dict(state["state"])
        self.trainer.meters.load_state_dict(state["meters"])


def run_components(trainer: TrainerParts) -> list[StateComponent]:
    """Schedule, position in the data, random streams, counters, callbacks."""
    args = trainer.args
    go_on = args.on_world_size_change == "continue"
    shared, own = SharingPattern.GLOBAL, SharingPattern.PER_RANK
    callbacks = args.restore_callback_states_from_checkpoint
    found = [
        StateComponent("scheduler", Part(trainer.scheduler), shared),
        StateComponent("scaler", Part(trainer.scaler), shared),
        StateComponent("trainer", Progress(trainer), shared),
        StateComponent("callbacks", Part(trainer.callbacks, callbacks), shared),
        # A position in the data means the same on every rank and for any number of ranks; a random
        # stream does not.
        StateComponent("rng", RNGState(), own, on_resize="keep" if go_on else "error"),
    ]
    # Always there, so that a checkpoint of a run which had such callbacks can be read by one that
    # has none.
    each = any(
        getattr(callback, "state_per_rank", False) for callback in trainer.callbacks.callbacks
    )
    part = StateComponent("callbacks_per_rank", Part(trainer.callbacks.per_rank(), callbacks), own)
    part.on_resize = ("keep" if go_on else "error") if each else (lambda *_: 0)
    found.append(part)
    if trainer.loader is not None:
        loader = (EpochAlone if args.ignore_data_skip else Part)(trainer.loader)
        found.append(
            StateComponent("loader", loader, own if trainer.loader.state_per_rank else shared)
        )
    return found
