from __future__ import annotations

import logging
from typing import Any

import pytest
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import CallbackHandler, TrainerCallback, TrainerControl, TrainerState
from ckpt_trainers.callbacks.protocol import EVENTS, name_of


class Noted:
    """Notes what it is called with; not built on TrainerCallback."""

    def __init__(self, notes: list[Any], mark: str) -> None:
        self.notes, self.mark = notes, mark

    def on_step_end(self, **kwargs: Any) -> None:
        self.notes.append((self.mark, kwargs))


class Kept(TrainerCallback):
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class KeptByRank(Kept):
    state_per_rank = True


def fire(
    handler: CallbackHandler, event: str, state: TrainerState | None = None, **extra: Any
) -> TrainerControl:
    return handler.fire(event, "args", state or TrainerState(), TrainerControl(), **extra)


def test_handlers_run_in_order_with_all_extras_by_keyword() -> None:
    notes: list[Any] = []
    handler = CallbackHandler(
        [Noted(notes, "a"), object(), Noted(notes, "b")], context=lambda: {"model": "m"}
    )
    state, control = TrainerState(), TrainerControl()
    assert handler.fire("on_step_end", "args", state, control, more=1) is control
    assert [mark for mark, _ in notes] == ["a", "b"]
    nothing = (
        "processing_class",
        "optimizer",
        "lr_scheduler",
        "train_dataloader",
        "eval_dataloader",
        "trainer",
    )
    expected = dict.fromkeys(nothing) | {
        "args": "args",
        "state": state,
        "control": control,
        "model": "m",
        "more": 1,
    }
    assert notes[0][1] == expected


def test_an_event_that_nobody_handles_asks_for_nothing() -> None:
    def context() -> dict[str, Any]:
        raise AssertionError("was asked")

    handler = CallbackHandler([Noted([], "a"), TrainerCallback()], context=context)
    assert not any(handler.has(event) for event in EVENTS if event != "on_step_end")
    assert handler.has("on_step_end")
    fire(handler, "on_log", logs={})


def test_callbacks_come_and_go() -> None:
    notes: list[Any] = []
    first, second = Noted(notes, "a"), Noted(notes, "b")
    handler = CallbackHandler([first])
    fire(handler, "on_step_end")
    assert handler.add(second) is second
    assert handler.remove(first) is first
    fire(handler, "on_step_end")
    assert handler.remove(first) is None
    assert handler.remove(Noted) is second
    fire(handler, "on_step_end")
    assert [mark for mark, _ in notes] == ["a", "b"]
    assert isinstance(handler.add(Kept), Kept)  # a class, as Hugging Face takes it


