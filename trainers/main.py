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
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

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
    Arguments,
    BaseTrainingArguments,
    DataNotFound,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    GPTArguments,
    InvalidArgument,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
    native_name,
    print_configuration,
    raise_any,
)
from .arguments.configuration import CommandLine, parse_command_line, show_help
from .arguments.conflicts import KINDS
from .arguments.kinds import Count, Flag, Text, arg, arguments_of

if TYPE_CHECKING:
    from .parallel.environment import DistributedEnvironment
    from .trainer import Trainer

BAD, USAGE, NOT_FOUND, STORAGE, INTERRUPTED = 1, 2, 3, 4, 130

CLASSES: dict[str, type[TrainingArguments]] = {
    "single": TrainingArguments,
    "ddp": DDPTrainingArguments,
    "fsdp2": FSDP2TrainingArguments,
    "pipeline": PipelineTrainingArguments,
    "accel": AccelTrainingArguments,
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


@dataclass(kw_only=True)
class ProgramArguments(Arguments):
    """What is trained, and by which trainer."""

    trainer: Literal["auto", "single", "ddp", "fsdp2", "pipeline", "accel"] = arg(
        "auto", "auto: single, or ddp on several processes"
    )
    schedule: Text = arg("ScheduleGPipe", "of a pipeline, as torch names it")
    threads: Count | None = arg(
        None, "of torch on the CPU; results are the same at the same number only"
    )
    data: Annotated[list[Text], BeforeValidator(_as_list)] = arg(
        list, "files, folders or globs of text; none: the sources of Python's standard library"
    )
    max_data_bytes: Count | None = arg(4 * 2**20, "bytes of text that are used; None uses all")
    control: Flag = arg(False, "take commands: see `ckpt-train control`")
    model: GPTArguments = arg(GPTArguments, "size of the byte-level GPT")


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

OPTIONS: tuple[type[Arguments], ...] = (
    ProgramArguments,
    MinimalTrainingArguments,
    BaseTrainingArguments,
    *CLASSES.values(),
)


@dataclass(frozen=True)
class Program:
    """A configuration, resolved. kind: of trainer."""

    args: TrainingArguments
    kind: str
    own: ProgramArguments

    def to_yaml(self, everything: bool = False) -> str:
        """YAML that is a configuration itself: all, or what is not at its default."""
        own = {**self.own.as_dict(), "trainer": self.kind}
        if not everything:
            own = {k: v for k, v in own.items() if v or k in ("data", "max_data_bytes")}
            if self.kind != "pipeline":
                del own["schedule"]
        rest = self.args.as_dict() if everything else self.args.changed()
        return print_configuration({**own, **rest})


def make_program(said: CommandLine, world_size: int = 1) -> Program:
    """What a command line says. Raises one InvalidArgument for all that is wrong."""
    given, own = dict(said.values), dict[str, Any]()
    faults: list[InvalidArgument] = []
    for name in arguments_of(GPTArguments).keys() & given.keys():
        instead = f"did you mean model.{name}?"
        faults.append(InvalidArgument(name, given.pop(name), "unknown name", instead))
    for name in arguments_of(ProgramArguments).keys() & given.keys():
        value = given.pop(name)
        own |= {name: value} if value is not None or name != "model" else {}
    kind = own.get("trainer", "auto")
    if kind == "auto":
        kind = "single" if world_size == 1 else "ddp"
    if not said.has_file:
        names = {native_name(name) for name in given}
        names |= {name for name, alternative in INSTEAD.items() if given.get(alternative)}
        given |= {name: value for name, value in DEMONSTRATION.items() if name not in names}
    if kind == "fsdp2" and isinstance(inner := given.get("fsdp2") or {}, dict):
        given["fsdp2"] = {"transformer_layers_path": "blocks", **inner}
    made: list[Any] = []
    arguments = CLASSES.get(str(kind), TrainingArguments)
    for cls, values in ((ProgramArguments, own), (arguments, given)):
        try:
            made.append(cls(**values))
        except InvalidArgument as error:
            faults += error.faults
    raise_any(faults)
    settings, args = made
    if os.path.isfile(args.output_dir):
        raise InvalidArgument("output_dir", args.output_dir, "is a file", "name a folder")
    return Program(args, kind, settings)


class Job:
    """Rank and size are known at once, the process group (and torch) come with `start`."""

    def __init__(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world_size > 1 else 0
        self.environment: DistributedEnvironment | None = None
        self._first_here = self.world_size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        self._starting = False

    def start(self, args: Any) -> DistributedEnvironment:
        from .parallel.environment import DistributedEnvironment

        self._starting = True
        self.environment = DistributedEnvironment.from_environ(args)
        return self.environment

    def finish(self) -> None:
        """At a good end only: after a failure this could wait for ranks that never come."""
        if self.environment is not None:
            self.environment.close()

    def say(self, text: str) -> None:
        """On stderr, once for all ranks that have the same to say.

        Before the ranks know each other it is the first of each machine: all have the same
        arguments and the same files.
        """
        store = self.environment.store if self.environment is not None else None
        speaks = self._starting or self._first_here
        if store is not None:
            me, speaks = str(self.rank), True
            with suppress(RuntimeError):  # the store went with the process that hosts it
                speaks = store.compare_set(f"ckpt-train said: {text}", "", me) == me.encode()
        if speaks:
            print(text, file=sys.stderr)


OTHERS = {"control": ".control", "diloco": ".diloco.command"}  # imported when they are asked for


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    said = list(sys.argv[1:] if words is None else words)
    if said and said[0] in OTHERS:
        try:
            home = import_module(OTHERS[said[0]], __package__)
            lent = home.Training(build_model, main) if said[0] == "diloco" else None
            getattr(home, said[0]).main(said[1:], prog_name=f"ckpt-train {said[0]}", obj=lent)
        except SystemExit as left:
            return int(left.code or 0)
    job, program = Job(), None
    level = logging.INFO if job.rank == 0 else logging.ERROR
    # What --print_config and --show print is a configuration, and nothing else.
    stream = sys.stderr if {"--print_config", "--show"} & {*said} else sys.stdout
    logging.basicConfig(level=level, format="%(message)s", stream=stream, force=True)

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        job.say(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        warnings.simplefilter("always", CheckpointWarning)
        try:
            line = parse_command_line(said, OPTIONS)
            if "help" in line.flags:
                print(show_help(OPTIONS), end="")
            elif "version" in line.flags:
                print(f"ckpt-train {metadata.version('ckptcore')}")
            else:
                program = make_program(line, job.world_size)
                if line.flags:
                    print(program.to_yaml("print_config" in line.flags), end="")
                else:
                    run(program, job)
            return 0
        except InvalidArgument as error:
            for fault in error.faults:
                job.say(f"ckpt-train: {' '.join(str(fault).splitlines()[0].split())}")
            return USAGE
        except (CheckpointError, OSError) as error:
            job.say(f"ckpt-train: {' '.join(str(error).split())}")
            if isinstance(error, CheckpointNotFound | DataNotFound):
                return BAD if isinstance(error, NoUsableCheckpoint) else NOT_FOUND
            storage = isinstance(error, StorageError) or not isinstance(error, CheckpointError)
            return STORAGE if storage else BAD
        except KeyboardInterrupt:
            job.say(f"\ninterrupted; {_where_it_stands(program)}")
            return INTERRUPTED


def run(program: Program, job: Job) -> None:
    import torch

    if program.own.threads is not None:
        torch.set_num_threads(program.own.threads)
    trainer = make_trainer(program, job.start(program.args))
    if job.rank == 0:
        print(program.to_yaml())
    result = trainer.train()
    if result.steps_run and job.rank == 0:
        endings = {None: "finished", "sigterm": "stopped by SIGTERM"}
        ending = endings.get(result.stop_reason, "stopped")
        steps = f"{result.steps_run} steps to step {result.global_step}"
        print(f"{ending}: {steps}, mean loss {result.training_loss:.4f}")
    job.finish()


def build_model(words: tuple[str, ...]) -> Any:
    """The model that these words train, as it is before the first step."""
    from .build import seed_everything
    from .model import ByteGPT

    program = make_program(parse_command_line(words, OPTIONS))
    if program.args.seed >= 0:
        seed_everything(program.args.seed)
    return ByteGPT(program.own.model)


def make_trainer(program: Program, environment: DistributedEnvironment) -> Trainer:
    """The trainer of the kind that is wanted, with the byte-level GPT and its text."""
    from . import callbacks
    from .data.corpus import read_corpus, split_corpus
    from .model import ByteGPT, next_byte_loss

    args, own = program.args, program.own
    trainer: type[Trainer] = getattr(import_module(__package__ or ""), KINDS[program.kind])
    train, held_out = split_corpus(read_corpus(own.data, own.max_data_bytes), own.model.block_size)
    called = trainer.default_callbacks()
    if own.control:
        called.append(callbacks.TrainerControlCallback())
    if os.environ.get("DILOCO_SERVER"):  # as `ckpt-train diloco worker` sets it
        called.append(callbacks.DiLoCoCallback())
    what: dict[str, Any] = {
        "model_init": lambda: ByteGPT(own.model),
        "train_dataset": train,
        "eval_dataset": held_out,
        "distributed_env": environment,
        "callbacks": called,
        "compute_loss_func": None if args.label_smoothing_factor else next_byte_loss,
    }
    if program.kind == "pipeline":
        from torch.distributed import pipelining

        from .parallel.stages import ByteGPTSplitter

        schedule = getattr(pipelining, own.schedule, None)
        if schedule is None:
            reason = "torch has none of this name"
            raise InvalidArgument("schedule", own.schedule, reason, "give ScheduleGPipe")
        what |= {"model_splitter": ByteGPTSplitter(), "pipe_schedule_factory": schedule}
    if program.kind == "accel":
        from accelerate import Accelerator

        what["accelerator"] = Accelerator(
            cpu=environment.device.type == "cpu",
            mixed_precision=args.mixed_precision or "no",
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )
    return trainer(args, **what)


def _where_it_stands(program: Program | None) -> str:
    output_dir, found = "" if program is None else program.args.output_dir, []
    try:
        found = restore_candidates(scan_root(output_dir))
    except CheckpointNotFound:
        pass
    except CheckpointError as error:
        return f"the checkpoints cannot be listed: {error}"
    newest = next((entry for entry in found if entry.status == "committed"), None)
    if newest is None:
        return f"there is no checkpoint in {output_dir} yet"
    newest_is = f"the latest checkpoint is {newest.name} in {output_dir}"
    return f"{newest_is}; the same command goes on from it"


if __name__ == "__main__":
    sys.exit(main())
