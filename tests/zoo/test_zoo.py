"""Whatever `save` takes, `restore` of the same program gives back, or `save` refuses.

Each entry is a program: it trains three steps, saves, and goes on for five. The same program, begun
with other random numbers, restores, makes the same five steps, and must have the same bits. The
control is torch's own `load_state_dict` of what `state_dict` gave, which must do the same.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from ckptcore import CheckpointManager, InvalidState, OptimizerState, RNGState, UnsupportedValue

TRAINED, MORE = 3, 5

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
    "error::ckptcore.CheckpointWarning",
)


@dataclass
class Program:
    """state: what is saved. step: trains one step, from numbers that depend on its number alone.
    outcome: what is compared.
    control: whether torch's own load_state_dict, component by component, is exact for it."""

    state: dict[str, Any]
    step: Callable[[int], Any]
    outcome: Callable[[], Any]
    control: bool = True


@dataclass
class Entry:
    make: Callable[[], Program]
    refused: type[Exception] | None = None
    live: tuple[int, ...] = (0, 2)


ZOO: dict[str, Entry] = {}


def entry(
    name: str, *, refused: type[Exception] | None = None, live: tuple[int, ...] = (0, 2)
) -> Callable[[Any], Any]:
    """refused: the error with which `save` says that it does not take it. live: steps that the
    program which restores has made before."""

    def add(make: Callable[[], Program]) -> Callable[[], Program]:
        ZOO[name] = Entry(make, refused, (0,) if refused else live)
        return make

    return add


def batch(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + step))


def bits(value: Any) -> Any:
    """Copies of all tensors, at any depth."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def training(
    model: nn.Module,
    optimizer: Any = None,
    *,
    data: Callable[[int], Any] = lambda step: batch(step, 5, 4),
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    after: Callable[[int], Any] | None = None,
    state: dict[str, Any] | None = None,
    outcome: Callable[[], Any] | None = None,
    control: bool = True,
) -> Program:
    """The usual loop over a model and an optimizer."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    measured = loss or (lambda m, x: m(x).square().mean())

    def step(number: int) -> None:
        torch.manual_seed(number)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = measured(model, data(number))
            value.backward()
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if after is not None:
            after(number)

    def found() -> Any:
        return bits([dict(model.state_dict()), outcome() if outcome else None])

    return Program(state or {"model": model, "optimizer": optimizer}, step, found, control)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def fresh(make: Callable[[], Program], seed: int) -> Program:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return make()


# --- modules
# --------------------------------------------------------------------------------------------------


@entry("linear layers")
def _() -> Program:
    return training(net())


@entry("batch norm")
def _() -> Program:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3),
        nn.BatchNorm1d(3),
        nn.ReLU(),
        nn.Conv1d(3, 2, 2),
        nn.BatchNorm1d(2, momentum=None),
    )
    return training(model, data=lambda s: batch(s, 4, 2, 8))


@entry("group norm, layer norm, instance norm with running statistics")
def _() -> Program:
    model = nn.Sequential(
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(6),
    )
    return training(model, data=lambda s: batch(s, 3, 4, 6))


@entry("tied weights")
def _() -> Program:
    model = nn.ModuleDict({"in": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)})
    model["out"].weight = model["in"].weight
    return training(
        model, loss=lambda m, x: m["out"](m["in"](torch.arange(7))).logsumexp(-1).mean()
    )


@entry("lazy layers, restored before their first step")
def _() -> Program:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    return training(model)


@entry("lazy layers that made a step first")
def _() -> Program:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    model(batch(0, 5, 4))
    return training(model)


@entry("an uninitialized parameter", refused=UnsupportedValue)
def _() -> Program:
    model = nn.Sequential(nn.LazyLinear(5))
    return Program({"model": model}, lambda n: None, lambda: None)


@entry("parametrized: weight norm")
def _() -> Program:
    return training(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 4))
    )


@entry("parametrized: spectral norm")
def _() -> Program:
    return training(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 4))
    )


@entry("parametrized: orthogonal")
def _() -> Program:
    return training(
        nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4))
    )


@entry("weight norm of older torch")
def _() -> Program:
    return training(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 4)))


@entry("spectral norm of older torch")
def _() -> Program:
    return training(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 4)))


@entry("pruned weights")
def _() -> Program:
    model = net()
    prune.random_unstructured(model[0], "weight", 0.5)
    return training(model)


