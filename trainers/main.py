"""`ckpt-train`: train a byte-level GPT that can be stopped at any moment and goes on bit for bit.

Exit codes: 0 good, 1 bad (a damaged or unfitting checkpoint), 2 usage, 3 not found, 4 storage,
130 interrupted. torch is imported only once the arguments are known to be good. Under `torchrun` every
process trains its share; what they have to say is said once.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ckptcore import CheckpointError, CheckpointNotFound, CheckpointWarning, NoUsableCheckpoint, StorageError, scan_root

from .arguments import DataNotFound, GPTArguments, InvalidArgument, TrainingArguments
from .job import Job

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["main"]

BAD, USAGE, NOT_FOUND, STORAGE, INTERRUPTED = 1, 2, 3, 4, 130

EPILOG = (
    "Run the same command again after an interruption or a crash and it goes on from the newest good "
    "checkpoint, bit for bit; on a finished run it does nothing. Look at the result with `ckpt ls`, "
    "`ckpt inspect` and `ckpt verify`. On several processes: `torchrun --nproc-per-node 2 -m "
    "ckpt_trainers.main` and the same options."
)


Command = TypeVar("Command", bound="Callable[..., Any] | click.Command")


class GroupedOption(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def option(group: str, *names: str, **settings: Any) -> Callable[[Command], Command]:
    settings.setdefault("show_default", True)
    return click.option(*names, cls=GroupedOption, group=group, **settings)


RUN, DATA, MODEL = "Run", "Data", "Model"
OPTIMIZER, CADENCE, CHECKPOINTS = "Optimizer and schedule", "Logging and evaluation", "Checkpoints"


@click.command(
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --output_dir is --output-dir
    },
)
@option(
    RUN,
    "--output-dir",
    required=True,
    type=click.Path(file_okay=False),
    help="Folder for checkpoints, losses.jsonl and TensorBoard logs.",
)
@option(RUN, "--max-steps", default=300, help="Optimizer steps in all; 0 or less goes by --num-train-epochs.")
@option(RUN, "--num-train-epochs", default=1.0, help="Epochs, where --max-steps does not say.")
@option(RUN, "--seed", default=42, help="Of weights, dropout and data order; -1 does not seed.")
@option(RUN, "--device", help="Such as cpu or cuda:0.  [default: cuda where there is one, else cpu]")
@option(
    RUN,
    "--threads",
    type=click.IntRange(min=1),
    help="CPU threads of torch. Results are reproducible at the same number only.  [default: torch's choice]",
)
@option(
    RUN,
    "--disable-tqdm",
    is_flag=True,
    default=None,
    show_default=False,
    help="Plain lines in the place of a progress bar.  [default: when not on a terminal]",
)
@option(
    DATA,
    "--data",
    multiple=True,
    metavar="PATH",
    help="A file, folder or glob to train on; may be repeated.  [default: Python's standard library sources]",
)
@option(DATA, "--max-data-bytes", default=4 * 2**20, help="Read at most so many bytes; 0 reads all.")
@option(DATA, "--per-device-train-batch-size", "--batch-size", default=16, help="Windows per batch.")
@option(DATA, "--gradient-accumulation-steps", default=1, help="Batches per optimizer step.")
@option(DATA, "--dataloader-drop-last", is_flag=True, help="Leave out the short last batch of an epoch.")
@option(MODEL, "--n-layer", default=GPTArguments.n_layer, help="Blocks.")
@option(MODEL, "--n-head", default=GPTArguments.n_head, help="Attention heads.")
@option(MODEL, "--n-embd", default=GPTArguments.n_embd, help="Width.")
@option(MODEL, "--block-size", default=GPTArguments.block_size, help="Bytes per window.")
@option(MODEL, "--dropout", default=GPTArguments.dropout, help="Dropout probability.")
@option(OPTIMIZER, "--learning-rate", "--lr", default=2e-3, help="Highest rate, reached after warm-up.")
@option(OPTIMIZER, "--warmup-steps", default=20, help="Linear ramp from 0; a cosine to 0 follows.")
@option(OPTIMIZER, "--weight-decay", default=0.01, help="Of AdamW.")
@option(OPTIMIZER, "--max-grad-norm", default=1.0, help="Clip gradients to this norm; 0 does not clip.")
@option(CADENCE, "--logging-steps", default=10, help="Steps between two entries of the log.")
@option(CADENCE, "--eval-steps", default=100, help="Steps between two validations; 0 never validates.")
@option(CADENCE, "--max-eval-steps", default=8, help="Batches per validation; -1 takes all.")
@option(
    CADENCE, "--report-to", type=click.Choice(["tensorboard", "none"]), default="tensorboard", help="Where curves go."
)
@option(
    CADENCE,
    "--logging-dir",
    type=click.Path(file_okay=False),
    help="TensorBoard folder.  [default: OUTPUT_DIR/runs/TIME_HOST, kept on resume]",
)
@option(CHECKPOINTS, "--save-steps", default=50, help="Steps between two checkpoints; the last step is always saved.")
@option(CHECKPOINTS, "--save-total-limit", default=2, help="Newest checkpoints to keep; 0 keeps all.")
@option(CHECKPOINTS, "--save-async", is_flag=True, help="Write checkpoints in the background, while training goes on.")
@option(
    CHECKPOINTS,
    "--enable-jit-checkpoint",
    is_flag=True,
    help="On SIGTERM, to any process of a job, save the step at hand and end well.",
)
@option(
    CHECKPOINTS,
    "--resume-from-checkpoint",
    "--resume",
    metavar="auto|no|PATH",
    default="auto",
    help="Go on from the newest good checkpoint, from none, or from this one.",
)
@option(
    CHECKPOINTS,
    "--overwrite-output-dir",
    is_flag=True,
    help="With --resume no: replace the checkpoints that are there.",
)
@option(
    CHECKPOINTS,
    "--on-world-size-change",
    type=click.Choice(["error", "continue"]),
    default="error",
    help="What to do with a checkpoint of another number of processes: refuse it, or go on from its data position "
    "with random streams that start anew.",
)
def main(threads: int | None, **given: Any) -> None:
    """Train a byte-level GPT on text, with checkpoints that it can go on from bit for bit."""
    output_dir, job = given["output_dir"], Job()
    level = logging.INFO if job.rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout, force=True)

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
            _train(arguments(given), threads, job)
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
            say(f"\ninterrupted; {_where_it_stands(output_dir)}")
            sys.exit(INTERRUPTED)


def arguments(given: dict[str, Any]) -> TrainingArguments:
    """The command's options as arguments of the trainer."""
    given = dict(given)
    model = GPTArguments(**{name: given.pop(name) for name in ("n_layer", "n_head", "n_embd", "block_size", "dropout")})
    given["eval_strategy"] = "steps" if given["eval_steps"] else "no"
    given["eval_steps"] = given["eval_steps"] or 1
    for name in ("max_data_bytes", "save_total_limit", "max_grad_norm"):
        given[name] = given[name] or None
    resume = given["resume_from_checkpoint"]
    given["resume_from_checkpoint"] = {"auto": True, "no": False}.get(resume, resume)
    return TrainingArguments(model=model, **given)


def _train(args: TrainingArguments, threads: int | None, job: Job) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    job.start()
    result = _trainer(args, job).train()
    if result.steps_run and job.rank == 0:
        ending = "stopped by SIGTERM" if result.stop_reason else "finished"
        click.echo(f"{ending}: {result.steps_run} steps to step {result.global_step}, loss {result.losses[-1]:.4f}")
    job.finish()


def _trainer(args: TrainingArguments, job: Job) -> Trainer:
    if job.world_size > 1:
        from .ddp import DDPTrainer

        return DDPTrainer(args)
    from .trainer import Trainer

    return Trainer(args)


def _where_it_stands(output_dir: str) -> str:
    try:
        committed = [entry for entry in scan_root(output_dir) if entry.status == "committed"]
    except CheckpointError as error:
        return f"the checkpoints cannot be listed: {error}"
    if not committed:
        return f"there is no checkpoint in {output_dir} yet"
    return f"the latest checkpoint is {committed[-1].name} in {output_dir}; the same command goes on from it"


if __name__ == "__main__":
    main(prog_name="ckpt-train")
