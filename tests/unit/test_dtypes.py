"""B38: every torch dtype is restored bit for bit, or refused by name with nothing left on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ckptcore import CheckpointManager, UnsupportedValue

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
NATIVE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
REFUSED = {torch.qint8, torch.qint32, torch.quint8, torch.quint2x4, torch.quint4x2}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def every_bit(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of shape [2, 3] with random bits, or random truth values."""
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.randint(0, 2, (2, 3), generator=generator, dtype=torch.uint8).bool()
    if dtype in REFUSED:
        return torch.empty(6, dtype=torch.uint8)  # made by the test itself
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (2, 3 * size), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.zeros(*shape[:-1], shape[-1] * size, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in REFUSED], ids=name)
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_b38_dtype_comes_back_bit_for_bit(
    dtype: torch.dtype, transactional: bool, tmp_path: Path
) -> None:
    saved = every_bit(dtype)
    live = {"t": zeros(dtype, 2, 3), "scalar": zeros(dtype, 1)[0], "none": zeros(dtype, 0, 3)}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"t": saved, "scalar": saved[1, 2], "none": saved[:0]}})
        found = ckpt.load({"c": live}, transactional=transactional).values["c"]
    expected = {"t": saved, "scalar": saved[1, 2].reshape(1), "none": saved[:0]}
    for state in (live, found):
        assert [tuple(t.shape) for t in state.values()] == [(2, 3), (), (0, 3)]
        for key, tensor in state.items():
            assert tensor.dtype is dtype
            held = tensor.reshape(1) if key == "scalar" else tensor
            assert held.view(torch.uint8).tolist() == expected[key].view(torch.uint8).tolist(), key


@pytest.mark.parametrize("dtype", sorted(REFUSED, key=str), ids=name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_b38_quantized_dtypes_are_refused_before_a_byte_is_written(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    if dtype in (torch.quint4x2, torch.quint2x4):
        scales, zeros = torch.ones(2), torch.zeros(2)
        made = torch.quantize_per_channel(torch.ones(2, 4), scales, zeros, 0, torch.quint4x2)
        if dtype is torch.quint2x4:
            pytest.skip("this torch makes no tensor of it")
    else:
        made = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, dtype)
    with (
        CheckpointManager(tmp_path / "root") as ckpt,
        pytest.raises(UnsupportedValue, match=name(dtype)) as caught,
    ):
        ckpt.save(1, {"net": {"layer": {"q": made}}})
    assert (caught.value.component, caught.value.key) == ("net", "layer/q")
    assert not (tmp_path / "root").exists() or list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("dtype", NATIVE, ids=name)
def test_b38_stock_library_reads_what_both_know(dtype: torch.dtype, tmp_path: Path, same) -> None:
    saved = every_bit(dtype)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": {"w": saved, "wt": saved.t(), "w0": saved[1, 2]}})
    found = safetensors.torch.load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    expected = {"w": saved, "w0": saved[1, 2], "wt": saved.t()}
    same({key: found[key] for key in expected}, expected)
    assert len(found) == 3


class Coded(torch.Tensor):
    """A toy quantized tensor: codes and a scale."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


def test_b38_tensor_subclass_is_exact_or_refused(tmp_path: Path) -> None:
    coded = Coded(torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor(0.5))
    with CheckpointManager(tmp_path / "root") as ckpt:
        try:
            ckpt.save(1, {"opt": {"moments": {"q": coded}}})
        except UnsupportedValue as error:
            assert (error.component, error.key) == ("opt", "moments/q")
            assert "Coded" in str(error)
            assert not (tmp_path / "root").exists() or list((tmp_path / "root").iterdir()) == []
            return
        live = Coded(torch.zeros(3, dtype=torch.uint8), torch.tensor(0.0))
        found = ckpt.load({"opt": {"moments": {"q": live}}}).values["opt"]["moments"]["q"]
    assert type(found) is Coded
    assert found.codes.tolist() == [1, 2, 3]
    assert found.scale.item() == 0.5


NUMPY = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", [*NUMPY, ">f4", ">i8", "longdouble", "M8[ns]", "S4", "U3"])
@pytest.mark.parametrize("count", [3, 5000])
def test_numpy_arrays_small_and_large(dtype: str, count: int, tmp_path: Path) -> None:
    raw = np.random.default_rng(3).integers(0, 2, count * np.dtype(dtype).itemsize, dtype=np.uint8)
    saved = raw.view(dtype).reshape(-1, 1)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"a": saved}})
        found = ckpt.load({"c": {"a": np.zeros_like(saved)}}).values["c"]["a"]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (saved.dtype, saved.shape)
    assert found.tobytes() == saved.tobytes()
