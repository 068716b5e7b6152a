"""`ckpt-train`: train a byte-level GPT that can be stopped at any moment and goes on bit for bit.

Exit codes: 0 good, 1 bad (a damaged or unfitting checkpoint), 2 usage, 3 not found, 4 storage,
130 interrupted. torch is imported only once the arguments are known to be good. Under `torchrun`
every process trains its share; what they have to say is said once.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptcore import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointWarning,
    NoUsableCheckpoint,
    StorageError,
    restore_candidates,
    scan_root,
)

from .arguments import (
    AccelTrainingArguments,
    DataNotFound,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    GPTArguments,
    InvalidArgument,
    PipelineTrainingArguments,
    TrainingArguments,
    load_configuration,
    native_name,
    print_configuration,
    resolve_arguments,
)
from .arguments.errors import whole
from .control import control
from .job import Job

if TYPE_CHECKING:
    from .parallel.environment import DistributedEnvironment
    from .trainer import Trainer

__all__ = ["Program", "main", "make_program"]

BAD, USAGE, NOT_FOUND, STORAGE, INTERRUPTED = 1, 2, 3, 4, 130

CLASSES: dict[str, type[TrainingArguments]] = {
    "single": TrainingArguments,
    "ddp": DDPTrainingArguments,
    "fsdp2": FSDP2TrainingArguments,
    "pipeline": PipelineTrainingArguments,
    "accel": AccelTrainingArguments,
}

# What a run without a configuration file does: a few minutes on a laptop.
DEMONSTRATION = {
    "max_steps": 300,
    "seed": 42,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "logging_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "max_eval_steps": 8,
    "save_steps": 50,
    "report_to": "tensorboard",
}

# What a demonstration has of these is not meant where the user says the other one.
INSTEAD = {
    "max_steps": "num_train_epochs",
    "warmup_steps": "warmup_ratio",
    "max_grad_norm": "fuse_optim_with_backward",
}

EPILOG = (
    "WORDS are a YAML file, or none, and any number of name=value, which win over the file: any "
    "training argument "
    "(also ddp.static_graph=true), model.n_layer, n_head, n_embd, block_size, dropout, "
    "data=[paths], max_data_bytes, "
    "trainer=auto|single|ddp|fsdp2|pipeline|accel and schedule=ScheduleGPipe. Without a file a "
    "small GPT is trained "
    "on the sources of Python's standard library. Run the same command again after an "
    "interruption or a crash and it "
    "goes on from the newest good checkpoint, bit for bit; on a finished run it does nothing. "
    "`ckpt-train control` lists the running jobs and tells one to save, stop or abort. "
    "Look at the result with "
    "`ckpt ls`, `ckpt inspect` and `ckpt verify`. On several processes: `torchrun "
    "--nproc-per-node 2 -m "
    "ckpt_trainers.main` and the same words."
)


@dataclass
class Program:
    """A configuration, resolved."""

    args: TrainingArguments
    kind: str
    model: GPTArguments = field(default_factory=GPTArguments)
    data: list[str] = field(default_factory=list)
    max_data_bytes: int | None = 4 * 2**20
    schedule: str = "ScheduleGPipe"
    control: bool = False  # take commands: see `ckpt-train control`

    def __str__(self) -> str:
        """All that differs from the defaults of the arguments, as YAML that is a configuration
        itself."""
        own = {
            "data": self.data,
            "max_data_bytes": self.max_data_bytes,
            "model": asdict(self.model),
            **({"control": True} if self.control else {}),
        }
        kind = {"schedule": self.schedule} if self.kind == "pipeline" else {}
        return print_configuration({"trainer": self.kind, **kind, **own, **self.args.changed()})


def make_program(words: tuple[str, ...], world_size: int = 1) -> Program:
    """What the words say. Raises InvalidArgument, DataNotFound, OSError."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise InvalidArgument(
            "WORDS", " ".join(files), "more than one file", "give one, and name=value words"
        )
    if files and not os.path.exists(files[0]):
        raise DataNotFound(
            f"{files[0]}: no such file (and no argument: these are name=value)", path=files[0]
        )
    given = load_configuration(files[0] if files else None, [word for word in words if "=" in word])
    kind = given.pop("trainer", "auto")
    if kind == "auto":
        kind = "single" if world_size == 1 else "ddp"
    if kind not in CLASSES:
        raise InvalidArgument("trainer", kind, "unknown", f"give one of auto, {', '.join(CLASSES)}")
    own = {
        name: given.pop(name)
        for name in ("data", "max_data_bytes", "schedule", "control")
        if name in given
    }
    if isinstance(own.get("data"), str):
        own["data"] = [own["data"]]
    _check_own(**own)
    model = _model(given.pop("model", None) or {})
    _check_sizes(given)
    if not files:
        said = {native_name(name) for name in given}
        other = {name for name, alternative in INSTEAD.items() if given.get(alternative)}
        given |= {name: value for name, value in DEMONSTRATION.items() if name not in said | other}
    if kind == "fsdp2" and isinstance(inner := given.get("fsdp2") or {}, dict):
        given["fsdp2"] = {"transformer_layers_path": "blocks", **inner}
    args = resolve_arguments(CLASSES[kind], given)
    if os.path.isfile(args.output_dir):
        raise InvalidArgument("output_dir", args.output_dir, "is a file", "name a folder")
    return Program(args, kind, model, **own)


