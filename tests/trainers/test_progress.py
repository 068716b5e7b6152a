from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ckpt_trainers.arguments import TrainingArguments
from ckpt_trainers.progress import LossFile, Progress, choose_logging_dir, read_losses, stored_logging_dir

VALUES = [0.1, 1 / 3, 5e-324, math.inf, -0.0]


def write(folder: Path, restored: int, losses: dict[int, float]) -> None:
    file = LossFile(folder, restored)
    for step, loss in losses.items():
        file.append(step, loss)
    file.sync()
    file.close()


def test_losses_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path, 0, dict(enumerate(VALUES, start=1)) | {6: math.nan})
    found = read_losses(tmp_path)
    assert [found[step].hex() for step in range(1, 7)] == [value.hex() for value in [*VALUES, math.nan]]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / "losses.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "lo', b'{"step": 6, "loss": 1.0, "hex": "0x1p+0"}'])
def test_what_was_written_after_the_restored_step_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "losses.jsonl"
    write(tmp_path, 0, {step: step / 7 for step in range(1, 6)})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    write(tmp_path, 5, {})
    assert path.read_bytes() == whole
    path.write_bytes(whole + torn)
    write(tmp_path, 3, {4: 0.4})
    assert path.read_bytes().splitlines()[:3] == whole.splitlines()[:3]
    assert read_losses(tmp_path) == {1: 1 / 7, 2: 2 / 7, 3: 3 / 7, 4: 0.4}
    write(tmp_path, 0, {})
    assert path.read_bytes() == b""


def test_progress_goes_there_and_back() -> None:
    progress = Progress(step=3, losses=[0.5])
    progress.log(loss=1.0)
    progress.log(eval_loss=2.0)
    progress.step = 4
    progress.log(loss=0.5)
    state = progress.state_dict()
    assert state["log_history"] == [{"step": 3, "loss": 1.0, "eval_loss": 2.0}, {"step": 4, "loss": 0.5}]
    other = Progress()
    other.load_state_dict(state)
    assert other == progress
    other.log(loss=9.0)
    assert state["log_history"][1]["loss"] == 0.5


def test_a_resumed_run_logs_where_it_did_even_when_it_was_moved(tmp_path: Path) -> None:
    first = TrainingArguments(output_dir=str(tmp_path / "a"))
    folder = choose_logging_dir(first, {})
    assert folder.parent == tmp_path / "a" / "runs"
    metadata = {"logging_dir": stored_logging_dir(first, folder)}
    moved = TrainingArguments(output_dir=str(tmp_path / "b"))
    assert choose_logging_dir(moved, metadata) == tmp_path / "b" / "runs" / folder.name
    elsewhere = {"logging_dir": stored_logging_dir(first, tmp_path / "logs")}
    assert choose_logging_dir(moved, elsewhere) == tmp_path / "logs"
    asked = TrainingArguments(output_dir=str(tmp_path / "b"), logging_dir=str(tmp_path / "c"))
    assert choose_logging_dir(asked, metadata) == tmp_path / "c"
