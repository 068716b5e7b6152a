"""`ckpt-train` as a user meets it."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ckpt_trainers
import click
import pytest
import yaml
from ckpt_trainers import callbacks
from ckpt_trainers import trainer as trainer_module
from ckpt_trainers.arguments.hugging_face import NAMES
from ckpt_trainers.arguments.kinds import arguments_of
from ckpt_trainers.main import CLASSES, ProgramArguments, main
from click.testing import CliRunner, Result

from ckptcore import CheckpointManager, open_storage, scan_root
from ckptcore.testing.faults import FaultStorage
from ckptcore.testing.processes import patience

TINY = [
    *(
        "model.n_layer=1",
        "model.n_head=1",
        "model.n_embd=8",
        "model.block_size=8",
        "per_device_train_batch_size=4",
    ),
    *("--threads", "1", "use_cpu=true", "report_to=none", "disable_tqdm=true", "save_async=false"),
]


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    sys.exit(main(words))


def train(*words: object) -> Result:
    return CliRunner().invoke(command, [*TINY, *map(str, words)])


def one_line(result: Result) -> str:
    (line,) = result.stderr.splitlines()
    assert line.startswith("ckpt-train: ") and "Traceback" not in result.output
    return line


@pytest.fixture
def run(tmp_path: Path, text: Path) -> list[str]:
    return [f"output_dir={tmp_path / 'run'}", f"data={text}", "max_steps=4", "save_steps=2"]


def test_help_says_how_it_is_told_what_to_do() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    shown = re.sub(r"\s+", " ", result.output)
    for said in ("--config FILE", "name=value", "--print_config", "--version", "torchrun"):
        assert said in shown, said
    for cls in (ProgramArguments, *CLASSES.values()):
        for name, argument in arguments_of(cls).items():
            inside = [] if argument.group is None else arguments_of(argument.group)
            for option in [f"--{name}.{inner} " for inner in inside] or [f"--{name} "]:
                assert option in shown, option
            assert argument.group is not None or argument.text in shown
    for name, row in NAMES.items():
        if row.kind == "alias" and name not in ("dispatch_batches", "accelerator_config"):
            assert f"--{name} [VALUE] sets {row.target}" in shown, name


def test_a_file_and_words_are_one_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "lr: 0.25\nmax_steps: 7\nmodel: {n_layer: 2, dropout: 0.0}\ntrainer: ddp\nddp: "
        "{static_graph: true}\n"
    )
    result = CliRunner().invoke(
        command, ["--show", str(file), "max_steps=9", "model.n_head=2", "ddp.bucket_cap_mb=3"]
    )
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "trainer": "ddp",
        "data": [],
        "max_data_bytes": 4 * 2**20,
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64, "dropout": 0.0},
        "learning_rate": 0.25,
        "max_steps": 9,
        "ddp": {"static_graph": True, "bucket_cap_mb": 3},
    }
    again = tmp_path / "again.yaml"
    again.write_text(result.stdout)
    assert CliRunner().invoke(command, ["--show", str(again)]).stdout == result.stdout


def test_without_a_file_words_win_over_what_a_demonstration_has() -> None:
    result = CliRunner().invoke(
        command, ["--show", "lr=0.25", "eval_strategy=no", "max_grad_norm=null"]
    )
    shown = yaml.safe_load(result.stdout)
    assert (shown["learning_rate"], shown["max_steps"], shown["warmup_steps"]) == (0.25, 300, 20)
    assert (
        shown["trainer"] == "single"
        and "eval_strategy" not in shown
        and "max_grad_norm" not in shown
    )


def shown(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(command, ["--show", *words])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["num_train_epochs=0.01"],
            {"num_train_epochs": 0.01, "max_steps": None, "warmup_steps": 20},
        ),
        (["num_train_epochs=1"], {"max_steps": None}),
        (["num_train_epochs=2", "max_steps=7"], {"num_train_epochs": 2.0, "max_steps": 7}),
        (["warmup_ratio=0.1"], {"warmup_ratio": 0.1, "warmup_steps": None}),
        (["lr=5e-5"], {"learning_rate": None}),  # as it is without a demonstration
        (["evaluation_strategy=no"], {"eval_strategy": None, "max_steps": 300}),
        (
            ["fuse_optim_with_backward=true"],
            {"fuse_optim_with_backward": True, "max_grad_norm": None},
        ),
        (["fuse_optim_with_backward=false"], {"max_grad_norm": 1.0}),
        (
            ["load_best_model_at_end=true", "save_steps=100"],
            {"load_best_model_at_end": True, "eval_steps": None},
        ),
    ],
)
def test_a_demonstration_does_not_beat_what_is_said(
    words: list[str], expected: dict[str, Any]
) -> None:
    found = shown(*words)
    assert {name: found.get(name) for name in expected} == expected


def test_what_is_shown_is_a_configuration_whatever_is_noted(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--show", "do_train=true", "lr=0.25"])
    assert result.stderr.count("arguments without effect: do_train") == 1
    file = tmp_path / "again.yaml"
    file.write_text(result.stdout)
    assert shown(str(file)) == yaml.safe_load(result.stdout)


def test_an_option_of_fsdp2_leaves_the_layers_where_they_are() -> None:
    found = shown("trainer=fsdp2", "fsdp2.reduce_dtype=float32")["fsdp2"]
    assert found == {"transformer_layers_path": "blocks", "reduce_dtype": "float32"}
    assert shown("trainer=fsdp2")["fsdp2"] == {"transformer_layers_path": "blocks"}
    assert shown("trainer=fsdp2", "fsdp2.transformer_layers_path=x")["fsdp2"] == {
        "transformer_layers_path": "x"
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("batch_size=8", "did you mean per_device_train_batch_size, per_device_eval_batch_size?"),
        ("epochs=3", "did you mean num_train_epochs, epoch_train_steps"),
        ("workers=2", "did you mean dataloader_num_workers, dataloader_persistent_workers?"),
        ("n_layer=2", "did you mean model.n_layer?"),
        ("xyzzy=1", "see docs/arguments.md and `ckpt-train --help`"),
        ("hub_tokn=secret", "hub_tokn='<hidden>'"),
    ],
)
def test_an_unknown_name_is_answered_with_names_that_work(word: str, said: str) -> None:
    result = CliRunner().invoke(command, ["--show", word])
    assert result.exit_code == 2 and said in one_line(result)
    suggested = re.findall(r"did you mean ([^?]+)\?", result.stderr)
    names = suggested[0].split(", ") if suggested and "model." not in suggested[0] else []
    assert not any(name in NAMES and NAMES[name].kind == "refused" for name in names)


def test_no_message_sends_a_user_to_what_does_not_exist() -> None:
    refusals = {row.name: (row.reason, row.instead) for row in NAMES.values()}
    for name, (reason, instead) in refusals.items():
        for word in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\b\w+Callback\b", f"{reason} {instead}"):
            there = hasattr(ckpt_trainers, word) or word in callbacks.__all__
            assert there or word in OTHERS, f"{name}: {word}"


# Names in messages that are not this project's.
OTHERS = ("DistributedDataParallel", "DeepSpeed", "DataLoader", "AdamW")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["torch_compile=true", "torch_compile_backend=nonsense"],
            "torch_compile_backend='nonsense': torch has no",
        ),
        (
            ["sdpa_backend=cudnn"],
            "sdpa_backend='cudnn': none of these kernels can do this model's attention",
        ),
        (["sdpa_backend=[efficient, cudnn]"], "none of these kernels"),
    ],
)
def test_what_only_torch_knows_to_be_wrong_is_one_line_too(
    run: list[str], words: list[str], said: str
) -> None:
    result = train(*run, *words)
    assert result.exit_code == 2, result.output
    assert said in one_line(result)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["optim=sgd", "optim_args=momentum=0.9"], ["optim=adamw_torch"]),
        (["optim=adamw_torch"], ["optim=adafactor"]),
        (["optim=adamw_torch"], ["optim=sgd"]),
    ],
)
@pytest.mark.parametrize(
    "how", [[], ["resume_from_checkpoint={root}/checkpoint-4", "output_dir={root}-other"]]
)
def test_another_optimizer_is_refused_before_anything_is_loaded(
    run: list[str], tmp_path: Path, first: list[str], then: list[str], how: list[str]
) -> None:
    assert train(*run, *first).exit_code == 0
    words = [word.format(root=tmp_path / "run") for word in how]
    result = train(*run, *words, "max_steps=6", *then)
    assert result.exit_code == 1, result.output
    refused = "component 'optimizer'", "resume with the optimizer that was saved"
    assert all(text in one_line(result) for text in refused) and "Traceback" not in result.output
    assert [entry.step for entry in scan_root(str(tmp_path / "run"))] == [2, 4]
    assert train(*run, *words, "max_steps=6", *first).exit_code == 0


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from ckpt_trainers.main import main; "
        "main(['--help']); print('torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == "False"


def test_a_run_tells_what_it_did_and_can_be_repeated(run: list[str], tmp_path: Path) -> None:
    result = train(*run)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"^finished: 4 steps to step 4, mean loss \d\.\d{4}$", result.stdout, re.MULTILINE
    )
    assert [entry.step for entry in scan_root(str(tmp_path / "run"))] == [2, 4]
    result = train(*run)
    assert result.exit_code == 0, result.output
    assert "nothing to do: step 4 of 4 is reached" in result.stdout
    result = train(*run, "max_steps=6", "lr=0.5")
    assert "resumed from step 4" in result.stdout
    assert "learning_rate 0.002 -> 0.5" in result.stdout and "max_steps 4 -> 6" in result.stdout
    assert "finished: 2 steps to step 6" in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["model.n_embd=7", "model.n_head=2"], 2, "n_embd=7: not a multiple of n_head=2"),
        (["save_steps=0"], 2, "save_steps=0: "),
        (["lr=.nan"], 2, "learning_rate=nan: "),
        (["model.dropout=1.5"], 2, "dropout=1.5: out of range"),
        (["model.block_size=1000"], 2, "data='460 bytes': too short"),
        (["model.heads=3"], 2, "model.heads=3: unknown name; there are n_layer, n_head"),
        (["device=abacus", "use_cpu=false"], 2, "device='abacus'"),
        (["data=no/such/file"], 3, "data: 'no/such/file' names no file"),
        (["resume_from_checkpoint=no/such/checkpoint"], 3, "no/such/checkpoint"),
        (["max_steps=many"], 2, "max_steps='many'"),
        (["max_stepps=3"], 2, "did you mean max_steps"),
        (["report_to=wandb"], 2, "report_to='wandb'"),
        (
            ["trainer=deepspeed"],
            2,
            "trainer='deepspeed': unknown; give one of auto, single, ddp, fsdp2, pipeline, accel",
        ),
        (["trainer=pipeline"], 2, "a pipeline needs more than one rank"),
        (["no-such.yaml"], 3, "no-such.yaml: no such file"),
        (["max_steps"], 3, "max_steps: no such file (and no argument: these are --name value)"),
        (["max_data_bytes=abc"], 2, "max_data_bytes='abc': is of type str; give a whole number"),
        (["max_data_bytes=-5"], 2, "max_data_bytes=-5: out of range"),
        (["data=5"], 2, "data=5: is of type int; give a list (files, folders or globs"),
        (["data=[5]"], 2, "data=[5]: "),
        (["trainer=pipeline", "schedule=5"], 2, "schedule='5': torch has none of this name"),
        (["resume_from_checkpoint=best"], 3, "resume_from_checkpoint='best': "),
        (["one.yaml", "two.yaml"], 3, "one.yaml: no such file"),
    ],
)
def test_what_a_user_got_wrong_is_one_line_and_leaves_nothing(
    run: list[str], tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    result = train(*run, *words)
    assert result.exit_code == code, result.output
    assert said in one_line(result)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_words_that_are_not_options_are_usage_errors(run: list[str]) -> None:
    result = train(*run, "--no-such-option")
    assert result.exit_code == 2
    assert "no-such-option=None: unknown name" in one_line(result)
    assert train(*run, "--max_steps", "3", "-x").exit_code == 2


def test_output_dir_must_not_be_a_file(text: Path) -> None:
    result = train(f"output_dir={text}")
    assert result.exit_code == 2 and "is a file" in one_line(result)


def test_changed_data_is_named(run: list[str], text: Path) -> None:
    assert train(*run).exit_code == 0
    text.write_bytes(b"x" * 460)
    result = train(*run, "max_steps=6")
    assert result.exit_code == 1
    assert re.search(r"data xxh3_128 was \w{32}, is \w{32}", one_line(result))


def test_another_batch_size_is_told_and_goes_on(run: list[str]) -> None:
    assert train(*run).exit_code == 0
    result = train(*run, "max_steps=6", "per_device_train_batch_size=3")
    assert result.exit_code == 0 and "per_device_train_batch_size 4 -> 3" in result.output


def test_another_model_than_the_checkpoints_is_refused(run: list[str]) -> None:
    assert train(*run).exit_code == 0
    result = train(*run, "max_steps=6", "model.n_embd=16")
    assert result.exit_code == 1
    assert "embedding.weight" in one_line(result)


def test_a_run_with_damaged_checkpoints_only_is_not_started_over(
    run: list[str], tmp_path: Path
) -> None:
    assert train(*run).exit_code == 0
    for manifest in tmp_path.glob("run/checkpoint-*/checkpoint_manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-1])
    result = train(*run)
    assert result.exit_code == 1, result.output
    assert "checkpoint-4" in result.stderr and "Traceback" not in result.output


def test_a_damaged_newest_checkpoint_is_passed_over_with_one_warning(
    run: list[str], tmp_path: Path
) -> None:
    assert train(*run).exit_code == 0
    weights = tmp_path / "run" / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = train(*run)
    assert result.exit_code == 0, result.output
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("warning: ") and "checkpoint-4" in warning
    assert "resumed from step 2" in result.stdout


def test_starting_over_must_be_asked_for(run: list[str]) -> None:
    assert train(*run).exit_code == 0
    result = train(*run, "resume_from_checkpoint=false")
    assert result.exit_code == 1 and "overwrite_output_dir" in one_line(result)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(run: list[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        result = train(*run)
    finally:
        tmp_path.chmod(0o700)
    assert result.exit_code == 4 and str(tmp_path) in one_line(result)


def test_an_output_dir_below_a_file_is_a_storage_error(run: list[str], text: Path) -> None:
    result = train(*run, f"output_dir={text / 'run'}")
    assert result.exit_code == 4, result.output
    assert str(text) in one_line(result)


def test_an_interrupted_run_says_where_it_stands(
    run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = trainer_module.Trainer.training_step

    def interrupted(self: trainer_module.Trainer) -> None:
        if self.state.global_step == stop:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(trainer_module.Trainer, "training_step", interrupted)
    stop = 1
    result = train(*run)
    assert result.exit_code == 130 and "there is no checkpoint in" in result.stderr
    stop = 3
    result = train(*run)
    assert result.exit_code == 130
    assert "the latest checkpoint is checkpoint-2 in" in result.stderr


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_save_that_fails_in_the_background_fails_the_run(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage = FaultStorage(open_storage(tmp_path / "run"))
    storage.fail(kind="write_at", path="checkpoint-2*", error=number, times=None)
    monkeypatch.setattr(
        "ckpt_trainers.checkpoints.CheckpointManager",
        lambda root, **how: CheckpointManager(storage, **how),
    )
    result = train(*run, "save_async=true", "max_steps=6")
    assert result.exit_code not in (0, 2), result.output
    said = one_line(result)
    assert "the save of step 2 in the background failed" in said and os.strerror(number) in said
    assert "finished" not in result.stdout
    assert [
        entry.step for entry in scan_root(str(tmp_path / "run")) if entry.status == "committed"
    ] == []


@pytest.mark.parametrize("words", [[], ["save_async=true"]])
def test_sigterm_is_a_good_end_when_asked_for(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    step = trainer_module.Trainer.training_step

    def terminated(self: trainer_module.Trainer) -> None:
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        step(self)

    monkeypatch.setattr(trainer_module.Trainer, "training_step", terminated)
    result = train(*run, "enable_jit_checkpoint=true", *words)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"^stopped by SIGTERM: 3 steps to step 3, mean loss \d\.\d{4}$", result.stdout, re.MULTILINE
    )
    assert [entry.step for entry in scan_root(str(tmp_path / "run"))] == [2, 3]
    result = train(*run, *words)
    assert result.exit_code == 0, result.output
    assert "resumed from step 3" in result.stdout and "finished: 1 steps to step 4" in result.stdout


def test_ctrl_c_on_the_real_command(run: list[str], tmp_path: Path) -> None:
    # Nothing is being deleted when the signal comes: all checkpoints are kept.
    endless = ["max_steps=1000000", "save_steps=20", "save_total_limit=null"]
    command = [sys.executable, "-m", "ckpt_trainers.main", *TINY, *run, *endless]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )
    until = time.monotonic() + 60 * patience()
    while not (tmp_path / "run" / "checkpoint-20").exists() and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=60 * patience())
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # says where each thread is
        pytest.fail("\n".join(process.communicate(timeout=20)))
    assert process.returncode == 130
    found = re.search(r"the latest checkpoint is checkpoint-(\d+) in", errors)
    assert found and "Traceback" not in errors
    entries = scan_root(str(tmp_path / "run"))
    assert {entry.status for entry in entries} == {"committed"}  # nothing half-written is left
    assert max(entry.step or 0 for entry in entries) == int(found[1])