def _check_own(
    data: Any = (), max_data_bytes: Any = None, schedule: Any = "", control: Any = False
) -> None:
    if not isinstance(control, bool):
        raise InvalidArgument("control", control, "neither True nor False", "give one of them")
    if not isinstance(data, list | tuple | None) or not all(
        isinstance(entry, str) for entry in data or ()
    ):
        raise InvalidArgument(
            "data", data, "no path, nor a list of paths", "name files, folders or globs"
        )
    if max_data_bytes is not None:
        whole("max_data_bytes", max_data_bytes, 1, instead="or null for all")
    if not isinstance(schedule, str):
        raise InvalidArgument("schedule", schedule, "not a name", "give ScheduleGPipe")


def _check_sizes(given: dict[str, Any]) -> None:
    """The sizes of the model have a prefix."""
    for name in asdict(GPTArguments()):
        if name in given:
            raise InvalidArgument(name, given[name], "unknown name", f"did you mean model.{name}?")


def _model(given: Any) -> GPTArguments:
    names = list(asdict(GPTArguments()))
    unknown = sorted(set(given) - set(names)) if isinstance(given, dict) else [str(given)]
    if unknown:
        raise InvalidArgument("model", unknown[0], "unknown", f"there are {', '.join(names)}")
    return GPTArguments(**given)


