"""Every parameter of what is public is described where it is, on a line of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ckptcore

# By callable, what is not described yet. This list may only shrink.
UNDESCRIBED: dict[str, set[str]] = {
    "CheckpointCoordinator": {
        "comm",
        "io_threads",
        "process_groups",
        "storage_mode",
        "workers",
        "writers",
    },
    "CheckpointCoordinator.save_checkpoint": {"overwrite", "path"},
    "CheckpointCoordinator.load_checkpoint": {
        "cast",
        "keys",
        "path",
        "storage_options",
        "strict",
        "transactional",
    },
    "CheckpointCoordinator.save": {"components", "name", "request", "storage"},
    "CheckpointCoordinator.saving": {"components", "name", "request", "storage"},
    "CheckpointCoordinator.load": {"cast", "name", "storage", "strict", "whole"},
    "CheckpointInfo": {
        "abandoned",
        "manifest",
        "marked",
        "name",
        "pinned",
        "reason",
        "status",
        "step",
        "url",
    },
    "CheckpointManager": {
        "comm",
        "drain_timeout",
        "error_join_timeout",
        "io_threads",
        "keep",
        "liveness_timeout",
        "on_event",
        "run_id",
        "storage_mode",
        "storage_options",
        "tiers",
        "when_busy",
    },
    "CheckpointManager.save": {"metadata", "overwrite", "state", "step", "training_args_hash"},
    "CheckpointManager.save_async": {
        "metadata",
        "metrics",
        "overwrite",
        "state",
        "step",
        "training_args_hash",
    },
    "CheckpointManager.prewarm": {"state"},
    "CheckpointManager.wait": {"timeout"},
    "CheckpointManager.load": {"state"},
    "CheckpointManager.restore": {
        "cast",
        "fresh_ok",
        "keys",
        "state",
        "strict",
        "training_args_hash",
        "transactional",
        "which",
    },
    "CheckpointManager.best": {"metric", "mode"},
    "CheckpointManager.pin": {"step"},
    "CheckpointManager.unpin": {"step"},
    "CheckpointManager.verify": {"step"},
    "CheckpointManager.delete": {"step"},
    "CheckpointManifest": {
        "attempt_id",
        "checkpoint_id",
        "components",
        "created",
        "digest",
        "environment",
        "extra",
        "files",
        "format_version",
        "groups",
        "metadata",
        "metrics",
        "metrics_step",
        "nodes",
        "run_id",
        "sequence",
        "step",
        "timings",
        "training_args_hash",
        "versions",
        "world_size",
    },
    "CheckpointManifest.holds": {"copy"},
    "CheckpointManifest.copies": {"key"},
    "CheckpointManifest.decode": {"data", "path"},
    "CheckpointView": {"folder", "storage"},
    "CheckpointView.index": {"writer"},
    "CheckpointView.forget": {"writer"},
    "CheckpointView.read_file": {"name"},
    "CheckpointView.component": {"copy", "key"},
    "CheckpointView.boxes": {"component"},
    "CheckpointView.dtypes": {"component", "copy"},
    "CheckpointView.values": {"component"},
    "CheckpointView.values_bytes": {"component"},
    "CheckpointView.read": {"box", "name"},
    "CheckpointView.check_files": {"files"},
    "CheckpointView.reads_of": {"index"},
    "CheckpointView.verify": {"progress"},
    "Communicator.call": {"what"},
    "Communicator.exclusively": {"number", "what", "work"},
    "Communicator.leave": {"error", "number"},
    "Communicator.round": {"joining"},
    "Communicator.together": {"decide", "joining", "local", "topic"},
    "Communicator.share": {"buffer", "source"},
    "Communicator.branch": {"name"},
    "ComponentManifest": {
        "checksum",
        "extra",
        "files",
        "group",
        "group_keys",
        "key",
        "metadata",
        "partition",
        "pattern",
        "required",
        "size_bytes",
        "tensors",
    },
    "KeepBest": {"count", "metric", "mode"},
    "KeepBest.ranked": {"checkpoints"},
    "KeepBest.keep": {"checkpoints"},
    "KeepEvery": {"seconds"},
    "KeepEvery.keep": {"checkpoints"},
    "KeepLast": {"count"},
    "KeepLast.keep": {"checkpoints"},
    "Leftover": {"abandoned", "nbytes", "writer"},
    "LoadReport": {
        "cast",
        "manifest",
        "missing",
        "path",
        "skipped",
        "step",
        "unexpected",
        "values",
    },
    "ModelState.decides": {"name"},
    "ModelState.differences": {"saved"},
    "ModelState.load_state_dict": {"state_dict"},
    "Opaque": {"codec", "payload"},
    "OptimizerState.differences": {"saved"},
    "OptimizerState.allocate": {"dtype", "name", "shape"},
    "OptimizerState.load_state_dict": {"state_dict"},
    "PreemptionGuard": {"repeat_after", "signals"},
    "PreemptionGuard.should_stop": {"step"},
    "Problem": {"actual", "expected", "file", "kind", "message", "tensor"},
    "RNGState.load_state_dict": {"state_dict"},
    "RetentionPolicy.keep": {"checkpoints"},
    "SaveEvent": {
        "error",
        "kind",
        "name",
        "nbytes",
        "rank",
        "retries",
        "root",
        "step",
        "time",
        "timings",
    },
    "SaveHandle": {"drain_timeout", "on_error", "saving", "step"},
    "SaveHandle.result": {"timeout"},
    "SaveHandle.wait": {"timeout"},
    "SaveHandle.end": {"error", "info"},
    "Shard": {"global_shape", "offset", "tensor"},
    "SharingPattern": {"boundary", "module", "names", "qualname", "start", "type", "value"},
    "SingleProcess.round": {"joining"},
    "SingleProcess.call": {"what"},
    "StateComponent": {
        "atol",
        "group_key",
        "inferred",
        "key",
        "metadata",
        "on_resize",
        "process_group_name",
        "required",
        "rtol",
        "stateful",
        "validate_replication",
        "validation_level",
    },
    "Stateful": {"args", "kwargs"},
    "Stateful.load_state_dict": {"state_dict"},
    "StatefulProvider": {"args", "kwargs"},
    "Storage.create": {"path", "size"},
    "Storage.open": {"path"},
    "Storage.list": {"path"},
    "Storage.list_folders": {"beginning"},
    "Storage.make_folder": {"path"},
    "Storage.sync_folder": {"path"},
    "Storage.rename": {"source", "target"},
    "Storage.remove": {"path"},
    "Storage.remove_all": {"paths"},
    "Storage.remove_folder": {"path"},
    "Storage.write": {"data", "path"},
    "Storage.read": {"limit", "path"},
    "Storage.drop_uploads": {"path"},
    "Storage.at": {"path"},
    "StoreCommunicator": {
        "error_join_timeout",
        "join_timeout",
        "liveness_timeout",
        "name",
        "node",
        "rank",
        "store",
        "work_timeout",
        "world_size",
    },
    "StoreCommunicator.share": {"buffer", "source"},
    "StoredBox": {"digests", "file", "nbytes", "offset", "shape", "start", "writer"},
    "TensorInfo": {"alias_of", "component", "dtype", "file", "layout", "name", "nbytes", "shape"},
    "Tier": {"every", "storage_options"},
    "ValidationLevel": {"boundary", "module", "names", "qualname", "start", "type", "value"},
    "Value.load_state_dict": {"state_dict"},
    "copy_checkpoint": {
        "overwrite",
        "pins",
        "progress",
        "source",
        "storage_options",
        "target",
        "target_options",
        "threads",
    },
    "delete_checkpoint": {"damaged", "url"},
    "find_leftovers": {"url"},
    "join_url": {"path", "url"},
    "kept_by": {"policies", "run_id"},
    "masked_url": {"url"},
    "open_checkpoint": {"storage_options", "url"},
    "open_storage": {"storage_options", "url"},
    "pin_checkpoint": {"url"},
    "register_codec": {"decode", "encode", "name"},
    "restore_candidates": {"run_id"},
    "scan_root": {"storage_options", "url"},
    "split_url": {"url"},
    "sweep_root": {"url"},
    "unpin_checkpoint": {"storage_options", "url"},
}


def public_callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(name, what takes the parameters, docstring that describes them)."""
    for name in ckptcore.__all__:
        found = getattr(ckptcore, name)
        if inspect.isfunction(found):
            yield name, found, inspect.getdoc(found) or ""
        if not inspect.isclass(found):
            continue
        if not issubclass(found, BaseException):
            # Beside the class, as a reader of help() meets it first.
            yield name, found, f"{inspect.getdoc(found)}\n{inspect.getdoc(found.__init__)}"
        for member, method in vars(found).items():
            method = inspect.unwrap(getattr(method, "__func__", method))
            if inspect.isfunction(method) and not member.startswith("_"):
                yield f"{name}.{member}", method, inspect.getdoc(getattr(found, member)) or ""


def parameters(function: Callable[..., Any]) -> list[str]:
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        return []
    return [name for name in found if name not in ("self", "cls", "_") and name[0] != "_"]


def undescribed(function: Callable[..., Any], text: str) -> set[str]:
    described = {
        name
        for line in text.splitlines()
        if (match := re.match(r"\s*(\*{0,2}\w+(?:, \*{0,2}\w+)*): \S", line))
        for name in re.split(r", ", match.group(1).replace("*", ""))
    }
    return set(parameters(function)) - described


CALLABLES = {name: (function, text) for name, function, text in public_callables()}


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_has_a_line(name: str) -> None:
    assert undescribed(*CALLABLES[name]) <= UNDESCRIBED.get(name, set())