@entry("buffers, one of them not persistent")
def _() -> Program:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
            self.register_buffer("nothing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.mean.lerp_(x.mean(0), 0.1)
            return x * self.weight * self.scale + self.mean

    return training(Counts())


class Extra(nn.Module):
    """Keeps a history beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.history: list[float] = []
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(float(x.sum()))
        self.table = torch.tensor(self.history)
        return x * self.weight * (1 + len(self.history))

    def get_extra_state(self) -> Any:
        return {"history": list(self.history), "table": self.table}

    def set_extra_state(self, state: Any) -> None:
        self.history, self.table = list(state["history"]), state["table"]


@entry("extra state that grows")
def _() -> Program:
    return training(nn.Sequential(Extra(), nn.Linear(4, 4)))


class Versioned(nn.Module):
    """Version 2 stores the weight itself; version 1 stored half of it."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version") != 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@entry("a module of a later version")
def _() -> Program:
    return training(nn.Sequential(Versioned(), nn.Linear(4, 4)))


class Packed(nn.Module):
    """Stores its weight packed, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self._register_state_dict_hook(self.pack)
        self._register_load_state_dict_pre_hook(self.unpack)

    @staticmethod
    def pack(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "packed"] = torch.stack(
            [state.pop(prefix + "weight").detach(), torch.zeros(4)]
        )

    @staticmethod
    def unpack(state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "packed")[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@entry("a module that stores another form of itself, by hooks")
def _() -> Program:
    return training(nn.Sequential(Packed(), nn.Linear(4, 4)))


@entry("quantization-aware training")
def _() -> Program:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    model.qconfig = get_default_qat_qconfig("fbgemm")
    return training(prepare_qat(model.train()))


@entry("quantized weights", refused=UnsupportedValue)
def _() -> Program:
    model = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear})
    return Program({"model": model}, lambda n: None, lambda: None)


@entry("compiled")
def _() -> Program:
    return training(torch.compile(net(), backend="eager"))


@entry("data parallel")
def _() -> Program:
    return training(nn.DataParallel(net()))


@entry("attention and a transformer layer with dropout")
def _() -> Program:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return training(model, torch.optim.AdamW(model.parameters()), data=lambda s: batch(s, 2, 5, 4))


@entry("multi-head attention with a bias of keys")
def _() -> Program:
    model = nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=3, vdim=5)
    loss = lambda m, x: m(x, batch(1, 5, 2, 3), batch(2, 5, 2, 5))[0].square().mean()  # noqa: E731
    return training(model, loss=loss, data=lambda s: batch(s, 5, 2, 4))


@entry("recurrent layers")
def _() -> Program:
    model = nn.LSTM(4, 3, num_layers=2, bidirectional=True, dropout=0.2)
    return training(
        model, loss=lambda m, x: m(x)[0].square().mean(), data=lambda s: batch(s, 3, 2, 4)
    )


@entry("dicts and lists of modules and parameters")
def _() -> Program:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "0": nn.Linear(4, 4)})
            self.more = nn.ModuleList([nn.Linear(4, 4)])
            self.scales = nn.ParameterList([torch.randn(4), torch.randn(1)])
            self.shifts = nn.ParameterDict({"x": torch.randn(4), "unused": torch.randn(2)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in [*self.layers.values(), *self.more]:
                x = layer(x)
            return x * self.scales[0] * self.scales[1] + self.shifts["x"]

    return training(Many())


@entry("narrow and complex parameters, empty ones, other memory formats")
def _() -> Program:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
            self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(3, 4).t())
            self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (
                x.sum() * self.narrow.float()
                + (self.complex * (1 + 2j)).abs()
                + self.frozen
                + self.empty.sum()
            )
            return self.conv(x).mean() + y.sum() + self.turned.sum()

    model = Odd()
    return training(
        model, torch.optim.AdamW(model.parameters()), data=lambda s: batch(s, 1, 2, 4, 4)
    )


@entry("a frozen part, and a parameter that never gets a gradient")
def _() -> Program:
    model = nn.ModuleDict(
        {"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)}
    )
    model["frozen"].requires_grad_(False)
    return training(
        model,
        torch.optim.Adam(model.parameters()),
        loss=lambda m, x: m["frozen"](m["used"](x)).square().mean(),
    )


@entry("a buffer that is expanded")
def _() -> Program:
    model = net()
    model.register_buffer("shift", torch.zeros(1).expand(4))
    return training(model, control=False)  # torch's own refuses to copy into it


def causal(model: nn.Module) -> Program:
    ids = lambda s: torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(s))  # noqa: E731
    loss = lambda m, x: m(input_ids=x, labels=x).loss  # noqa: E731
    return training(model, torch.optim.AdamW(model.parameters(), lr=0.01), data=ids, loss=loss)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config).train()


@entry("transformers: Llama")
def _() -> Program:
    return causal(llama())


@entry("transformers: GPT-2 with dropout and tied embeddings")
def _() -> Program:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    return causal(transformers.GPT2LMHeadModel(config).train())


@entry("transformers: T5 with three ties")
def _() -> Program:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return causal(transformers.T5ForConditionalGeneration(config).train())


@entry("peft: adapters in a model")
def _() -> Program:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    return causal(peft.get_peft_model(llama(), config))


@entry("peft: adapters alone, as a dict of tensors")
def _() -> Program:
    peft = pytest.importorskip("peft")
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)  # the same weights below
    base = llama()
    torch.set_rng_state(torch_state)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    program = causal(model)
    program.state["adapters"] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    program.state["optimizer"] = torch.optim.AdamW(program.state["adapters"].values(), lr=0.01)
    del program.state["model"]
    return training(
        model,
        program.state["optimizer"],
        state=program.state,
        control=False,
        data=lambda s: torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(s)),
        loss=lambda m, x: m(input_ids=x, labels=x).loss,
    )


# --- optimizers
# --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam foreach, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(
        p, lr=0.1, history_size=3, max_iter=3, line_search_fn="strong_wolfe"
    ),
    "groups with options of their own": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "lr": 0.2, "tag": "first"}, {"params": p[1:], "betas": (0.8, 0.9)}],
        lr=0.1,
    ),
}


def _add_optimizers() -> None:
    for name, make in OPTIMIZERS.items():

        def program(make: Any = make) -> Program:
            model = net()
            return training(model, make(list(model.parameters())))

        entry(f"optimizer: {name}")(program)


_add_optimizers()


@entry("optimizer: Muon and AdamW in a container of one's own")
def _() -> Program:
    class Both(torch.optim.Optimizer):
        def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
            self.parts = parts
            super().__init__(
                [p for part in parts for g in part.param_groups for p in g["params"]], {}
            )

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

        def state_dict(self) -> Any:
            return [part.state_dict() for part in self.parts]

        def load_state_dict(self, state: Any) -> None:
            for part, own in zip(self.parts, state, strict=True):
                part.load_state_dict(own)

    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return training(
        model, Both([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.1)])
    )


class Slow(torch.optim.Optimizer):
    """Lookahead: slow weights of its own around the moments of another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(
                self.slow, (p for g in self.param_groups for p in g["params"]), strict=True
            ):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow, self.count = [t.clone() for t in state["slow"]], state["count"]


