"""Training on several ranks, stopped and resumed, is on every rank the training that was not stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ckpt_trainers.arguments import InvalidArgument, TrainingArguments
from ckpt_trainers.compare import compare_checkpoints
from ckpt_trainers.main import main
from ckpt_trainers.progress import read_losses
from ckpt_trainers.trainer import Trainer
from click.testing import CliRunner

from ckptcore import open_checkpoint, scan_root

DIED = 9
TINY = [
    *("--n-layer", "1", "--n-head", "1", "--n-embd", "8", "--block-size", "8", "--batch-size", "2"),
    *("--threads", "1", "--device", "cpu", "--report-to", "none", "--save-steps", "2", "--save-total-limit", "0"),
]

MakeArgs = Callable[..., TrainingArguments]


class Ranks:
    """Jobs of several ranks, one after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ddp_ranks.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _run(self, world_size: int, what: str, **how: Any) -> list[int]:
        assert self.process.stdin and self.process.stdout
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        order = {"port": store.port, "world_size": world_size, "what": what, "how": how}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        codes: list[int] = json.loads(self.process.stdout.readline())
        return codes

    def train(
        self,
        world_size: int,
        args: TrainingArguments,
        stop: int | None = None,
        forgotten: str | None = None,
        sigterm: tuple[int, float] | None = None,
    ) -> list[int]:
        """Exit codes. stop: the ranks die when so many steps are done. forgotten: a component not to be restored.
        sigterm: the rank that gets one, and so many seconds after its first step."""
        return self._run(world_size, "train", arguments=asdict(args), stop=stop, forgotten=forgotten, sigterm=sigterm)

    def command(self, world_size: int, words: list[str], output: Path) -> list[int]:
        return self._run(world_size, "command", words=words, output=str(output))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def ddp_args(make_args: MakeArgs) -> MakeArgs:
    """27 samples. Two ranks: 7 batches of 4, the last of 3, so 4 steps to an epoch. Four: 4 of 8, the last of 3, so 2
    steps, and one rank without a sample in the last batch of an epoch."""

    def make(run: str, **changes: Any) -> TrainingArguments:
        return make_args(run, **{"per_device_train_batch_size": 2, "max_steps": 10, "use_cpu": True} | changes)

    return make


@pytest.fixture(scope="module")
def references(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainingArguments]:
    """The run that is not stopped, and saves at its end only; trained once for every number of ranks."""
    made: dict[int, TrainingArguments] = {}

    def reference(world_size: int, ddp_args: MakeArgs) -> TrainingArguments:
        if world_size not in made:
            folder = tmp_path_factory.mktemp("reference")
            args = ddp_args("", output_dir=str(folder / "run"), save_steps=100)
            assert ranks.train(world_size, args) == [0] * world_size
            made[world_size] = args
        return made[world_size]

    return reference


def seen(folder: str | Path, world_size: int) -> list[dict[int, dict[str, Any]]]:
    """By rank: step -> what it did last time it did that step."""
    found = []
    for rank in range(world_size):
        lines = Path(f"{folder}.rank{rank}.jsonl").read_text().splitlines()
        found.append({entry["step"]: entry for entry in map(json.loads, lines) if "step" in entry})
    return found


def assert_same_run(one: TrainingArguments, other: TrainingArguments, world_size: int) -> None:
    assert seen(one.output_dir, world_size) == seen(other.output_dir, world_size)
    last = f"checkpoint-{one.max_steps}"
    parts = compare_checkpoints(str(one.root / last), str(other.root / last))
    assert [part.name for part in parts] == ["loader", "model", "optimizer", "progress", "rng", "scheduler"]
    assert {part.name: part.differences for part in parts if part.differences} == {}
    assert next(part for part in parts if part.name == "rng").tensors == world_size
    assert (one.root / "losses.jsonl").read_bytes() == (other.root / "losses.jsonl").read_bytes()
    assert sorted(read_losses(one.root)) == list(range(1, one.max_steps + 1))


# Case B14. Two ranks: stopped at the end of an epoch and in the middle of one; before the first save, and in the last
# and short step of an epoch. Four: at its end, and in the middle, which is before that short step.
# The first once more with saves in the background, where the end of the ranks may come in the middle of one.
@pytest.mark.parametrize(
    ("world_size", "lives", "save_async"),
    [
        (2, [(4, 6), (5, 7)], False),
        (2, [(4, 6), (5, 7)], True),
        (2, [(3, 2), (3, 4)], False),
        (4, [(2, 5), (3, 8)], False),
    ],
)
def test_b14_resuming_is_exact_on_every_rank(
    ranks: Ranks,
    ddp_args: MakeArgs,
    references: MakeArgs,
    world_size: int,
    lives: list[tuple[int, int]],
    save_async: bool,
) -> None:
    reference = references(world_size, ddp_args)
    for save_steps, stop in lives:
        stopped = ddp_args("stopped", save_steps=save_steps, save_async=save_async)
        assert ranks.train(world_size, stopped, stop) == [DIED] * world_size
    assert ranks.train(world_size, stopped) == [0] * world_size
    assert_same_run(reference, stopped, world_size)


