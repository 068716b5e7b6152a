"""Where this process stands among those of the job, and messages that need no device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..arguments import InvalidArgument

log = logging.getLogger(__name__)


def choose_workspace(args: Any) -> None:
    """cuBLAS reads this when CUDA is initialised, so it comes before anything touches a device."""
    if not args.full_determinism or "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        log.warning(
            "full_determinism: CUDA was initialised before CUBLAS_WORKSPACE_CONFIG could be set"
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def choose_device(args: Any, local_rank: int = 0, world_size: int = 1) -> torch.device:
    """The device that the arguments name; by default cuda, one a process, else the CPU."""
    if args.use_cpu:
        return torch.device("cpu")
    name = str(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name == "cuda" and world_size > 1 and torch.cuda.is_available():
        devices = torch.cuda.device_count()
        if local_rank >= devices:
            reason = f"process {local_rank + 1} of this machine, which has {devices} of them"
            instead = "start one process per device, or train on the cpu"
            raise InvalidArgument("device", "cuda", reason, instead)
        torch.cuda.set_device(local_rank)
    try:
        return torch.empty(0, device=name).device
    # torch has no one type for this
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason, instead = str(error).splitlines()[0], "give one that this machine has, such as cpu"
        raise InvalidArgument("device", name, reason, instead) from None


@dataclass
class DistributedEnvironment:
    """Rank and size of the job, this process's device, and a CPU group for what ranks have to agree
    on.

    Made on every rank at the same point of the program. started: whether `close` is to end the
    process group.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    started: bool = False
    cpu_group: Any = field(default=None, repr=False)
    store: Any = field(default=None, repr=False)  # of the process group, where it was started here

    def __post_init__(self) -> None:
        if self.world_size > 1 and self.cpu_group is None:
            self.cpu_group = dist.new_group(backend="gloo")

    @classmethod
    def from_environ(cls, args: Any) -> DistributedEnvironment:
        """What the launcher said; starts the process group of several ranks if none is running."""
        choose_workspace(args)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
        if world_size == 1:
            return cls(device=choose_device(args))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = choose_device(args, local_rank, world_size)
        started = not dist.is_initialized()
        store = None
        if started:
            timeout = timedelta(seconds=args.ddp_timeout)
            store, rank, _ = next(rendezvous("env://", timeout=timeout))
            # Ranks that are started again find the same store, with what was left there.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
            how = {"rank": rank, "world_size": world_size, "timeout": timeout}
            dist.init_process_group(_backend(args, device), store=store, **how)
        elif args.ddp_timeout != type(args)().ddp_timeout:
            log.warning("ddp_timeout has no effect: the process group is running already")
        node_rank = int(os.environ.get("GROUP_RANK", "0"))
        return cls(dist.get_rank(), local_rank, world_size, node_rank, device, started, store=store)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """A rank's value, on every rank."""
        if self.world_size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, source, group=self.cpu_group)
        return held[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.world_size == 1:
            return [value]
        held: list[Any] = [None] * self.world_size
        dist.all_gather_object(held, value, group=self.cpu_group)
        return held

    def scatter_objects(self, values: list[Any] | None) -> Any:
        """Of rank 0's values, one for each rank, this rank's."""
        if self.world_size == 1:
            return (values or [None])[0]
        held: list[Any] = [None]
        dist.scatter_object_list(held, values, 0, group=self.cpu_group)
        return held[0]

    def max_flags(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks."""
        return self.begin_max(values)()

    def begin_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin `max_flags` in the background; call what is returned for the result."""
        if self.world_size == 1:
            return lambda: list(values)
        tensor = torch.tensor(list(values), dtype=torch.int64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.cpu_group, async_op=True)

        def end() -> list[int]:
            work.wait()
            result: list[int] = tensor.tolist()
            return result

        return end

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the ranks, in double precision."""
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, group=self.cpu_group)
        result: list[float] = tensor.tolist()
        return result

    def close(self) -> None:
        """At a good end only: after a failure this could wait for ranks that never come."""
        if self.started and dist.is_initialized():
            dist.destroy_process_group()
        self.started = False


def _backend(args: Any, device: torch.device) -> str:
    """A CPU group must exist beside that of the device: for flags, and for what is offloaded."""
    wanted: str = args.ddp_backend or ("nccl" if device.type == "cuda" else "gloo")
    return (
        wanted if "cpu" in device.type or wanted == "gloo" else f"cpu:gloo,{device.type}:{wanted}"
    )
