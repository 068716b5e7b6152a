"""The best checkpoint: what counts for it, what is known of it after a resume, what is loaded at
the end."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.parallel.environment import DistributedEnvironment

from ckptcore import CheckpointWarning, scan_root

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "logging_strategy": "no"}


def measured(
    tiny: Any, values: list[float], run: str = "run", **options: Any
) -> tuple[Any, dict[int, torch.Tensor]]:
    """A run whose evaluations give these values, one a step; and the weights of its steps, once it
    has run."""
    weights: dict[int, torch.Tensor] = {}

    class Keeps:
        def on_step_end(self, state: Any, model: Any, **_: Any) -> None:
            weights[state.global_step] = model.head.weight.detach().clone()

    trainer = tiny.trainer(
        run,
        callbacks=(Keeps(), *options.pop("callbacks", ())),
        **{"max_steps": len(values), **EVERY_STEP, **options},
    )
    trainer.measure = lambda dataset, prefix: {"eval_loss": values[trainer.state.global_step - 1]}
    return trainer, weights


def best(trainer: Any) -> tuple[int | None, float | None, str | None]:
    return trainer.state.best_step, trainer.state.best_metric, trainer.state.best_checkpoint


class Accuracy:
    """Adds a metric of its own to each evaluation."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_evaluate(self, state: Any, metrics: dict[str, float], **_: Any) -> None:
        metrics["eval_accuracy"] = self.values[state.global_step - 1]


# What counts.


@pytest.mark.parametrize(
    "options",
    [{"save_strategy": "best"}, {"load_best_model_at_end": True}, {"preserve_best_model": True}],
)
def test_a_metric_that_evaluations_do_not_give_ends_the_run_at_the_first_one(
    tiny: Any, options: dict[str, Any]
) -> None:
    trainer, weights = measured(tiny, [2.0, 1.0], metric_for_best_model="accuracy", **options)
    with pytest.raises(
        InvalidArgument,
        match=r"metric_for_best_model='accuracy': evaluations give eval_loss; .*on_eval",
    ):
        trainer.train()
    assert list(weights) == [1]


def test_a_metric_that_nothing_depends_on_may_be_missing(tiny: Any) -> None:
    trainer, _ = measured(tiny, [2.0, 1.0], metric_for_best_model="accuracy")
    assert trainer.train().global_step == 2 and best(trainer) == (None, None, None)


def test_what_a_callback_adds_to_an_evaluation_counts(tiny: Any) -> None:
    accuracy = Accuracy([0.25, 0.75, 0.5])
    trainer, weights = measured(
        tiny,
        [1.0, 2.0, 3.0],
        callbacks=(accuracy,),
        metric_for_best_model="accuracy",
        save_strategy="best",
        load_best_model_at_end=True,
    )
    result = trainer.train()
    assert best(trainer) == (2, 0.75, "checkpoint-2") and tiny.steps() == [1, 2]
    assert torch.equal(trainer.model.head.weight, weights[2])
    assert [entry.get("eval_accuracy") for entry in result.log_history] == accuracy.values
    infos = scan_root(str(tiny.root()))
    assert [info.metrics["eval_accuracy"] for info in infos] == [0.25, 0.75]


