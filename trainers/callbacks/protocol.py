"""How a trainer talks to callbacks: what it passes, in which order, and what is kept of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ckptcore import Stateful

from ..arguments import InvalidArgument

_EVENTS = """
    on_init_end on_train_begin on_epoch_begin on_epoch_end on_step_begin on_forward_backward_begin
    on_forward_backward_end on_substep_end on_pre_optimizer_step on_optimizer_step on_train_metrics
    on_step_end on_log_step on_log on_prediction_step on_evaluate on_predict on_save
    on_checkpoint_commit on_train_end
"""
EVENTS = tuple(_EVENTS.split())

# The extras that every event brings; None for what is not built yet.
_EXTRAS = """
    model processing_class optimizer lr_scheduler train_dataloader eval_dataloader trainer
"""
EXTRAS = tuple(_EXTRAS.split())

Handler = Callable[..., Any]
Logs = Mapping[str, Any]

log = logging.getLogger(__name__)


class TrainerCallback:
    """A base to build on, though any object will do: a trainer calls the `on_...` methods that it
    finds.

    Every handler gets `args`, `state`, `control` and all extras by keyword, so it may name what it
    needs and take the rest as `**kwargs`. It changes `control` in place, or returns another one for
    those that come after it. A callback with `state_dict()` and `load_state_dict()` is kept in the
    checkpoints under its `name`; rank 0's state is what all ranks get back, or with `state_per_rank
    = True` each rank its own. `close()` is called when training ends with an
    error: local cleanup, nothing that waits for other ranks. `resumed_elsewhere()` is called after
    a load from another root than output_dir: files that the state names are another run's then.
    """

    state_per_rank = False
    _name: str | None = None

    @property
    def name(self) -> str:
        """Its name in log lines and checkpoints: that of its class, unless it was given another."""
        return self._name or type(self).__name__

    @name.setter
    def name(self, name: str) -> None:
        self._name = name


class KeptCallback(TrainerCallback):
    """One that a checkpoint keeps. kept: the attributes that are its state; the class has the
    values that they begin with."""

    kept: ClassVar[tuple[str, ...]]

    def reset(self) -> None:
        """As before the first step of a run."""
        self.load_state_dict({name: getattr(type(self), name) for name in self.kept})

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.kept:
            setattr(self, name, state[name])


def name_of(callback: Any) -> str:
    """The name of any callback."""
    return str(getattr(callback, "name", None) or type(callback).__name__)


@dataclass
class TrainerControl:
    """What callbacks may ask for; it is done at the next step boundary."""

    should_training_stop: bool = False  # end with all that belongs to a normal end
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    # With should_training_stop: end now, evaluate and save nothing.
    should_abort_without_save: bool = False

    def flags(self) -> list[bool]:
        """All of them, in the order of the fields."""
        return [bool(getattr(self, entry.name)) for entry in fields(self)]

    def set_flags(self, flags: Iterable[bool | int]) -> None:
        """Take over what `flags()` of another control gave."""
        for entry, flag in zip(fields(self), flags, strict=True):
            setattr(self, entry.name, bool(flag))


@dataclass
class TrainerState:
    """How far a run has come."""

    global_step: int = 0  # completed optimizer steps
    epoch: float = 0.0
    max_steps: int = 0
    num_train_epochs: float = 0
    max_eval_steps: int = -1
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    log_history: list[dict[str, Any]] = field(default_factory=list)
    total_flos: float = 0
    num_input_tokens_seen: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    best_checkpoint: str | None = None
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0
    stop_reason: str | None = None
    stop_requested_by: str | None = None
    steps_run: int = 0  # of this call of train()

    # What callbacks written for Hugging Face's trainer read under other names.
    is_hyper_param_search = False
    trial_name = None
    trial_params = None
    best_model_checkpoint = property(lambda self: self.best_checkpoint)
    best_global_step = property(lambda self: self.best_step)

    def note(self, values: Logs) -> None:
        """Keep values in the history, where each step has one entry."""
        if not self.log_history or self.log_history[-1]["step"] != self.global_step:
            self.log_history.append({"step": self.global_step, "epoch": self.epoch})
        self.log_history[-1].update(values)

    def state_dict(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in _PERSISTED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _PERSISTED:
            setattr(self, name, copy.deepcopy(state[name]))


_PERSISTED = (
    *("global_step", "epoch", "log_history", "total_flos", "num_input_tokens_seen"),
    *("best_metric", "best_step", "best_checkpoint"),
)


class CallbackHandler:
    """The callbacks of one trainer, called in the order in which they were added.

    context: gives the extras of every event when one is fired. An event that nobody handles costs
    one look-up. Its own state is that of the stateful callbacks, by name; `per_rank()` is a second
    one, for those whose state belongs to a rank.
    """

    def __init__(
        self, callbacks: Iterable[Any] = (), *, context: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.context = context or dict
        self.callbacks: list[Any] = []
        self.requesters: dict[str, str] = {}  # flag -> who set it first
        self._index: dict[str, list[tuple[str, Handler]]] = {}  # event -> name and handler of each
        self._beginning: dict[int, Any] = {}  # states of stateful callbacks as they were added
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> Any:
        """Add a callback (or a class, made without arguments) after the others; returns it."""
        callback = callback() if isinstance(callback, type) else callback
        self.stateful(callback)
        if isinstance(callback, Stateful) and not hasattr(callback, "reset"):
            self._beginning[id(callback)] = copy.deepcopy(callback.state_dict())
        self.callbacks.append(callback)
        self._index.clear()
        return callback

    def remove(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class; returns it, or None if there is none."""
        for number, known in enumerate(self.callbacks):
            if known is callback or (isinstance(callback, type) and type(known) is callback):
                self._index.clear()
                return self.callbacks.pop(number)
        return None

    def handlers(self, event: str) -> list[tuple[str, Handler]]:
        """(name of the callback, its handler) in the order of calls."""
        if not self._index:
            self._index = {known: list(self._each(known)) for known in EVENTS}
        return self._index[event]

    def has(self, event: str) -> bool:
        """Whether anyone handles the event."""
        return bool(self.handlers(event))

    def _each(self, method: str) -> Iterator[tuple[str, Handler]]:
        """A method of those that have it."""
        for callback in list(self.callbacks):
            if callable(found := getattr(callback, method, None)):
                yield name_of(callback), found

    def fire(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **extra: Any
    ) -> TrainerControl:
        """Call all handlers of an event; returns the control that is current afterwards."""
        handlers = self.handlers(event)
        if not handlers:
            return control
        kwargs = {**dict.fromkeys(EXTRAS), **self.context(), **extra}
        # A copy: a handler may add or remove callbacks.
        for name, handler in list(handlers):
            before = control.flags()
            returned = handler(args=args, state=state, control=control, **kwargs)
            control = _replacement(control, returned, f"{name}.{event}")
            for entry, was, is_set in zip(fields(control), before, control.flags(), strict=True):
                if is_set and not was:
                    self.requesters.setdefault(entry.name, name)
                    if entry.name == "should_training_stop" and state.stop_requested_by is None:
                        state.stop_requested_by = name
        return control

    def close(self) -> None:
        """Let those that can clean up do so; one that fails keeps nobody else from it."""
        for name, close in self._each("close"):
            try:
                close()
            except Exception:
                log.exception("%s could not be closed", name)

    def resumed_elsewhere(self) -> None:
        """The state is another run's, in another root: its log files stay as they are."""
        for _, drop in self._each("resumed_elsewhere"):
            drop()

    def stateful(self, *more: Any) -> dict[str, Any]:
        """The stateful callbacks, and more, by name. Raises InvalidArgument where two have one."""
        found: dict[str, Any] = {}
        for callback in (*self.callbacks, *more):
            name = name_of(callback)
            if isinstance(callback, Stateful) and found.setdefault(name, callback) is not callback:
                reason = "two callbacks that are kept in checkpoints have this name"
                instead = "give each a name of its own (callback.name = ...)"
                raise InvalidArgument("callbacks", name, reason, instead)
        return found

    def reset(self) -> None:
        """Let stateful callbacks be as they were when they were added: for a run that starts from
        its beginning.

        One with a `reset()` does it itself."""
        self.requesters.clear()
        for callback in self.stateful().values():
            if hasattr(callback, "reset"):
                callback.reset()
            else:
                callback.load_state_dict(copy.deepcopy(self._beginning[id(callback)]))

    def state_dict(self) -> dict[str, Any]:
        return CallbackStates(self, per_rank=False).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        CallbackStates(self, per_rank=False).load_state_dict(state)

    def per_rank(self) -> CallbackStates | None:
        """The state of those whose state belongs to a rank; None if there are none."""
        states = CallbackStates(self, per_rank=True)
        return states if states.callbacks() else None


@dataclass(frozen=True)
class CallbackStates:
    """Those that a checkpoint keeps, by name: the same for all ranks, or each rank's own."""

    handler: CallbackHandler
    per_rank: bool

    def callbacks(self) -> dict[str, Any]:
        return {
            name: callback
            for name, callback in self.handler.stateful().items()
            if bool(getattr(callback, "state_per_rank", False)) is self.per_rank
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self.callbacks().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        callbacks = self.callbacks()
        speaks = getattr(self.handler.context().get("trainer"), "rank", 0) == 0
        for name, callback in callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
            elif speaks:
                log.info("callback %s is not in the checkpoint and starts fresh", name)
        if (unknown := sorted(state.keys() - callbacks.keys())) and speaks:
            lost = ", ".join(unknown)
            log.warning("the checkpoint's state of %s is dropped: no callback of that name", lost)


def _replacement(control: TrainerControl, returned: Any, where: str) -> TrainerControl:
    """The control after a handler has returned; another library's is taken field by field."""
    if returned is None or returned is control:
        return control
    if isinstance(returned, TrainerControl):
        return returned
    if not hasattr(returned, "should_training_stop"):
        what = f"{where} returned {type(returned).__name__}"
        raise TypeError(f"{what}; a handler returns None or a TrainerControl")
    names = (entry.name for entry in fields(TrainerControl))
    return TrainerControl(**{name: bool(getattr(returned, name, False)) for name in names})
