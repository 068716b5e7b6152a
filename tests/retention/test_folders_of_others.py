"""Folders that are named like checkpoints and hold what others put there are called what they
are."""

import pytest

from ckptcore import CheckpointManager, KeepLast, NoUsableCheckpoint, scan_root


@pytest.mark.parametrize("how", ["retention", "delete"])
def test_what_a_deleted_checkpoint_leaves_of_others_is_not_damaged(tmp_path, marked, how):
    with CheckpointManager(tmp_path, keep=KeepLast(1) if how == "retention" else None) as ckpt:
        for step in range(3):
            ckpt.save(step, marked.state(step))
            (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
        for step in () if how == "retention" else (0, 1):
            ckpt.delete(step)
        ckpt.save(3, marked.state(3))
    left = {
        info.name: (info.status, info.reason)
        for info in scan_root(tmp_path)
        if info.status != "committed"
    }
    assert set(left) >= {"checkpoint-0", "checkpoint-1"}
    for name, (status, reason) in left.items():
        assert status == "partial" and "never committed" not in reason and "config.json" in reason
        assert [p.name for p in (tmp_path / name).iterdir()] == ["config.json"]
    for name in ("checkpoint-2", "checkpoint-3"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    assert CheckpointManager(tmp_path).restore(marked.state(-1)).fresh  # they hide no checkpoint


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ["config.json", "model.safetensors"],
            "model.safetensors: it looks like a Hugging Face folder",
        ),
        (
            ["pytorch_model.bin", "optimizer.pt"],
            "pytorch_model.bin: it looks like a Hugging Face folder",
        ),
        (["optimizer.pt", "scheduler.pt"], "optimizer.pt: it looks like a folder of torch.save"),
        (
            [".metadata", "__0_0.distcp"],
            ".metadata: it looks like a folder of torch.distributed.checkpoint",
        ),
        (["model.safetensors", "index.rank00000.msgpack"], "it was never committed, or damaged"),
    ],
)
def test_what_others_saved_is_named(tmp_path, marked, files, said):
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"theirs")
    with pytest.raises(NoUsableCheckpoint) as caught:
        CheckpointManager(tmp_path).restore(marked.state(-1))
    assert said in caught.value.reasons["checkpoint-500"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(files)