@entry("optimizer: Lookahead of one's own")
def _() -> Program:
    model = net()
    return training(model, Slow(torch.optim.AdamW(model.parameters(), lr=0.1)))


@entry("optimizer: one that keeps state which nothing gives away", refused=InvalidState)
def _() -> Program:
    class Silent(Slow):
        state_dict = torch.optim.Optimizer.state_dict
        load_state_dict = torch.optim.Optimizer.load_state_dict

        def step(self, closure: Any = None) -> None:
            super().step()
            self.state[self.param_groups[0]["params"][0]]["count"] = self.count

    model = net()
    return training(model, Silent(torch.optim.AdamW(model.parameters(), lr=0.1)))


@entry("optimizer: SparseAdam of embeddings")
def _() -> Program:
    model = nn.Embedding(9, 4, sparse=True)
    ids = lambda s: torch.randint(0, 9, (4,), generator=torch.Generator().manual_seed(s))  # noqa: E731
    return training(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), data=ids)


@entry("optimizer: one for each parameter, in a list")
def _() -> Program:
    model = net()
    several = [torch.optim.Adam([p], lr=0.1) for p in model.parameters()]

    class Each:
        def step(self) -> None:
            for one in several:
                one.step()

        def zero_grad(self) -> None:
            model.zero_grad()

    return training(model, Each(), state={"model": model, "optimizers": several}, control=False)


