"""What evaluations measure, what callbacks may add, and that training does not notice them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.data.loader import collate
from ckpt_trainers.model import next_byte_loss
from ckpt_trainers.trainer import Trainer

from ckptcore import CheckpointManager, SaveEvent, Tier, scan_root

EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "no", "max_steps": 2}


def streams() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def test_data_that_draw_random_numbers_are_the_same_at_each_evaluation(tiny: Any) -> None:
    trainer = tiny.trainer(eval_dataset=tiny.windows(5, noisy=True))
    before = streams()
    first = trainer.evaluate()
    assert streams() == before
    random.random(), np.random.rand(), torch.rand(1)
    assert trainer.evaluate() == first


def test_training_is_the_same_with_and_without_evaluations(tiny: Any) -> None:
    found = []
    for strategy in ("no", "steps"):
        notes = tiny.notes()
        options = {**EACH_STEP, "eval_strategy": strategy, "max_steps": 4, "save_strategy": "no"}
        tiny.trainer(strategy, notes, eval_dataset=tiny.windows(5, noisy=True), **options).train()
        found.append(notes.steps)
    assert found[0] == found[1]


def test_several_data_sets_have_metrics_of_their_own(tiny: Any) -> None:
    first, second = tiny.windows(3, noisy=False), tiny.windows(2, noisy=False)
    trainer = tiny.trainer(
        eval_dataset={"a": first, "b": second},
        metric_for_best_model="a_loss",
        load_best_model_at_end=True,
        save_steps=1,
        **EACH_STEP,
    )
    result = trainer.train()
    values = {"eval_a_loss", "eval_b_loss"}
    assert all(values <= entry.keys() for entry in result.log_history)
    assert trainer.state.best_metric == min(entry["eval_a_loss"] for entry in result.log_history)
    assert trainer.evaluate(first) == {"eval_loss": trainer.evaluate()["eval_a_loss"]}
    assert all(values <= info.metrics.keys() for info in scan_root(str(tiny.root())))


class Adds:
    """Adds to the metrics of each evaluation."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def on_evaluate(self, metrics: dict[str, Any], **_: Any) -> None:
        metrics.update(self.values)


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.int64(3), torch.tensor(0.25), torch.tensor([2]), np.ones(1)]
)
def test_what_callbacks_add_becomes_plain_numbers(tiny: Any, value: Any) -> None:
    trainer = tiny.trainer(
        callbacks=(Adds(eval_it=value),), metric_for_best_model="it", save_steps=1, **EACH_STEP
    )
    result = trainer.train()
    assert [type(entry["eval_it"]) for entry in result.log_history] == [type(value.item())] * 2
    assert trainer.state.best_metric == value.item()
    infos = scan_root(str(tiny.root()))
    assert [info.metrics["eval_it"] for info in infos] == [value.item()] * 2


@pytest.mark.parametrize("value", ["good", None, {"a": 1}])
def test_what_is_no_number_is_refused_by_name(tiny: Any, value: Any) -> None:
    trainer = tiny.trainer(callbacks=(Adds(eval_it=value),), save_strategy="no", **EACH_STEP)
    with pytest.raises(InvalidArgument, match=r"metrics\['eval_it'\]=.* is no number.*on_evaluate"):
        trainer.train()


def test_columns_of_lists_are_tensors_of_a_batch(tiny: Any) -> None:
    samples = [{"ids": [1, 2, 3], "pairs": [[1, 2]], "name": "a", "x": 0.5} for _ in range(2)]
    batch = collate(samples)
    assert batch["ids"].tolist() == [[1, 2, 3]] * 2 and batch["pairs"].shape == (2, 1, 2)
    assert batch["name"] == ["a", "a"] and batch["x"].tolist() == [0.5, 0.5]

    class Lists:
        def __len__(self) -> int:
            return 11

        def __getitem__(self, number: int) -> dict[str, Any]:
            found = tiny.windows(11, noisy=False)[number]
            return {name: value.tolist() for name, value in found.items()}

    losses = []
    for run, data in (("lists", Lists()), ("tensors", tiny.windows(11, noisy=False))):
        result = tiny.trainer(run, train_dataset=data, max_steps=3, save_strategy="no").train()
        losses.append(result.training_loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "instead"), [("compute_metrics", "on_evaluate"), ("optimizers", "optimizer_factory")]
)
def test_what_hugging_faces_trainer_takes_is_refused_with_what_to_use(
    tiny: Any, name: str, instead: str
) -> None:
    what = {"model": torch.nn.Linear(1, 1), "compute_loss_func": next_byte_loss}
    with pytest.raises(InvalidArgument, match=f"{name}=.*{instead}"):
        Trainer(tiny.arguments(), **what, **{name: print})
    with pytest.raises(TypeError, match="no argument 'computemetrics'"):
        Trainer(tiny.arguments(), **what, computemetrics=print)


def test_the_manager_may_be_given_tiers_and_a_watcher(tiny: Any) -> None:
    events: list[SaveEvent] = []
    tier = tiny.root("durable")
    options = {"tiers": [Tier(str(tier))], "on_event": events.append}
    tiny.trainer(manager_options=options, max_steps=2, save_steps=1).train()
    assert [e.step for e in events if e.kind == "committed"] == [1, 2]
    assert [info.step for info in scan_root(str(tier))][-1] == 2
    with CheckpointManager(tier) as ckpt:
        assert [problem for step in (2,) for problem in ckpt.verify(step)] == []


def test_a_saved_model_has_the_config_that_belongs_to_it(tiny: Any, tmp_path: Path) -> None:
    class Config:
        def save_pretrained(self, path: str) -> None:
            (Path(path) / "config.json").write_text("{}")

    trainer = tiny.trainer(save_strategy="no")
    trainer.model.config = Config()
    trainer.save_model(str(tmp_path / "model"))
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
