"""How a model is built and made to compute: devices, precision, compilation, memory."""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptcore import RNGState

from .arguments import InvalidArgument
from .lowbit import lower_precision

log = logging.getLogger(__name__)

SDPA = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seed_everything(seed: int) -> None:
    """The process's random streams."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def apply_settings(args: Any, rank: int) -> None:
    """What the arguments say of the whole process."""
    level = args.log_level if rank == 0 else args.log_level_replica
    if args.log_level != "passive" and level != "passive":  # passive: as the program has it
        for name in ("ckpt_trainers", "ckptcore"):
            logging.getLogger(name).setLevel(level.upper())
    if any(value is True for name, value in vars(args).items() if name.startswith("debug_")):
        show_debugging()
    if args.full_determinism:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if args.seed >= 0:
        seed_everything(args.seed)
    if args.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(args.float32_matmul_precision)
    for package, name, value in (
        ("dynamo", "recompile_limit", args.dynamo_recompile_limit),
        ("functorch", "activation_memory_budget", args.activation_memory_budget),
    ):
        if value is not None:
            setattr(import_module(f"torch._{package}.config"), name, value)


def show_debugging() -> None:
    """What a debug_* flag asks for is seen on each rank, whatever the program does with logs."""
    debugging = logging.getLogger("ckpt_trainers.debugging")
    debugging.setLevel(logging.DEBUG)
    if not debugging.hasHandlers():
        debugging.addHandler(logging.StreamHandler())


@dataclass
class ModelBuilder:
    """Makes bare modules of what a trainer was given, ready to be wrapped and trained.

    model, model_init: one of the two. enable_checkpointing: (rank, model) -> activation
    checkpointing for models without Hugging Face's method. rank: of this process. filled: False
    once a module was built without values, which a checkpoint is to bring.
    """

    args: Any
    model: nn.Module | None
    model_init: Callable[[], nn.Module] | None
    enable_checkpointing: Callable[[int, nn.Module], Any] | None
    rank: int
    filled: bool = True

    def build(self, device: torch.device | str, empty: bool = False) -> nn.Module:
        """On a device; empty: without values, where the arguments leave them to a checkpoint."""
        wanted = self.args.construct_model_on
        if self.model is not None or self.model_init is None:
            assert self.model is not None
            model = self.model
        elif str(device) == "meta" or (wanted == "meta" and empty):
            model = self._build_empty(device)
        else:
            where = torch.device(device) if wanted == "device" else nullcontext()
            with self.default_dtype(), where:
                model = self.model_init()
        return self.prepare(model if str(device) == "meta" else model.to(device))

    def _build_empty(self, device: torch.device | str) -> nn.Module:
        assert self.model_init is not None
        with self.default_dtype(), torch.device("meta"):
            model = self.model_init()
        if str(device) == "meta":
            return model
        if derived := derived_buffers(model):
            log.info(
                "construct_model_on='meta': checkpoints do not hold %s, so the model is built",
                derived[0],
            )
            with self.default_dtype():
                return self.model_init()
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        model = model.to_empty(device=device)
        for first, *others in names.values():  # to_empty unties them
            for name in others:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
        self.filled = False
        return model

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """The dtype that modules are built in."""
        before = torch.get_default_dtype()
        if self.args.default_dtype is not None:
            torch.set_default_dtype(getattr(torch, self.args.default_dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Low precision and activation checkpointing, as the arguments want them."""
        args = self.args
        model = lower_precision(model, args)
        if not args.gradient_checkpointing:
            return model
        if self.enable_checkpointing is not None:
            self.enable_checkpointing(self.rank, model)
        elif (enable := getattr(model, "gradient_checkpointing_enable", None)) is not None:
            kwargs = args.gradient_checkpointing_kwargs
            enable() if kwargs is None else enable(gradient_checkpointing_kwargs=kwargs)
        else:
            reason = f"{type(model).__name__} has no gradient_checkpointing_enable()"
            instead = "give enable_activation_checkpoint_fn"
            raise InvalidArgument("gradient_checkpointing", True, reason, instead)
        return model

    def compile(self, model: nn.Module) -> nn.Module:
        """Compiled in place where the arguments want it, so that names stay what they are."""
        args = self.args
        if args.torch_compile:
            model.compile(
                backend=compile_backend(args.torch_compile_backend or "inductor"),
                mode=None if args.torch_compile_mode == "default" else args.torch_compile_mode,
                dynamic=args.torch_compile_dynamic,
                fullgraph=args.torch_compile_full_graph,
            )
        return model


