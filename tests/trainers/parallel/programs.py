"""What the ranks of the tests in this folder do: train, and tell what happened, to the last bit."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from ckpt_trainers.arguments import GPTArguments, InvalidArgument
from ckpt_trainers.callbacks import (
    GradNormLogger,
    JsonLogger,
    ProfilerCallback,
    ResumableSummaryWriter,
    TBLogger,
    TextgenCallback,
    TrainerControlCallback,
)
from ckpt_trainers.model import ByteGPT, next_byte_loss
from ckpt_trainers.parallel.accel import AccelTrainer
from ckpt_trainers.parallel.ddp import DDPTrainer
from ckpt_trainers.parallel.environment import DistributedEnvironment
from ckpt_trainers.parallel.fsdp2 import FSDP2Trainer
from ckpt_trainers.parallel.pipeline import PipelineTrainer
from ckpt_trainers.parallel.stages import ByteGPTSplitter
from ckpt_trainers.trainer import Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset

from ckptcore import CheckpointManager

torch.set_num_threads(1)

SAMPLES, LENGTH = 27, 8


def warm_up() -> None:
    """Before the ranks are forked: what torch imports when it is first used."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
    import_module("torch._dynamo")
    import_module("ckptcore.manager")
    import_module("accelerate")
    for kind in (Trainer, DDPTrainer, FSDP2Trainer, PipelineTrainer, AccelTrainer):
        kind.arguments_class()
    model()


class Windows(Dataset[dict[str, Tensor]]):
    """The first byte of a sample is its number; noise of two generators is in others."""

    def __init__(self, samples: int = SAMPLES, noisy: bool = True, ignored: int = 0) -> None:
        self.samples, self.noisy, self.ignored = samples, noisy, ignored

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number >= self.samples:
            raise IndexError(number)
        text = torch.tensor([number, *((number * number + 7 * i) % 251 for i in range(LENGTH))])
        if self.noisy:
            text[1 + np.random.randint(LENGTH)] = random.randrange(256)
            text[1 + int(torch.randint(LENGTH, ()))] = 255
        labels = text[1:].clone()
        labels[: number % (self.ignored + 1)] = -100
        return {"input_ids": text[:-1], "labels": labels}


