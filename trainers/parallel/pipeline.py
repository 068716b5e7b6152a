"""A model too large for one device, in stages: batches go through the ranks in parts."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.utils.data import DataLoader

from ckptcore import ModelState, SharingPattern, StateComponent

from ..arguments import InvalidArgument, PipelineTrainingArguments, resolve_arguments
from ..build import stepper, without_trace
from ..data.position import Counted
from ..losses import count_labels
from ..optim import make_optimizer, parameter_groups
from .ddp import RanksTrainer
from .stages import ModelSplitter, Stages, place_stages

debugging = logging.getLogger("ckpt_trainers.debugging")


class PipelineOutput(NamedTuple):
    """What a loss function gets for a stage that returns one tensor: as a whole model gives it."""

    logits: Tensor
    loss: None = None


class _Stage(nn.Module):
    """A stage as a schedule calls it, with the trainer's settings around its forward pass alone."""

    def __init__(self, module: nn.Module, trainer: PipelineTrainer) -> None:
        super().__init__()
        self.module, self.computing = module, trainer.computing
        self.shared: dict[str, Any] = {}  # what all micro-batches of a batch get as it is

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing(training=self.training):
            return self.module(*args, **kwargs, **self.shared)


class PipelineTrainer(RanksTrainer):
    """A `Trainer` whose ranks hold the stages of one model. All read the same batches; the loss
    arises on the last stage.

    model_splitter: see ModelSplitter; required. pipe_schedule_factory: a schedule class of
    torch.distributed.pipelining. `model` is a shell on the meta device, with all names and no
    values. A parameter that several ranks have stays one: its gradients are added up before the
    optimizer's step.
    """

    kind = "pipeline"
    arguments_class = PipelineTrainingArguments

    def __init__(
        self,
        args: Any,
        *,
        model_splitter: ModelSplitter | None = None,
        pipe_schedule_factory: type[Any] = ScheduleGPipe,
        **what: Any,
    ) -> None:
        args = resolve_arguments(self.arguments_class, args)
        self.model_splitter, self.pipe_schedule_factory = model_splitter, pipe_schedule_factory
        self._fused: dict[nn.Parameter, tuple[Callable[[Tensor], None], list[int]]] = {}
        self._rehearsed, self._items = False, 1.0
        fused = what.get("fused_loss_factory")
        if fused is not None:  # it shares weights with the last stage, on the rank that has it
            what["fused_loss_factory"] = lambda _: (
                fused(self.stages.last) if self.stages.last is not None else _no_loss
            )
        elif what.get("compute_loss_func") is None and not args.label_smoothing_factor:
            what["compute_loss_func"] = getattr(model_splitter, "loss", None)
        super().__init__(args, **what)

    def check(self) -> None:
        args, data = self.args, self.train_dataset
        loss = self.compute_loss_func or self.fused_loss_factory or args.label_smoothing_factor
        if self.model_splitter is None:
            reason = "where to cut a model is not known by itself"
            instead = "give one, such as ByteGPTSplitter()"
            raise InvalidArgument("model_splitter", None, reason, instead)
        if not loss:
            reason = "the last stage's output is no loss"
            instead = "give one, or a splitter with a `loss`"
            raise InvalidArgument("compute_loss_func", None, reason, instead)
        if isinstance(data, DataLoader) and not data.drop_last:
            reason = "its last batch may be shorter than the others"
            instead = "make it with drop_last=True"
            raise InvalidArgument("train_dataset", "a DataLoader", reason, instead)
        super().check()
        if args.pp_stage_type == "v" and args.stages_per_rank != 2:
            reason, given = "a V has two stages a rank", args.stages_per_rank
            raise InvalidArgument("stages_per_rank", given, reason, "set 2")

    @property
    def data_parallel(self) -> tuple[int, int]:
        return 0, 1

    def share_state(self) -> None:
        """Each stage has its own."""

    # The stages.

    def build_model(self) -> None:
        args = self.args
        assert self.model_splitter is not None
        ranks = place_stages(self.world_size, args.stages_per_rank, args.pp_stage_type)
        mine = [number for number, rank in enumerate(ranks) if rank == self.rank]
        self.model = self.builder.build("meta")
        modules, self.pipeline_stages = self.model_splitter(
            copy.deepcopy(self.model),
            n_stages=len(ranks),
            stage_indices=mine,
            device=self.device,
            group=None,
        )
        self.stages = Stages(dict(zip(mine, modules, strict=True)), ranks, self.env, self.model)
        self.tell("debug_split_model", "stages %s of the placement %s: %s", mine, ranks, modules)
        self.stages.allocate(self.device)
        self.fill_stages()
        for name, p in self.stages.parameters().items():
            what = name, list(p.shape), p.dtype, p.device
            self.tell("debug_model_params", "%s: %s %s on %s", *what)
        stages = self.stages.modules.items()
        self.callable = {n: _Stage(self.builder.compile(stage), self) for n, stage in stages}
        self.wrapped = nn.ModuleList(self.callable.values())
        for known, module in zip(self.pipeline_stages, self.callable.values(), strict=True):
            known.submod = module
        self.schedule = self.make_schedule()

    def fill_stages(self) -> None:
        """From the checkpoint, if there is one to go on from; else rank 0 builds and deals out."""
        builder = self.builder
        # Buffers that are in no checkpoint come from the constructor in either case.
        builder.filled = not self.restorable or self.stages.has_derived
        source = "rank 0" if builder.filled else "the checkpoint"
        self.tell("debug_model_init", "stages get their values from %s", source)
        if builder.filled and builder.model_init is not None:
            with builder.default_dtype():
                whole = builder.prepare(builder.model_init()) if self.rank == 0 else None
                self.stages.fill(whole)

    def make_schedule(self) -> Any:
        made_by, number = self.pipe_schedule_factory, self.args.n_microbatches
        several = issubclass(made_by, PipelineScheduleMulti)
        stages = self.pipeline_stages if several else self.pipeline_stages[0]
        self.tell("debug_pipeline", "%s with %d micro-batches", made_by.__name__, number)
        try:
            # Losses are shares of the mean of the whole step: nothing is left to scale.
            return made_by(stages, number, loss_fn=self.micro_loss, scale_grads=False)
        except ValueError as error:
            reason = f"{made_by.__name__} refuses it: {error}"
            raise InvalidArgument("n_microbatches", number, reason, "give another number") from None

    def tell(self, flag: str, text: str, *values: Any) -> None:
        if getattr(self.args, flag):
            debugging.debug("rank %d: " + text, self.rank, *values)

    # A step.

    def split_batch(self, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        """(input of the first stage, labels, what all stages get by name)"""
        if not isinstance(batch, Mapping):
            first, labels = batch
            return first, labels, {}
        others = dict(batch)
        return others.pop("input_ids"), others.pop("labels"), others

    def share_whole(self, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        """`split_batch`, but for what is not one row for each sample: torch would cut any tensor
        into micro-batches. That goes to the stages as it is."""
        first, labels, others = self.split_batch(batch)
        whole = getattr(self.model_splitter, "shared_inputs", ())
        rows = {
            name: value
            for name, value in others.items()
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(first)
            if name not in whole
        }
        shared = {name: value for name, value in others.items() if name not in rows}
        for stage in self.callable.values():
            stage.shared = shared
        return first, labels, rows

    def micro_loss(self, outputs: Any, labels: Tensor) -> Tensor:
        assert self.loss_function is not None
        with self.computing():
            given = PipelineOutput(outputs) if isinstance(outputs, Tensor) else outputs
            return self.loss_function(given, labels, self._items)

    def run_schedule(self, batch: Any, items: float) -> Tensor:
        """The batch's part in the mean loss, on the last stage's rank; 0 on others."""
        first, labels, others = self.share_whole(self.move_batch(batch))
        losses: list[Tensor] = []
        self._items = items
        self.schedule.step(
            *([first] if 0 in self.stages.modules else []),
            target=None if self.stages.last is None else labels,
            losses=losses,
            return_outputs=False,
            **others,
        )
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().detach().float()

    def forward_backward(self, group: list[Counted], items: float) -> Tensor:
        total = torch.zeros((), device=self.device)
        if not self._rehearsed:
            # Stages find out by computing what shapes they exchange, which must leave no trace: a
            # run that resumes does so where the run that did not stop had no need to.
            with without_trace(self.wrapped):
                self.run_schedule(group[0][0], 1.0)
            self._rehearsed = True
        for number, (batch, _, _) in enumerate(group, start=1):
            self.fire("on_forward_backward_begin")
            total += self.run_schedule(batch, items)
            self.fire("on_forward_backward_end")
            if number < len(group):
                self.fire("on_substep_end")
        self.stages.add_up_gradients()
        for parameter, (step, count) in self._fused.items():
            count[0] = 0
            if parameter.grad is not None:
                step(parameter)
        dist.broadcast(total, self.stages.place[-1])
        return total

    def clip_gradients(self, max_norm: float) -> Tensor:
        square = torch.zeros((), device=self.device)
        for gradient in self.stages.gradients():
            square += torch.linalg.vector_norm(gradient, dtype=torch.float32) ** 2
        dist.all_reduce(square)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.stages.parameters().values(), max_norm, norm)
        return norm

    def build_optimizer(self) -> None:
        modules = list(self.stages.modules.values())
        self.optimizer = make_optimizer(self.args, modules, **self.optimizer_choice)
        # The groups of the whole model, so that they are the same on all ranks, and on one.
        whole = parameter_groups(self.model, self.optimizer_choice["groups"])
        names, mine = {group["name"] for group in whole}, self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in mine if group["name"] in names]
        self.build_scheduler()
        self.fuse_optimizer()

    def fuse_optimizer(self) -> None:
        """Step each parameter when the gradients of all micro-batches are there, if no other rank
        or stage has a part in it; what is left over (those parameters, and all where a schedule
        makes gradients by itself) after the last."""
        if not self.args.fuse_optim_with_backward:
            return
        stages = self.stages
        uses = Counter(p for module in stages.modules.values() for p in module.parameters())
        named, shared = stages.parameters().items(), stages.shared
        alone = {p for name, p in named if uses[p] == 1 and name not in shared}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in alone and parameter not in self._fused:
                    parameter.register_post_accumulate_grad_hook(self._count)
                self._fused[parameter] = stepper(self.optimizer, parameter, group), [0]

    def _count(self, parameter: Any) -> None:
        step, count = self._fused[parameter]
        count[0] += self._rehearsed
        if count[0] == self.args.n_microbatches:
            step(parameter)

    # Looking.

    def evaluate_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        first, labels, others = self.share_whole(self.move_batch(batch))
        count = min(self.args.n_microbatches, len(first))
        parts = {name: value.tensor_split(count) for name, value in others.items()}
        chunks = [
            (x, {name: part[i] for name, part in parts.items()})
            for i, x in enumerate(first.tensor_split(count))
        ]
        outputs = self.stages.forward(self.callable, chunks)
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._items = 1.0
        for output, target in zip(outputs, labels.tensor_split(count), strict=False):
            found[0] += self.micro_loss(output, target)
            found[1] += count_labels(target, self.shifts_labels)
        dist.broadcast(found, self.stages.place[-1])
        return found[0], found[1]

    def reduce(self, values: Sequence[Any]) -> list[float]:
        return [float(value) for value in values]  # the same on all ranks

    @torch.no_grad()
    def pipeline_generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **sampling: Any,
    ) -> Tensor:
        """The tokens (texts x length) and what the model adds to them, on every rank; called on all
        of them with the same values. sampling: of `next_tokens`."""
        ids, ended = input_ids, torch.zeros(len(input_ids), dtype=torch.bool, device=self.device)
        for _ in range(max_new_tokens):
            with self.computing(training=False):
                outputs = self.stages.forward(self.stages.modules, [(ids, {})])
            chosen = torch.empty(len(ids), dtype=ids.dtype, device=self.device)
            for output in outputs:
                logits = output if isinstance(output, Tensor) else output.logits
                chosen = next_tokens(logits[:, -1], ids, **sampling)
                if pad_token_id is not None:
                    chosen = chosen.masked_fill(ended, pad_token_id)
            dist.broadcast(chosen, self.stages.place[-1])
            ids = torch.cat([ids, chosen[:, None]], dim=1)
            if eos_token_id is not None:
                ended |= chosen == eos_token_id
                if bool(ended.all()):
                    break
        return ids

    # State.

    def model_components(self) -> list[StateComponent]:
        """By the names of the whole model, so that the number of stages may change, to one too."""
        modules = list(self.stages.modules.values())
        return self.components_of(ModelState(modules), modules, SharingPattern.SHARDED)

    def export_state(self) -> dict[str, Tensor]:
        return self.stages.gather()


def next_tokens(
    logits: Tensor,
    ids: Tensor,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """One token for each text, as transformers choose it: logits of tokens that are in `ids`
    already are made smaller, then comes the largest, or one drawn among the top_k largest."""
    logits = logits.float()
    known = logits.gather(1, ids)
    known = torch.where(known < 0, known * repetition_penalty, known / repetition_penalty)
    logits = logits.scatter(1, ids, known)
    if not do_sample:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("only the last stage has a loss")
