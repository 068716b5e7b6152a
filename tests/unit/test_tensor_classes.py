"""Tensors that are made of other tensors, at any place of a state: taken apart at a save, and read
into the live ones or put together at a load."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    InvalidState,
    ReplicationMismatch,
    StateMismatch,
    UnsupportedValue,
    load_state,
    open_checkpoint,
    register_tensor_class,
)
from ckptcore.state import containers
from ckptcore.testing.ranks import run_ranks

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)


class Kind(Enum):
    ROW = 1


class Facts(NamedTuple):
    kind: Kind
    bits: int


class Rows(torch.Tensor):
    """A matrix as codes and a scale for each row. As torch's wrappers, it has no memory itself."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
        shape = codes.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, facts: Any = None) -> None:
        self.codes, self.scale, self.facts = codes, scale, facts or Facts(Kind.ROW, 8)

    def __tensor_flatten__(self) -> Any:
        context = {"facts": self.facts, "block": [1, self.codes.shape[1]], "dtype": torch.int8}
        return ["codes", "scale"], context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context["block"] == [1, size[1]] and context["dtype"] is torch.int8
        return cls(inner["codes"], inner["scale"], context["facts"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            for name in ("codes", "scale"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].facts)
        raise NotImplementedError(func)


class Unknown(Rows):
    pass


register_tensor_class(Rows, context=[Facts, Kind], name="tests.Rows")


def rows(seed: int, count: int = 6, width: int = 4) -> Rows:
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (count, width), generator=made, dtype=torch.int8)
    return Rows(codes, torch.rand(count, 1, generator=made))


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(seed), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("table", rows(seed + 1))
        self.bias = nn.Parameter(torch.full((6,), float(seed)))


def same(one: Any, other: Any) -> bool:
    return (
        type(one) is type(other)
        and torch.equal(one.codes, other.codes)
        and torch.equal(one.scale, other.scale)
        and one.facts == other.facts
    )


def test_weights_and_buffers_are_read_into_in_place(tmp_path: Path) -> None:
    saved, live = Model(1), Model(5)
    before = live.weight, live.weight.codes, live.table.scale
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": saved})
        checkpoints.load({"model": live})
    assert same(live.weight, saved.weight) and same(live.table, saved.table)
    assert live.bias.tolist() == [1.0] * 6
    assert (live.weight, live.weight.codes, live.table.scale) == before
    assert live.weight is before[0] and live.tied is live.weight


def test_what_stock_readers_find_is_the_inner_tensors(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        path = checkpoints.save(1, {"model": Model(1)}).url
    view = open_checkpoint(path)
    found = {info.name: info.alias_of for info in view.tensors()}
    parts = {f"{of}/tensors/{part}" for of in ("weight", "table") for part in ("codes", "scale")}
    assert {name for name, alias in found.items() if alias is None} == {*parts, "bias"}
    assert found["tied/tensors/codes"] is not None or found["weight/tensors/codes"] is not None


def test_plain_values_come_back_as_they_were_saved(tmp_path: Path) -> None:
    saved = {"a": rows(1), "list": [rows(2), {"deep": rows(3)}], "n": 7}
    live: dict[str, Any] = {"a": rows(8, count=2), "list": [], "n": 0}
    with CheckpointManager(tmp_path) as checkpoints:
        path = checkpoints.save(1, {"state": saved}).url
        checkpoints.load({"state": live})
    for state in (live, load_state(path, "state"), load_state(path, "state", dtype="bfloat16")):
        assert same(state["a"], saved["a"]) and same(
            state["list"][1]["deep"], saved["list"][1]["deep"]
        )
        assert same(state["list"][0], saved["list"][0]) and state["n"] == 7


def test_a_state_dict_of_its_own_gets_them_put_together(tmp_path: Path) -> None:
    class Own:
        def __init__(self, value: Rows | None) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return {} if self.value is None else {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    saved, live, fresh = Own(rows(1)), Own(rows(2)), Own(None)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"own": saved})
        checkpoints.load({"own": live})
        checkpoints.load({"own": fresh})
    assert same(live.value, saved.value) and same(fresh.value, saved.value)


