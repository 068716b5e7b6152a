"""`optim` and `optim_args`, as far as they can be judged without torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from .errors import InvalidArgument
from .vocabulary import OPTIMIZERS, REJECTED_OPTIMIZERS

__all__ = ["ADAM", "check_optimizer_name", "options_in", "parse_options"]

ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit")
_OWN_FIELDS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_OWN_FIELDS_OF_ADAM = {"betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}


def check_optimizer_name(name: str) -> None:
    if name in OPTIMIZERS:
        return
    if name in REJECTED_OPTIMIZERS:
        reason, other = REJECTED_OPTIMIZERS[name]
        instead = f"use {other}, or " if other else "use another one, or "
        raise InvalidArgument(
            "optim", name, reason, f"{instead}give the trainer an optimizer_factory"
        )
    raise InvalidArgument(
        "optim", name, "unknown", f"give one of {', '.join(OPTIMIZERS)}, or an optimizer_factory"
    )


def parse_options(optim: str, given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`optim_args` as keyword arguments of the optimizer's class: "key=value,key=value" with Python
    literals."""
    options = options_in(given) if isinstance(given, str) else dict(given or {})
    taken = _OWN_FIELDS | (_OWN_FIELDS_OF_ADAM if optim in ADAM else {})
    for name, value in options.items():
        if name in taken:
            raise InvalidArgument(
                f"optim_args.{name}", value, "has an argument of its own", f"set {taken[name]}"
            )
        if name == "fused" and optim == "adamw_torch_fused":
            raise InvalidArgument(
                "optim_args.fused",
                value,
                "adamw_torch_fused is fused",
                "leave it out, or set optim to adamw_torch",
            )
    return options


def options_in(text: str) -> dict[str, Any]:
    """The options in "key=value,key=value". Raises InvalidArgument."""
    instead = (
        "give key=value,key=value with Python literals, as momentum=0.9,nesterov=True, or a mapping"
    )
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError:
        raise InvalidArgument(
            "optim_args", text, "not of the form key=value,key=value", instead
        ) from None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.args
        or any(k.arg is None for k in call.keywords)
    ):
        raise InvalidArgument("optim_args", text, "not of the form key=value,key=value", instead)
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            options[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            shown = ast.unparse(keyword.value)
            raise InvalidArgument(
                f"optim_args.{keyword.arg}", shown, "not a Python literal", instead
            ) from None
    return options
