"""docs/arguments.md, made of the arguments: `python -m ckpt_trainers.arguments.reference`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .building import Arguments
from .hugging_face import NAMES
from .kinds import arguments_of
from .native import (
    AccelTrainingArguments,
    BaseTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    GPTArguments,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
)
from .optimizer_options import OPTIMIZERS, REFUSED_OPTIMIZERS

CLASSES: tuple[type[Arguments], ...] = (
    MinimalTrainingArguments,
    BaseTrainingArguments,
    TrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
    AccelTrainingArguments,
    GPTArguments,
)
_BEGINNING = """\
# Arguments of the trainers

This page is made of the arguments themselves, by `python -m ckpt_trainers.arguments.reference`.

Each class takes the arguments of those above it that it is derived from, and all names of Hugging
Face's `TrainingArguments` as well: `TrainingArguments(bf16=True, lr=1e-3)`. A
`transformers.TrainingArguments` object becomes one of these by `TrainingArguments.from_hf(theirs)`.
Names of Hugging Face's have its meaning; some defaults differ. What is wrong is raised at once, in
one `InvalidArgument` with a line for each argument.

On the command line `ckpt-train` takes the same names: `--max_steps 3` or `max_steps=3`, nested ones
with dots (`--ddp.static_graph true`), and `--config run.yaml`. `--print_config` prints the whole
configuration as YAML that `--config` reads back, `--show` what of it is not at its default.
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _BEGINNING
    for cls in CLASSES:
        parent = cls.__bases__[0].__name__
        heading = cls.__name__ if parent == "Arguments" else f"{cls.__name__} ({parent} and these)"
        yield f"## {heading}\n\n{' '.join((cls.__doc__ or '').split())}\n"
        yield from _table(("name", "what may be given", "default", "meaning"), _rows(cls))
    yield "## Hugging Face's other names of the same\n"
    kinds: dict[str, list[tuple[str, ...]]] = {"alias": [], "no effect": [], "refused": []}
    for row in NAMES.values():
        values = ", ".join(f"{given} is {meaning}" for given, meaning in row.values.items())
        what = f"`{row.target}`" + (f" ({values or row.reason})" if values or row.reason else "")
        cells = (what,) if row.kind == "alias" else (row.reason, row.instead)
        kinds[row.kind].append((f"`{row.name}`", *(cell for cell in cells if cell)))
    yield from _table(("name", "sets"), kinds["alias"])
    yield "## Hugging Face's names without effect\n\nA line of the log names those that were set.\n"
    yield from _table(("name", "why"), kinds["no effect"])
    yield (
        "## Hugging Face's names that are refused\n\n"
        "Only where the value is another than Hugging Face's default.\n"
    )
    yield from _table(("name", "why", "instead"), kinds["refused"])
    yield f"## Optimizers\n\n`optim` is one of {', '.join(OPTIMIZERS)}. Others are refused:\n"
    refused = [(f"`{n}`", why, use or "-") for n, (why, use) in REFUSED_OPTIMIZERS.items()]
    yield from _table(("optim", "why", "instead of an optimizer_factory"), refused)


def _rows(cls: type[Arguments], prefix: str = "") -> Iterator[tuple[str, ...]]:
    for name, argument in arguments_of(cls).items():
        if name not in cls.__annotations__:
            continue  # inherited
        if argument.group is not None:
            yield from _rows(argument.group, f"{prefix}{name}.")
        else:
            default: Any = argument.default
            yield f"`{prefix}{name}`", argument.allowed, f"`{default!r}`", argument.text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


if __name__ == "__main__":
    print(page(), end="")
