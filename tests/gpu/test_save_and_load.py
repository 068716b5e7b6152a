"""Saving from and loading to an accelerator, bit for bit, and comparing replicas where they are."""

import pytest
import torch

from ckptcore import (
    CheckpointManager,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    ValidationLevel,
)
from ckptcore.replicas import compare
from ckptcore.replicas.device_digest import fingerprints
from ckptcore.testing.ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def tensor_of(dtype, shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(
        0,
        2 if dtype == torch.bool else 256,
        (count * size,),
        generator=generator,
        dtype=torch.uint8,
    )
    return raw.view(dtype).view(shape).to(device)


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(tmp_path, device, dtype, how):
    shapes = {"large": (3000, 1001), "scalar": (), "empty": (0, 3), "odd": (7, 3)}
    state = {name: tensor_of(dtype, shape, device) for name, shape in shapes.items()}
    state["transposed"] = tensor_of(dtype, (1024, 768), device).t()
    state["slice"] = tensor_of(dtype, (900, 900), device)[3:-5:2, 7:]
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with CheckpointManager(tmp_path) as ckpt:
        done = getattr(ckpt, how)(1, {"s": state})
        if how == "save_async":
            done.result(60)
        assert ckpt.verify(1) == []
        ckpt.load({"s": live})
    for name, tensor in state.items():
        assert torch.equal(bits(live[name]), bits(tensor)), name
        assert live[name].device == device


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_stream_of_the_callers_own(tmp_path, device, how):
    stream = torch.cuda.Stream()
    weight = torch.zeros(16 << 20, device=device)
    with torch.cuda.stream(stream), CheckpointManager(tmp_path) as ckpt:
        for step in range(1, 6):
            torch.cuda._sleep(20_000_000)
            weight.fill_(step)
            done = getattr(ckpt, how)(step, {"w": weight})
            weight.fill_(-1)
            if how == "save_async":
                done.result(60)
            torch.cuda._sleep(20_000_000)
            live = torch.zeros_like(weight)
            ckpt.load({"w": live}, step)
            assert torch.equal(live, torch.full_like(live, step))


def test_fingerprints_are_of_every_byte_and_of_nothing_else(device):
    base = tensor_of(torch.uint8, (5 << 20,), device)
    like_cpu = fingerprints([base.cpu()], sampled=False)
    assert fingerprints([base, base.clone()], sampled=False) == like_cpu * 2
    for at in (0, 1, 4095, 1 << 20, (4 << 20) + 3, (5 << 20) - 1):
        for bit in range(8):
            changed = base.clone()
            changed[at] ^= 1 << bit
            assert fingerprints([changed], sampled=False) != like_cpu
    swapped = base.clone()
    swapped[:8], swapped[8:16] = base[8:16], base[:8]
    assert fingerprints([swapped], sampled=False) != like_cpu


@pytest.mark.parametrize("level", ["QUICK", "TENSOR", "FULL"])
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_replicas_on_the_device(tmp_path, device, level, how, monkeypatch):
    copied = []
    monkeypatch.setattr(compare, "chunk_digests", lambda t: copied.append(t.name) or b"")

    def program(comm, spoil):
        weight = tensor_of(torch.float32, (2000, 1000), device)
        if spoil and comm.rank == 1:
            weight[0, 0] += 1
        component = StateComponent(
            "w", {"a": weight}, SharingPattern.REPLICATED, validation_level=ValidationLevel(level)
        )
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            done = getattr(ckpt, how)(2 if spoil else 1, [component])
            return (done if how == "save" else done.result(60)).step

    assert run_ranks(2, lambda comm: program(comm, False)) == [1, 1]
    assert copied == []  # only the writer's bytes were copied to the host, to be written
    errors = run_ranks(2, lambda comm: program(comm, True), errors=True)
    for error in errors:
        found = error.__cause__ if how == "save_async" else error
        assert isinstance(found, ReplicationMismatch), error
        assert found.component == "w"
        assert found.ranks == [1]
        if level == "FULL":
            assert found.details["a"]["differing"] == 1
            assert found.details["a"]["first index"] == 0