def test_saves_in_the_background_have_bytes_of_one_step(tmp_path: Path) -> None:
    model, live = Model(1), Model(5)
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2, 3):  # the second and third know the structure again
            wanted = model.weight.codes.clone()
            handle = checkpoints.save_async(step, {"model": model})
            with torch.no_grad():
                model.weight.codes.add_(1)
            handle.result(60)
            checkpoints.load({"model": live}, step)
            assert torch.equal(live.weight.codes, wanted)


def test_a_context_that_changes_is_stored_as_it_is_then(tmp_path: Path) -> None:
    state = {"a": rows(1)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"state": state})
        state["a"].facts = Facts(Kind.ROW, 4)
        path = checkpoints.save(2, {"state": state}).url
    assert load_state(path, "state")["a"].facts == Facts(Kind.ROW, 4)


def test_an_unknown_class_is_refused_with_the_function_that_registers_it(tmp_path: Path) -> None:
    unknown = Unknown(rows(1).codes, rows(1).scale)
    for state in ({"w": unknown}, {"w": {"deep": [unknown]}}):
        with (
            CheckpointManager(tmp_path) as checkpoints,
            pytest.raises(
                UnsupportedValue,
                match=r"component 'w'.*Unknown is not supported; call register_tensor_class",
            ),
        ):
            checkpoints.save(1, state)


def test_a_context_that_is_not_plain_is_refused(tmp_path: Path) -> None:
    value = rows(1)
    value.facts = object()
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(
            InvalidState,
            match=r"component 's', key 'w': .*builtins.object; name its class as context=",
        ),
    ):
        checkpoints.save(1, {"s": {"w": value}})


def test_what_does_not_fit_the_live_one_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, quantised = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    quantised.weight = nn.Parameter(rows(1), requires_grad=False)
    other = nn.Linear(4, 6, bias=False)
    other.weight = nn.Parameter(rows(9), requires_grad=False)
    other.weight.facts = Facts(Kind.ROW, 4)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"m": plain})
        checkpoints.save(2, {"m": quantised})
        before = plain.weight.detach().clone()
        for step, live, text in (
            (2, plain, r"'m/weight' was saved as a tests.Rows, the live state has a plain tensor"),
            (1, quantised, r"'m/weight' was saved as a plain tensor, .* has a tests.Rows"),
            (2, other, r"tests.Rows with facts .*'bits': 8.*the live state has facts .*'bits': 4"),
        ):
            with pytest.raises(StateMismatch, match=text):
                checkpoints.load({"m": live}, step)
        monkeypatch.delitem(containers._BY_NAME, "tests.Rows")
        with pytest.raises(StateMismatch, match=r"component 'm': .*call register_tensor_class"):
            checkpoints.load({"m": quantised}, 2)
    assert torch.equal(plain.weight, before) and same(quantised.weight, rows(1))


def test_keys_and_transactions_go_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    saved, live = Model(1), Model(5)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": saved})
        checkpoints.load({"model": live}, keys=["model/weight"], transactional=True)
    assert same(live.weight, saved.weight) and same(live.table, rows(6))
    assert live.bias.tolist() == [5.0] * 6


def sharded(comm: Any, whole: Rows, cuts: list[int]) -> Any:
    """This rank's rows of a matrix, as a slice."""
    from ckptcore import Shard

    first, last = cuts[comm.rank], cuts[comm.rank + 1]
    part = Rows(whole.codes[first:last].clone(), whole.scale[first:last].clone())
    return Shard(part, tuple(whole.shape), (first, 0))


@pytest.mark.parametrize("cuts", [[0, 1, 6], [0, 2, 3, 6], [0, 6]])
def test_slices_are_saved_and_resharded(tmp_path: Path, cuts: list[int]) -> None:
    whole = rows(1)

    def save(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as checkpoints:
            checkpoints.save(1, {"state": {"w": sharded(comm, whole, [0, 3, 6])}})

    def load(comm: Any) -> bool:
        live = sharded(comm, rows(2), cuts)
        with CheckpointManager(tmp_path, comm=comm) as checkpoints:
            checkpoints.load({"state": {"w": live}})
        return same(live.tensor, sharded(comm, whole, cuts).tensor)

    run_ranks(2, save)
    assert run_ranks(len(cuts) - 1, load) == [True] * (len(cuts) - 1)
    assert same(load_state(tmp_path / "checkpoint-1", "state")["w"], whole)


def test_slices_that_inner_tensors_cannot_follow_are_refused_by_name(tmp_path: Path) -> None:
    from ckptcore import Shard

    blocks = Rows(torch.zeros(3, 4, dtype=torch.int8), torch.zeros(2, 1))  # 3 rows, 2 scales
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(
            InvalidState, match=r"component 's', key 'w': inner tensor 'scale' of a tests.Rows"
        ),
    ):
        checkpoints.save(1, {"s": {"w": Shard(blocks, (6, 4), (0, 0))}})