def test_a_returned_control_replaces_the_one_of_those_that_follow() -> None:
    seen: list[TrainerControl] = []

    class Asks:
        def on_step_end(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_log = True

    class Replaces:
        def on_step_end(self, **kwargs: Any) -> TrainerControl:
            return TrainerControl(should_save=True)

    class Looks:
        def on_step_end(self, control: TrainerControl, **kwargs: Any) -> None:
            seen.append(control)

    result = fire(CallbackHandler([Asks(), Looks(), Replaces(), Looks()]), "on_step_end")
    assert seen[0].should_log and not seen[0].should_save
    assert result is seen[1] and result.flags() == TrainerControl(should_save=True).flags()


def test_a_control_of_another_library_is_taken_over_and_nonsense_is_not() -> None:
    class Foreign:
        should_training_stop = True
        should_log = False

    class Returns:
        def __init__(self, value: Any) -> None:
            self.value = value

        def on_step_end(self, **kwargs: Any) -> Any:
            return self.value

    assert fire(CallbackHandler([Returns(Foreign())]), "on_step_end") == TrainerControl(
        should_training_stop=True
    )
    with pytest.raises(TypeError, match=r"Returns\.on_step_end returned int"):
        fire(CallbackHandler([Returns(3)]), "on_step_end")


def test_a_callback_written_for_hugging_face_works_unchanged() -> None:
    class StopsAndRemembers:
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> Any:
            if (
                not state.is_hyper_param_search
                and state.is_world_process_zero
                and state.best_model_checkpoint is None
            ):
                control.should_training_stop = logs["loss"] > 1 and kwargs["model"] is None
            return control

    state = TrainerState()
    assert fire(
        CallbackHandler([StopsAndRemembers]), "on_log", state, logs={"loss": 2.0}
    ).should_training_stop
    assert state.stop_requested_by == "StopsAndRemembers"


def test_the_first_requester_is_noted() -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop = control.should_save = True

    first, second = Stops(), Stops()
    first.name, second.name = "plateau", "time"
    handler, state = CallbackHandler([first, second]), TrainerState()
    fire(handler, "on_step_end", state)
    assert state.stop_requested_by == "plateau"
    assert handler.requesters == {"should_training_stop": "plateau", "should_save": "plateau"}


def test_names() -> None:
    class Plain:
        pass

    named = Kept()
    assert (named.name, name_of(Plain())) == ("Kept", "Plain")
    named.name = "mine"
    assert (named.name, Kept().name) == ("mine", "Kept")
    with pytest.raises(InvalidArgument, match=r"Kept.*name of its own"):
        CallbackHandler([Kept(), Kept()])
    handler = CallbackHandler([Kept(), named])
    with pytest.raises(InvalidArgument):
        handler.add(Kept())
    assert len(handler.callbacks) == 2


def test_state_is_found_by_name_whatever_the_order(caplog: pytest.LogCaptureFixture) -> None:
    a, b, own = Kept(1), Kept(2), KeptByRank(3)
    a.name, b.name = "a", "b"
    old = CallbackHandler([a, own, b])
    per_rank = old.per_rank()
    assert per_rank is not None and per_rank.state_dict() == {"KeptByRank": {"value": 3}}
    assert old.state_dict() == {"a": {"value": 1}, "b": {"value": 2}}
    b2, c2, own2 = Kept(), Kept("as it was"), KeptByRank()
    b2.name, c2.name = "b", "c"
    new = CallbackHandler([c2, b2, own2])
    with caplog.at_level(logging.INFO):
        new.load_state_dict(old.state_dict())
        new.per_rank().load_state_dict(per_rank.state_dict())  # type: ignore[union-attr]
    assert (b2.value, c2.value, own2.value) == (2, "as it was", 3)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "callback c is not in the checkpoint and starts fresh"),
        ("WARNING", "the checkpoint's state of a is dropped: no callback of that name"),
    ]
    assert CallbackHandler([Kept()]).per_rank() is None


def test_a_run_from_the_beginning_finds_them_as_they_were_added() -> None:
    class ByItself(Kept):
        def reset(self) -> None:
            self.value = "fresh"

    kept, own = Kept([1]), ByItself()
    handler = CallbackHandler([kept, own])
    kept.value.append(2)
    handler.reset()
    assert (kept.value, own.value) == ([1], "fresh")
    kept.value.append(3)
    handler.reset()
    assert kept.value == [1]


def test_close_reaches_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    class Closes:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def close(self) -> None:
            if self.fails:
                raise OSError("disk is gone")
            closed.append("closed")

    CallbackHandler([Closes(True), object(), Closes(False)]).close()
    assert closed == ["closed"]
    assert "Closes could not be closed" in caplog.text and "disk is gone" in caplog.text


def test_errors_of_handlers_reach_the_trainer() -> None:
    class Fails:
        def on_step_end(self, **kwargs: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fire(CallbackHandler([Fails()]), "on_step_end")


def test_what_of_the_state_is_kept() -> None:
    state = TrainerState(
        global_step=7, epoch=0.7, max_steps=9, is_world_process_zero=False, stop_reason="x"
    )
    state.note({"loss": 1.5})
    state.best_metric, state.best_step, state.best_checkpoint = 0.5, 6, "p"
    state.total_flos, state.num_input_tokens_seen = 1e15, 12
    stored = state.state_dict()
    state.log_history[0]["loss"] = None
    assert stored == {
        "global_step": 7,
        "epoch": 0.7,
        "log_history": [{"step": 7, "epoch": 0.7, "loss": 1.5}],
        "total_flos": 1e15,
        "num_input_tokens_seen": 12,
        "best_metric": 0.5,
        "best_step": 6,
        "best_checkpoint": "p",
    }
    other = TrainerState(max_steps=30)
    other.load_state_dict(stored)
    assert other.state_dict() == stored
    assert (other.max_steps, other.is_world_process_zero, other.stop_reason) == (30, True, None)
    assert (other.best_model_checkpoint, other.best_global_step) == ("p", 6)


def test_flags_travel_as_a_list() -> None:
    control = TrainerControl(should_evaluate=True, should_abort_without_save=True)
    other = TrainerControl(should_save=True)
    other.set_flags(control.flags())
    assert other == control