class WithControl(click.Command):
    """Training, unless the first word is `control`."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **how: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == ["control"]:
            return control.main(words[1:], **{**how, "prog_name": "ckpt-train control"})
        return super().main(words, *rest, **how)


@click.command(
    cls=WithControl,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("words", nargs=-1)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="CPU threads of torch. Results are reproducible at the same number only.  [default: "
    "torch's choice]",
)
@click.option("--show", is_flag=True, help="Print the resolved configuration, and train nothing.")
def main(words: tuple[str, ...], threads: int | None, show: bool) -> None:
    """Train a byte-level GPT; stopped or killed at any moment, the same command goes on bit for
    bit."""
    job = Job()
    level = logging.INFO if job.rank == 0 else logging.ERROR
    # What --show prints is a configuration, and nothing else.
    logging.basicConfig(
        level=level, format="%(message)s", stream=sys.stderr if show else sys.stdout, force=True
    )
    program: Program | None = None

    def say(text: str) -> None:
        if job.speaks(text):
            click.echo(text, err=True)

    def fail(error: Exception, code: int) -> NoReturn:
        say(f"ckpt-train: {' '.join(str(error).split())}")
        sys.exit(code)

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        say(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        warnings.simplefilter("always", CheckpointWarning)
        try:
            program = make_program(words, job.world_size)
            if show:
                click.echo(str(program), nl=False)
                return
            run(program, threads, job)
        except NoUsableCheckpoint as error:
            fail(error, BAD)
        except (CheckpointNotFound, DataNotFound) as error:
            fail(error, NOT_FOUND)
        except StorageError as error:
            fail(error, STORAGE)
        except CheckpointError as error:
            fail(error, BAD)
        except InvalidArgument as error:
            fail(error, USAGE)
        except OSError as error:  # a file that cannot be read or written
            fail(error, STORAGE)
        except KeyboardInterrupt:
            say(f"\ninterrupted; {_where_it_stands(program)}")
            sys.exit(INTERRUPTED)


def run(program: Program, threads: int | None, job: Job) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    environment = job.start(program.args)
    trainer = make_trainer(program, environment)
    if job.rank == 0:
        click.echo(str(program))
    result = trainer.train()
    if result.steps_run and job.rank == 0:
        ending = {None: "finished", "sigterm": "stopped by SIGTERM"}.get(
            result.stop_reason, "stopped"
        )
        loss = result.training_loss
        click.echo(
            f"{ending}: {result.steps_run} steps to step {result.global_step}, mean loss {loss:.4f}"
        )
    job.finish()


def make_trainer(program: Program, environment: DistributedEnvironment) -> Trainer:
    """The trainer of the kind that is wanted, with the byte-level GPT and its text."""
    from .callbacks.control import TrainerControlCallback
    from .callbacks.loss_record import LossRecord
    from .data.corpus import read_corpus, split_corpus
    from .model import ByteGPT, next_byte_loss
    from .trainer import Trainer

    args = program.args
    train, held_out = split_corpus(
        read_corpus(program.data, program.max_data_bytes), program.model.block_size
    )
    commanded = [TrainerControlCallback()] if program.control else []
    what: dict[str, Any] = {
        "model_init": lambda: ByteGPT(program.model),
        "train_dataset": train,
        "eval_dataset": held_out,
        "distributed_env": environment,
        "callbacks": [*Trainer.default_callbacks(), LossRecord(), *commanded],
        "compute_loss_func": None if args.label_smoothing_factor else next_byte_loss,
    }
    if program.kind == "ddp":
        from .parallel.ddp import DDPTrainer

        return DDPTrainer(args, **what)
    if program.kind == "fsdp2":
        from .parallel.fsdp2 import FSDP2Trainer

        return FSDP2Trainer(args, **what)
    if program.kind == "pipeline":
        import torch.distributed.pipelining as pipelining

        from .parallel.pipeline import PipelineTrainer
        from .parallel.splitting import ByteGPTSplitter

        schedule = getattr(pipelining, program.schedule, None)
        if schedule is None:
            raise InvalidArgument(
                "schedule", program.schedule, "torch has none of this name", "give ScheduleGPipe"
            )
        return PipelineTrainer(
            args, model_splitter=ByteGPTSplitter(), pipe_schedule_factory=schedule, **what
        )
    if program.kind == "accel":
        from accelerate import Accelerator

        from .parallel.accel import AccelTrainer

        accelerator = Accelerator(
            cpu=environment.device.type == "cpu",
            mixed_precision=args.mixed_precision or "no",
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )
        return AccelTrainer(args, accelerator=accelerator, **what)
    return Trainer(args, **what)


def _where_it_stands(program: Program | None) -> str:
    output_dir = "" if program is None else program.args.output_dir
    try:
        found = restore_candidates(scan_root(output_dir))
    except CheckpointError as error:
        return f"the checkpoints cannot be listed: {error}"
    newest = next((entry for entry in found if entry.status == "committed"), None)
    if newest is None:
        return f"there is no checkpoint in {output_dir} yet"
    return (
        f"the latest checkpoint is {newest.name} in {output_dir}; the same command goes on from it"
    )


if __name__ == "__main__":
    main(prog_name="ckpt-train")