class Noted:
    """A callback that writes down each step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.samples: list[list[int]] = []

    def on_train_metrics(self, state: Any, trainer: Any, metrics: dict[str, Any], **_: Any) -> None:
        norm = metrics.get("grad_norm")
        self.steps[state.global_step] = {
            "samples": self.samples,
            "loss": float(metrics["loss"]).hex(),
            "norm": None if norm is None else float(norm).hex(),
            "rate": float(metrics["learning_rate"]).hex(),
            "streams": bits(
                [
                    repr(random.getstate()),
                    np.random.get_state()[1].tobytes(),
                    np.random.get_state()[2:],
                    torch.get_rng_state(),
                ]
            ),
            "weights": bits(weights_of(trainer)),
            "moments": bits(
                {
                    name: dict(trainer.optimizer.state.get(p, {}))
                    for name, p in weights_of(trainer).items()
                }
            ),
        }
        self.samples = []


def watched(cls: type[Any]) -> type[Any]:
    class Watched(cls):  # type: ignore[misc]
        noted: Noted

        def forward_backward(self, group: Any, items: float) -> Tensor:
            for batch, samples, _ in group:
                self.noted.samples.append(batch["input_ids"][:samples, 0].tolist())
            result: Tensor = super().forward_backward(group, items)
            return result

    return Watched


def weights_of(trainer: Any) -> dict[str, Tensor]:
    stages = getattr(trainer, "stages", None)
    named: dict[str, Tensor] = (
        dict(trainer.model.named_parameters()) if stages is None else stages.parameters()
    )
    return named


def bits(value: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves(value):
        digest.update(leaf)
    return digest.hexdigest()[:16]


def leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value).encode()


def model(**changes: Any) -> nn.Module:
    return ByteGPT(
        GPTArguments(
            **{
                "n_layer": 4,
                "n_head": 2,
                "n_embd": 8,
                "block_size": LENGTH,
                "dropout": 0.2,
                **changes,
            }
        )
    )


def trainer_of(kind: str, args: dict[str, Any], **what: Any) -> Any:
    """kind: "single", "ddp", "fsdp2", "accel", or a schedule of a pipeline."""
    given = {
        "seed": 5,
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.01,
        "logging_steps": 3,
        "save_steps": 1,
        "save_total_limit": None,
        "save_async": False,
        "max_steps": 9,
        **args,
    }
    changes = what.pop("model", {}) if isinstance(what.get("model"), dict) else {}
    dataset = what.pop("dataset", {})
    what = {
        "model_init": lambda: model(**changes),
        "train_dataset": Windows(**dataset),
        "callbacks": [],
        **what,
    }
    if given.get("eval_strategy", "no") != "no":
        what["eval_dataset"] = Windows(11, noisy=False)
    if kind != "accel":
        what.setdefault("distributed_env", environment())
    cls = {"single": Trainer, "ddp": DDPTrainer, "fsdp2": FSDP2Trainer, "accel": AccelTrainer}.get(
        kind, PipelineTrainer
    )
    if kind == "fsdp2":
        given["fsdp2"] = {"transformer_layers_path": "blocks", **given.get("fsdp2", {})}
    elif kind == "accel":
        what = {"accelerator": accelerator_of(**what.pop("accelerator", {})), **what}
    elif cls is PipelineTrainer:
        made_by = getattr(pipelining, kind)
        multi = issubclass(made_by, pipelining.schedules.PipelineScheduleMulti)
        shape = {
            "is_multistage": multi,
            "stages_per_rank": 1 + multi,
            "pp_stage_type": "v" if "ZBV" in kind else "loop",
        }
        given = {"n_microbatches": 2, **shape, **given}
        what = {"model_splitter": ByteGPTSplitter(), "pipe_schedule_factory": made_by, **what}
    if given.get("gradient_accumulation_steps", 1) > 1:
        what.setdefault("compute_loss_func", next_byte_loss)
    trainer = watched(cls)(given, **what)
    trainer.noted = trainer.callbacks.add(Noted())
    return trainer


def accelerator_of(**how: Any) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    (
        AcceleratorState._reset_state(),
        GradientState._reset_state(),
    )  # else the first one decides for all
    return accelerate.Accelerator(cpu=True, **how)


def environment() -> DistributedEnvironment:
    if not dist.is_initialized():
        return DistributedEnvironment()
    return DistributedEnvironment(dist.get_rank(), dist.get_rank(), dist.get_world_size())


def train(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs in turn. Each: kind, args, and what else the trainer takes."""
    found = []
    for run in runs:
        # A run that resumes is to find nothing of the one before it.
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        trainer = trainer_of(**run)
        result = trainer.train()
        found.append(
            {
                "steps": trainer.noted.steps,
                "from": result.resumed_from,
                "step": result.global_step,
                "log": [
                    {k: v for k, v in entry.items() if k in ("step", "loss", "eval_loss")}
                    for entry in result.log_history
                ],
            }
        )
    return found


def resave(source: str, target: str, run: dict[str, Any]) -> None:
    """Restore a checkpoint and save what that has made of the state, without a step between."""
    trainer = trainer_of(**run)
    with CheckpointManager(target) as into:
        into.load(trainer, step=source)
        into.save(trainer.state.global_step, trainer)


