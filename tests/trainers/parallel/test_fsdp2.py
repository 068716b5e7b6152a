"""FSDP2Trainer: slices on every rank, and yet the training of one process; checkpoints for any
number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = {"n_layer": 2}
STILL = {
    "model": {"dropout": 0.0, **SMALL},
    "dataset": {"noisy": False},
}  # nothing random, so that any number of ranks computes the same
PARAMETERS = 28  # of a model with two layers
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2}

Run = Callable[..., dict[str, Any]]


def numbers(found: dict[str, Any], name: str) -> list[float]:
    return [float.fromhex(step[name]) for step in found["steps"].values()]


def losses(*parts: list[dict[str, Any]]) -> list[float]:
    """Of each step, all ranks together."""
    return [
        sum(step) / len(step)
        for part in parts
        for step in zip(*(numbers(rank, "loss") for rank in part), strict=True)
    ]


# The ranks together are the one process.


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_policy_computes_what_one_process_computes(
    ranks: Any, run: Run, accumulation: int
) -> None:
    args = {
        "max_steps": 2,
        "save_strategy": "no",
        "gradient_accumulation_steps": accumulation,
        **EVALUATED,
        "eval_steps": 1,
        "logging_steps": 1,
    }
    (one,) = ranks.run("train", 1, runs=[run("one", "single", STILL, **args)])[0]
    policies: list[dict[str, Any]] = [
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"cpu_offload": True},
        {"shard_transformer_layers": False},
    ]
    runs = [
        run(
            f"two-{number}",
            "fsdp2",
            STILL,
            **args,
            per_device_train_batch_size=2,
            dispatch_batches=number % 2 == 0,
            fsdp2=policy,
        )
        for number, policy in enumerate(policies)
    ]
    two = ranks.run("train", 2, runs=runs)
    for found in zip(*two, strict=True):
        assert found[0]["log"] == found[1]["log"]
        assert [entry["step"] for entry in found[0]["log"]] == [1, 2]
        for mine, theirs in zip(found[0]["log"], one["log"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        for rank in found:
            assert numbers(rank, "norm") == pytest.approx(numbers(one, "norm"), rel=3e-6)
            assert numbers(rank, "rate") == numbers(one, "rate")
        together = [
            sorted(a + b)
            for step in zip(*(r["steps"].values() for r in found), strict=True)
            for a, b in zip(*(s["samples"] for s in step), strict=True)
        ]
        assert together == [
            sorted(batch) for step in one["steps"].values() for batch in step["samples"]
        ]


def test_one_rank_is_a_plain_trainer(ranks: Any, run: Run) -> None:
    args = {"max_steps": 3, "save_strategy": "no"}
    one, alone = ranks.run(
        "train", 1, runs=[run("one", "single", **args), run("alone", "fsdp2", **args)]
    )[0]
    assert alone["steps"] == one["steps"] and len(one["steps"]) == 3


def test_dtypes_tied_weights_and_placement(ranks: Any, run: Run) -> None:
    options = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "bfloat16"}
    for rank in ranks.run("anatomy", 2, run=run("run", "fsdp2", fsdp2=options)):
        assert rank["tied"] and rank["sharded"] == rank["parameters"] == 52
        assert rank["dtypes"] == {
            "parameters": ["float32"],
            "logits": "bfloat16",
            "gradients": ["float32"],
            "buffer": "bfloat16",
        }
        assert rank["exported"] == (53 if rank["rank"] == 0 else 0)
    for path in ("no.such.layers", ""):
        first, second = ranks.run(
            "anatomy", 2, run=run("run", "fsdp2", fsdp2={"transformer_layers_path": path})
        )
        assert first["roots"] == second["roots"] == 1
        assert (
            len(first["warnings"]) == 1
            and repr(path) in first["warnings"][0]
            and second["warnings"] == []
        )


def test_compiled_checkpointed_offloaded_and_in_groups(ranks: Any, run: Run) -> None:
    args = {"max_steps": 2, "save_strategy": "no"}
    variants: list[dict[str, Any]] = [
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"gradient_checkpointing": True},
        {"enable_activation_offloading": True},
        {"construct_model_on": "device"},
    ]
    groups = {
        "optimizer_groups": {"all": {"regex": ".", "config": {"weight_decay": 0.01}}},
        "model": SMALL,
    }
    runs = [
        run(f"run-{number}", "fsdp2", {"model": SMALL}, **args, **more)
        for number, more in enumerate([{}, *variants])
    ]
    for rank in ranks.run("train", 2, runs=[*runs, run("grouped", "fsdp2", groups, **args)]):
        plain, *others = [found["steps"] for found in rank]
        assert others == [plain] * (len(variants) + 1)


def test_without_a_seed_all_ranks_have_slices_of_one_model(ranks: Any, run: Run) -> None:
    first, second = ranks.run("anatomy", 2, run=run("run", "fsdp2", seed=-1))
    assert first["whole"] == second["whole"]


# Stop and go on.


def test_a_resumed_run_is_the_run_that_did_not_stop(resumed: Any) -> None:
    whole_epochs = {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 2}
    cases = [
        ("fsdp2", {"max_steps": 4, "dataloader_num_workers": 2, "dispatch_batches": False}, [2]),
        # Three steps an epoch: in the first one, and at its end.
        ("fsdp2", {**whole_epochs, "gradient_accumulation_steps": 3, **EVALUATED}, [2, 3]),
        (
            "fsdp2",
            {
                "max_steps": 3,
                "save_async": True,
                "mixed_precision": "bf16",
                **EVALUATED,
                "fsdp2": {
                    "reshard_after_forward": False,
                    "param_dtype": "bfloat16",
                    "cpu_offload": True,
                },
            },
            [2],
        ),
        ("fsdp2", {"max_steps": 3, "construct_model_on": "meta"}, [2]),
        ("fsdp2", {"max_steps": 3, "mixed_precision": "fp16"}, [2]),
    ]
    assert resumed(2, cases, model=SMALL) == 6
    # Slices of different sizes, some of them empty.
    cases = [("fsdp2", {"max_steps": 2, "gradient_accumulation_steps": 2}, [1])]
    assert resumed(3, cases, model=SMALL) == 1


@pytest.mark.parametrize("dispatch", [True, False])
def test_four_ranks_two_and_four_again_are_one_run(
    ranks: Any, run: Run, tmp_path: Path, tensors: Any, dispatch: bool
) -> None:
    args = {
        "max_steps": 3,
        "on_world_size_change": "continue",
        "dispatch_batches": dispatch,
        "num_train_epochs": 9,
    }
    sizes = {1: 4, 2: 2, 4: 1}

    def train(
        folder: str, world: int, step: int | None = None, source: str = ""
    ) -> list[dict[str, Any]]:
        more: dict[str, Any] = {"per_device_train_batch_size": sizes[world]}
        if step is not None:
            more["resume_from_checkpoint"] = str(tmp_path / source / f"checkpoint-{step}")
        kind = "fsdp2" if world > 1 else "single"
        given = {
            name: value
            for name, value in args.items()
            if kind == "fsdp2" or name != "dispatch_batches"
        }
        return [
            rank[0]
            for rank in ranks.run("train", world, runs=[run(folder, kind, STILL, **given, **more)])
        ]

    whole = train("whole", 1)
    four = train("four", 4)
    two = train("two", 2, 1, "four")
    again = train("again", 4, 2, "two")
    assert [rank["from"] for rank in (*two, *again)] == [1, 1, 2, 2, 2, 2]
    parts = [
        [{**rank, "steps": dict(list(rank["steps"].items())[:1])} for rank in part]
        for part in (four, two, again)
    ]
    assert losses(*parts) == pytest.approx(losses(whole), rel=3e-6) and len(losses(whole)) == 3
    one = train("one", 1, 2, "two")
    assert losses(one) == pytest.approx(losses(whole)[2:], rel=3e-6)

    # What a restore has made of a checkpoint is what is in it: weights and moments, whole and by
    # name.
    given = {**args, "per_device_train_batch_size": 2}
    at_four, copy = tmp_path / "four" / "checkpoint-1", tmp_path / "copy"
    ranks.run(
        "resave",
        2,
        source=str(at_four),
        target=str(copy),
        run=run("unused", "fsdp2", STILL, **given),
    )
    saved = tensors(at_four)
    assert len([name for name in saved if name.startswith("optimizer/")]) == 3 * PARAMETERS
    assert tensors(copy / "checkpoint-1") == saved


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_a_resumed_run_is_the_same_from_every_step(resumed: Any) -> None:
    seen = 0
    for workers in (0, 2):
        for accumulation, steps in ((1, 21), (3, 9)):
            for dispatch in (True, False):
                args = {
                    "num_train_epochs": 3,
                    "max_steps": -1,
                    "dataloader_num_workers": workers,
                    "dispatch_batches": dispatch,
                    "gradient_accumulation_steps": accumulation,
                    "per_device_train_batch_size": 2,
                }
                seen += resumed(2, [("fsdp2", args, list(range(1, steps)))])
    assert seen == 2 * 2 * (20 + 8)
    print(f"{seen} resumed runs on two ranks, all equal to the uninterrupted ones")


# What cannot be.


@pytest.mark.parametrize(
    ("args", "name", "reason", "instead"),
    [
        (
            {"fsdp2": {"reshard_after_forward": 3}},
            "fsdp2.reshard_after_forward",
            "does not divide the 2 ranks",
            "True or False",
        ),
        (
            {"fuse_optim_with_backward": True, "max_grad_norm": None},
            "fuse_optim_with_backward",
            "needs whole gradients",
            "Trainer",
        ),
        ({"fsdp2": {"param_dtype": "int8"}}, "fsdp2.param_dtype", "unknown", "bfloat16"),
        ({"optim": "adafactor"}, "optim", "cannot compute on slices", "adamw_torch"),
        ({"n_microbatches": 2}, "n_microbatches", "PipelineTrainer", "PipelineTrainer"),
    ],
)
def test_constraints(
    ranks: Any, args: dict[str, Any], name: str, reason: str, instead: str
) -> None:
    for found in ranks.run("constraint", 2, kind="fsdp2", args=args):
        assert found[0] == name and reason in found[1] and instead in found[2], found