def test_of_several_ranks_the_first_ones_metrics_count(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = measured(tiny, [1.0], save_strategy="best")
    trainer.state.global_step = 3
    told = {"a": (0.5, ["eval_loss"]), "b": (None, ["eval_other"])}
    monkeypatch.setattr(DistributedEnvironment, "broadcast_object", lambda self, value: told["a"])
    assert trainer.note_best({}) is True and best(trainer) == (3, 0.5, None)
    monkeypatch.setattr(DistributedEnvironment, "broadcast_object", lambda self, value: told["b"])
    with pytest.raises(InvalidArgument, match="evaluations give eval_other"):
        trainer.note_best({"eval_loss": 0.25})


# After a resume.


def test_the_best_one_of_the_run_that_this_one_goes_on_from_is_loaded(tiny: Any) -> None:
    trainer, weights = measured(tiny, [3.0, 1.0, 2.0, 0.5, 4.0], preserve_best_model=True)
    trainer.train()
    assert best(trainer) == (4, 0.5, "checkpoint-4")
    path = str(tiny.root() / "checkpoint-3")
    trainer, _ = measured(
        tiny,
        [3.0, 1.0, 2.0, 6.0, 5.0],
        load_best_model_at_end=True,
        resume_from_checkpoint=path,
        overwrite_output_dir=True,
    )
    with pytest.warns(CheckpointWarning, match="gone back behind what it saved of steps 5"):
        assert trainer.train().resumed_from == 3
    assert best(trainer) == (2, 1.0, "checkpoint-2") and tiny.steps() == [1, 2, 3, 4, 5]
    assert torch.equal(trainer.model.head.weight, weights[2])
    # It is still known when that run goes on, and a better one takes its place.
    values = [3.0, 1.0, 2.0, 6.0, 5.0, 7.0]
    again, _ = measured(tiny, values, load_best_model_at_end=True)
    assert again.train().resumed_from == 5 and best(again)[0] == 2
    assert torch.equal(again.model.head.weight, weights[2])
    better, later = measured(tiny, [*values, 0.25, 8.0], load_best_model_at_end=True)
    assert better.train().resumed_from == 6 and best(better) == (7, 0.25, "checkpoint-7")
    assert torch.equal(better.model.head.weight, later[7])


def test_in_the_place_of_a_best_one_that_is_gone_no_later_one_comes(tiny: Any) -> None:
    measured(tiny, [2.0, 1.0, 3.0, 0.5])[0].train()
    shutil.rmtree(tiny.root() / "checkpoint-2")
    path = str(tiny.root() / "checkpoint-3")
    trainer, _ = measured(
        tiny,
        [2.0, 1.0, 3.0, 4.0],
        load_best_model_at_end=True,
        resume_from_checkpoint=path,
        overwrite_output_dir=True,
    )
    with pytest.warns(
        CheckpointWarning,
        match="checkpoint-2, .* not there any more; checkpoint-1 is the best of those",
    ):
        trainer.train()
    assert best(trainer) == (1, 2.0, "checkpoint-1")


def test_a_best_step_that_was_never_saved_is_known_as_in_the_run_that_goes_through(
    tiny: Any,
) -> None:
    values = [9.0, 5.0, 9.0, 4.0, 9.0, 1.0, 9.0, 3.0, 9.0, 2.0, 9.0, 6.0]
    options = {"eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True}
    whole, weights = measured(tiny, values, "whole", **options)
    whole.train()
    assert best(whole) == (6, 1.0, None) and tiny.steps("whole") == [4, 8, 12]
    assert torch.equal(whole.model.head.weight, weights[8])
    for stop in (5, 9):
        notes = tiny.notes()
        notes.die_at = stop
        stopped, _ = measured(tiny, values, f"stopped-{stop}", callbacks=(notes,), **options)
        with pytest.raises(tiny.died):
            stopped.train()
        resumed, _ = measured(
            tiny, values, f"stopped-{stop}", **options
        )  # a warning would be an error
        assert resumed.train().resumed_from == stop - 1
        assert best(resumed) == (6, 1.0, None)
        assert torch.equal(resumed.model.head.weight, weights[8])


# At the end.


def damage(tiny: Any, step: int) -> None:
    file = tiny.root() / f"checkpoint-{step}" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("damaged", "loaded"), [([2], 3), ([2, 3, 1, 4], None)])
def test_in_the_place_of_a_damaged_best_one_the_next_best_is_loaded(
    tiny: Any, damaged: list[int], loaded: int | None
) -> None:
    class Damages:
        def on_checkpoint_commit(self, record: Any, **_: Any) -> None:
            if record.step in damaged:
                damage(tiny, record.step)

    trainer, weights = measured(
        tiny,
        [4.0, 1.0, 2.0, 3.0],
        callbacks=(Damages(),),
        load_best_model_at_end=True,
        save_async=False,
    )
    now = (
        "the final weights stay"
        if loaded is None
        else f"those of checkpoint-{loaded} are the best of the others"
    )
    with pytest.warns(
        CheckpointWarning, match=rf"best weights cannot be loaded .*checkpoint-2.*; {now}$"
    ) as caught:
        result = trainer.train()
    assert len(caught) == 1 and result.global_step == 4 and result.stop_reason is None
    assert torch.equal(trainer.model.head.weight, weights[loaded or 4])
