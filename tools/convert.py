"""`ckpt import` and `ckpt export`: from and to what other libraries write. Needs torch. What was
left out is listed, and is no error."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from time import perf_counter
from typing import Any

import click

from ckptcore import CheckpointWarning, export_checkpoint, import_checkpoint

from . import facts
from .cli import LOCATION, Decorator, Pair, choice, command, flag, number, repeated, storage_option
from .failures import not_found, writing
from .lookup import Options, Subject, on_checkpoint
from .render import Block, Line, Report, count, size, table

FORMATS = ["auto", "dcp", "hf", "hf-trainer", "accelerate", "lightning", "safetensors", "torch"]
FORMATS += ["legacy", "deepspeed-universal"]
TARGETS = {"hf": "A Hugging Face folder (default)", "torch": "a file of torch.save"}
TARGETS |= {"dcp": "a folder of torch.distributed.checkpoint."}


def shared(target: str, model: str) -> Decorator:
    """The options of both. target: that is there in the way; model: what it says."""

    def made(function: Any) -> Any:
        flag("--dry-run", "Only say what would be done.")(function)
        storage_option("--target-option", f"As --storage-option, for {target} alone.")(function)
        what = "Names of tensors that begin with OLD begin with NEW."
        repeated("--map", "OLD=NEW", what, "maps", type=Pair())(function)
        what = f"Makes the model, without memory, to see {model}."
        return click.option("--model", metavar="MODULE:FUNCTION", help=what)(function)

    return made


def ended(
    document: dict[str, Any], start: float, head: str, columns: str, rows: str, done: str
) -> Report:
    """What both say. head, done: the first and the last line; columns, rows: of the table."""
    document["seconds"] = round(perf_counter() - start, 6)
    what = f"{count(document['verified'], 'tensor')} read back and compared"
    last = Line(f"{done}, {what}", "green")
    if document["dry_run"]:
        last = Line("nothing was written: leave --dry-run out to write it", "yellow")
    blocks: list[Block] = [Line(head), *[table("", columns, document[rows])] * bool(document[rows])]
    blocks += [Line(f"checked: {text}", "dim") for text in document.get("checks", ())]
    blocks += [Line(f"left out: {text}", "yellow") for text in document["left"]]
    return Report(document, [*blocks, last])


@command(
    "ckpt import outputs/checkpoint-500 runs/a --dry-run",
    "ckpt import s3://bucket/llama runs/base --step 0 --map model.=",
)
@click.argument("source", type=LOCATION)
@click.argument("root", type=LOCATION)
@choice("--format", FORMATS, "What SOURCE is, by default as it is recognised.", "kind")
@number("--step", 0, "By default what SOURCE says, else 0.")
@repeated(
    "--component",
    "KEY=NEW",
    "Another key for a component; KEY= leaves it out.",
    "components",
    type=Pair(),
)
@flag("--overwrite", "Replace a checkpoint that is there.")
@shared("ROOT", "which parameters an optimizer numbers")
def import_command(
    source: str,
    root: str,
    kind: str,
    components: tuple[Any, ...],
    maps: tuple[Any, ...],
    target_option: tuple[Any, ...],
    options: Options,
    **how: Any,
) -> Report:
    """Make a checkpoint in ROOT of what another library wrote in SOURCE: a Hugging Face folder, a
    checkpoint of its Trainer, what Accelerate or Lightning saved, a folder of
    torch.distributed.checkpoint, a safetensors file, a file of torch.save or a folder of them, a
    universal folder of DeepSpeed. What is remote is downloaded to a temporary folder.

    An optimizer that numbers its parameters is stored by their names, where --model, config.json
    and transformers, or the file itself, say them. No pickle is ever executed; what is not
    understood is listed. When the last name of ROOT is checkpoint-<number>, that is the folder.
    """
    if not source or not root:
        raise not_found("the path is empty", path="")

    def rename(name: str) -> str:
        old, new = next(((o, n) for o, n in maps if name.startswith(o)), ("", ""))
        return new + name[len(old) :]

    start = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        found = import_checkpoint(
            source,
            root,
            format=kind,
            components=dict(components),
            rename=rename if maps else None,
            source_options=options,
            storage_options=dict(target_option) or options,
            **how,
        )
    document = facts.fields(found, "source format step left checks verified") | {
        "components": [asdict(component) for component in found.components],
        "checkpoint": None if found.info is None else facts.head(found.info),
        "dry_run": found.info is None,
    }
    head = f"{found.source}  is of the format {found.format}, step {found.step}"
    columns = "component=key, pattern, tensors>, size>=size_bytes, from=origin"
    done = f"{found.info and found.info.url}  imported, no pickle was executed"
    return ended(document, start, head, columns, "components", done)


@command(
    "ckpt export runs/a hf-model --dtype bf16",
    "ckpt export runs/a/checkpoint-500 state.pt --to torch",
)
@on_checkpoint
@click.argument("folder", type=LOCATION)
@choice("--to", [*TARGETS], ", or ".join(TARGETS.values()), "kind")
@click.option("--component", metavar="KEY", help="By default model for hf, else all of them.")
@click.option("--dtype", metavar="DTYPE", help="Of floating point tensors: bf16, fp16, fp32.")
@repeated("--keys", "PATTERN", "Which tensors.")
@click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", help="Of a safetensors file (default 5GB)."
)
@click.option("--quantize", metavar="RECIPE", help="Linear layers in few bits, as torchao does it.")
@shared("FOLDER", "which layers are linear")
@repeated("--linear", "PATTERN", "Or the names of weights of linear layers")
def export_command(
    subject: Subject,
    folder: str,
    kind: str,
    maps: tuple[Any, ...],
    target_option: tuple[Any, ...],
    **how: Any,
) -> Report:
    """Write the checkpoint PATH as another library reads it, in whatever layout it was saved: what
    was sharded is put together. FOLDER, local or a URL, must not be there yet, or be empty; with
    --to torch it is the file."""
    if not folder:
        raise not_found("the path to write to is empty", path="")
    start = perf_counter()
    with warnings.catch_warnings(), writing():
        warnings.simplefilter("ignore")  # torch's, of a save without a process group
        found = export_checkpoint(
            subject.typed,
            folder,
            format=kind,
            rename=dict(maps),
            storage_options=subject.options,
            target_options=dict(target_option) or None,
            **how,
        )
    files = [{"name": name, "size_bytes": nbytes} for name, nbytes in found.files.items()]
    document = asdict(found) | {"source": subject.url, "files": files, "dry_run": how["dry_run"]}
    what = f"{count(found.tensors, 'tensor')} of {', '.join(found.components)}"
    cast = f", {found.cast} in another dtype" if found.cast else ""
    cast += f", {found.quantized} quantised" if found.quantized else ""
    head = f"{subject.url}  {what}, {size(found.size_bytes)}{cast}"
    columns, done = "file=name, size>=size_bytes", f"{found.folder}  written"
    return ended(document, start, head, columns, "files", done)
