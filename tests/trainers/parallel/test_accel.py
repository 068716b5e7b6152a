"""AccelTrainer: the Accelerator decides how to compute, the checkpoints are this project's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.parallel.accel import AccelTrainer

pytest.importorskip("accelerate")

SMALL = {"n_layer": 2}
STILL = {"model": {"dropout": 0.0, **SMALL}, "dataset": {"noisy": False}}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2}

Run = Callable[..., dict[str, Any]]


def test_it_computes_what_one_process_and_ddp_compute(ranks: Any, run: Run) -> None:
    args = {"max_steps": 2, "save_strategy": "no", **EVALUATED, "eval_steps": 1, "logging_steps": 1}
    accumulated = {**STILL, "accelerator": {"gradient_accumulation_steps": 3}}
    one = ranks.run(
        "train",
        1,
        runs=[
            run("a", "single", STILL, **args),
            run("b", "accel", STILL, **args),
            run("c", "single", STILL, **args, gradient_accumulation_steps=3),
            run("d", "accel", accumulated, **args, gradient_accumulation_steps=3),
        ],
    )[0]
    assert one[1]["steps"] == one[0]["steps"] and len(one[0]["steps"]) == 2
    args |= {"per_device_train_batch_size": 2}
    two = ranks.run(
        "train",
        2,
        runs=[
            run("e", "ddp", STILL, **args, dispatch_batches=False),
            run("f", "accel", STILL, **args),
            run("g", "accel", accumulated, **args, gradient_accumulation_steps=3),
            run(
                "h",
                "accel",
                STILL,
                **{**args, "per_device_train_batch_size": 4},
                split_batches=True,
                dispatch_batches=True,
            ),
        ],
    )
    for rank in two:
        assert rank[1]["steps"] == rank[0]["steps"]
    for found, expected in (
        (one[1], one[0]),
        (two[0][1], one[0]),
        (two[0][3], one[0]),
        (one[3], one[2]),
        (two[0][2], one[2]),
    ):
        assert [entry["step"] for entry in found["log"]] == [1, 2]
        for mine, theirs in zip(found["log"], expected["log"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_resumed_run_is_the_run_that_did_not_stop(resumed: Any) -> None:
    cases = [
        ("accel", {"max_steps": 4, "dataloader_num_workers": 2, "dispatch_batches": True}, [3]),
        # Seven steps an epoch: in the middle of the first.
        (
            "accel",
            {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 2, **EVALUATED},
            [5],
        ),
    ]
    assert resumed(2, cases, model=SMALL) == 2
    config = {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"}
    cases = [("accel", {"max_steps": 3, "gradient_accumulation_steps": 3, "save_async": True}, [2])]
    assert resumed(3, cases, accelerator=config, model=SMALL) == 1


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_a_resumed_run_is_the_same_from_every_step(resumed: Any) -> None:
    seen = 0
    for workers in (0, 2):
        for accumulation, steps in ((1, 21), (3, 9)):
            args = {
                "num_train_epochs": 3,
                "max_steps": -1,
                "dataloader_num_workers": workers,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": accumulation,
            }
            cases = [("accel", args, list(range(1, steps)))]
            seen += resumed(2, cases, accelerator={"gradient_accumulation_steps": accumulation})
    assert seen == 2 * (20 + 8)
    print(f"{seen} resumed runs on two ranks, all equal to the uninterrupted ones")


def test_the_accelerator_wins_and_says_so(ranks: Any, tmp_path: Path) -> None:
    args = {
        "output_dir": str(tmp_path),
        "mixed_precision": "fp16",
        "gradient_accumulation_steps": 2,
        "fp8_recipe": "rowwise",
    }
    how = {"gradient_accumulation_steps": 4, "mixed_precision": "bf16"}
    first, second = ranks.run("decided", 2, args=args, accelerator=how)
    assert (first["precision"], first["accumulation"]) == ("bf16", 4)
    assert first["warnings"] == [
        "mixed_precision='fp16' is not used: the Accelerator's is 'bf16'",
        "fp8_recipe='rowwise' is not used: the Accelerator's is None",
        "gradient_accumulation_steps=2 is not used: the Accelerator's is 4",
    ]
    assert second["warnings"] == [] and first["wrapped"] == "DistributedDataParallel"
    args = {
        "output_dir": str(tmp_path),
        "accelerator_config": {"split_batches": True, "even_batches": False},
    }
    (found, _) = ranks.run("decided", 2, args=args)
    assert (found["batch"], found["loader"], found["warnings"]) == (2, "MapLoader", [])
    assert found["config"]["split_batches"] is True and found["config"]["even_batches"] is False
    (found, _) = ranks.run(
        "decided", 2, args={"output_dir": str(tmp_path), "dispatch_batches": True}
    )
    assert (found["batch"], found["loader"]) == (4, "DispatchedLoader")


@pytest.mark.parametrize(
    ("args", "name", "reason", "instead"),
    [
        (
            {"accelerator_config": {"nonsense": 1}},
            "accelerator_config.nonsense",
            "no such setting",
            "split_batches",
        ),
        (
            {"split_batches": True, "per_device_train_batch_size": 3},
            "accelerator_config.split_batches",
            "no multiple of 2",
            "make it one",
        ),
        (
            {"fuse_optim_with_backward": True, "max_grad_norm": None},
            "fuse_optim_with_backward",
            "needs whole gradients",
            "Trainer",
        ),
    ],
)
def test_constraints(
    ranks: Any, args: dict[str, Any], name: str, reason: str, instead: str
) -> None:
    for found in ranks.run("constraint", 2, kind="accel", args=args):
        assert found[0] == name and reason in found[1] and instead in found[2], found


def test_without_an_accelerator_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidArgument,
        match="accelerator=None: AccelTrainer trains through one; give a configured",
    ) as caught:
        AccelTrainer({}, model_init=lambda: None)
    assert caught.value.name == "accelerator"
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidArgument, match=r"accelerate is not installed; install ckptcore\[accelerate\]"
    ):
        AccelTrainer({}, model_init=lambda: None)


class Sharding:
    distributed_type = "FSDP"


def test_an_accelerator_that_shards_is_refused() -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"accelerator='FSDP': it does not keep a whole model.*use FSDP2Trainer",
    ):
        AccelTrainer({}, accelerator=Sharding(), model_init=lambda: None)
