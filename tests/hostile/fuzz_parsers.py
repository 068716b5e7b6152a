"""Coverage-guided fuzzing of what reads a checkpoint's files: `python fuzz_parsers.py TARGET
SECONDS CORPUS [NEW]`.

TARGET is one of the functions in TARGETS. Inputs that reach new code are written to NEW (else to a
folder that is thrown away); CORPUS is only read. Everything but an error of our tree, more than
MEMORY more for one input, more than TIMEOUT seconds for one, and a value that is not the same when
it is written and read again, is a finding: it ends the run, and the input is printed. A digest
would stop any fuzzer, so inputs are tried with the digest that fits as well.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["ckptcore.format", "ckptcore.errors", "json"]):
    import msgpack

    from ckptcore.errors import CheckpointError, InvalidState, UnsupportedValue
    from ckptcore.format.digest import content_digest
    from ckptcore.format.layout import decode_layouts, encode_layouts
    from ckptcore.format.manifest import CheckpointManifest, Index
    from ckptcore.format.values import TensorRef
    from ckptcore.format.values import decode as decode_value
    from ckptcore.format.values import encode as encode_value

MEMORY = 64 << 20
TIMEOUT = 5
MAX_LENGTH = 8192
WORLD = 8


def manifest(data: bytes) -> None:
    for whole in (data, data + b',\n "digest": "%s"\n}\n' % content_digest(data).encode()):
        try:
            found = CheckpointManifest.decode(whole, "runs/a/checkpoint-1")
        except CheckpointError:
            continue
        assert found.size_bytes >= 0
        for key in found.components:
            try:
                found.copies(key)
            except CheckpointError:
                pass
        try:
            again = found.encode()
        except InvalidState:  # what JSON can spell and UTF-8 cannot hold
            continue
        second = CheckpointManifest.decode(again)
        assert second.encode() == again, (
            "a manifest that is not the same when it is written and read again"
        )


def index(data: bytes) -> None:
    try:
        found = Index.decode(data, "index.rank00000.msgpack")
    except CheckpointError:
        return
    assert found.file_digests().keys() == found.files.keys()
    again = found.encode()
    second = Index.decode(again)
    # By bytes: a field of a later version, which is kept, may be a NaN, and no NaN is equal to itself.
    assert second.encode() == again, (
        "an index that is not the same when it is written and read again"
    )


def layouts(data: bytes) -> None:
    try:
        table = msgpack.unpackb(data, unicode_errors="surrogatepass")
    except Exception:
        return
    try:
        found = decode_layouts(table, WORLD)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ):  # what the reader takes for damage
        return
    for tensor in found[:50]:
        if tensor.layout is None:
            continue
        whole = (0,) * len(tensor.shape), tensor.shape
        for writer, (offset, size) in islice(tensor.layout.cuts(tensor.shape, whole), 100):
            assert 0 <= writer < WORLD
            assert all(
                o >= 0 and o + n <= s for o, n, s in zip(offset, size, tensor.shape, strict=True)
            )
        for rank in range(WORLD):
            tensor.layout.box_of(tensor.shape, rank)
    second = decode_layouts(encode_layouts(found), WORLD)
    assert second == found, "a table that is not the same when it is written and read again"


def values(data: bytes) -> None:
    found: list[Any] = []
    for lenient in (False, True):
        try:
            found.append(decode_value(data, lenient=lenient))
        except CheckpointError:
            continue
    if not found:
        return
    try:
        written = encode_value(found[0], lambda _, leaf: leaf if type(leaf) is TensorRef else None)
    except (
        UnsupportedValue
    ):  # what only a stranger would store, such as an array of nothing nested too deep
        return
    again = encode_value(
        decode_value(written, lenient=True),
        lambda _, leaf: leaf if type(leaf) is TensorRef else None,
    )
    assert again == written, "a value that is not the same when it is written and read again"


# Mutations that keep the structure: random bytes alone seldom get past the first brackets of JSON
# and msgpack.

ODD = [
    None,
    True,
    0,
    1,
    -1,
    7,
    8,
    4096,
    2**31,
    2**61,
    2**62,
    2**63,
    -(2**63),
    2**64 - 1,
    0.5,
    1e308,
    float("nan"),
    "",
    "a",
    "0",
    "../a",
    "a/b",
    "\ud800",
    "\0",
    "F32",
    "complex128",
    "S0",
    "s0 R",
    "R S1",
    "(1,)i4",
    "(01)i4,",
    "i4,i4",
    "<U9",
    "|O",
    "M8[D]",
    "UTC",
    "2026-01-01",
    "datetime",
    "timezone",
    "OrderedDict",
    "Fraction",
    "range",
    "1e999999",
    b"",
    b"\xc1",
    b"d" * 8,
    b"d" * 16,
    [],
    {},
    [[]],
    [0],
    [2**61, 0],
    [1] * 70,
    {"a": 0},
]


def changed(value: Any, rng: random.Random, pool: list[Any]) -> Any:
    """A copy of a document with one place in it changed."""
    roll = rng.random()
    if isinstance(value, list | dict) and value and roll < 0.9:
        items: list[Any] = list(value.items()) if isinstance(value, dict) else list(value)
        at = rng.randrange(len(items))
        if roll < 0.1:
            items.insert(at, rng.choice(items))
        elif roll < 0.2:
            del items[at]
        elif isinstance(value, dict) and roll < 0.3:
            items[at] = (rng.choice(["a", "", "\ud800", "../a", *value]), items[at][1])
        elif isinstance(value, dict):
            items[at] = (items[at][0], changed(items[at][1], rng, pool))
        else:
            items[at] = changed(items[at], rng, pool)
        return dict(items) if isinstance(value, dict) else items
    if isinstance(value, msgpack.ExtType) and roll < 0.9:
        code = rng.randrange(15) if roll < 0.1 else value.code
        return msgpack.ExtType(code, changed_msgpack(value.data, rng))
    if isinstance(value, int) and roll < 0.4:
        return value + rng.choice([-1, 1, 8, 2**32, -value, value])
    if isinstance(value, bytes) and roll < 0.6:
        try:
            return changed_msgpack(value, rng)
        except Exception:
            return value * 2 if roll < 0.3 else value[:-1]
    if roll < 0.5 and pool:
        return rng.choice(pool)
    return [value] if roll > 0.95 else rng.choice(ODD)


def parts(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(part for item in inner for part in parts(item))]


def changed_msgpack(data: bytes, rng: random.Random) -> bytes:
    document = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    return bytes(
        msgpack.packb(changed(document, rng, parts(document)), unicode_errors="surrogatepass")
    )


def changed_json(data: bytes, rng: random.Random) -> bytes:
    text = data.rpartition(b',\n "digest"')[0] or data
    document = json.loads(text if text.rstrip().endswith(b"}") else text + b"}")
    return (
        json.dumps(changed(document, rng, parts(document)), indent=1, default=repr)
        .removesuffix("\n}")
        .encode()
    )


def mutator(name: str) -> Any:
    rewrite = changed_json if name == "manifest" else changed_msgpack

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.6:
            try:
                new = rewrite(data, rng)
                for _ in range(rng.randrange(3)):
                    new = rewrite(new, rng)
                return new[:max_size]
            except Exception:
                pass
        return bytes(atheris.Mutate(data, max_size))

    return mutate


TARGETS = {"manifest": manifest, "index": index, "layouts": layouts, "values": values}


def watched(target: Any) -> Any:
    def one(data: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        target(data)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < MEMORY, f"{grown >> 20} MiB more for an input of {len(data)} bytes"

    return one


def main() -> None:
    name, seconds, corpus = sys.argv[1:4]
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(sys.argv[4] if len(sys.argv) > 4 else f"{scratch}/new")
        new.mkdir(exist_ok=True, parents=True)
        flags = {
            "max_total_time": seconds,
            "timeout": TIMEOUT,
            "max_len": MAX_LENGTH,
            "rss_limit_mb": 1024,
            "print_final_stats": 1,
            "artifact_prefix": f"{new}/finding-",
            "use_value_profile": 1,
        }
        arguments = [
            sys.argv[0],
            *(f"-{flag}={value}" for flag, value in flags.items()),
            str(new),
            corpus,
        ]
        atheris.Setup(arguments, watched(TARGETS[name]), custom_mutator=mutator(name))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
