"""PipelineTrainer: it computes what one process computes, in every schedule, and goes on from any
of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.parallel import pipeline
from ckpt_trainers.parallel.pipeline import PipelineTrainer
from ckpt_trainers.parallel.stages import ByteGPTSplitter, place_stages
from safetensors.numpy import load_file
from torch import nn

from ckptcore import open_checkpoint

SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2}
STILL = {
    "model": {"dropout": 0.0},
    "dataset": {"noisy": False},
}  # nothing random, so that any number of ranks computes the same

Run = Callable[..., dict[str, Any]]


def numbers(found: dict[str, Any], name: str) -> list[float]:
    return [float.fromhex(step[name]) for step in found["steps"].values()]


# Any schedule is the one process.


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_schedule_computes_what_one_process_computes(
    ranks: Any, run: Run, accumulation: int
) -> None:
    args = {
        "max_steps": 2,
        "save_strategy": "no",
        "dataloader_drop_last": True,
        "gradient_accumulation_steps": accumulation,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 1,
    }
    (one,) = ranks.run("train", 1, runs=[run("one", "single", STILL, **args)])[0]
    runs = [run(kind, kind, STILL, **args) for kind in SCHEDULES]
    two = ranks.run("train", 2, runs=runs)
    four = ranks.run(
        "train", 4, runs=[run("four", "Schedule1F1B", STILL, **args, n_microbatches=4)]
    )
    for rank in [*two, *four]:
        for found in rank:
            assert [step["samples"] for step in found["steps"].values()] == [
                step["samples"] for step in one["steps"].values()
            ]
            for name in ("loss", "norm", "rate"):
                assert numbers(found, name) == pytest.approx(numbers(one, name), rel=3e-6)
            assert [e["step"] for e in found["log"]] == [1, 2]
            for mine, theirs in zip(found["log"], one["log"], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-6)
    assert [found["log"] for found in two[0]] == [found["log"] for found in two[1]]


# Stop and go on: the same run.


def test_a_resumed_run_is_the_run_that_did_not_stop(
    ranks: Any, run: Run, tmp_path: Path, resumed: Any
) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    cases = [
        ("ScheduleGPipe", {"max_steps": 4, "dataloader_num_workers": 2}, [3]),
        # Two steps an epoch: in the first one, and at the end of the second.
        (
            "ScheduleGPipe",
            {"num_train_epochs": 3, "max_steps": -1, "gradient_accumulation_steps": 3, **evaluated},
            [1, 4],
        ),
        ("ScheduleZBVZeroBubble", {"max_steps": 3, "save_async": True, **evaluated}, [2]),
        (
            "ScheduleInterleaved1F1B",
            {"max_steps": 3, "mixed_precision": "bf16", "gradient_accumulation_steps": 3},
            [2],
        ),
        (
            "Schedule1F1B",
            {"max_steps": 3, "fuse_optim_with_backward": True, "max_grad_norm": None},
            [2],
        ),
    ]
    assert resumed(2, cases) == 6


# Another number of ranks.


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "ScheduleZBVZeroBubble"])
def test_two_ranks_one_and_four_are_one_run(
    ranks: Any, run: Run, tmp_path: Path, tensors: Any, kind: str
) -> None:
    groups = {
        "no decay": {"regex": "norm|bias", "config": {"weight_decay": 0.0}},
        "blocks": {"regex": r"^blocks\."},
    }
    what = {**STILL, "optimizer_groups": groups}
    args = {"max_steps": 3, "on_world_size_change": "continue", "dataloader_drop_last": True}
    (whole,) = ranks.run("train", 1, runs=[run("whole", "single", what, **args)])[0]
    (two,) = ranks.run("train", 2, runs=[run("two", kind, what, **args)])[0]
    at_two = tmp_path / "two" / "checkpoint-1"
    (one,) = ranks.run(
        "train", 1, runs=[run("one", "single", what, **args, resume_from_checkpoint=str(at_two))]
    )[0]
    at_four = tmp_path / "one" / "checkpoint-2"
    more = {**args, "resume_from_checkpoint": str(at_four)}
    (four,) = ranks.run(
        "train", 4, runs=[run("four", "Schedule1F1B", what, **more, n_microbatches=4)]
    )[0]
    assert (one["from"], four["from"]) == (1, 2)
    curve = [*numbers(two, "loss")[:1], *numbers(one, "loss")[:1], *numbers(four, "loss")]
    assert curve == pytest.approx(numbers(whole, "loss"), rel=3e-6)
    assert [*numbers(one, "rate"), *numbers(four, "rate")] == [
        *numbers(whole, "rate")[1:],
        *numbers(whole, "rate")[2:],
    ]

    # What a restore has made of a checkpoint is what is in it: weights and moments, by name.
    for source, world, other in (
        (at_two, 1, "single"),
        (at_four, 4, "Schedule1F1B"),
        (at_four, 2, kind),
    ):
        again = tmp_path / f"again-{world}"
        again_args = {**args, **({"n_microbatches": 4} if world > 1 else {})}
        ranks.run(
            "resave",
            world,
            source=str(source),
            target=str(again),
            run=run("unused", other, what, **again_args),
        )
        saved = tensors(source)
        assert len([name for name in saved if name.startswith("optimizer/")]) == 3 * 52
        assert tensors(again / source.name) == saved


# Where values come from and go to.


def test_rank_0_builds_the_model_once_and_a_resumed_run_never(
    ranks: Any, run: Run, tmp_path: Path
) -> None:
    args = {"max_steps": 2, "output_dir": str(tmp_path / "run")}
    first = {"kind": "ScheduleGPipe", "args": args}
    again = {"kind": "ScheduleZBVZeroBubble", "args": {**args, "max_steps": 3}}
    fresh, resumed = zip(*ranks.run("pipeline", 2, runs=[first, again]), strict=True)
    assert [rank["built"] for rank in fresh] == [["meta", "cpu"], ["meta"]]
    assert [(rank["built"], rank["from"]) for rank in resumed] == [(["meta"], 2)] * 2
    assert all(
        rank["shell"] == ["meta"] and rank["drop_last"] is True for rank in (*fresh, *resumed)
    )
    # Buffers that no checkpoint holds come from the constructor in any case.
    derived = ranks.run(
        "pipeline", 2, derived=True, runs=[first | {"args": {**args, "max_steps": 4}}]
    )
    assert [rank[0]["built"] for rank in derived] == [["meta", "cpu"], ["meta"]]
    assert [rank[0]["table"] for rank in derived] == [[[0.0, 1.0, 2.0]]] * 2


def test_the_whole_model_is_exported(ranks: Any, run: Run, tmp_path: Path) -> None:
    runs = [
        run(f"run-{kind}", kind, max_steps=1, learning_rate=0.0)
        for kind in ("ScheduleGPipe", "ScheduleZBVZeroBubble")
    ]
    ranks.run("pipeline", 2, runs=runs)
    (one,) = ranks.run("train", 1, runs=[run("one", "single", max_steps=1, learning_rate=0.0)])[0]
    assert one["step"] == 1
    expected = load_file(tmp_path / "run-ScheduleGPipe" / "export" / "model.safetensors")
    assert len(expected) == 52
    with open_checkpoint(str(tmp_path / "one" / "checkpoint-1")) as view:
        for kind in ("ScheduleGPipe", "ScheduleZBVZeroBubble"):
            exported = load_file(tmp_path / f"run-{kind}" / "export" / "model.safetensors")
            assert exported.keys() == expected.keys()
            for name, tensor in exported.items():
                assert tensor.tobytes() == view.read(f"model/{name}").tobytes(), name


def test_losses_of_ones_own_and_compiled_checkpointed_and_fused_stages(
    ranks: Any, run: Run
) -> None:
    args = {"max_steps": 2, "save_strategy": "no"}
    variants: list[dict[str, Any]] = [
        {"fused": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"gradient_checkpointing": True},
        {"enable_activation_offloading": True},
        {
            "debug_pipeline": True,
            "debug_split_model": True,
            "debug_model_params": True,
            "debug_model_init": True,
        },
    ]
    runs = [
        run(f"run-{number}", "ScheduleGPipe", **args, **more)
        for number, more in enumerate([{}, *variants])
    ]
    unclipped = {**args, "max_grad_norm": None}
    for kind in ("ScheduleGPipe", "ScheduleZBVZeroBubble"):
        runs += [
            run(f"{kind}-{fused}", kind, **unclipped, fuse_optim_with_backward=fused)
            for fused in (False, True)
        ]
    for rank in ranks.run("pipeline", 2, runs=runs):
        plain, *others = [found["steps"] for found in rank]
        assert others[: len(variants)] == [plain] * len(variants)
        apart, fused, zero_bubble_apart, zero_bubble_fused = others[len(variants) :]
        assert fused == apart and zero_bubble_fused == zero_bubble_apart


def test_labels_that_do_not_count_and_smoothed_labels(ranks: Any, run: Run) -> None:
    args = {"max_steps": 2, "save_strategy": "no", **EVALUATED}
    ignoring = {**STILL, "dataset": {"noisy": False, "ignored": 3}}
    for what, more in ((ignoring, {}), (STILL, {"label_smoothing_factor": 0.2})):
        (one,) = ranks.run(
            "train",
            1,
            runs=[run("one", "single", what, **args, **more, gradient_accumulation_steps=1)],
        )[0]
        two = ranks.run("train", 2, runs=[run("two", "ScheduleGPipe", what, **args, **more)])
        for rank in two:
            assert numbers(rank[0], "loss") == pytest.approx(numbers(one, "loss"), rel=3e-6)
            assert rank[0]["log"][-1] == pytest.approx(one["log"][-1], rel=3e-6)


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_a_resumed_run_is_the_same_from_every_step(resumed: Any) -> None:
    seen = 0
    for kind in ("ScheduleGPipe", "ScheduleZBVZeroBubble"):
        for workers in (0, 2):
            for accumulation, steps in ((1, 18), (3, 6)):
                args = {
                    "num_train_epochs": 3,
                    "max_steps": -1,
                    "dataloader_num_workers": workers,
                    "gradient_accumulation_steps": accumulation,
                }
                seen += resumed(2, [(kind, args, list(range(1, steps)))])
    assert seen == 2 * 2 * (17 + 5)
    print(f"{seen} resumed runs of two pipelines, all equal to the uninterrupted ones")


def test_what_is_no_row_of_a_sample_is_not_cut() -> None:
    """A mask of all positions, and one that only happens to have as many rows as the batch."""
    seen: list[dict[str, Any]] = []

    class Notes(nn.Module):
        def forward(self, x: torch.Tensor, **named: Any) -> torch.Tensor:
            seen.append(named)
            return x

    trainer = PipelineTrainer.__new__(PipelineTrainer)
    trainer.device, trainer.args = torch.device("cpu"), SimpleNamespace(n_microbatches=2)
    trainer.computing = lambda training=True: nullcontext()  # type: ignore[method-assign]
    trainer.model_splitter = SimpleNamespace(shared_inputs=("square",))  # type: ignore[assignment]
    stage = pipeline._Stage(Notes(), trainer)
    trainer.callable = {0: stage}
    batch = {
        "input_ids": torch.zeros(4, 3),
        "labels": torch.zeros(4, 3),
        "weights": torch.arange(4.0),
        "square": torch.eye(4),
        "mask": torch.eye(3),
        "scale": torch.tensor(2.0),
        "flag": True,
    }
    first, _, rows = trainer.share_whole(batch)
    assert list(rows) == ["weights"] and first is batch["input_ids"]
    stage(first, **rows)
    assert seen[0].keys() == batch.keys() - {"input_ids", "labels"}
    assert torch.equal(seen[0]["square"], torch.eye(4)) and seen[0]["flag"] is True


# What cannot be.


PIPELINE, MULTI = "ScheduleGPipe", "ScheduleInterleaved1F1B"


@pytest.mark.parametrize(
    ("kind", "args", "what", "name", "reason", "instead"),
    [
        (
            PIPELINE,
            {},
            {"splitter": "none"},
            "model_splitter",
            "not known by itself",
            "ByteGPTSplitter()",
        ),
        (
            PIPELINE,
            {},
            {"splitter": "no loss"},
            "compute_loss_func",
            "output is no loss",
            "a splitter with a `loss`",
        ),
        (
            PIPELINE,
            {},
            {"splitter": "unknown"},
            "model_splitter",
            "no tensor of this name",
            "the names of the model",
        ),
        (PIPELINE, {}, {"splitter": "lost"}, "model_splitter", "is in no stage", "put it in one"),
        (
            PIPELINE,
            {},
            {"splitter": "tied"},
            "model_splitter",
            "another name of a parameter",
            "first name",
        ),
        (PIPELINE, {}, {"instance": True}, "model", "builds its stages itself", "model_init"),
        (PIPELINE, {}, {"loader": True}, "train_dataset", "may be shorter", "drop_last=True"),
        (PIPELINE, {"mixed_precision": "fp16"}, {}, "mixed_precision", "pipeline", "bf16"),
        (
            PIPELINE,
            {"torch_compile_mode": "max-autotune"},
            {},
            "torch_compile_mode",
            "micro-batches",
            "max-autotune-no-cudagraphs",
        ),
        (
            PIPELINE,
            {"n_microbatches": 3},
            {},
            "n_microbatches",
            "does not divide",
            "give one that does",
        ),
        (
            PIPELINE,
            {"per_device_eval_batch_size": 3},
            {},
            "n_microbatches",
            "per_device_eval_batch_size=3",
            "give one",
        ),
        (
            PIPELINE,
            {"stages_per_rank": 2},
            {},
            "stages_per_rank",
            "one stage unless is_multistage",
            "set is_multistage",
        ),
        (PIPELINE, {"is_multistage": True}, {}, "is_multistage", "one stage a rank", "set False"),
        (PIPELINE, {"pp_stage_type": "v"}, {}, "pp_stage_type", "another order", "'loop'"),
        (PIPELINE, {"dispatch_batches": True}, {}, "dispatch_batches", "", "DDPTrainer"),
        (
            "Schedule1F1B",
            {"n_microbatches": 1},
            {},
            "n_microbatches",
            "refuses it",
            "another number",
        ),
        (
            MULTI,
            {"is_multistage": False, "stages_per_rank": 1},
            {},
            "is_multistage",
            "several stages a rank",
            "set True",
        ),
        (
            MULTI,
            {"stages_per_rank": 3},
            {},
            "stages_per_rank",
            "6 stages, and the model has 4 blocks",
            "fewer ranks",
        ),
        (
            "ScheduleInterleavedZeroBubble",
            {"torch_compile": True},
            {},
            "torch_compile",
            "cannot walk a compiled",
            "another schedule",
        ),
        (
            "ScheduleZBVZeroBubble",
            {"torch_compile": True},
            {},
            "torch_compile",
            "cannot walk a compiled",
            "do not compile",
        ),
        (
            "ScheduleZBVZeroBubble",
            {"pp_stage_type": "loop"},
            {},
            "pp_stage_type",
            "another order",
            "'v'",
        ),
        (
            "ScheduleZBVZeroBubble",
            {"stages_per_rank": 1},
            {},
            "stages_per_rank",
            "two stages a rank",
            "set 2",
        ),
    ],
)
def test_constraints(
    ranks: Any,
    tmp_path: Path,
    kind: str,
    args: dict[str, Any],
    what: dict[str, Any],
    name: str,
    reason: str,
    instead: str,
) -> None:
    given = {"output_dir": str(tmp_path / "run"), **args}
    for found in ranks.run("constraint", 2, kind=kind, args=given, **what):
        assert found and found[0] == name and reason in found[1] and instead in found[2], found


def test_one_rank_is_no_pipeline(ranks: Any) -> None:
    (found,) = ranks.run("constraint", 1, kind=PIPELINE, args={})
    assert found == ["world_size", "a pipeline needs more than one rank", "use Trainer"]


@pytest.mark.parametrize(
    ("ranks_", "per_rank", "kind", "expected"),
    [
        (4, 1, "loop", [0, 1, 2, 3]),
        (2, 3, "loop", [0, 1, 0, 1, 0, 1]),
        (3, 2, "v", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_placement(ranks_: int, per_rank: int, kind: str, expected: list[int]) -> None:
    assert place_stages(ranks_, per_rank, kind) == expected


def test_a_splitter_for_another_model() -> None:
    with pytest.raises(InvalidArgument, match="the model is a Linear; give one for it"):
        ByteGPTSplitter()(
            nn.Linear(1, 1), n_stages=2, stage_indices=[0], device=torch.device("cpu"), group=None
        )
