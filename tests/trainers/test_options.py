"""What the arguments for precision, memory and construction do."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument, TrainingArguments
from ckpt_trainers.build import free_memory
from ckpt_trainers.model import ByteGPT
from ckpt_trainers.parallel import environment
from ckpt_trainers.parallel.ddp import DDPTrainer
from ckpt_trainers.trainer import Trainer
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ckptcore import SharingPattern

SHORT = {"max_steps": 4, "save_strategy": "no", "logging_steps": 1}


def losses(tiny: Any, run: str, **options: Any) -> list[str]:
    notes = tiny.notes()
    tiny.trainer(run, notes, **{**SHORT, **options}).train()
    return [seen["loss"] for seen in notes.steps.values()]


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"fuse_optim_with_backward": True, "max_grad_norm": None}, True),
        ({"gradient_checkpointing": True}, True),
        ({"enable_activation_offloading": True}, True),
        ({"sdpa_backend": "math"}, False),
        ({"sdpa_backend": ["math", "flash"], "sdpa_set_priority": True}, False),
        ({"construct_model_on": "device"}, True),
        ({"construct_model_on": "meta"}, True),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, False),
        (
            {
                "dataloader_num_workers": 1,
                "dataloader_persistent_workers": True,
                "dataloader_prefetch_factor": 1,
            },
            True,
        ),
        ({"torch_empty_cache_steps": 1, "speed_metrics_start_step": 2}, True),
        ({"save_async": False, "eval_strategy": "steps", "eval_steps": 1}, True),
        ({"detect_anomaly": True}, True),
    ],
)
def test_what_is_no_part_of_the_computation_leaves_it_as_it_is(
    tiny: Any, options: dict[str, Any], exact: bool
) -> None:
    plain = losses(tiny, "plain", **({"max_grad_norm": None} if "max_grad_norm" in options else {}))
    others = losses(tiny, "other", **options)
    if exact:
        assert others == plain
    else:
        assert list(map(float.fromhex, others)) == pytest.approx(
            list(map(float.fromhex, plain)), rel=1e-4
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_computes_in_it_and_keeps_full_weights(tiny: Any, precision: str) -> None:
    seen: list[torch.dtype] = []

    def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.append(output.dtype)

    trainer = tiny.trainer("mixed", **SHORT, mixed_precision=precision)
    trainer.model.head.register_forward_hook(look)
    result = trainer.train()
    assert set(seen) == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert trainer.model.head.weight.dtype == torch.float32 and (trainer.scaler is not None) == (
        precision == "fp16"
    )
    full = tiny.trainer("full", **SHORT).train()
    assert result.training_loss == pytest.approx(full.training_loss, rel=0.02)
    assert result.training_loss != full.training_loss


def test_a_step_that_the_scaler_leaves_out_does_not_move_the_schedule(tiny: Any) -> None:
    """And its state goes on where it was."""
    trainer = tiny.trainer(
        **{**SHORT, "save_strategy": "steps"},
        save_steps=3,
        mixed_precision="fp16",
        notes=(notes := tiny.notes()),
    )
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)

    def stop(name: str, control: Any, state: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == 3 and name == "on_step_end"

    notes.do = stop
    trainer.train()
    assert trainer.scheduler.last_epoch == 0 and trainer.scaler.get_scale() == 2.0**57
    assert len({seen["weights"] for seen in notes.steps.values()}) == 1
    resumed = tiny.trainer(**SHORT, mixed_precision="fp16")
    assert resumed.scaler.get_scale() == 2.0**16
    resumed.train()
    assert resumed.scaler.get_scale() == 2.0**56 and resumed.scheduler.last_epoch == 0


def test_a_fused_optimizer_has_the_same_checkpoints(tiny: Any) -> None:
    options = {"max_grad_norm": None, "max_steps": 6, "save_steps": 3}
    tiny.trainer("plain", **options).train()
    tiny.trainer("fused", fuse_optim_with_backward=True, **options).train()
    for step in (3, 6):
        assert tiny.differences("plain", "fused", step) == {}
    path = str(tiny.root("plain") / "checkpoint-3")
    tiny.trainer(
        "resumed", fuse_optim_with_backward=True, resume_from_checkpoint=path, **options
    ).train()
    assert tiny.differences("plain", "resumed", 6) == {}


def test_a_fused_optimizer_steps_once_in_a_second_run_too(tiny: Any) -> None:
    options = {"max_grad_norm": None, "max_steps": 3, "save_steps": 3}
    trainer = tiny.trainer("twice", fuse_optim_with_backward=True, **options)
    trainer.train()
    (tiny.root("twice") / "checkpoint-3").rename(tiny.root("twice") / "first")
    trainer.train()
    counts = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert counts == {3}


def test_a_model_without_values_is_filled_from_the_checkpoint(tiny: Any) -> None:
    made: list[str] = []

    def init() -> nn.Module:
        model = ByteGPT(tiny.gpt)
        made.append(model.head.weight.device.type)
        return model

    options = {"max_steps": 6, "save_steps": 3, "construct_model_on": "meta", "model_init": init}
    stopped = tiny.notes()
    stopped.die_at = 4
    with pytest.raises(tiny.died):
        tiny.trainer("meta", stopped, **options).train()
    trainer = tiny.trainer("meta", **options)
    assert made == ["cpu", "meta"] and trainer.model.head.weight is trainer.model.embedding.weight
    assert trainer.evaluate() != {}  # reads the weights first
    trainer = tiny.trainer("meta", **options)
    trainer.train()
    tiny.trainer("plain", max_steps=6, save_steps=3).train()
    assert tiny.differences("plain", "meta", 6) == {}


def test_the_default_dtype_holds_while_the_model_is_built(tiny: Any) -> None:
    trainer = tiny.trainer(**SHORT, default_dtype="bfloat16")
    assert (
        trainer.model.head.weight.dtype == torch.bfloat16
        and torch.get_default_dtype() == torch.float32
    )
    trainer.train()


def test_label_smoothing_is_its_formula(tiny: Any) -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(1)))

        def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            return {"logits": self.logits.expand(*input_ids.shape, 256)}

    trainer = tiny.trainer(
        **SHORT, model_init=Logits, compute_loss_func=None, label_smoothing_factor=0.1
    )
    log_p = torch.log_softmax(trainer.model.logits.detach(), 0)
    labels = torch.cat([tiny.windows(3, noisy=False)[i]["labels"] for i in range(3)])
    expected = (0.9 * -log_p[labels] + 0.1 * -log_p.mean()).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_that_shares_weights_with_the_model(tiny: Any) -> None:
    class Hidden(ByteGPT):
        def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:  # type: ignore[override]
            head, self.head = self.head, nn.Identity()
            hidden = super().forward(input_ids).logits
            self.head = head
            return hidden

    def fused(model: nn.Module) -> Any:
        def loss(outputs: torch.Tensor, labels: torch.Tensor, items: float) -> torch.Tensor:
            logits = model.head(outputs).flatten(0, 1)
            return (
                torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / items
            )

        return loss

    notes = tiny.notes()
    model = {
        "model_init": lambda: Hidden(tiny.gpt),
        "compute_loss_func": None,
        "fused_loss_factory": fused,
    }
    tiny.trainer("fused", notes, **SHORT, **model, gradient_accumulation_steps=2).train()
    plain = losses(tiny, "plain", gradient_accumulation_steps=2)
    assert [seen["loss"] for seen in notes.steps.values()] == plain


def test_cublas_is_told_before_anything_touches_a_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, choosing the device initialises CUDA, which reads the setting."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    begun: list[str | None] = []

    def choose_device(*_: Any) -> torch.device:
        begun.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return torch.device("cpu")

    monkeypatch.setattr(environment, "choose_device", choose_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(begun))
    args = TrainingArguments(full_determinism=True, seed=1)
    environment.DistributedEnvironment.from_environ(args)
    environment.choose_workspace(args)  # as a trainer does, once more
    assert begun == [":4096:8"] and "was initialised before" not in caplog.text
    # Somebody else was first: that is said.
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    environment.choose_workspace(args)
    assert "CUDA was initialised before CUBLAS_WORKSPACE_CONFIG could be set" in caplog.text


class Card:
    """A GPU of 100 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: int, peak: int, reserved: int):
        self.allocated, self.reserved, self.held, self.said = allocated, reserved, 0, list[str]()
        for name, value in {
            "get_device_properties": lambda _: SimpleNamespace(total_memory=100),
            "memory_allocated": lambda _: self.allocated,
            "max_memory_allocated": lambda _: peak,
            "memory_reserved": lambda _: self.reserved,
            "empty_cache": self.empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(gc, "collect", self.collect)

    def empty(self) -> None:
        self.said.append("empty")
        self.reserved = self.allocated + self.held

    def collect(self) -> None:
        self.said.append("collect")
        self.held = 0


@pytest.mark.parametrize(
    ("allocated", "peak", "reserved", "held", "said"),
    [
        (40, 45, 95, 0, []),  # below the threshold
        (70, 90, 95, 0, []),  # a full card: what it has reserved, the next step needs
        (60, 65, 95, 0, ["empty"]),
        (60, 65, 95, 30, ["empty", "collect", "empty"]),
    ],
)
def test_the_cache_is_emptied_when_that_gives_something_back(
    monkeypatch: pytest.MonkeyPatch,
    allocated: int,
    peak: int,
    reserved: int,
    held: int,
    said: list[str],
) -> None:
    card = Card(monkeypatch, allocated, peak, reserved)
    card.held = held
    args = TrainingArguments(gc_threshold=0.5, torch_empty_cache_steps=None)
    for step in range(1, 4):
        free_memory(args, torch.device("cuda"), step)
    assert card.said == said


def test_full_determinism_is_switched_on(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        tiny.trainer(**SHORT, full_determinism=True, float32_matmul_precision="high").train()
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("name", "recipe"), [("fp8_recipe", "rowwise"), ("qat_recipe", "int4-weight-only")]
)
def test_low_precision_without_its_package_or_device_is_a_clear_error(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str, recipe: str
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # installed or not
    with pytest.raises(InvalidArgument, match=f"{name}='{recipe}'.*(torchao|CUDA)"):
        tiny.trainer(**{name: recipe})


def test_without_a_seed_the_order_of_the_data_is_kept_all_the_same(tiny: Any) -> None:
    stopped, resumed = tiny.notes(), tiny.notes()
    stopped.die_at = 4
    with pytest.raises(tiny.died):
        tiny.trainer("run", stopped, seed=-1, save_steps=4).train()
    tiny.trainer("run", resumed, seed=-1, save_steps=4).train()
    steps = {**stopped.steps, **resumed.steps}
    assert sorted(
        i for step in range(1, 7) for batch in steps[step]["samples"] for i in batch
    ) == list(range(11))


def test_the_order_of_the_data_may_have_a_seed_of_its_own(tiny: Any) -> None:
    notes = {seed: tiny.notes() for seed in (None, 8, 9)}
    for seed, seen in notes.items():
        tiny.trainer(f"seed-{seed}", seen, **SHORT, data_seed=seed)
        tiny.trainer(f"seed-{seed}", seen, **SHORT, data_seed=seed).train()
    orders = [[step["samples"] for step in seen.steps.values()] for seen in notes.values()]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_looking_at_data_leaves_training_alone(tiny: Any) -> None:
    trainer = tiny.trainer(**SHORT, notes=(notes := tiny.notes()), dataloader_num_workers=1)
    trainer.wrapped.train()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    metrics = trainer.evaluate()
    by_batches = {trainer.args.max_eval_steps: metrics["eval_loss"]}
    assert list(trainer.predict(tiny.windows(3, noisy=False)).items()) == [
        ("test_loss", metrics["eval_loss"])
    ]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2] and trainer.wrapped.training
    assert [name for name, _ in notes.events] == [
        *("on_init_end", "on_prediction_step", "on_prediction_step", "on_evaluate"),
        *("on_prediction_step", "on_prediction_step", "on_predict"),
    ]
    assert by_batches[-1] > 0 and tiny.trainer(**SHORT, max_eval_steps=1).evaluate() != metrics
    stream = torch.utils.data.DataLoader(tiny.windows(3, noisy=False), batch_size=2)
    assert trainer.evaluate(stream) == metrics and len(stream) == 2


def test_data_of_other_kinds_can_be_trained_on(tiny: Any) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = tiny.windows(11, noisy=False)
            return iter([data[i] for i in range(11)])

    for kind, dataset in (
        ("stream", Stream()),
        ("loader", torch.utils.data.DataLoader(tiny.windows(11, noisy=False), batch_size=2)),
    ):
        whole, stopped, resumed = tiny.notes(), tiny.notes(), tiny.notes()
        options = {
            "train_dataset": dataset,
            "max_steps": 9,
            "epoch_train_steps": 6,
            "save_steps": 5,
        }
        tiny.trainer(f"{kind}-whole", whole, **options).train()
        stopped.die_at = 5
        with pytest.raises(tiny.died):
            tiny.trainer(f"{kind}-stopped", stopped, **options).train()
        tiny.trainer(f"{kind}-stopped", resumed, **options).train()
        assert {**stopped.steps, **resumed.steps} == whole.steps
        assert whole.steps[5]["samples"] == [[8, 9]], kind


def test_a_saved_model_has_each_weight_once_and_loads(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tokens:
        def save_pretrained(self, path: str) -> None:
            (Path(path) / "tokens.json").write_text("{}")

    trainer = Trainer(
        tiny.arguments(save_safetensors=False),
        model=ByteGPT(tiny.gpt),
        callbacks=[],
        processing_class=Tokens(),
    )
    assert "save_safetensors=False has no effect" in caplog.text
    trainer.save_model(str(tmp_path / "model"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "model.safetensors",
        "tokens.json",
    ]
    state = load_file(tmp_path / "model" / "model.safetensors")
    assert "head.weight" not in state
    other = ByteGPT(tiny.gpt)
    missing = other.load_state_dict(state, strict=False)
    assert (missing.unexpected_keys, missing.missing_keys) == ([], ["head.weight"])
    assert all(
        torch.equal(a, b)
        for a, b in zip(other.parameters(), trainer.model.parameters(), strict=True)
    )


def test_groups_and_optimizers_of_ones_own(tiny: Any) -> None:
    groups = {"plain": {"regex": "norm|bias", "config": {"weight_decay": 0.0}}}
    trainer = tiny.trainer(
        optimizer_groups=groups, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}), **SHORT
    )
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert [
        group["weight_decay"]
        for group in trainer.optimizer.param_groups
        if group.get("name") == "plain"
    ] == [0.0]
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(
        list(trainer.model.parameters())
    )
    trainer.train()


# Case B17.
def test_b17_no_step_is_logged_twice(tiny: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {
        "max_steps": 20,
        "logging_steps": 1,
        "save_steps": 10,
        "report_to": ["tensorboard", "json"],
    }
    stopped = tiny.notes()
    stopped.die_at = 15
    with pytest.raises(tiny.died):
        tiny.trainer(notes=stopped, **options).train()
    result = tiny.trainer(**options).train()
    assert result.resumed_from == 10
    steps = [entry["step"] for entry in result.log_history]
    assert steps == list(range(1, 21))
    (folder,) = (tiny.root() / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train-loss")] == steps
    assert [event.value for event in events.Scalars("train-loss")] == pytest.approx(
        [e["loss"] for e in result.log_history]
    )
    from ckpt_trainers.callbacks import read_json_array

    records = [
        record for record in read_json_array(folder / "trainer_logs.json") if "loss" in record
    ]
    assert [record["global_step"] for record in records] == steps


class Looks:
    """Keeps what a callback finds in `args`."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def note(self, event: str, args: Any) -> None:
        names = ("device", "logging_dir", "run_name", "world_size", "local_rank", "process_index")
        self.seen[event] = {name: getattr(args, name) for name in names}
        self.seen["json"] = json.loads(args.to_json_string())

    def on_init_end(self, args: Any, **kwargs: Any) -> None:
        self.note("init", args)

    def on_step_end(self, args: Any, **kwargs: Any) -> None:
        self.note("step", args)


def test_callbacks_find_in_arguments_what_is_in_use(tiny: Any, tmp_path: Path) -> None:
    looks = Looks()
    trainer = tiny.trainer("run", looks, **SHORT)
    trainer.train()
    root, place = trainer.args.output_dir, trainer.logging_dir
    common = {"device": torch.device("cpu"), "run_name": root, "world_size": 1, "local_rank": 0}
    assert looks.seen["init"] == {**common, "logging_dir": None, "process_index": 0}
    assert looks.seen["step"] == {**common, "logging_dir": place, "process_index": 0}
    assert place.startswith(root) and looks.seen["json"]["logging_dir"] == place
    # What was left open stays so, for the checkpoints.
    assert (trainer.args.device, trainer.args.logging_dir, trainer.args.run_name) == (None,) * 3


def test_a_callback_of_transformers_reads_the_arguments(tiny: Any, tmp_path: Path) -> None:
    integrations = pytest.importorskip("transformers.integrations")
    trainer = tiny.trainer("run", integrations.TensorBoardCallback(), run_name="mine", **SHORT)
    trainer.train()
    assert any(Path(trainer.args.output_dir).rglob("events.out.tfevents.*"))


def test_what_debug_flags_ask_for_is_seen_without_a_level(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("ckpt_trainers").setLevel(logging.ERROR)
    try:
        args = tiny.arguments("run", debug_optimizer_groups=True, log_level="passive", **SHORT)
        data = [{"input_ids": torch.zeros(8, dtype=torch.long)}] * 4
        Trainer(args, model_init=lambda: torch.nn.Linear(1, 1), train_dataset=data)
    finally:
        logging.getLogger("ckpt_trainers").setLevel(logging.NOTSET)
    assert "optimizer group default: " in caplog.text


def test_options_without_a_class_that_has_them_and_those_of_a_factory(tiny: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"optim_args.nesterov=True: AdamW has no such"):
        tiny.trainer("run", optim_args="nesterov=True", **SHORT)
    made = tiny.trainer(
        "run", optim_args="nesterov=True", optimizer_factory=torch.optim.SGD, **SHORT
    )
    assert type(made.optimizer) is torch.optim.SGD


def test_ranks_that_differ_between_averages_keep_their_scaler_and_schedule_too(tiny: Any) -> None:
    """Each leaves out steps of its own, so what rank 0 has is not what the others have."""
    trainer = DDPTrainer(
        tiny.arguments(mixed_precision="fp16"),
        model_init=lambda: ByteGPT(tiny.gpt),
        train_dataset=tiny.windows(11),
        callbacks=[],
    )
    shared = {part.key: part.sharing_pattern for part in trainer.get_state_components()}
    assert shared["scaler"] == shared["scheduler"] == SharingPattern.GLOBAL
    trainer.averager = PeriodicModelAverager.__new__(PeriodicModelAverager)
    trainer.local_sgd = None
    own = {part.key: part.sharing_pattern for part in trainer.get_state_components()}
    assert {key for key in own if own[key] == SharingPattern.PER_RANK} == {
        *("model", "optimizer", "scaler", "scheduler"),
        *("rng", "callbacks_per_rank"),
    }
    assert own.keys() - shared.keys() == {"averager"}