def warnings_of(logger: str) -> list[str]:
    """What is logged from now on."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return heard


def anatomy(run: dict[str, Any]) -> dict[str, Any]:
    """How FSDP2Trainer has laid out a model with a buffer of its own, and what its parts compute
    in."""
    heard = warnings_of("ckpt_trainers.parallel.fsdp2")

    def with_buffer() -> nn.Module:
        made = model()
        made.register_buffer("scale", torch.ones(1))
        return made

    trainer = trainer_of(**run, model_init=with_buffer)
    found: dict[str, Any] = {"rank": trainer.rank, "warnings": heard}
    parameters = list(trainer.model.parameters())
    trainer.wrapped.train()
    outputs = trainer.wrapped(**trainer.move_batch(trainer.loader.next_group(1)[0][0]))
    outputs.loss.backward()
    exported = trainer.export_state()
    return found | {
        "parameters": len(parameters),
        "sharded": sum(type(parameter).__name__ == "DTensor" for parameter in parameters),
        "roots": sum(isinstance(module, FSDPModule) for module in trainer.model.modules()),
        "tied": trainer.model.head.weight is trainer.model.embedding.weight,
        "exported": sum(value.numel() > 0 for value in exported.values()) - 1
        if trainer.rank == 0
        else sum(value.numel() > 0 for name, value in exported.items() if name != "scale"),
        "whole": bits(
            {name: parameter.full_tensor() for name, parameter in trainer.model.named_parameters()}
        ),
        "dtypes": {
            "parameters": sorted({str(p.dtype)[6:] for p in parameters}),
            "logits": str(outputs.logits.dtype)[6:],
            "gradients": sorted({str(p.grad.dtype)[6:] for p in parameters}),
            "buffer": str(trainer.model.scale.dtype)[6:],
        },
    }


def decided(args: dict[str, Any], **what: Any) -> dict[str, Any]:
    """What an AccelTrainer makes of arguments and an Accelerator."""
    heard = warnings_of("ckpt_trainers.parallel.accel")
    trainer = trainer_of("accel", args, **what)
    given = trainer.args
    return {
        "warnings": heard,
        "precision": given.mixed_precision,
        "accumulation": given.gradient_accumulation_steps,
        "batch": given.per_device_train_batch_size,
        "loader": type(trainer.loader).__name__,
        "wrapped": type(trainer.wrapped).__name__,
        "config": vars(trainer.accelerator.dataloader_config),
    }


class Renaming(ByteGPTSplitter):
    """A splitter that does something wrong: `how` says what."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "no loss":
            self.loss = None  # type: ignore[assignment]

    def __call__(self, whole: nn.Module, **of: Any) -> Any:
        modules, stages = super().__call__(whole, **of)
        if self.how == "unknown" and 0 in of["stage_indices"]:
            modules[0].extra = nn.Linear(1, 1, device="meta")
        if self.how == "lost" and 0 in of["stage_indices"]:
            del modules[0].position
        if self.how == "tied" and 0 not in of["stage_indices"]:
            del modules[
                0
            ].embedding  # and so the head has another name for what stage 0 has as well
        return modules, stages


def constraint(
    kind: str, args: dict[str, Any], splitter: str | None = None, **what: Any
) -> list[str]:
    """What is wrong with it: name, reason and replacement."""
    if splitter is not None:
        what["model_splitter"] = None if splitter == "none" else Renaming(splitter)
    if what.pop("instance", False):
        what |= {"model_init": None, "model": model()}
    if what.pop("loader", False):
        what["train_dataset"] = DataLoader(Windows(), batch_size=4)
    try:
        trainer_of(kind, args, **what)
    except InvalidArgument as error:
        return [error.name, error.reason, error.instead]
    return []


def pipeline(runs: list[dict[str, Any]], derived: bool = False) -> list[dict[str, Any]]:
    """How pipelines are built, and what they leave behind."""
    found = []
    for run in runs:
        built: list[str] = []

        def build(built: list[str] = built) -> nn.Module:
            made = model()
            if derived:
                made.register_buffer("table", torch.arange(3.0), persistent=False)
            built.append(str(made.norm.weight.device))
            return made

        def fused(stage: nn.Module) -> Any:
            def loss(outputs: Any, labels: Tensor, items: float) -> Tensor:
                assert stage.head.weight.shape == (256, 8)
                return next_byte_loss(outputs, labels, items)

            return loss

        what = {"fused_loss_factory": fused} if run["args"].pop("fused", False) else {}
        if derived:
            what["model_splitter"] = WithTable()
        torch.manual_seed(1)
        trainer = trainer_of(**run, model_init=build, **what)
        result = trainer.train()
        target = Path(trainer.args.output_dir) / "export"
        trainer.save_model(str(target))
        table = [module.table.tolist() for module in trainer.stages.modules.values() if derived]
        found.append(
            {
                "built": built,
                "from": result.resumed_from,
                "steps": trainer.noted.steps,
                "table": table,
                "shell": sorted(
                    {parameter.device.type for parameter in trainer.model.parameters()}
                ),
                "drop_last": trainer.args.dataloader_drop_last,
                "groups": [g["name"] for g in trainer.optimizer.param_groups],
            }
        )
    return found


