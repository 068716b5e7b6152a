"""Training on several ranks, stopped and resumed, is on every rank the training that was not
stopped."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from ckpt_trainers.arguments import DDPTrainingArguments, InvalidArgument
from ckpt_trainers.callbacks import read_json_array
from ckpt_trainers.main import main
from click.testing import CliRunner

from ckptcore import open_checkpoint, scan_root

from .comparison import compare_checkpoints
from .loss_record import read_losses

DIED, FAILED = 9, 70
TIMES = ("tok_per_sec", "train_runtime", "train_samples_per_second", "train_steps_per_second")
PARTS = [
    "callbacks",
    "callbacks_per_rank",
    "loader",
    "model",
    "optimizer",
    "rng",
    "scaler",
    "scheduler",
    "trainer",
]


Make = Callable[..., dict[str, Any]]


@pytest.fixture
def ddp_args(tiny: Any) -> Make:
    """27 samples. Two ranks: 7 batches of 4, the last of 3, so 4 steps to an epoch. Four: 4 of 8,
    the last of 3, so 2 steps, and one rank without a sample in the last batch of an epoch."""

    def make(run: str, **changes: Any) -> dict[str, Any]:
        few = {
            "max_steps": 10,
            "gradient_accumulation_steps": 2,
            "save_steps": 100,
            "logging_steps": 3,
        }
        looking = {"eval_strategy": "steps", "eval_steps": 4}
        return dict(tiny.arguments(run, **few | looking | changes))

    return make


@pytest.fixture(scope="module")
def references(
    ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """The run that is not stopped, and saves at its end only; trained once for every number of
    ranks."""
    made: dict[tuple[int, bool], dict[str, Any]] = {}

    def reference(world_size: int, ddp_args: Make, dispatch: bool = True) -> dict[str, Any]:
        if (world_size, dispatch) not in made:
            folder = tmp_path_factory.mktemp("reference")
            args = ddp_args("", output_dir=str(folder / "run"), dispatch_batches=dispatch)
            assert ranks.train(world_size, args) == [0] * world_size
            made[world_size, dispatch] = args
        return made[world_size, dispatch]

    return reference


def root(args: dict[str, Any]) -> Path:
    return Path(args["output_dir"])


def seen(folder: str | Path, world_size: int) -> list[dict[int, dict[str, Any]]]:
    """By rank: step -> what it did last time it did that step."""
    found = []
    for rank in range(world_size):
        lines = Path(f"{folder}.rank{rank}.jsonl").read_text().splitlines()
        found.append({entry["step"]: entry for entry in map(json.loads, lines)})
    return found


def assert_same_run(one: dict[str, Any], other: dict[str, Any], world_size: int) -> None:
    assert seen(root(one), world_size) == seen(root(other), world_size)
    last = f"checkpoint-{one['max_steps']}"
    parts = compare_checkpoints(str(root(one) / last), str(root(other) / last), TIMES)
    assert [part.name for part in parts] == PARTS
    assert {part.name: part.differences for part in parts if part.differences} == {}
    assert next(part for part in parts if part.name == "rng").tensors == world_size
    assert (root(one) / "losses.json").read_bytes() == (root(other) / "losses.json").read_bytes()
    assert sorted(read_losses(root(one))) == list(range(1, one["max_steps"] + 1))


# Case B14. Two ranks: stopped at the end of an epoch and in the middle of one; before the first
# save, and in the last and short step of an epoch. Four: at its end, and in the middle, which is
# before that short step.
@pytest.mark.parametrize(
    ("world_size", "lives", "dispatch"),
    [(2, [(4, 6), (5, 7)], True), (2, [(3, 2), (3, 4)], False), (4, [(2, 5), (3, 8)], False)],
)
def test_b14_resuming_is_exact_on_every_rank(
    ranks: Any,
    ddp_args: Make,
    references: Make,
    world_size: int,
    lives: list[tuple[int, int]],
    dispatch: bool,
) -> None:
    reference = references(world_size, ddp_args, dispatch)
    for save_steps, stop in lives:
        stopped = ddp_args("stopped", save_steps=save_steps, dispatch_batches=dispatch)
        assert ranks.train(world_size, stopped, stop) == [DIED] * world_size
    assert ranks.train(world_size, stopped) == [0] * world_size
    assert_same_run(reference, stopped, world_size)


def terminate_and_resume(
    ranks: Any, reference: dict[str, Any], args: dict[str, Any], seconds: float
) -> None:
    # Endless, so that it does not end before the signal.
    assert ranks.train(
        2, {**args, "max_steps": 100_000, "eval_strategy": "no"}, sigterm=(1, seconds)
    ) == [0, 0]
    (entry,) = scan_root(args["output_dir"])
    assert entry.status == "committed" and entry.step is not None
    assert [max(rank) + 1 for rank in seen(root(args), 2)] == [entry.step] * 2
    assert sorted(read_losses(root(args))) == list(range(1, entry.step + 1))


def test_a_sigterm_to_one_rank_is_a_checkpoint_that_all_go_on_from(
    ranks: Any, ddp_args: Make, references: Make
) -> None:
    args = ddp_args("stopped", save_steps=1000, enable_jit_checkpoint=True)
    terminate_and_resume(ranks, args, args, random.random() / 4)
    how = {"save_steps": 3, "enable_jit_checkpoint": True, "dispatch_batches": True}
    early = ddp_args("early", **how)
    assert ranks.train(2, early, sigterm=(1, 0.0)) == [0, 0]
    (stopped,) = scan_root(early["output_dir"])
    assert (stopped.status, stopped.step in (1, 2, 3)) == ("committed", True)
    assert ranks.train(2, early) == [0, 0]
    assert_same_run(references(2, ddp_args), early, 2)


def test_all_ranks_go_by_what_the_first_one_knows(ranks: Any, ddp_args: Make) -> None:
    """Of a metric that is added on one rank alone, and of steps that are in the way of a run that
    goes back."""
    best = {
        "save_strategy": "best",
        "metric_for_best_model": "luck",
        "load_best_model_at_end": True,
    }
    args = ddp_args("lucky", max_steps=6, eval_steps=2, **best)
    assert ranks.train(2, args) == [0, 0]
    infos = scan_root(args["output_dir"])
    assert [(info.step, info.metrics["eval_luck"]) for info in infos] == [(2, 10), (4, 12)]
    back = {**args, "resume_from_checkpoint": str(root(args) / "checkpoint-2")}
    before = seen(root(args), 2)
    assert ranks.train(2, back) == [FAILED, FAILED]  # before anything is trained
    assert seen(root(args), 2) == before
    # In the epoch of step 6, which is the second one, from its first batch on.
    later = ddp_args("later", max_steps=6, save_steps=5)
    assert ranks.train(2, later) == [0, 0]
    path = str(root(later) / "checkpoint-5")
    for dispatch in (False, True):
        over = ddp_args(
            f"over-{dispatch}",
            max_steps=6,
            resume_from_checkpoint=path,
            ignore_data_skip=True,
            dispatch_batches=dispatch,
        )
        assert ranks.train(2, over) == [0, 0]
        for rank, whole in zip(seen(root(over), 2), seen(root(later), 2), strict=True):
            assert (
                list(rank) == [5]
                and rank[5]["epoch"] == 1
                and rank[5]["samples"] == whole[4]["samples"]
            )


@pytest.mark.stress
@pytest.mark.parametrize("attempt", range(20))
def test_a_sigterm_may_come_at_any_time(ranks: Any, ddp_args: Make, attempt: int) -> None:
    args = ddp_args("stopped", save_steps=1000, enable_jit_checkpoint=True)
    terminate_and_resume(ranks, args, args, random.random() / 2)


def test_ranks_share_the_data_and_nothing_random(
    ranks: Any, ddp_args: Make, references: Make
) -> None:
    args = references(2, ddp_args)
    first, second = seen(root(args), 2)
    for epoch in (0, 1):
        shares = [
            [i for e in rank.values() if e["epoch"] == epoch for i in e["samples"]]
            for rank in (first, second)
        ]
        assert not set(shares[0]) & set(shares[1])
        assert sorted(shares[0] + shares[1]) == list(range(27))
        assert [len(share) for share in shares] == [14, 13]
    for step in first:
        for stream in ("python", "numpy", "torch"):
            assert first[step]["streams"][stream] != second[step]["streams"][stream]
        assert first[step]["own_losses"] != second[step]["own_losses"]
        same = ("loss", "norm", "rate", "weights", "moments")
        assert {name: first[step][name] for name in same} == {
            name: second[step][name] for name in same
        }
    with open_checkpoint(root(args) / "checkpoint-10") as view:
        patterns = {name: part.pattern for name, part in view.manifest.components.items()}
        assert view.manifest.world_size == 2
    assert patterns == {
        **dict.fromkeys(PARTS, "GLOBAL"),
        **dict.fromkeys(("model", "optimizer"), "REPLICATED"),
        **dict.fromkeys(("callbacks_per_rank", "rng"), "PER_RANK"),
    }


def test_rank_0_may_read_for_all_or_each_for_itself(
    ranks: Any, ddp_args: Make, references: Make
) -> None:
    """The same samples in the same steps, and so the same training."""
    for one, other in zip(
        *(seen(root(references(2, ddp_args, d)), 2) for d in (True, False)), strict=True
    ):
        assert one == other


def test_the_comparison_notices_what_a_resume_could_lose(
    ranks: Any, ddp_args: Make, references: Make, tmp_path: Path
) -> None:
    reference = seen(root(references(2, ddp_args)), 2)
    assert ranks.train(2, ddp_args("whole", save_steps=3, save_async=False), 3) == [DIED, DIED]
    for lost in ("scheduler", "loader", "rng"):
        args = ddp_args(f"without-{lost}")
        shutil.copytree(tmp_path / "whole", root(args))
        assert ranks.train(2, args, 6, lost) == [DIED, DIED]
        for ours, theirs in zip(reference, seen(root(args), 2), strict=True):
            assert sorted(theirs) == [3, 4, 5]
            assert ours[5]["weights"] != theirs[5]["weights"], lost


def test_local_steps_with_averages_now_and_then_are_resumed_exactly(
    ranks: Any, ddp_args: Make
) -> None:
    """The replicas differ between two averages: each rank keeps its own."""
    local = {
        "post_local_sgd": {"enabled": True, "start_step": 2, "period": 3},
        "eval_strategy": "no",
    }
    whole, stopped = (
        ddp_args("whole", **local),
        ddp_args("stopped", save_steps=4, save_async=False, **local),
    )
    assert ranks.train(2, whole) == [0, 0]
    assert ranks.train(2, stopped, 6) == [DIED, DIED]
    assert ranks.train(2, stopped) == [0, 0]
    first, second = seen(root(whole), 2)
    equal = [step for step in first if first[step]["weights"] == second[step]["weights"]]
    assert equal == [0, 1, 2, 5, 8]
    assert [seen(root(run), 2) for run in (whole, stopped)] == [[first, second]] * 2
    with open_checkpoint(root(stopped) / "checkpoint-4") as view:
        assert view.manifest.components["model"].pattern == "PER_RANK"
        assert view.values("averager") == {"step": 4, "iter": 2}  # the hook counts up to the switch


def test_what_one_rank_asks_for_all_ranks_do_at_the_same_step(ranks: Any, ddp_args: Make) -> None:
    """It is known one step later, or at once where something is due."""
    asks = [
        (1, 1, "should_save"),
        (1, 3, "should_evaluate"),
        (0, 5, "should_log"),
        (1, 7, "should_epoch_stop"),
        (1, 10, "should_save"),
        (1, 10, "should_training_stop"),
    ]
    args = ddp_args(
        "asked",
        max_steps=100,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=10,
        gradient_accumulation_steps=1,
    )
    assert ranks.train(2, args, asks=asks) == [0, 0]
    found = [
        [
            json.loads(line)
            for line in Path(f"{root(args)}.asked{rank}.jsonl").read_text().splitlines()
        ]
        for rank in (0, 1)
    ]
    assert found[0] == found[1]  # the losses, and the times of the saves, too
    names = [entry[:2] for entry in found[0] if entry[0] not in ("commit", "epoch")]
    assert names == [
        ["save", 2],
        ["evaluate", 4],
        ["log", 6],
        ["log", 10],
        ["save", 10],
        ["end", 10],
    ]
    assert [entry[1] for entry in found[0] if entry[0] == "epoch"] == [
        7,
        10,
    ]  # the seventh is the last of its epoch
    assert found[0][-1][2:] == ["requested", "Asking"]
    commits = [entry for entry in found[0] if entry[0] == "commit"]
    assert [(entry[2], entry[3]) for entry in commits] == [(2, True), (10, True)]
    assert all(entry[4] > 0 and entry[5] > 0 for entry in commits) and 3 <= commits[0][1] <= 10


def test_one_rank_is_a_trainer(ranks: Any, ddp_args: Make, tiny: Any) -> None:
    args = ddp_args("one", max_steps=3, save_steps=3)
    assert ranks.train(1, args) == [0]
    with open_checkpoint(root(args) / "checkpoint-3") as view:
        assert {part.pattern for part in view.manifest.components.values()} == {
            "GLOBAL",
            "PER_RANK",
        }


def test_a_step_on_ranks_is_the_step_of_one_process_on_all_their_samples(
    ranks: Any, words: list[str], tmp_path: Path
) -> None:
    """Also in the last batch of an epoch, where one of the four ranks has no sample."""
    words += [
        "model.dropout=0",
        "max_steps=8",
        "save_steps=8",
        "eval_strategy=steps",
        "eval_steps=4",
    ]
    words += ["gradient_accumulation_steps=2", "per_device_eval_batch_size=1", "max_data_bytes=264"]
    words += ["report_to=json", "logging_steps=1"]
    four, one = tmp_path / "four", tmp_path / "one"
    folders = [f"output_dir={four}", f"logging_dir={four}.logs"]
    assert ranks.command(4, [*words, *folders], tmp_path / "log") == [0] * 4
    folders = [f"output_dir={one}", f"logging_dir={one}.logs", "per_device_train_batch_size=8"]
    assert ranks.command(1, [*words, *folders], tmp_path / "log") == [0]
    ours, theirs = (
        [r["loss"] for r in read_json_array(f"{root}.logs/trainer_logs.json") if "loss" in r]
        for root in (four, one)
    )
    assert len(ours) == 8 and ours == pytest.approx(theirs, rel=1e-5)
    (evaluated,), (alone,) = scan_root(str(four)), scan_root(str(one))
    assert evaluated.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-5)


# Another number of ranks.


def test_another_number_of_ranks_may_go_on_where_the_data_were(ranks: Any, ddp_args: Make) -> None:
    go_on = {
        "on_world_size_change": "continue",
        "gradient_accumulation_steps": 1,
        "dispatch_batches": False,
    }
    two = ddp_args("two", max_steps=3, **go_on)
    assert ranks.train(2, two) == [0, 0]
    used = [i for rank in seen(root(two), 2) for e in rank.values() for i in e["samples"]]
    assert len(set(used)) == 12
    for world_size in (1, 3):
        steps = 3 + -(-15 // (2 * world_size))  # to the end of the epoch
        args = ddp_args(f"then-{world_size}", max_steps=steps, **go_on)
        shutil.copytree(root(two), root(args))
        assert ranks.train(world_size, args) == [0] * world_size
        found = seen(root(args), world_size)
        assert sorted(
            used + [i for rank in found for e in rank.values() for i in e["samples"]]
        ) == list(range(27))
        assert sorted(read_losses(root(args))) == list(range(1, steps + 1))
        assert len({rank[3]["streams"]["torch"] for rank in found}) == world_size


def test_going_on_with_other_ranks_needs_a_length_in_steps() -> None:
    with pytest.raises(InvalidArgument, match="max_steps"):
        DDPTrainingArguments(max_steps=0, on_world_size_change="continue")


# `ckpt-train` on several processes.


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    sys.exit(main(words))


@pytest.fixture
def words(tmp_path: Path, text: Path) -> list[str]:
    model = [
        f"model.{name}={value}"
        for name, value in (("n_layer", 1), ("n_head", 1), ("n_embd", 8), ("block_size", 8))
    ]
    values = {
        "output_dir": tmp_path / "run",
        "data": f"[{text}]",
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "use_cpu": "true",
        "report_to": "none",
        "save_steps": 2,
        "save_total_limit": "null",
        "eval_strategy": "no",
    }
    return ["--threads", "1", *model, *(f"{name}={value}" for name, value in values.items())]


def test_the_command_says_everything_once(ranks: Any, words: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ranks.command(2, words, log) == [0, 0]
    said = log.read_text()
    assert said.count("finished: 6 steps") == 1 and said.count("trainer: ddp") == 1
    weights = tmp_path / "run" / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    log.unlink()
    assert ranks.command(2, words, log) == [0, 0]
    said = log.read_text()
    assert said.count("warning: ") == 1 and said.count("resumed from step 4") == 1
    log.unlink()
    assert ranks.command(3, [*words, "max_steps=8"], log) == [1, 1, 1]
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("ckpt-train: ")]
    assert "saved for 2 ranks, there are 3 now" in line
    result = CliRunner().invoke(command, [*words, "max_steps=8"])
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("ckpt-train: ") and "saved for 2 ranks, there are 1 now" in line
    log.unlink()
    assert ranks.command(2, [*words, "data=no/such/file"], log) == [3, 3]
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a GPU here")
def test_the_accelerator_is_where_the_ranks_are(
    ranks: Any, words: list[str], tmp_path: Path
) -> None:
    """The command of the README, on a machine without a GPU: nobody says use_cpu."""
    words = [*(word for word in words if not word.startswith("use_cpu")), "trainer=accel"]
    log = tmp_path / "log"
    assert ranks.command(2, words, log) == [0, 0], log.read_text()
    assert ranks.command(2, [*words, "max_steps=8"], log) == [0, 0], log.read_text()
    assert log.read_text().count("resumed from step 6") == 1
    assert [info.step for info in scan_root(tmp_path / "run")] == [2, 4, 6, 8]


def test_a_bad_argument_is_said_once(ranks: Any, words: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ranks.command(2, [*words, "trainer=fsdp2", "fsdp=no_shard"], log) == [2, 2]
    assert log.read_text().count("ckpt-train: fsdp=") == 1
