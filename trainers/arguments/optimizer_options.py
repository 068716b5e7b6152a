"""`optim` and `optim_args`, as far as they can be judged without torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import InvalidArgument

ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit")
OPTIMIZERS = (*ADAM, "adafactor", "sgd", "adagrad", "rmsprop")

# What is needed for it, what could be used instead, names.
_REFUSED = (
    ("torch_xla", "adamw_torch", "adamw_torch_xla"),
    ("torch_npu", "adamw_torch_fused", "adamw_torch_npu_fused"),
    ("apex", "adamw_torch_fused", "adamw_apex_fused"),
    ("torchdistx", "adamw_torch", "adamw_anyprecision"),
    (
        "bitsandbytes",
        "adamw_torch_8bit",
        "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit",
    ),
    (
        "bitsandbytes",
        "",
        "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit "
        "rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit",
    ),
    ("bitsandbytes >= 0.44", "", "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit"),
    ("schedulefree", "", "schedule_free_adamw schedule_free_radam schedule_free_sgd"),
    (
        "galore_torch",
        "",
        "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise "
        "galore_adamw_8bit_layerwise galore_adafactor_layerwise",
    ),
    ("apollo_torch", "", "apollo_adamw apollo_adamw_layerwise"),
    ("lomo-optim", "", "lomo adalomo"),
    ("grokadamw", "", "grokadamw"),
    ("torch-optimi and torchdistx", "", "stable_adamw"),
)
# Name -> (reason, what to use besides optimizer_factory).
REFUSED_OPTIMIZERS = {
    name: (f"needs the package {package}, which is not used here", instead)
    for package, instead, names in _REFUSED
    for name in names.split()
} | {"adamw_hf": ("removed upstream", "adamw_torch")}

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