class WithTable(ByteGPTSplitter):
    """Every stage has the model's buffer that no checkpoint holds."""

    def __call__(self, whole: nn.Module, **of: Any) -> Any:
        modules, stages = super().__call__(whole, **of)
        for module in modules:
            module.register_buffer("table", whole.table, persistent=False)
        return modules, stages


class Sends:
    """Rank 0 sends commands to its own job in a step; all note what comes of it."""

    def __init__(self, control: Any, at: dict[str, list[str]]) -> None:
        self.control, self.at, self.events = control, at, []

    def on_step_begin(self, state: Any, **_: Any) -> None:
        where = self.control.endpoint
        for command in self.at.get(str(state.global_step), []) if where is not None else ():
            connection = http.client.HTTPConnection(where.host, where.port, timeout=20)
            headers = {"Authorization": f"Bearer {where.token()}"}
            body = json.dumps({"command": command})
            connection.request("POST", f"/jobs/{where.job_id}/control", body, headers)
            assert connection.getresponse().status == 200

    def on_save(self, state: Any, **_: Any) -> None:
        self.events.append(["save", state.global_step])

    def on_evaluate(self, state: Any, **_: Any) -> None:
        self.events.append(["evaluate", state.global_step])


def controlled(kind: str, args: dict[str, Any], at: dict[str, list[str]]) -> dict[str, Any]:
    """A run that is sent commands over HTTP, as each rank saw it."""
    os.environ["TRAINERS_CONFIG_DIR"] = str(Path(args["output_dir"]) / "config")
    control = TrainerControlCallback(port=0)
    sends = Sends(control, at)
    trainer = trainer_of(kind, args, callbacks=[control, sends])
    result = trainer.train()
    return {
        "step": result.global_step,
        "reason": result.stop_reason,
        "by": trainer.state.stop_requested_by,
        "events": sends.events,
    }


class Dies:
    """The end of all ranks at the beginning of a step, as a kill is one."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_step_begin(self, state: Any, **_: Any) -> None:
        if state.global_step == self.at:
            dist.barrier()  # what the others have begun is done
            os._exit(0)


def recorded(
    kind: str,
    args: dict[str, Any],
    die_at: int | None = None,
    texts: dict[str, Any] | None = None,
    silent: bool = False,
) -> dict[str, Any]:
    """A run with the callbacks that write files, into its output_dir. texts: what TextgenCallback
    gets; silent: without any of them."""
    folder = Path(args["output_dir"])
    writer = ResumableSummaryWriter(str(folder / "tb"))
    what: dict[str, Any] = {"callbacks": [Dies(die_at)]}
    if not silent:
        what["callbacks"] += [
            *[GradNormLogger(), JsonLogger(), TBLogger(writer), writer],
            ProfilerCallback(2, 1, str(folder / "profiles"), with_stack=False),
        ]
    if texts is not None:
        talk = import_module("texts")
        what["processing_class"] = talk.Letters()
        if kind in ("single", "ddp", "fsdp2"):
            what |= {"processing_class": talk.tokenizer(), "model_init": talk.language_model}
            what["compute_loss_func"] = None
            args = {"fsdp2": {"transformer_layers_path": "transformer.h"}, **args}
            args = args if kind == "fsdp2" else {n: v for n, v in args.items() if n != "fsdp2"}
        if not silent:
            what["callbacks"].insert(0, TextgenCallback(writer, **texts))
    trainer = trainer_of(kind, {"logging_dir": str(folder / "logs"), **args}, **what)
    result = trainer.train()
    return {"from": result.resumed_from, "steps": trainer.noted.steps}


def continued(checkpoint: str, prompts: list[str], count: int, penalty: float) -> list[str]:
    """What the whole model of a checkpoint adds to prompts, by the letter of the definition."""
    whole = model().eval()
    with CheckpointManager(Path(checkpoint).parent) as checkpoints:
        checkpoints.load({"model": whole}, checkpoint)
    found = []
    for prompt in prompts:
        ids = list(prompt.encode())
        for _ in range(count):
            logits = whole(torch.tensor([ids])).logits[0, -1].tolist()
            for token in set(ids):
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            ids.append(max(range(len(logits)), key=logits.__getitem__))
            if ids[-1] == 255:
                break
        found.append(f"{prompt} [START] {bytes(ids[len(prompt) :]).hex()}")
    return found