@entry("optimizer: over named tensors without a module")
def _() -> Program:
    held = {n: torch.randn(4, requires_grad=True) for n in ("a", "b")}
    optimizer = torch.optim.Adam(held.values(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (held["a"] * held["b"] * batch(number, 4)).sum().square().backward()
        optimizer.step()

    state = {"held": held, "optimizer": OptimizerState(optimizer, held)}
    return Program(state, step, lambda: bits(held), control=False)


@entry("optimizer: transformers' Adafactor")
def _() -> Program:
    transformers = pytest.importorskip("transformers")
    model = net()
    return training(
        model,
        transformers.Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True),
    )


@entry("optimizer: torchao with 8 bits")
def _() -> Program:
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Sequential(nn.Linear(64, 64))
    program = training(
        model,
        torchao.AdamW8bit(model.parameters(), lr=0.1),
        data=lambda s: batch(s, 2, 64),
        control=False,  # its moments cannot be copied
    )

    def step(number: int) -> None:
        with torch.compiler.set_stance("force_eager"):  # compiling takes a minute
            program.step(number)

    return replace(program, step=step)


@entry("optimizer: prepared by accelerate")
def _() -> Program:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    bare = net()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    return training(model, optimizer)


@entry("optimizer: set up by Fabric")
def _() -> Program:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    bare = net()
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    return training(model, optimizer)


# --- schedules
# --------------------------------------------------------------------------------------------------


class Curve:
    """A callable with state, which LambdaLR stores."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR with a callable object": lambda o: lr_scheduler.LambdaLR(o, Curve()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    "CyclicLR with a function": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 6)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def _add_schedules() -> None:
    for name, make in SCHEDULES.items():

        def program(make: Any = make) -> Program:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            schedule = make(optimizer)
            plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
            return training(
                model,
                optimizer,
                after=lambda n: schedule.step(*([1.0 + n % 2] if plateau else [])),
                state={"model": model, "optimizer": optimizer, "scheduler": schedule},
                outcome=lambda: [group["lr"] for group in optimizer.param_groups],
            )

        entry(f"schedule: {name}")(program)


_add_schedules()


# --- scalers, averages, random streams, plain values, data
# -----------------------------------------------------------


def scaled(enabled: bool) -> Program:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=enabled)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch(number, 5, 4)).square().mean()).backward()
        if number == 2:
            model[0].bias.grad[0] = float("inf")  # this step is left out, and the scale goes down
        if enabled or number != 2:
            scaler.step(optimizer)
            scaler.update()

    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Program(state, step, lambda: bits([dict(model.state_dict()), scaler.state_dict()]))


@entry("scaler: on")
def _() -> Program:
    return scaled(True)


@entry("scaler: off")
def _() -> Program:
    return scaled(False)


@entry("average: of the weights")
def _() -> Program:
    model = net()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training(
        model,
        optimizer,
        after=lambda n: average.update_parameters(model),
        state={"model": model, "average": average, "optimizer": optimizer},
        outcome=lambda: dict(average.state_dict()),
    )


@entry("average: exponential, with buffers, and SWALR")
def _() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    return training(
        model,
        optimizer,
        after=lambda n: (average.update_parameters(model), schedule.step()),
        state={"average": average, "model": model, "optimizer": optimizer, "schedule": schedule},
        outcome=lambda: dict(average.state_dict()),
    )


class Average:
    """Refers to the weights themselves until its first update."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = dict(model.state_dict())
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.shadow = {k: 0.9 * self.shadow[k] + 0.1 * v for k, v in model.state_dict().items()}
        self.updates += 1

    def state_dict(self) -> Any:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.shadow, self.updates = dict(state["shadow"]), state["updates"]


def shadowed(first: str) -> Program:
    model = net()
    average = Average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "average": average, "optimizer": optimizer}
    return training(
        model,
        optimizer,
        after=lambda n: average.update(model),
        state={first: state[first], **state},
        outcome=lambda: average.state_dict(),
    )


@entry("average: of references to the weights, after the model")
def _() -> Program:
    return shadowed("model")


@entry("average: of references to the weights, before the model")
def _() -> Program:
    return shadowed("average")


@entry("average: a dict of tensors")
def _() -> Program:
    model = net()
    average = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(number: int) -> None:
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 0.1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training(
        model,
        optimizer,
        after=update,
        state={"model": model, "average": average, "optimizer": optimizer},
        outcome=lambda: average,
        control=False,
    )


