"""Optimizers and schedules by name, and their options, judged without torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from .errors import InvalidArgument
from .hugging_face import INSIDE

# lr_scheduler_type -> its own lr_scheduler_kwargs with their defaults.
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 1},
    "constant": {},
    "constant_with_warmup": {},
    "polynomial": {"power": 1.0},
}
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "polynomial"
]

ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit")
OPTIMIZERS = (*ADAM, "adafactor", "sgd", "adagrad", "rmsprop")

# Name -> (reason, what to use besides optimizer_factory).
REFUSED_OPTIMIZERS = {
    name.partition("=")[2]: (row.reason, row.instead)
    for name, row in INSIDE.items()
    if name.startswith("optim=")
}

_OWN_FIELDS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_OWN_FIELDS_OF_ADAM = {"betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}


def known_optimizer(name: str) -> str:
    """The name, if there is such an optimizer. Raises InvalidArgument."""
    if name in OPTIMIZERS:
        return name
    listed = f"one of {', '.join(OPTIMIZERS)}"
    reason, other = REFUSED_OPTIMIZERS.get(name, ("unknown", listed))
    instead = f"use {other or 'another one'}, or give the trainer an optimizer_factory"
    raise InvalidArgument("optim", name, reason, instead)


def option_conflicts(
    optim: str, given: str | Mapping[str, Any] | None
) -> Iterator[InvalidArgument]:
    """What `optim_args` cannot hold."""
    try:
        options = options_in(given)
    except InvalidArgument as error:
        yield error
        return
    taken = _OWN_FIELDS | (_OWN_FIELDS_OF_ADAM if optim in ADAM else {})
    for name, value in options.items():
        shown = f"optim_args.{name}"
        if name in taken:
            reason = "has an argument of its own"
            yield InvalidArgument(shown, value, reason, f"set {taken[name]}")
        if name == "fused" and optim == "adamw_torch_fused":
            instead = "leave it out, or set optim to adamw_torch"
            yield InvalidArgument(shown, value, "adamw_torch_fused is fused", instead)


def options_in(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`optim_args` as keyword arguments: a mapping, or "key=value,key=value" with Python literals.
    Raises InvalidArgument."""
    if not isinstance(given, str):
        return dict(given or {})
    instead = (
        "give key=value,key=value with Python literals, as momentum=0.9,nesterov=True, or a mapping"
    )
    wrong = InvalidArgument("optim_args", given, "not of the form key=value,key=value", instead)
    try:
        call = ast.parse(f"f({given})", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise wrong from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise wrong
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise wrong
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            shown = ast.unparse(keyword.value)
            name = f"optim_args.{keyword.arg}"
            raise InvalidArgument(name, shown, "not a Python literal", instead) from None
    return options
