"""How a model is built and made to compute: devices, precision, compilation, memory."""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from .arguments import InvalidArgument
from .parallel.environment import choose_workspace

__all__ = ["Models", "apply_settings", "seed_everything"]

log = logging.getLogger(__name__)

SDPA = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def apply_settings(args: Any) -> None:
    """What the arguments say of the whole process."""
    if args.full_determinism:
        choose_workspace(args)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if args.seed >= 0:
        seed_everything(args.seed)
    if args.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(args.float32_matmul_precision)
    if args.dynamo_recompile_limit is not None:
        from torch._dynamo import config as dynamo

        dynamo.recompile_limit = args.dynamo_recompile_limit
    if args.activation_memory_budget is not None:
        from torch._functorch import config as functorch

        functorch.activation_memory_budget = args.activation_memory_budget


class Models:
    """The part of a trainer that turns what it was given into a model that can be trained."""

    args: Any
    device: torch.device
    rank: int
    saves: Any
    model: nn.Module
    wrapped: nn.Module
    optimizer: Any
    given_model: nn.Module | None
    model_init: Callable[[], nn.Module] | None
    enable_activation_checkpoint_fn: Callable[[int, nn.Module], Any] | None
    fused: Sequence[Any] = ()  # hooks that step the optimizer in the backward pass
    filled = True  # False: built without values, which a checkpoint is to bring

    @property
    def restorable(self) -> bool:
        """Whether a checkpoint will fill the model; the same on all ranks."""
        return bool(self.saves.restorable())

    def construct(self, on: torch.device | str | None = None) -> nn.Module:
        """The bare module on the device, ready to be wrapped and trained. on: another device than
        the trainer's."""
        device = on or self.device
        wanted = self.args.construct_model_on
        if self.given_model is not None or self.model_init is None:
            assert self.given_model is not None
            model = self.given_model
        elif str(device) == "meta" or (wanted == "meta" and self.restorable):
            model = self.construct_empty(device)
        else:
            with (
                self.default_dtype(),
                torch.device(device) if wanted == "device" else nullcontext(),
            ):
                model = self.model_init()
        if str(device) != "meta":
            model = model.to(device)
        return self.prepare(model)

    def construct_empty(self, device: torch.device | str) -> nn.Module:
        """Without values, to be filled from a checkpoint."""
        assert self.model_init is not None
        with self.default_dtype(), torch.device("meta"):
            model = self.model_init()
        if str(device) == "meta":
            return model
        if not_saved := [
            name for name, _ in model.named_buffers() if name not in model.state_dict()
        ]:
            log.info(
                "construct_model_on='meta': checkpoints do not hold %s, so the model is built",
                not_saved[0],
            )
            with self.default_dtype():
                return self.model_init()
        tied = _names_by_parameter(model)
        model = model.to_empty(device=device)
        for first, *others in tied:
            for name in others:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
        self.filled = False
        return model

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        if self.args.default_dtype is None:
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.args.dtype_of(self.args.default_dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Low precision and activation checkpointing, as the arguments want them."""
        args = self.args
        if args.fp8_recipe is not None:
            model = to_float8(model, args.fp8_recipe, args.fp8_dim_alignment)
        if args.qat_recipe is not None:
            model = to_fake_quantised(model, args.qat_recipe)
        if args.gradient_checkpointing:
            if self.enable_activation_checkpoint_fn is not None:
                self.enable_activation_checkpoint_fn(self.rank, model)
            elif (enable := getattr(model, "gradient_checkpointing_enable", None)) is not None:
                kwargs = args.gradient_checkpointing_kwargs
                enable() if kwargs is None else enable(gradient_checkpointing_kwargs=kwargs)
            else:
                raise InvalidArgument(
                    "gradient_checkpointing",
                    True,
                    f"{type(model).__name__} has no gradient_checkpointing_enable()",
                    "give enable_activation_checkpoint_fn",
                )
        return model

    def compile(self, model: nn.Module) -> nn.Module:
        """Compiled in place, so that names stay what they are."""
        args = self.args
        if args.torch_compile:
            model.compile(
                backend=compile_backend(args.torch_compile_backend or "inductor"),
                mode=None if args.torch_compile_mode == "default" else args.torch_compile_mode,
                dynamic=args.torch_compile_dynamic,
                fullgraph=args.torch_compile_full_graph,
            )
        return model

    @contextmanager
    def computing(self, training: bool = True) -> Iterator[None]:
        """Around each forward pass: precision, attention kernels, where activations are kept."""
        args = self.args
        with ExitStack() as stack:
            if args.mixed_precision in AUTOCAST:
                stack.enter_context(
                    torch.autocast(self.device.type, AUTOCAST[args.mixed_precision])
                )
            if args.sdpa_backend is not None:
                names = (
                    [args.sdpa_backend] if isinstance(args.sdpa_backend, str) else args.sdpa_backend
                )
                kernels = [getattr(torch.nn.attention.SDPBackend, SDPA[name]) for name in names]
                stack.enter_context(
                    torch.nn.attention.sdpa_kernel(kernels, set_priority=args.sdpa_set_priority)
                )
                stack.enter_context(naming_kernels(args.sdpa_backend))
            if args.enable_activation_offloading and training:
                pinned = self.device.type == "cuda"
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
            yield

    def fuse_optimizer(self) -> None:
        """Step each parameter when its gradient is there, and let go of the gradient.

        State and options stay those of the one optimizer, so checkpoints and schedules see no
        difference.
        """
        for hook in self.fused:  # of an optimizer that was made before
            hook.remove()
        hooks: list[Any] = []
        self.fused = hooks
        if not self.args.fuse_optim_with_backward:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                single = copy.copy(self.optimizer)
                single.param_groups = [{**group, "params": [parameter]}]
                step = stepper(self.optimizer, single, group)
                hooks.append(parameter.register_post_accumulate_grad_hook(step))

    def free_memory(self, step: int) -> None:
        """After a step."""
        args = self.args
        if self.device.type != "cuda":
            return
        if args.torch_empty_cache_steps and step % args.torch_empty_cache_steps == 0:
            torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        if torch.cuda.memory_allocated(self.device) > args.gc_threshold * total:
            torch.cuda.empty_cache()
            if torch.cuda.memory_allocated(self.device) > args.gc_threshold * total:
                gc.collect()


def compile_backend(name: str) -> str:
    """A backend that torch.compile has. Raises InvalidArgument."""
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        usual = ", ".join(torch.compiler.list_backends())
        raise InvalidArgument(
            "torch_compile_backend",
            name,
            "torch has no backend of this name",
            f"give one of {usual}",
        )
    return name


@contextmanager
def naming_kernels(wanted: str | list[str]) -> Iterator[None]:
    """Attention finds out in the forward pass that no kernel that is allowed fits the device and
    the inputs."""
    try:
        yield
    except RuntimeError as error:
        if not any(said in str(error) for said in ("No available kernel", "No viable backend")):
            raise
        raise InvalidArgument(
            "sdpa_backend",
            wanted,
            "none of these kernels can do this model's attention on this device",
            "add math, which always can, or leave it out",
        ) from None


def stepper(
    whole: torch.optim.Optimizer, single: torch.optim.Optimizer, group: dict[str, Any]
) -> Callable[[torch.Tensor], None]:
    def step(parameter: torch.Tensor) -> None:
        single.state = whole.state  # a load replaces it
        single.param_groups[0].update(
            {name: value for name, value in group.items() if name != "params"}
        )
        single.step()
        parameter.grad = None

    return step


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def _torchao(argument: str, recipe: str) -> Any:
    try:
        import torchao
    except ImportError:
        raise InvalidArgument(
            argument,
            recipe,
            "torchao is not installed",
            "pip install ckptcore[torchao], or leave it out",
        ) from None
    return torchao


def to_float8(model: nn.Module, recipe: str, alignment: int) -> nn.Module:
    """Linear layers whose dimensions are multiples of `alignment` compute in float8."""
    _torchao("fp8_recipe", recipe)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise InvalidArgument(
            "fp8_recipe", recipe, "needs a CUDA device of capability 8.9 or above", "leave it out"
        )

    def fits(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear) and not any(
            size % alignment for size in (module.in_features, module.out_features)
        )

    config = Float8LinearConfig.from_recipe_name(recipe)
    made: nn.Module = convert_to_float8_training(model, config=config, module_filter_fn=fits)
    return made


def to_fake_quantised(model: nn.Module, recipe: str) -> nn.Module:
    """Linear layers train as if they were quantised; converting them is a step of its own, after
    training."""
    _torchao("qat_recipe", recipe)
    from torchao import quantization
    from torchao.quantization.qat import QATConfig

    name, options = {
        "int8-dynamic-act-int4-weight": (
            "Int8DynamicActivationIntxWeightConfig",
            {"weight_dtype": getattr(torch, "int4", None)},
        ),
        "int4-weight-only": ("Int4WeightOnlyConfig", {}),
        "float8-dynamic-act-float8-weight": ("Float8DynamicActivationFloat8WeightConfig", {}),
    }[recipe]
    quantization.quantize_(model, QATConfig(getattr(quantization, name)(**options), step="prepare"))
    return model
