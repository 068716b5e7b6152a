"""Groups of arguments inside the arguments of DDPTrainer and FSDP2Trainer."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import one_of, whole
from .typed import check_types

__all__ = ["DDPArguments", "DTYPES", "FSDP2Arguments", "PostLocalSGDArguments"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(kw_only=True)
class DDPArguments:
    """Handed to `DistributedDataParallel`."""

    broadcast_buffers: bool = True  # buffers are synchronised at each forward
    init_sync: bool = True  # parameters and buffers are synchronised when the model is wrapped
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False  # walks the graph once more
    gradient_as_bucket_view: bool = True  # saves memory
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False

    def __post_init__(self) -> None:
        check_types(self, "ddp.")
        if self.bucket_cap_mb is not None:
            whole(
                "ddp.bucket_cap_mb",
                self.bucket_cap_mb,
                at_least=1,
                instead="None leaves torch's size",
            )


@dataclass(kw_only=True)
class PostLocalSGDArguments:
    """Ranks step on their own gradients and average their parameters now and then."""

    enabled: bool = False
    start_step: int = 500  # ordinary all-reduce before this step
    period: int = 4  # optimizer steps from one average to the next
    post_local_gradient_allreduce: bool = False  # gradients stay all-reduced after the switch

    def __post_init__(self) -> None:
        check_types(self, "post_local_sgd.")
        whole("post_local_sgd.start_step", self.start_step, at_least=0)
        whole("post_local_sgd.period", self.period, at_least=1)


@dataclass(kw_only=True)
class FSDP2Arguments:
    """Policies for `fully_shard`."""

    reshard_after_forward: bool | int = (
        True  # True ~ ZeRO-3, False ~ ZeRO-2, N: reshard to groups of N ranks
    )
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None  # torch has no such policy: the trainer casts buffers
    cpu_offload: bool = False
    shard_transformer_layers: bool = True
    transformer_layers_path: str = (
        "causal_lm.layer_stack.layers"  # empty or not there: only the root is sharded
    )

    def __post_init__(self) -> None:
        check_types(self, "fsdp2.")
        if not isinstance(self.reshard_after_forward, bool):
            whole(
                "fsdp2.reshard_after_forward",
                self.reshard_after_forward,
                at_least=1,
                instead="or True or False",
            )
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            one_of(f"fsdp2.{name}", getattr(self, name), (None, *DTYPES))