@entry("random streams")
def _() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn: list[float] = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4) + random.random() + np.random.rand()).square().mean().backward()
        optimizer.step()
        drawn[:] = [random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]

    state = {"model": model, "optimizer": optimizer, "rng": RNGState()}
    return Program(state, step, lambda: bits([dict(model.state_dict()), drawn]), control=False)


class Loop:
    """A loop's own place and history, with lists, an array and a dict that starts empty."""

    def __init__(self) -> None:
        self.step, self.history, self.best, self.by_name = 0, [], None, {}
        self.array = np.zeros(3)

    def advance(self, number: int) -> None:
        self.step = number
        self.history.append({"loss": 1.0 / (1 + number), "tensor": torch.full((2,), float(number))})
        self.best = {"step": number} if number % 2 == 0 else self.best
        self.by_name[f"step {number}"] = (number, {number})
        self.array = np.append(self.array, number)

    def state_dict(self) -> Any:
        return dict(vars(self))

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


@entry("a loop's own state, which grows and starts empty")
def _() -> Program:
    loop = Loop()
    return Program({"loop": loop}, loop.advance, lambda: copy.deepcopy(vars(loop)))


@entry("plain values in a dict, list and set of the state")
def _() -> Program:
    values = {"progress": {"epoch": 0, "seen": {}, "best": None}, "losses": [], "names": {"none"}}

    def step(number: int) -> None:
        values["progress"]["epoch"] += number  # type: ignore[call-overload, index]
        values["progress"]["seen"][f"f{number}"] = number  # type: ignore[call-overload, index]
        values["progress"]["best"] = {"step": number}  # type: ignore[call-overload, index]
        values["losses"].append(1.0 / (1 + number))  # type: ignore[attr-defined]
        values["names"].add(f"n{number}")  # type: ignore[attr-defined]

    return Program(dict(values), step, lambda: copy.deepcopy(values), control=False)


def loaded(workers: int) -> Program:
    data = pytest.importorskip("torchdata.stateful_dataloader")
    from torch.utils.data import TensorDataset

    loader = data.StatefulDataLoader(
        TensorDataset(torch.arange(40)),
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(torch.initial_seed() % 1000),
    )
    seen: list[int] = []
    batches: list[Any] = []

    def step(number: int) -> None:
        if not batches:
            batches.append(iter(loader))
        seen.extend(next(batches[0])[0].tolist())
        del seen[:-2]

    return Program({"loader": loader}, step, lambda: list(seen))


@entry("loader: torchdata's, in this process", live=(0,))
def _() -> Program:
    return loaded(0)


@entry("loader: torchdata's, with 2 workers", live=(0,))
def _() -> Program:
    return loaded(2)


# --- what is asked of each
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "live_steps"), [(name, n) for name, one in ZOO.items() for n in one.live]
)
def test_what_save_takes_restore_gives_back(
    tmp_path: Path, same, name: str, live_steps: int
) -> None:
    """live_steps: how many the program that restores has made before, from other numbers."""
    one = ZOO[name]
    program = fresh(one.make, 0)
    for number in range(TRAINED):
        program.step(number)
    with CheckpointManager(tmp_path) as ckpt:
        if one.refused is not None:
            with pytest.raises(one.refused):
                ckpt.save(TRAINED, program.state)
            assert not list(tmp_path.glob("checkpoint*"))
            return
        ckpt.save(TRAINED, program.state)
    kept = {
        k: copy.deepcopy(v.state_dict())
        for k, v in program.state.items()
        if program.control and stateful(v)
    }
    for number in range(TRAINED, TRAINED + MORE):
        program.step(number)
    expected = program.outcome()

    if program.control:
        control = fresh(one.make, 1)
        for number in range(20, 20 + live_steps):
            control.step(number)
        for key, state in kept.items():
            control.state[key].load_state_dict(state)
        for number in range(TRAINED, TRAINED + MORE):
            control.step(number)
        same(control.outcome(), expected)

    resumed = fresh(one.make, 2)
    for number in range(20, 20 + live_steps):
        resumed.step(number)
    with CheckpointManager(tmp_path) as ckpt:
        report = ckpt.restore(resumed.state)
    assert (report.step, report.missing, report.unexpected) == (TRAINED, [], [])
    for number in range(TRAINED, TRAINED + MORE):
        resumed.step(number)
    same(resumed.outcome(), expected)


def test_the_zoo_is_large() -> None:
    assert len(ZOO) >= 40
