"""`ckpt inspect`: the facts of one checkpoint, with and without tensors and values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ckptcore import CheckpointManager, open_checkpoint

from .conftest import Ckpt


def manifest_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "checkpoint_manifest.json").read_text())
    return found


def test_header_components_and_files(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-20"
    manifest = manifest_of(folder)
    done = ckpt("inspect", folder, "--json")
    assert done.code == 0 and done.err == ""
    document = done.document
    header = document["checkpoint"]
    assert header["name"] == "checkpoint-20" and header["url"] == str(folder)
    assert header["status"] == "committed" and header["reason"] is None
    assert header["step"] == 20 and header["run_id"] == "run-a" and header["world_size"] == 1
    for name in (
        "sequence",
        "created",
        "checkpoint_id",
        "attempt_id",
        "versions",
        "digest",
        "format_version",
    ):
        assert header[name] == manifest[name], name
    assert header["metrics"] == {"loss": 1 / 20, "accuracy": "NaN"} and header["metrics_step"] == 20
    assert header["metadata"] == {"note": "step 20 é"}

    model, train = (
        next(c for c in document["components"] if c["key"] == key) for key in ("model", "train")
    )
    assert model["pattern"] == "GLOBAL" and model["writers"] == [0] and model["required"] is True
    assert model["tensors"] == 3 and model["size_bytes"] == 6 * 4 + 3 * 2
    assert model["files"] == ["model.safetensors"]
    assert train["tensors"] == 0

    sizes = {
        f.name: f.stat().st_size for f in folder.iterdir() if f.name != "checkpoint_manifest.json"
    }
    assert {f["name"]: f["size_bytes"] for f in document["files"]} == sizes
    assert header["size_bytes"] == sum(sizes.values()) and header["files"] == len(sizes)
    assert all(len(f["digest"]) == 32 and f["writer"] == 0 for f in document["files"])

    assert (
        document["foreign_files"] == [] and document["problems"] == [] and document["newer"] == []
    )
    assert document["tensors"] is None and document["values"] is None
    assert document["fallback"] is None and document["verified"] is False


def test_tensors_and_their_patterns(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-20"
    tensors = {
        t["full_name"]: t
        for t in ckpt("inspect", folder, "--tensors", "--json").document["tensors"]
    }
    assert set(tensors) == {"model/layer.weight", "model/layer.bias", "model/tied.weight"}
    bias = tensors["model/layer.bias"]
    assert (bias["dtype"], bias["shape"], bias["size_bytes"]) == ("BF16", [3], 6)
    assert (bias["component"], bias["name"], bias["file"]) == (
        "model",
        "layer.bias",
        "model.safetensors",
    )
    aliases = {name: t["alias_of"] for name, t in tensors.items() if t["alias_of"]}
    assert len(aliases) == 1 and {*aliases, *(f"model/{a}" for a in aliases.values())} == {
        "model/layer.weight",
        "model/tied.weight",
    }

    def names(*arguments: str | Path) -> list[str]:
        return sorted(
            t["full_name"] for t in ckpt("inspect", *arguments, "--json").document["tensors"]
        )

    assert names(folder, "--tensors", "*.bias") == ["model/layer.bias"]
    assert names(folder, "--tensors=model/layer.*") == ["model/layer.bias", "model/layer.weight"]
    assert names("--tensors", "layer.weight", folder) == ["model/layer.weight"]
    assert len(names("--tensors", folder)) == 3  # the path is not taken for a pattern

    missing = ckpt("inspect", folder, "--tensors", "nothing*")
    assert missing.code == 3 and "'nothing*'" in missing.err


def test_values_keep_their_types(ckpt: Ckpt, root: Path) -> None:
    done = ckpt(
        "inspect", root / "checkpoint-20", "--values", "train", "--values", "model", "--json"
    )
    values = done.document["values"]
    train = values["train"]
    assert train["step"] == 20 and train["big"] == 2**70 and train["nan"] == "NaN"
    assert train["pair"] == {"$type": "tuple", "items": [1, "x"]}
    assert train["raw"] == {"$type": "bytes", "hex": "00ff"}
    assert train["names"] == {"$type": "set", "items": ["a", "b"]}
    assert train["by_rank"] == {"$type": "dict", "items": [[0, "zero"]]}
    assert train["nested"] == {"list": [{"deep/er": True}], "none": None}
    assert values["model"]["layer.bias"] == {
        "$type": "tensor",
        "name": "model/layer.bias",
        "dtype": "BF16",
        "shape": [3],
    }

    lines = ckpt("inspect", root / "checkpoint-20", "--values", "train").out.splitlines()
    shown = dict(line.split(None, 1) for line in lines[lines.index("values of train") + 1 :])
    assert shown["step"] == "20" and shown["pair"] == "(1, 'x')" and shown["raw"] == r"b'\x00\xff'"
    assert shown["nested/list/0/deep~1er"] == "True" and shown["by_rank/0"] == "'zero'"

    unknown = ckpt("inspect", root, "--values", "optimizer")
    assert unknown.code == 3
    assert "'optimizer'" in unknown.err and "model" in unknown.err and "train" in unknown.err


def test_a_root_shows_its_newest_committed_and_what_is_newer(ckpt: Ckpt, root: Path) -> None:
    (root / "checkpoint-30" / "checkpoint_manifest.json").unlink()
    done = ckpt("inspect", root, "--json")
    assert done.code == 0
    assert done.document["checkpoint"]["step"] == 20
    assert [(e["name"], e["status"]) for e in done.document["newer"]] == [
        ("checkpoint-30", "uncommitted")
    ]
    lines = ckpt("inspect", root).out.splitlines()
    assert lines[1].split() == ["status", "committed"]
    assert lines[2].split(None, 3)[:3] == ["newer,", "not", "usable"]
    assert (
        lines[2]
        .split(None, 3)[3]
        .startswith("checkpoint-30 is uncommitted: no checkpoint_manifest.json")
    )


def test_reads_no_tensor_bytes_until_told_to_verify(ckpt: Ckpt, root: Path) -> None:
    shard = root / "checkpoint-30" / "model.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    assert ckpt("inspect", root / "checkpoint-30", "--tensors", "--values", "model").code == 0
    assert ckpt("inspect", root / "checkpoint-30", "--verify").code == 1
    good = ckpt("inspect", root / "checkpoint-20", "--verify")
    assert good.code == 0 and "committed, every byte verified" in good.out
    assert (
        ckpt("inspect", root / "checkpoint-20", "--verify", "--json").document["verified"] is True
    )


def test_b30_foreign_files_are_reported_and_no_members(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-30"
    before = ckpt("inspect", folder, "--json").document
    shutil.copy(folder / "model.safetensors", folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "elsewhere.safetensors"}}'
    )
    (folder / "index.rank00007.msgpack").write_bytes(b"stale")
    done = ckpt("inspect", folder, "--verify", "--tensors", "--json")
    assert done.code == 0
    after = done.document
    foreign = [
        "index.rank00007.msgpack",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert after["foreign_files"] == foreign
    assert after["files"] == before["files"] and after["components"] == before["components"]
    assert {t["file"] for t in after["tensors"]} == {"model.safetensors"}
    text = ckpt("inspect", folder).out
    title = "foreign files: not part of this checkpoint, ignored when it is loaded"
    lines = text.splitlines()
    assert [line.strip() for line in lines[lines.index(title) + 1 :][:3]] == foreign


def test_deep_metadata_is_printed(ckpt: Ckpt, tmp_path: Path) -> None:
    metadata: dict[str, object] = {}
    for _ in range(600):
        metadata = {"n": metadata}
    with CheckpointManager(tmp_path / "deep") as manager:
        manager.save(1, {"train": {"step": 1}})
    # A save refuses it by now; earlier ones did not.
    with open_checkpoint(tmp_path / "deep" / "checkpoint-1") as view:
        view.manifest.metadata = metadata
        (tmp_path / "deep" / "checkpoint-1" / "checkpoint_manifest.json").write_bytes(
            view.manifest.encode()
        )
    assert ckpt("inspect", tmp_path / "deep").code == 0
    done = ckpt("inspect", tmp_path / "deep", "--json")
    assert done.code == 0 and done.document["checkpoint"]["metadata"] == metadata


def test_names_cannot_write_to_the_terminal(ckpt: Ckpt, root: Path) -> None:
    (root / "checkpoint-30" / "evil\x1b[2J\nname").touch()
    done = ckpt("inspect", root)
    assert "\x1b" not in done.out and r"evil\x1b[2J\nname" in done.out
    assert ckpt("inspect", root, "--json").document["foreign_files"] == ["evil\x1b[2J\nname"]
