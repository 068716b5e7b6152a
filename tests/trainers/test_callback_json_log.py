from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments.exactness import plain
from ckpt_trainers.callbacks import JsonLogger, read_json_array
from hypothesis import given
from hypothesis import strategies as st

from .callback_run import FakeTrainer


def run(folder: Path, to: int, checkpoint: Any = None, **info: Any) -> FakeTrainer:
    """Logs the steps and leaves the file as a killed process would."""
    trainer = FakeTrainer([JsonLogger(**info)], folder)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    trainer.train(to, lambda step: trainer.log({"loss": step / 7}))
    return trainer


def steps(path: Path) -> list[int]:
    return [record["global_step"] for record in read_json_array(path) if "global_step" in record]


def test_every_record_is_there_at_once_and_the_file_is_an_array_in_the_end(tmp_path: Path) -> None:
    before = time.time()
    trainer = run(tmp_path / "logs", 2, note="first", seed=3)
    trainer.evaluate(eval_loss=0.5)
    path = tmp_path / "logs" / "trainer_logs.json"
    with pytest.raises(ValueError):
        json.loads(path.read_text())
    records = read_json_array(path)
    trainer.fire("on_train_end")
    assert json.loads(path.read_text()) == records
    assert len(path.read_text().splitlines()) == 4 + 2  # a record a line
    stamps = [record.pop("timestamp") for record in records]
    assert stamps == sorted(stamps) and before <= stamps[0] and stamps[-1] <= time.time()
    assert records == [
        {"info": {"note": "first", "seed": 3}},
        {"global_step": 1, "epoch": 0.1, "loss": 1 / 7},
        {"global_step": 2, "epoch": 0.2, "loss": 2 / 7},
        {"global_step": 2, "epoch": 0.2, "eval_loss": 0.5},
    ]
    trainer.log({"loss": 1})  # after the end: not an error
    assert json.loads(path.read_text())[-1]["eval_loss"] == 0.5


def test_values_of_every_kind() -> None:
    found = plain(
        {
            "nan": math.nan,
            "inf": torch.tensor(math.inf),
            "minus": np.float32(-math.inf),
            "tensor": torch.tensor([[1, 2]]),
            "scalar": torch.tensor(1.5),
            "array": np.array([1.5, math.nan]),
            "path": Path("x"),
            "nested": ({"a": None, 3: True},),
        }
    )
    assert found == {
        "nan": "NaN",
        "inf": "Infinity",
        "minus": "-Infinity",
        "tensor": [[1, 2]],
        "scalar": 1.5,
        "array": [1.5, "NaN"],
        "path": "x",
        "nested": [{"a": None, "3": True}],
    }
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "torn", ["", ",\n", ',\n{"global_step": 9, "lo', "\n]\n", ',\n{"global_step": 12}\n]\n']
)
def test_a_resumed_run_goes_on_in_its_file_after_the_step_of_the_checkpoint(
    tmp_path: Path, torn: str
) -> None:
    trainer = run(tmp_path / "logs", 5, note=1)
    checkpoint = trainer.save()
    assert checkpoint["callbacks"]["JsonLogger"]["step"] == 5
    trainer.train(8, lambda step: trainer.log({"loss": -1.0}))
    path = tmp_path / "logs" / "trainer_logs.json"
    with path.open("a") as file:
        file.write(torn)
    # The new process has another logging directory.
    resumed = run(tmp_path / "elsewhere", 9, checkpoint, note=2)
    assert steps(path) == list(range(1, 10))
    records = read_json_array(path)
    assert records[0]["info"] == {"note": 1} and [r["loss"] for r in records[1:]] == [
        s / 7 for s in range(1, 10)
    ]
    assert not (tmp_path / "elsewhere").exists()
    resumed.handler.close()
    assert json.loads(path.read_text()) == records
    assert sorted(file.name for file in path.parent.iterdir()) == ["trainer_logs.json"]


def test_a_root_that_was_copied_is_written_in_the_copy(tmp_path: Path) -> None:
    checkpoint = run(tmp_path / "run" / "logs", 3).save()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    run(tmp_path / "copy" / "logs", 5, checkpoint)
    assert steps(tmp_path / "copy" / "logs" / "trainer_logs.json") == [1, 2, 3, 4, 5]
    assert steps(tmp_path / "run" / "logs" / "trainer_logs.json") == [1, 2, 3]


def test_a_log_that_is_gone_is_started_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = run(tmp_path / "logs", 3).save()
    (tmp_path / "logs" / "trainer_logs.json").unlink()
    run(tmp_path / "new", 5, checkpoint, note="again")
    assert "is gone; a new one is started" in caplog.text
    path = tmp_path / "new" / "trainer_logs.json"
    assert steps(path) == [4, 5] and read_json_array(path)[0]["info"] == {"note": "again"}


@pytest.mark.parametrize(
    "content", ["", "{}", "no json", '[\n{"a": 1},\n{"b": \n{"c": 1}\n', "[1, 2]"]
)
def test_a_log_that_cannot_be_read_is_moved_aside(tmp_path: Path, content: str) -> None:
    checkpoint = run(tmp_path / "logs", 3).save()
    path = tmp_path / "logs" / "trainer_logs.json"
    path.write_text(content)
    run(tmp_path / "logs", 5, checkpoint)
    assert steps(path) == [4, 5]
    assert (tmp_path / "logs" / "trainer_logs.json.bak").read_text() == content


def test_a_fresh_run_keeps_the_log_of_another_one(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        run(tmp_path / "logs", count)
    logs = tmp_path / "logs"
    names = ["trainer_logs.1.json", "trainer_logs.2.json", "trainer_logs.json"]
    assert sorted(file.name for file in logs.iterdir()) == names
    assert [len(steps(logs / name)) for name in names] == [1, 2, 3]


def test_other_ranks_and_runs_without_a_directory_write_nothing(tmp_path: Path) -> None:
    trainer = FakeTrainer([JsonLogger()], tmp_path / "logs")
    trainer.state.is_world_process_zero = False
    trainer.train(2, lambda step: trainer.log({"loss": 1.0}))
    trainer.fire("on_train_end")
    without = FakeTrainer([JsonLogger()])
    without.train(2, lambda step: without.log({"loss": 1.0}))
    assert list(tmp_path.iterdir()) == []


def test_the_state_is_kept_until_training_begins(tmp_path: Path) -> None:
    checkpoint = run(tmp_path / "logs", 3).save()
    resumed = FakeTrainer([JsonLogger()], tmp_path / "logs")
    resumed.restore(checkpoint)
    assert resumed.save() == checkpoint
    assert steps(tmp_path / "logs" / "trainer_logs.json") == [1, 2, 3]


records = st.lists(
    st.dictionaries(
        st.text(max_size=5), st.one_of(st.integers(), st.floats(), st.text(), st.none())
    ),
    max_size=6,
)


@given(records, st.integers(0, 200))
def test_a_file_that_was_torn_anywhere_gives_its_whole_records(
    made: list[dict[str, Any]], lost: int
) -> None:
    lines = [json.dumps(plain(record), allow_nan=False) for record in made]
    text = ("[\n" + ",\n".join(lines)).encode()
    kept = text[: max(len(text) - lost, 2)]

    class InMemory:
        def read_text(self, **kwargs: Any) -> str:
            return kept.decode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_trainers.callbacks.logs.Path", lambda path: InMemory())
        found = read_json_array("memory")
    assert found == plain(made)[: len(found)]
    assert len(found) >= kept.count(b",\n")
