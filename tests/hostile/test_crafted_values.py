"""Values and names that no state ever had, behind digests that are right: typed errors, and a
command that tells them."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import msgpack
import numpy as np
import pytest
import torch
from ckpt_tools.main import main

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    ModelState,
    OptimizerState,
    RNGState,
    UnsupportedValue,
    open_checkpoint,
)
from ckptcore.format.values import (
    NUMPY_ARRAY,
    REGISTERED,
    SET,
    TENSOR,
    TUPLE,
    TensorRef,
    decode,
    encode,
)
from ckptcore.testing.processes import patience


def ext(code: int, payload) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(payload, strict_types=True))


def nested(levels: int, inner: bytes = b"\x00") -> bytes:
    return b"\x91" * levels + inner


def nested_tuples(levels: int) -> bytes:
    data = b"\x00"
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(TUPLE, b"\x91" + data))
    return data


def nested_everything() -> bytes:
    """Lists in tuples in lists: as deep as both limits together allow."""
    data = b"\x00"
    for _ in range(60):
        data = nested(900, msgpack.packb(msgpack.ExtType(TUPLE, b"\x91" + data)))
    return data


def vast_lists_in_tuples() -> bytes:
    """Lists that say they are long, again and again: gigabytes for some hundred thousand bytes."""
    data = b"\x00" * 12_000
    for _ in range(40):
        head = b"\xdc\x27\x10" * 1000  # 10,000 items
        data = head + msgpack.packb(msgpack.ExtType(TUPLE, data))
    return data


TREES = {
    "deep lists": nested(1000),
    "deeper lists": nested(100_000),
    "deep dicts": b"\x81\xa1a" * 1000 + b"\x00",
    "deep tuples": nested_tuples(60),
    "lists in tuples": nested_everything(),
    "another tensor": msgpack.packb({"a": ext(TENSOR, [2**31, False]), "b": 0, "n": 0}),
    "negative tensor": msgpack.packb({"a": ext(TENSOR, [-1, False]), "b": 0, "n": 0}),
    "tensor as a key": msgpack.packb(ext(3, [[ext(TENSOR, [0, True]), 1]])),
    "tensor in a set": msgpack.packb(ext(SET, [msgpack.packb(ext(TENSOR, [0, False]))])),
    "no tree of a dict": msgpack.packb(7),
    "texts that no terminal can show": msgpack.packb(
        {"n": "\x1b[31m\x07\u202e", "\x1b]0;x\x07": 1}
    ),
    "lone surrogates": encode({"\ud800": "\udfff", "n": 0}),
    "a number of many digits": encode({"n": 7**6000, "m": [7**6000]}),
    "a timestamp": b"\x81\xa1n\xd6\xff\x00\x00\x00\x01",
}


# Of other names than were saved, and sound: plain values come back as they are.
SOUND = (
    "texts that no terminal can show",
    "lone surrogates",
    "a number of many digits",
    "a timestamp",
)


@pytest.mark.parametrize("name", TREES)
def test_trees(crafted, bounded, name):
    crafted.index(lambda raw: raw["components"]["plain"].update(tree=TREES[name]))
    found = bounded(crafted)
    assert found["load"] in (("",) if name in SOUND else ("CheckpointCorrupt", "StateMismatch"))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_the_command_tells_of_trees(crafted, measured, capfd, tree):
    crafted.index(lambda raw: raw["components"]["plain"].update(tree=tree))
    for more in (["--values", "plain"], ["--values", "plain", "--json"], ["--tensors", "*"]):
        ended = measured(lambda more=more: main(["inspect", str(crafted.folder), *more]))
        assert ended.error == [] and ended.result in (0, 1), ended.text[-1000:]
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "\x1b" not in out


def test_long_lists_in_tuples(measured):
    """What is only declared takes no memory, whatever it is nested in."""
    data = vast_lists_in_tuples()
    ended = measured(lambda: decode(data))
    assert "CheckpointCorrupt" in ended.error
    assert "more items than there are bytes" in ended.text
    assert ended.resident < 16 << 20


def test_lists_as_long_as_they_say():
    """The check of declared lengths knows every form that values are written in."""
    odd = [
        None,
        True,
        0,
        -1,
        127,
        -33,
        255,
        2**16,
        2**32,
        -(2**15),
        -(2**31),
        -(2**63),
        2**64 - 1,
        0.5,
        2**70,
        1 + 2j,
    ]
    texts = ["x" * n for n in (0, 1, 31, 32, 255, 256, 65_536)]
    raws = [text.encode() for text in texts]
    state = {
        "lists": [[*odd, *texts, *raws] * 20] * 20,
        "dicts": [{f"{n}": n for n in range(count)} for count in (0, 15, 16, 70_000)],
        "long": list(range(70_000)),
        "arrays": [np.arange(n) for n in (0, 1, 2, 500)] * 20,
        "other": [(1,), {2: 3}, {4}, frozenset({5}), b"\xdc\xdd\xde\xdf" * 100] * 20,
    }
    found = decode(encode(state))
    arrays = state.pop("arrays"), found.pop("arrays")
    assert found == state
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(*arrays, strict=True))


LONG = 7**6000  # more digits than Python writes
LONG_KEYS = {
    "int": LONG,
    "negative": -LONG,
    "tuple": (1, LONG),
    "frozenset": frozenset({LONG}),
    "fraction": Fraction(LONG, 2),
}


@pytest.mark.parametrize("key", LONG_KEYS.values(), ids=LONG_KEYS.keys())
def test_keys_of_many_digits(tmp_path, key):
    """They are stored like any other, in the values and in the names of tensors below them."""
    state = {key: {"w": torch.arange(3.0), "n": LONG}, "x": 1, 2: torch.ones(2)}
    CheckpointManager(tmp_path).save(1, {"m": state})
    live = {key: {"w": torch.zeros(3), "n": 0}, "x": 0, 2: torch.zeros(2)}
    found = CheckpointManager(tmp_path).load({"m": live}).values["m"]
    assert list(found) == [key, "x", 2]
    assert (found[key]["n"], found["x"]) == (LONG, 1)
    assert live[key]["w"].tolist() == [0, 1, 2] and live[2].tolist() == [1, 1]
    names = {info.name for info in open_checkpoint(tmp_path / "checkpoint-1").tensors()}
    assert "2" in names and len(names) == 2
    assert (f"{hex(LONG)}/w" in names) == (key == LONG)


def test_keys_of_many_digits_and_texts_that_look_like_them():
    state = {LONG: 1, hex(LONG): 2}
    assert decode(encode(state)) == state
    with pytest.raises(UnsupportedValue) as caught:
        encode({LONG: object(), hex(LONG): 2})
    assert caught.value.key == f"{hex(LONG)}~2int"


DTYPES = [
    "(1 1)i4",
    "(01)i4,",
    "i4,,",
    "(,)i4",
    "i4,i4",
    "(2,)i4",
    "\ud800",
    "a4",
    "M8[9999999999999Y]",
    "S2147483648",
    "O",
    "V4",
    None,
    5,
    [],
    ["i4"],
    {"names": ["a"], "formats": ["i4"]},
    "f" * 100_000,
    "(" * 5000,
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: ascii(d)[:30])
def test_dtypes_that_numpy_reads_in_its_own_ways(dtype):
    """Only the spelling that the encoder writes."""
    for shape, raw in (([1], b"\0" * 4), ([0], b""), ([0, 2**40], b"")):
        document = (
            ext(NUMPY_ARRAY, [dtype, shape, raw])
            if dtype != "\ud800"
            else msgpack.ExtType(
                NUMPY_ARRAY, msgpack.packb([dtype, shape, raw], unicode_errors="surrogatepass")
            )
        )
        try:
            found = decode(msgpack.packb(document))
        except CheckpointError:
            continue
        assert (
            isinstance(found, np.ndarray) and found.nbytes == len(raw) and found.dtype.str == dtype
        )


SLOW = {
    "fraction": ["Fraction", [7**400_000, 5**400_000]],
    "decimal": ["Decimal", "9" * 1_000_000],
    "exponent": ["Decimal", "1e999999999999999999"],
    "range": ["range", [0, 2**63, 1]],
    "deque": ["deque", [[], 2**62]],
    "uuid": ["UUID", b""],
}


@pytest.mark.parametrize("payload", SLOW.values(), ids=SLOW.keys())
def test_values_that_could_take_long(measured, payload):
    data = msgpack.packb(msgpack.ExtType(REGISTERED, encode(payload)))
    ended = measured(lambda: decode(data))
    assert not ended.error or "CheckpointError" in ended.error, ended.text
    assert ended.seconds < 3
    assert ended.resident < 64 << 20


def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


STATES = {
    "a list": [1, 2],
    "nothing": None,
    "names that are no texts": {0: 1, (1,): 2, None: 3},
    "lists for tensors": {"weight": [1.0, 2.0], "bias": "b"},
    "no dicts": {"state": [], "groups": 5, "group_of": [], "shapes": 0},
    "numbers for groups": {
        "state": {},
        "groups": [1, 2],
        "group_of": {"weight": 0, "bias": 0},
        "shapes": {},
    },
    "a state that is no dict": {
        "state": {"weight": 5, "bias": None},
        "groups": [{"lr": 1}],
        "group_of": {"weight": 0, "bias": 0},
        "shapes": {},
    },
    "unhashable groups": {
        "state": {},
        "groups": [{}],
        "group_of": {"weight": [], "bias": {}},
        "shapes": {},
    },
    "random states": {"python": "x", "numpy": 3, "torch": b"", "cuda": {}},
    "random states of other lengths": {
        "python": (3, (1, 2), None),
        "numpy": ("MT19937", [1], 9999, 0, 0.0),
        "torch": [1],
    },
}


@pytest.mark.parametrize("kind", ["model", "optimizer", "rng"])
@pytest.mark.parametrize("saved", STATES.values(), ids=STATES.keys())
def test_a_component_of_another_shape(tmp_path, crafted, measured, kind, saved):
    """The component has the right key, and what is in it is nothing that its kind ever saved."""
    live = model()
    parts = {
        "model": lambda: ModelState(live),
        "optimizer": lambda: OptimizerState(torch.optim.AdamW(live.parameters()), live),
        "rng": RNGState,
    }
    CheckpointManager(tmp_path / "run").save(1, {"part": parts[kind]()})
    own = type(crafted)(tmp_path / "run" / "checkpoint-1")
    tree = encode(saved, lambda path, leaf: leaf if isinstance(leaf, TensorRef) else None)
    own.index(lambda raw: raw["components"]["part"].update(tree=tree))
    ended = measured(lambda: CheckpointManager(tmp_path / "run").load({"part": parts[kind]()}, 1))
    # Random streams are looked at by their own code.
    expected = ["LoadFailed", "StateMismatch"] if kind == "rng" else ["StateMismatch"]
    assert ended.error[: len(expected)] == expected, f"{ended.error[:1]}: {ended.text[-800:]}"


def odd_sizes(document):
    document["files"]["plain.safetensors"][0] = 10**400
    document["components"]["plain"].update(size_bytes=10**400, tensors=10**400)


def odd_times(document):
    document["created"] = "9999-12-31T23:59:59-23:59"
    document["timings"] = {"write": "inf", "plan": 1e308}


def odd_ranks(document):
    document["components"]["plain"]["writers"] = [10**400, 0, 0]
    document["groups"] = {"g\x1b[2J": [[10**4000]]}


def odd_texts(document):
    document.update(
        run_id="\ud800",
        created="\x1b]8;;http://x\x07",
        checkpoint_id="\u202e" * 100,
        attempt_id="[red]",
    )
    document["metadata"] = {"\ud800": ["\udfff", "\x07"]}


def odd_steps(document):
    document["step"] = document["sequence"] = document["metrics_step"] = 10**4299
    document["metrics"] = {"loss": 10**308, "\x1b": "nan"}


@pytest.mark.parametrize(
    "change", [odd_sizes, odd_times, odd_ranks, odd_texts, odd_steps], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_command_tells_of_manifests(crafted, change, encoding):
    """As a user runs it, since the encoding of the output counts."""
    crafted.manifest(change)
    code = (
        "import contextlib, io, sys\nfrom ckpt_tools.main import main\n"
        f"for command in (['ls', {str(crafted.root)!r}], ['inspect', {str(crafted.folder)!r}], "
        f"['verify', {str(crafted.folder)!r}]):\n"
        "    for more in ([], ['--json']):\n"
        "        sys.stdout.flush()\n"
        "        assert main([*command, *more]) in (0, 1), (command, more)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60 * patience(),
        cwd=crafted.root,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONIOENCODING": encoding,
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-1500:]
    assert b"Traceback" not in done.stderr and b"\x1b" not in done.stdout