def test_a_sigterm_to_one_rank_is_a_checkpoint_that_all_go_on_from(
    ranks: Ranks, ddp_args: MakeArgs, references: MakeArgs
) -> None:
    reference = references(2, ddp_args)
    args = ddp_args("stopped", save_steps=1000, save_async=True, enable_jit_checkpoint=True, eval_strategy="no")
    endless = ddp_args("stopped", **{**asdict(args), "max_steps": 100_000, "output_dir": args.output_dir})
    assert ranks.train(2, endless, sigterm=(1, random.random() / 4)) == [0, 0]
    (entry,) = scan_root(args.output_dir)
    assert entry.status == "committed" and entry.step is not None
    assert [max(rank) + 1 for rank in seen(args.output_dir, 2)] == [entry.step] * 2
    assert sorted(read_losses(args.root)) == list(range(1, entry.step + 1))
    shutil.rmtree(args.root)
    for rank in range(2):
        Path(f"{args.output_dir}.rank{rank}.jsonl").unlink()

    early = ddp_args("stopped", save_steps=3, save_async=True, enable_jit_checkpoint=True)
    assert ranks.train(2, early, sigterm=(1, 0.0)) == [0, 0]
    (stopped,) = scan_root(early.output_dir)
    assert (stopped.status, stopped.step in (1, 2, 3)) == ("committed", True)
    assert ranks.train(2, early) == [0, 0]
    assert_same_run(reference, early, 2)


def test_ranks_share_the_data_and_nothing_random(ranks: Ranks, ddp_args: MakeArgs, references: MakeArgs) -> None:
    args = references(2, ddp_args)
    first, second = seen(args.output_dir, 2)
    for epoch in (0, 1):
        shares = [[i for e in rank.values() if e["epoch"] == epoch for i in e["samples"]] for rank in (first, second)]
        assert not set(shares[0]) & set(shares[1])
        assert sorted(shares[0] + shares[1]) == list(range(27))
        assert [len(share) for share in shares] == [14, 13]
    for step in first:
        for stream in ("python", "numpy", "torch"):
            assert first[step]["streams"][stream] != second[step]["streams"][stream]
        assert first[step]["own_losses"] != second[step]["own_losses"]
        same = ("loss", "norm", "rate", "weights", "moments")
        assert {name: first[step][name] for name in same} == {name: second[step][name] for name in same}
    with open_checkpoint(args.root / f"checkpoint-{args.max_steps}") as view:
        patterns = {name: part.pattern for name, part in view.manifest.components.items()}
        assert view.manifest.world_size == 2
    assert patterns == {
        **dict.fromkeys(("model", "optimizer", "scheduler", "progress"), "REPLICATED"),
        **dict.fromkeys(("loader", "rng"), "PER_RANK"),
    }


def test_the_comparison_notices_what_a_resume_could_lose(
    ranks: Ranks, ddp_args: MakeArgs, references: MakeArgs, tmp_path: Path
) -> None:
    reference = seen(references(2, ddp_args).output_dir, 2)
    assert ranks.train(2, ddp_args("whole", save_steps=3), 3) == [DIED, DIED]
    for lost in ("scheduler", "loader", "rng"):
        args = ddp_args(f"without-{lost}", save_steps=100)
        shutil.copytree(tmp_path / "whole", args.root)
        assert ranks.train(2, args, 6, lost) == [DIED, DIED]
        for ours, theirs in zip(reference, seen(args.output_dir, 2), strict=True):
            assert sorted(theirs) == [3, 4, 5]
            assert ours[5]["weights"] != theirs[5]["weights"], lost


