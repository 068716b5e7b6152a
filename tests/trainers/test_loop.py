"""What a run does in which order, and what callbacks can make it do."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import TrainerCallback
from ckpt_trainers.model import next_byte_loss
from ckpt_trainers.trainer import Trainer

QUIET = {"save_strategy": "no", "logging_strategy": "no"}
STEP = ["on_step_begin", "on_forward_backward_begin", "on_forward_backward_end", "on_substep_end"]
LAST = [
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
]
DONE = ["on_train_metrics", "on_step_end"]


def names(notes: Any) -> list[str]:
    return [name for name, _ in notes.events]


def test_events_come_in_the_order_that_is_promised(tiny: Any) -> None:
    notes = tiny.notes()
    tiny.trainer(
        notes=notes,
        max_steps=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_async=False,
    ).train()
    boundary = ["on_log_step", "on_log", "on_prediction_step", "on_prediction_step", "on_evaluate"]
    saved = ["on_save", "on_checkpoint_commit"]
    assert names(notes) == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *(STEP + LAST + DONE + boundary + saved),
        *(
            STEP + LAST + DONE + boundary
        ),  # the last step ends the epoch: its save has what comes with that
        *("on_epoch_end", *saved, "on_log_step", "on_log", "on_train_end"),
    ]


def test_the_last_batches_of_an_epoch_are_a_step_of_their_own(tiny: Any) -> None:
    notes = tiny.notes()
    tiny.trainer(notes=notes, num_train_epochs=2, gradient_accumulation_steps=4, **QUIET).train()
    sizes = [[len(batch) for batch in step["samples"]] for step in notes.steps.values()]
    assert sizes == [[2, 2, 2, 2], [2, 1]] * 2
    assert notes.of("on_epoch_begin", "on_epoch_end") == [
        ("on_epoch_begin", 0),
        ("on_epoch_end", 2),
        ("on_epoch_begin", 2),
        ("on_epoch_end", 4),
    ]


def test_accumulated_batches_are_one_large_batch(tiny: Any) -> None:
    """Normalised over the whole step, though the batches differ in size and in labels that
    count."""

    class Holes(tiny.windows):  # type: ignore[name-defined,misc]
        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            item = super().__getitem__(number)
            item["labels"] = item["labels"].clone()
            item["labels"][: number % 5] = -100
            return item

    def loss(outputs: Any, labels: torch.Tensor, items: float) -> torch.Tensor:
        flat = outputs.logits.flatten(0, 1)
        return (
            torch.nn.functional.cross_entropy(
                flat, labels.flatten(), ignore_index=-100, reduction="sum"
            )
            / items
        )

    results = []
    for batch, accumulation in ((6, 1), (2, 3), (1, 6)):
        notes = tiny.notes()
        trainer = tiny.trainer(
            f"by-{batch}",
            notes,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            train_dataset=Holes(11, noisy=False),
            compute_loss_func=loss,
            **QUIET,
        )
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer.train()
        results.append([float.fromhex(step["loss"]) for step in notes.steps.values()])
    assert results[1] == pytest.approx(results[0], rel=1e-5) and results[2] == pytest.approx(
        results[0], rel=1e-5
    )


def test_a_part_of_the_last_epoch_can_be_trained(tiny: Any) -> None:
    notes = tiny.notes()
    result = tiny.trainer(
        notes=notes, num_train_epochs=1.5, eval_strategy="epoch", save_strategy="epoch"
    ).train()
    assert result.global_step == 9 and notes.steps[9]["epoch"] == 1.5
    assert notes.of("on_evaluate", "on_save", "on_epoch_end") == [
        ("on_epoch_end", 6),
        ("on_evaluate", 6),
        ("on_save", 6),
        ("on_epoch_end", 9),
        ("on_evaluate", 9),
        ("on_save", 9),
    ]


def test_ratios_are_shares_of_all_steps(tiny: Any) -> None:
    notes = tiny.notes()
    trainer = tiny.trainer(
        notes=notes,
        max_steps=10,
        save_steps=0.5,
        logging_steps=0.25,
        eval_strategy="steps",
        eval_steps=0.01,
        eval_delay=9,
        logging_first_step=True,
    )
    trainer.train()
    state = trainer.state
    assert (state.save_steps, state.logging_steps, state.eval_steps, state.max_steps) == (
        5,
        3,
        1,
        10,
    )
    assert [step for _, step in notes.of("on_save")] == [5, 10]
    assert [step for _, step in notes.of("on_log")] == [1, 3, 6, 9, 10]  # the last is the summary
    assert [step for _, step in notes.of("on_evaluate")] == [9, 10]


def test_the_log_has_the_mean_loss_of_its_steps(tiny: Any) -> None:
    notes = tiny.notes()
    result = tiny.trainer(notes=notes, max_steps=7, logging_steps=3, save_strategy="no").train()
    losses = [float.fromhex(notes.steps[step]["loss"]) for step in range(1, 8)]
    logged = {entry["step"]: entry for entry in result.log_history}
    assert sorted(logged) == [3, 6, 7]
    assert logged[3]["loss"] == sum(losses[:3]) / 3 and logged[6]["loss"] == sum(losses[3:6]) / 3
    assert (
        logged[7]["train_loss"] == pytest.approx(sum(losses) / 7, rel=1e-12)
        and "loss" not in logged[7]
    )
    assert (
        logged[3]["tokens"] == 48 and logged[6]["total_tokens"] == 88
    )  # the sixth batch has one sample
    assert logged[6]["epoch"] == 1.0 and logged[3]["grad_norm"] == float.fromhex(
        notes.steps[3]["norm"]
    )


def test_tokens_are_counted_where_it_is_wanted(tiny: Any) -> None:
    trainer = tiny.trainer(
        max_steps=6, include_num_input_tokens_seen=True, save_strategy="no", logging_steps=6
    )
    assert (
        trainer.train().log_history[-1]["num_input_tokens_seen"]
        == 88
        == trainer.state.num_input_tokens_seen
    )


@pytest.mark.parametrize("keep", [False, True])
def test_losses_that_are_no_numbers_may_be_left_out_of_the_log(tiny: Any, keep: bool) -> None:
    def loss(outputs: Any, labels: torch.Tensor, items: float) -> torch.Tensor:
        steps.append(1)
        return next_byte_loss(outputs, labels, items) * (float("nan") if len(steps) == 2 else 1.0)

    class Still(torch.optim.SGD):
        """Lets nothing of it get into the weights."""

        def step(self, closure: Any = None) -> None:
            pass

    steps: list[int] = []
    notes = tiny.notes()
    trainer = tiny.trainer(
        notes=notes,
        max_steps=3,
        logging_steps=3,
        save_strategy="no",
        learning_rate=0.0,
        logging_nan_inf_filter=not keep,
        compute_loss_func=loss,
        optimizer_factory=lambda groups: Still(groups, lr=0.1),
    )
    (entry,) = trainer.train().log_history
    first, last = (float.fromhex(notes.steps[step]["loss"]) for step in (1, 3))
    assert (
        (entry["loss"] != entry["loss"])
        if keep
        else entry["loss"] == pytest.approx((first + last) / 2)
    )


# What callbacks ask for.


@pytest.mark.parametrize(
    ("flag", "at", "seen"),
    [
        ("should_save", "on_step_end", [("on_save", 2)]),
        ("should_evaluate", "on_optimizer_step", [("on_evaluate", 3)]),
        ("should_log", "on_step_end", [("on_log", 2), ("on_log", 8)]),
        ("should_epoch_stop", "on_step_end", [("on_epoch_end", 2), ("on_epoch_end", 8)]),
        ("should_training_stop", "on_step_end", [("on_train_end", 2)]),
    ],
)
def test_a_flag_is_done_at_the_boundary_that_follows(
    tiny: Any, flag: str, at: str, seen: list[Any]
) -> None:
    def ask(name: str, state: Any, control: Any, **_: Any) -> None:
        if name == at and state.global_step == 2:
            setattr(control, flag, True)

    notes = tiny.notes()
    notes.do = ask
    trainer = tiny.trainer(notes=notes, max_steps=8, **QUIET)
    result = trainer.train()
    assert notes.of(seen[0][0]) == seen
    if flag == "should_epoch_stop":
        assert (
            notes.steps[3]["epoch"] == pytest.approx(1 + 1 / 6) and notes.steps[8]["epoch"] == 2.0
        )
    if flag == "should_training_stop":
        assert (result.global_step, result.stop_reason, trainer.state.stop_requested_by) == (
            2,
            "requested",
            "Notes",
        )
        assert tiny.steps() == []


@pytest.mark.parametrize("strategy", ["steps", "epoch", "best"])
def test_an_abort_evaluates_and_saves_nothing_more(tiny: Any, strategy: str) -> None:
    def ask(name: str, state: Any, control: Any, **_: Any) -> None:
        if name == "on_step_end" and state.global_step == 6:
            control.should_abort_without_save = control.should_training_stop = (
                control.should_save
            ) = True

    notes = tiny.notes()
    notes.do = ask
    evaluation = "steps" if strategy == "steps" else "epoch"
    trainer = tiny.trainer(
        notes=notes,
        eval_strategy=evaluation,
        eval_steps=3,
        save_strategy=strategy,
        save_steps=3,
        logging_steps=6,
    )
    result = trainer.train()
    assert (result.global_step, result.stop_reason) == (6, "aborted")
    looked = [3] if strategy == "steps" else []
    assert [step for _, step in notes.of("on_evaluate")] == looked and tiny.steps() == looked
    assert notes.of("on_train_end") == [("on_train_end", 6)] and ("on_log", 6) in notes.events


def test_several_reasons_to_save_are_one_save(tiny: Any) -> None:
    def ask(name: str, state: Any, control: Any, **_: Any) -> None:
        if (
            name in ("on_step_end", "on_log", "on_evaluate", "on_epoch_end")
            and state.global_step == 6
        ):
            control.should_save = True
            control.should_training_stop = name == "on_epoch_end"
            if name == "on_evaluate":
                signal.raise_signal(signal.SIGTERM)

    notes = tiny.notes()
    notes.do = ask
    trainer = tiny.trainer(
        notes=notes,
        save_steps=3,
        logging_steps=6,
        eval_strategy="steps",
        eval_steps=6,
        enable_jit_checkpoint=True,
    )
    result = trainer.train()
    assert result.stop_reason == "sigterm" and notes.of("on_save") == [
        ("on_save", 3),
        ("on_save", 6),
    ]
    assert tiny.steps() == [3, 6] and [record.step for record in notes.records] == [3, 6]


@pytest.mark.parametrize(("at", "strategy"), [(0, "steps"), (4, "no"), (5, "steps"), (17, "epoch")])
def test_a_sigterm_saves_the_step_at_hand_and_the_run_goes_on(
    tiny: Any, at: int, strategy: str
) -> None:
    def terminate(name: str, state: Any, **_: Any) -> None:
        if name == "on_step_begin" and state.global_step == at:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    notes = tiny.notes()
    notes.do = terminate
    options = {"save_strategy": strategy, "save_steps": 100, "enable_jit_checkpoint": True}
    result = tiny.trainer("stopped", notes, **options).train()
    assert (result.global_step, result.stop_reason) == (at + 1, "sigterm")
    assert signal.getsignal(signal.SIGTERM) is before and tiny.steps("stopped")[-1] == at + 1
    resumed = tiny.trainer("stopped", **options).train()
    assert (resumed.resumed_from, resumed.steps_run, resumed.stop_reason) == (at + 1, 17 - at, None)
    whole = tiny.trainer("whole", save_steps=18).train()
    if at < 17:
        assert resumed.log_history[-1]["train_loss"] == whole.log_history[-1]["train_loss"]


def test_signals_are_left_alone_in_a_thread_and_unless_asked_for(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def look(name: str, **_: Any) -> None:
        seen.append(signal.getsignal(signal.SIGTERM) is before)

    notes = tiny.notes()
    notes.do = look
    tiny.trainer("plain", notes, max_steps=1, **QUIET).train()
    trainer = tiny.trainer("thread", notes, max_steps=1, enable_jit_checkpoint=True, **QUIET)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join(60)
    assert (
        all(seen)
        and trainer.state.global_step == 1
        and "enable_jit_checkpoint has no effect" in caplog.text
    )


def test_the_length_may_change_during_a_run(tiny: Any) -> None:
    def shorten(state: Any, **_: Any) -> None:
        state.max_steps = 4

    notes = tiny.notes()
    notes.do = lambda name, **what: shorten(**what) if name == "on_step_end" else None
    assert tiny.trainer(notes=notes, save_steps=100).train().global_step == 4
    assert tiny.steps() == [4]


# What an exception leaves.


def test_an_error_closes_callbacks_and_stays_the_one_that_counts(tiny: Any) -> None:
    class Closing:
        closed = 0

        def close(self) -> None:
            self.closed += 1
            raise OSError("cannot be closed either")

    closing, notes = Closing(), tiny.notes()
    notes.die_at = 4
    with pytest.raises(tiny.died) as caught:
        tiny.trainer(
            notes=notes, save_steps=4, callbacks=(closing,), enable_jit_checkpoint=True
        ).train()
    assert caught.value.args == (4,) and caught.value.__context__ is None
    assert closing.closed == 1 and notes.of("on_train_end") == []
    assert tiny.steps() == [4]  # the save that was staged is finished


def test_what_cannot_work_is_said_before_anything_is_built(tiny: Any) -> None:
    built: list[int] = []

    def init() -> torch.nn.Module:
        built.append(1)
        raise AssertionError

    for wrong in (
        {"eval_strategy": "steps", "eval_dataset": None},
        {"gradient_accumulation_steps": 2, "compute_loss_func": None},
        {"model_init": None},
        {"label_smoothing_factor": 0.1},
        {"load_best_model_at_end": True},
        {"no_such_argument": 1},
    ):
        with pytest.raises(InvalidArgument):
            tiny.trainer(**{"model_init": init, **wrong})
    with pytest.raises(InvalidArgument, match="nothing to train on"):
        Trainer(tiny.arguments(), model=torch.nn.Linear(1, 1), callbacks=[]).train()
    assert built == []


class Dropping(TrainerCallback):
    """Has Ctrl-C come inside a `__del__`, where Python prints and drops what is raised."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:

            class Last:
                def __del__(self) -> None:
                    signal.raise_signal(signal.SIGINT)

            Last()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_comes_again(tiny: Any) -> None:
    trainer = tiny.trainer(callbacks=[Dropping()], max_steps=50, **QUIET)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is before
