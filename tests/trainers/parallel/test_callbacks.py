"""Callbacks in runs of several real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.callbacks import read_json_array

from ckptcore import scan_root

from ..test_callback_profiler import steps_in
from ..test_callback_tensorboard import scalars, text


@pytest.mark.parametrize(
    ("at", "step", "reason", "saved"),
    [
        ({"3": ["save_checkpoint"], "6": ["save_and_stop"]}, 8, "requested", [3, 4, 6, 8]),
        ({"4": ["save_checkpoint", "abort"]}, 6, "aborted", [3]),  # 6 is a scheduled save
        ({"5": ["abort"]}, 6, "aborted", [3]),
    ],
)
def test_every_rank_obeys_at_the_same_step(
    at: dict[str, list[str]], step: int, reason: str, saved: list[int], ranks: Any, run: Any
) -> None:
    """At once where something is due (step 4 ends an epoch), else one step later (7 -> 8)."""
    args = {"max_steps": 9, "save_steps": 3, "logging_steps": 3}
    given = run("run", "ddp", **args)
    first, second = ranks.run("controlled", 2, at=at, **given)
    assert first == second
    assert (first["step"], first["reason"], first["by"]) == (step, reason, "TrainerControlCallback")
    found = [info.step for info in scan_root(given["args"]["output_dir"])]
    assert found == [event[1] for event in first["events"]] == saved


ARGS = {"max_steps": 7, "save_steps": 2, "logging_steps": 1, "eval_strategy": "steps"}
SPOKEN = {"prompts": ["w1 w2 w3", "w4"], "max_new_tokens": 4}


def files(folder: Path) -> dict[str, Any]:
    """What the callbacks of a run left, without times."""
    records = {
        path.name: [
            {name: v for name, v in record.items() if name != "timestamp" and "_per_s" not in name}
            for record in read_json_array(path)
            if "train_runtime" not in record
        ]
        for path in sorted((folder / "logs").glob("*.json"))
    }
    return {
        **records,
        "losses": scalars(folder / "tb", "train-loss"),
        "texts": text(folder / "tb", "eval-text"),
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_killed_run_goes_on_in_its_files(kind: str, ranks: Any, run: Any, tmp_path: Path) -> None:
    """On two ranks, with texts by a model of transformers; and training is none the wiser."""
    args = {**ARGS, "max_steps": 5, "eval_steps": 2}
    of = {folder: run(folder, kind, **args) for folder in ("silent", "whole", "killed")}
    silent = ranks.run("recorded", 2, texts=SPOKEN, silent=True, **of["silent"])
    whole = ranks.run("recorded", 2, texts=SPOKEN, **of["whole"])
    assert [found["steps"] for found in whole] == [found["steps"] for found in silent]
    assert ranks.run("recorded", 2, texts=SPOKEN, die_at=3, **of["killed"]) == [None, None]
    later = {str(step) for step in range(3, 6)}
    for found, expected in zip(
        ranks.run("recorded", 2, texts=SPOKEN, **of["killed"]), whole, strict=True
    ):
        assert found["from"] == 2
        assert found["steps"] == {n: s for n, s in expected["steps"].items() if n in later}
    left = files(tmp_path / "whole")
    assert files(tmp_path / "killed") == left
    assert [step for step, _ in left["losses"]] == list(range(1, 6))
    assert [step for step, _ in left["texts"]] == [2, 4]
    assert all(words.startswith("w1 w2 w3 [START] ") for _, words in left["texts"])
    assert [r["global_step"] for r in left["gradient_norms.json"]] == [2, 4]
    for folder in ("whole", "killed"):  # the killed one resumed at 2, and profiled that step
        traces = sorted((tmp_path / folder / "profiles").iterdir())
        assert [path.name for path in traces] == ["trace_rank0.json", "trace_rank1.json"]
        assert [steps_in(path) for path in traces] == [1, 1]


def test_a_pipeline_writes_what_one_process_would(ranks: Any, run: Any, tmp_path: Path) -> None:
    args = {**ARGS, "max_steps": 2, "eval_steps": 2, "logging_steps": 3}
    spoken = {"prompts": ["abc", "d"], "max_new_tokens": 5}
    silent = ranks.run(
        "recorded", 2, silent=True, texts=spoken, **run("silent", "ScheduleGPipe", **args)
    )
    for name, config in (("sampled", None), ("greedy", {"repetition_penalty": 1.5})):
        given = {**spoken, "generation_config": config}
        found = ranks.run("recorded", 2, texts=given, **run(name, "ScheduleGPipe", **args))
        assert [rank["steps"] for rank in found] == [rank["steps"] for rank in silent]
    ((_, written),) = text(tmp_path / "greedy" / "tb", "eval-text")
    ((_, sampled),) = text(tmp_path / "sampled" / "tb", "eval-text")
    expected = ranks.run(
        "continued",
        1,
        checkpoint=str(tmp_path / "greedy" / "checkpoint-2"),
        prompts=spoken["prompts"],
        count=5,
        penalty=1.5,
    )[0]
    assert written.split("\n\n---\n\n") == expected
    assert sampled != written and len(sampled) == len(written)