def test_a_step_on_ranks_is_the_step_of_one_process_on_all_their_samples(ranks: Ranks, ddp_args: MakeArgs) -> None:
    """Also in the last batch of an epoch, where one of the four ranks has no sample."""
    still = {"model": {**asdict(ddp_args("").model), "dropout": 0.0}, "max_steps": 4, "save_steps": 4}
    four = ddp_args("four", **still)
    # Not Watched: its losses have noise in them.
    words = [
        *("--output-dir", four.output_dir, "--data", four.data[0], "--n-layer", "2", "--n-head", "2"),
        *("--n-embd", "16", "--block-size", "16", "--dropout", "0", "--max-steps", "4", "--batch-size", "2"),
        *("--gradient-accumulation-steps", "2", "--lr", "1e-2", "--warmup-steps", "3", "--seed", "5"),
        *("--threads", "1", "--device", "cpu", "--report-to", "none", "--eval-steps", "2"),
    ]
    assert ranks.command(4, words, four.root.with_suffix(".log")) == [0] * 4
    one = ddp_args("one", **still | {"per_device_train_batch_size": 8, "eval_steps": 2})
    result = Trainer(one).train()
    ours, theirs = read_losses(four.root), read_losses(one.root)
    assert [ours[step] for step in (1, 2, 3, 4)] == pytest.approx([theirs[step] for step in (1, 2, 3, 4)], rel=1e-5)
    evaluated = scan_root(four.output_dir)[-1].metrics["eval_loss"]
    assert evaluated == pytest.approx(result.log_history[-1]["eval_loss"], rel=1e-5)


def test_ranks_differ_and_share_without_a_seed_too(ranks: Ranks, ddp_args: MakeArgs) -> None:
    args = ddp_args("run", max_steps=4, seed=-1)
    assert ranks.train(2, args) == [0, 0]
    first, second = seen(args.output_dir, 2)
    assert sorted(i for rank in (first, second) for e in rank.values() for i in e["samples"]) == list(range(27))
    # The other streams differ between processes, if these were not forked from one.
    assert first[0]["streams"]["torch"] != second[0]["streams"]["torch"]


# Another number of ranks.


def test_another_number_of_ranks_may_go_on_where_the_data_were(ranks: Ranks, ddp_args: MakeArgs) -> None:
    go_on = {"on_world_size_change": "continue", "gradient_accumulation_steps": 1}
    two = ddp_args("two", max_steps=3, **go_on)
    assert ranks.train(2, two) == [0, 0]
    used = [i for rank in seen(two.output_dir, 2) for e in rank.values() for i in e["samples"]]
    assert len(set(used)) == 12
    for world_size in (1, 3):
        steps = 3 + -(-15 // (2 * world_size))  # to the end of the epoch
        args = ddp_args(f"then-{world_size}", max_steps=steps, **go_on)
        shutil.copytree(two.root, args.root)
        assert ranks.train(world_size, args) == [0] * world_size
        found = seen(args.output_dir, world_size)
        assert sorted(used + [i for rank in found for e in rank.values() for i in e["samples"]]) == list(range(27))
        assert sorted(read_losses(args.root)) == list(range(1, steps + 1))
        assert len({rank[3]["streams"]["torch"] for rank in found}) == world_size


def test_going_on_with_other_ranks_needs_a_length_in_steps(make_args: MakeArgs) -> None:
    with pytest.raises(InvalidArgument, match="set max_steps"):
        make_args(max_steps=0, on_world_size_change="continue")


# `ckpt-train` on several processes.


@pytest.fixture
def words(tmp_path: Path, text: Path) -> list[str]:
    return [*TINY, "--output-dir", str(tmp_path / "run"), "--data", str(text), "--max-steps", "6"]


def test_the_command_says_everything_once(ranks: Ranks, words: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ranks.command(2, words, log) == [0, 0]
    lines = log.read_text().splitlines()
    assert sum(line.startswith("finished: 6 steps") for line in lines) == 1 and len(set(lines)) == len(lines)
    weights = tmp_path / "run" / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    log.unlink()
    assert ranks.command(2, words, log) == [0, 0]
    text = log.read_text()
    assert text.count("warning: ") == 1 and text.count("resumed from step 4") == 1
    log.unlink()
    assert ranks.command(3, [*words, "--max-steps", "8"], log) == [1, 1, 1]
    (line,) = log.read_text().splitlines()
    assert line.startswith("ckpt-train: ") and "saved for 2 ranks, there are 3 now" in line
    result = CliRunner().invoke(main, [*words, "--max-steps", "8"])
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("ckpt-train: ") and "saved for 2 ranks, there are 1 now" in line
    log.unlink()
    assert ranks.command(2, [*words, "--data", "no/such/file"], log) == [3, 3]
    assert len(log.read_text().splitlines()) == 1


def test_torchrun_resumes_to_the_same_bits(words: list[str], tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "ckpt_trainers.main", *words),
    ]
    # An end that leaves no more than the checkpoint of step 2 behind, and a loss file that is longer.
    first = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("finished: 6 steps to step 6") == 1
    run, reference = tmp_path / "run", tmp_path / "reference"
    shutil.copytree(run, reference)
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("resumed from step 2") == 1
    parts = compare_checkpoints(str(reference / "checkpoint-6"), str(run / "checkpoint-6"))
    assert {part.name: part.differences for part in parts if part.differences} == {}
    assert (reference / "losses.jsonl").read_bytes() == (run / "losses.jsonl").read_bytes()