def test_replicas_are_compared_by_their_inner_tensors(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as checkpoints:
            checkpoints.save(1, {"w": {"a": rows(comm.rank)}})

    for error in run_ranks(2, save, errors=True):
        assert isinstance(error, ReplicationMismatch) and error.ranks == [1]


# What torchao has.


def quantised(recipe: str) -> nn.Module:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    config = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int8-dynamic": lambda: Int8DynamicActivationInt8WeightConfig(),
        "float8": lambda: Float8WeightOnlyConfig(),
        "intx": lambda: IntxWeightOnlyConfig(
            weight_dtype=vars(torch)["int4"], granularity=PerGroup(32)
        ),
        "int8-int4": lambda: Int8DynamicActivationIntxWeightConfig(
            weight_dtype=vars(torch)["int4"], weight_granularity=PerGroup(32)
        ),
    }[recipe]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    quantize_(model, config())
    return model


def flat(tensor: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def equal(one: Any, other: Any) -> bool:
    a, b = flat(one), flat(other)
    return (
        type(one) is type(other)
        and a.keys() == b.keys()
        and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)
        and one.__tensor_flatten__()[1] == other.__tensor_flatten__()[1]
    )


RECIPES = ["int8", "int8-dynamic", "float8", "intx", "int8-int4"]


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_weights_of_torchao(tmp_path: Path, recipe: str) -> None:
    saved, live = quantised(recipe), quantised(recipe)
    given = torch.randn(3, 64)
    kept = live[0].weight, flat(live[0].weight)
    with CheckpointManager(tmp_path) as checkpoints:
        path = checkpoints.save(1, {"model": saved, "copy": {"w": saved[0].weight}}).url
        checkpoints.load({"model": live})
    assert equal(live[0].weight, saved[0].weight) and equal(live[2].weight, saved[2].weight)
    assert live[0].weight is kept[0]
    assert all(part is kept[1][name] for name, part in flat(live[0].weight).items())
    assert torch.equal(live(given), saved(given))
    rebuilt = load_state(path, "copy")["w"]
    assert type(rebuilt) is type(saved[0].weight) and equal(rebuilt, saved[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@needs_torchao
def test_float4_of_torchao_is_rebuilt(tmp_path: Path) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    saved = to_nf4(torch.randn(64, 64), 64, 2)
    with CheckpointManager(tmp_path) as checkpoints:
        path = checkpoints.save(1, {"s": {"w": saved}}).url
    assert torch.equal(
        load_state(path, "s")["w"].get_original_weight(), saved.get_original_weight()
    )


@pytest.fixture
def mesh() -> Any:
    """A mesh of two ranks of which this process is the second; only its geometry is used."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@needs_torchao
def test_local_parts_of_a_dtensor_are_slices(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Cut
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    weight: Any = quantised("int8-int4")[0].weight  # 32 x 64 in groups of 32

    def on_both(shape: tuple[int, int], placement: Any) -> Any:
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
        spec = DTensorSpec(mesh, (placement,), tensor_meta=meta)
        return DTensor(weight, spec, requires_grad=False)

    for placement, shape, offset, scale, at in (
        (Cut(0), (64, 64), (32, 0), (64, 2), (32, 0)),
        (Cut(1), (32, 128), (0, 64), (32, 4), (0, 2)),
    ):
        whole = on_both(shape, placement)
        taken = containers.flattened(whole)
        assert taken is not None and taken.payload["shape"] == list(whole.shape)
        parts = taken.payload["tensors"]
        assert parts["qdata"].offset == offset and parts["qdata"].tensor is weight.qdata
        assert parts["scale"].global_shape == scale and parts["scale"].offset == at
    taken = containers.flattened(on_both((32, 64), Replicate()))
    assert taken is not None and taken.payload["tensors"]["scale"].global_shape == (32, 2)