def derived_buffers(model: nn.Module) -> list[str]:
    """Buffers that no checkpoint holds: they come from the constructor alone."""
    kept = model.state_dict()
    return [name for name, _ in model.named_buffers() if name not in kept]


@contextmanager
def computing(args: Any, device: torch.device, training: bool = True) -> Iterator[None]:
    """Around each forward pass: precision, attention kernels, where activations are kept."""
    with ExitStack() as stack:
        if args.mixed_precision in AUTOCAST:
            stack.enter_context(torch.autocast(device.type, AUTOCAST[args.mixed_precision]))
        if args.sdpa_backend is not None:
            wanted = args.sdpa_backend
            names = [wanted] if isinstance(wanted, str) else wanted
            kernels = [getattr(torch.nn.attention.SDPBackend, SDPA[name]) for name in names]
            stack.enter_context(
                torch.nn.attention.sdpa_kernel(kernels, set_priority=args.sdpa_set_priority)
            )
            stack.enter_context(naming_kernels(wanted))
        if args.enable_activation_offloading and training:
            pinned = device.type == "cuda"
            stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
        yield


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Around a step that is thrown away: gradients, buffers and random streams are as they were."""
    streams, buffers = RNGState(), list(model.buffers())
    before, values = streams.state_dict(), [buffer.clone() for buffer in buffers]
    yield
    for parameter in model.parameters():
        parameter.grad = None
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)
    streams.load_state_dict(before)


def fuse_optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Step each parameter when its gradient is there, and let go of the gradient. Returns the
    hooks.

    State and options stay those of the one optimizer, so checkpoints and schedules see no
    difference.
    """
    return [
        parameter.register_post_accumulate_grad_hook(stepper(optimizer, parameter, group))
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def stepper(
    whole: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, Any]
) -> Callable[[torch.Tensor], None]:
    """What steps one parameter of an optimizer's group."""
    single = copy.copy(whole)
    single.param_groups = [{**group, "params": [parameter]}]

    def step(parameter: torch.Tensor) -> None:
        single.state = whole.state  # a load replaces it
        single.param_groups[0].update(
            {name: value for name, value in group.items() if name != "params"}
        )
        single.step()
        parameter.grad = None

    return step


SPARE_SHARE = 0.1  # of GPU memory: less is not worth emptying the cache for


def free_memory(args: Any, device: torch.device, step: int) -> None:
    """After a step."""
    if device.type != "cuda":
        return
    if args.torch_empty_cache_steps and step % args.torch_empty_cache_steps == 0:
        torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    most = args.gc_threshold * total
    if torch.cuda.memory_allocated(device) <= most:
        return
    # What is reserved beyond the worst moment of training is never used again. Emptying what a step
    # needs would have the next one ask the driver for all of it, step by step.
    spare = total * SPARE_SHARE
    if torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device) < spare:
        return
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved(device) > torch.cuda.max_memory_allocated(device) + spare:
        gc.collect()  # blocks are held by tensors that nobody can reach any more
        torch.cuda.empty_cache()


def compile_backend(name: str) -> str:
    """A backend that torch.compile has. Raises InvalidArgument."""
    if name not in torch.compiler.list_backends(exclude_tags=()):
        usual = f"give one of {', '.join(torch.compiler.list_backends())}"
        reason = "torch has no backend of this name"
        raise InvalidArgument("torch_compile_backend", name, reason, usual)
    return name


@contextmanager
def naming_kernels(wanted: str | list[str]) -> Iterator[None]:
    """Attention finds out in the forward pass that no kernel fits the device and the inputs."""
    try:
        yield
    except RuntimeError as error:
        if not any(said in str(error) for said in ("No available kernel", "No viable backend")):
            raise
        reason = "none of these kernels can do this model's attention on this device"
        instead = "add math, which always can, or leave it out"
        raise InvalidArgument("sdpa_backend", wanted, reason, instead) from None
