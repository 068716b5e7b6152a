"""How arguments come to be: Hugging Face's objects, all faults at once, the page, any mapping."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.arguments import (
    AccelTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    GPTArguments,
    InvalidArgument,
    PipelineTrainingArguments,
    Process,
    TrainingArguments,
    known_names,
    load_configuration,
    print_configuration,
    resolve_arguments,
)
from ckpt_trainers.arguments.configuration import parse_command_line, parse_value
from ckpt_trainers.arguments.kinds import arguments_of
from ckpt_trainers.arguments.reference import page
from ckpt_trainers.main import OPTIONS, make_program
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ckptcore

LEAVES: list[Any] = [
    TrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
    AccelTrainingArguments,
]


def test_the_page_of_the_documents_is_what_the_arguments_make() -> None:
    written = Path(ckptcore.__file__).parent.parent / "docs" / "arguments.md"
    made = page()
    assert written.read_text() == made, "python -m ckpt_trainers.arguments.reference > it"
    for cls in LEAVES:
        for name in known_names(cls):
            group = name in arguments_of(cls) and arguments_of(cls)[name].group is not None
            assert f"`{name}." in made if group else f"| `{name}` |" in made, name


def test_each_argument_says_what_it_means() -> None:
    for cls in [*LEAVES, GPTArguments]:
        assert [name for name, argument in arguments_of(cls).items() if not argument.text] == []


def test_classes_take_the_names_of_hugging_face() -> None:
    assert TrainingArguments(bf16=True).mixed_precision == "bf16"
    assert TrainingArguments(lr=1e-3, do_train=True).learning_rate == 1e-3
    assert TrainingArguments(activation_checkpointing=True).gradient_checkpointing is True
    assert DDPTrainingArguments(ddp_static_graph=True).ddp.static_graph is True
    assert TrainingArguments(report_to="json,tensorboard").reporters == ("json", "tensorboard")


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        DDPTrainingArguments(
            max_steps="10", epochs=3, ddp={"bucket": 1, "bucket_cap_mb": 0}, lr=-1, deepspeed="x"
        )
    faults = {fault.name: fault for fault in caught.value.faults}
    assert list(faults) == [
        *("epochs", "deepspeed", "max_steps", "learning_rate", "ddp.bucket_cap_mb", "ddp.bucket")
    ]
    lines = str(caught.value).splitlines()
    assert len(lines) == 6 and lines[1:] == [str(fault) for fault in caught.value.faults[1:]]
    assert "above 0: exactly so many optimizer steps" in str(faults["max_steps"])
    with pytest.raises(InvalidArgument) as caught:
        TrainingArguments(full_determinism=True, save_strategy="best")
    assert [fault.name for fault in caught.value.faults] == ["full_determinism", "save_strategy"]


def test_arguments_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    caplog.set_level(logging.INFO, logger="ckpt_trainers.arguments")
    theirs = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=True,
        warmup_steps=0.1,
        max_steps=7,
        optim="adamw_torch",
    )
    args = TrainingArguments.from_hf(theirs)
    assert (args.num_train_epochs, args.max_grad_norm, args.seed) == (3.0, 1.0, 42)
    assert (args.mixed_precision, args.max_steps, args.warmup(100)) == ("bf16", 7, 10)
    assert args.per_device_train_batch_size == 8 and args.output_dir == str(tmp_path)
    assert "columns are never removed" in caplog.text
    for cls in LEAVES:
        assert type(cls.from_hf(theirs)) is cls
    theirs = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        auto_find_batch_size=True,
        neftune_noise_alpha=5.0,
        optim="lion_32bit",
        use_cache=True,
    )
    with pytest.raises(InvalidArgument) as caught:
        TrainingArguments.from_hf(theirs)
    assert {fault.name for fault in caught.value.faults} == {
        *("auto_find_batch_size", "neftune_noise_alpha", "optim", "use_cache")
    }


def test_what_callbacks_find_in_arguments() -> None:
    args = TrainingArguments(seed=3)
    here = Process(1, 1, 2, 2, "cuda:1", "logs")
    seen = args.as_seen_by_callbacks(here)
    assert (seen.device, seen.logging_dir, seen.run_name) == ("cuda:1", "logs", "tmp_trainer")
    assert (seen.world_size, seen.process_index, seen.local_rank, seen.n_gpu) == (2, 1, 1, 1)
    assert seen.train_batch_size == 32 and seen.seed == 3
    assert json.loads(seen.to_json_string()) == seen.to_dict() == seen.to_sanitized_dict()
    assert (args.device, args.logging_dir, args.run_name, args.world_size) == (None, None, None, 1)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"use_seedable_sampler": False}, ["accelerator_config.use_seedable_sampler"]),
        ({"data_seed": 3}, ["accelerator_config.data_seed"]),
        (
            {"even_batches": 1, "custom": {}},
            ["accelerator_config.even_batches", "accelerator_config.custom"],
        ),
        ({"non_blocking": True, "use_stateful_dataloader": True, "even_batches": False}, []),
    ],
)
def test_settings_of_an_accelerator_work_or_are_refused(
    settings: dict[str, Any], names: list[str]
) -> None:
    faults: tuple[InvalidArgument, ...] = ()
    try:
        AccelTrainingArguments(accelerator_config=settings)
    except InvalidArgument as error:
        faults = error.faults
    assert [fault.name for fault in faults] == names


def test_settings_of_an_accelerator_that_change_nothing_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ckpt_trainers"):
        AccelTrainingArguments(accelerator_config={"even_batches": True, "non_blocking": False})
        assert caplog.text == ""
        AccelTrainingArguments(accelerator_config={"even_batches": False, "split_batches": True})
    (line,) = caplog.messages
    assert line == (
        "arguments without effect: accelerator_config.even_batches (no sample comes twice, and "
        "all ranks take equally many steps, with either)"
    )


# Any mapping at all.

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # a found example is short as it is

NAMES = sorted({name for cls in LEAVES for name in known_names(cls)})
WORDS = sorted(
    {"no", "steps", "epoch", "best", "bf16", "fp16", "cosine", "sgd", "full_shard offload", "auto"}
    | {
        "a=1",
        "momentum=0.9",
        "{",
        "[",
        "null",
        "1e-3",
        "../x",
        "tensorboard",
        "v",
        "meta",
        "x" * 300,
    }
)
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(0, 1),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
INNER = sorted(
    {
        n
        for cls in LEAVES
        for a in arguments_of(cls).values()
        if a.group
        for n in arguments_of(a.group)
    }
    | {"power", "num_cycles", "version", "fsdp_cpu_offload", "even_batches", "amsgrad", "lr"}
)
VALUE = st.one_of(
    LEAF,
    st.lists(LEAF, max_size=3),
    st.dictionaries(st.sampled_from(INNER) | st.text(max_size=4), LEAF, max_size=3),
    st.just(object()),
    st.just(Path("a/b")),
)
MAPPING = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUE, max_size=6)


@settings(max_examples=100, deadline=None, phases=PHASES)
@given(cls=st.sampled_from(LEAVES), values=MAPPING)
def test_any_mapping_gives_valid_arguments_or_one_error(cls: Any, values: dict[str, Any]) -> None:
    try:
        made = resolve_arguments(cls, values)
    except InvalidArgument as error:
        names = [fault.name for fault in error.faults]
        assert names and all(fault.reason and fault.instead for fault in error.faults)
        assert len(str(error).split("\n")) >= len(names)
    else:
        again_comes_back(cls, made)


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(cls=st.sampled_from(LEAVES), values=st.data())
def test_valid_arguments_come_back_from_a_dict_from_yaml_and_from_the_command_line(
    cls: Any, values: st.DataObject
) -> None:
    fitting = {
        "max_steps": st.integers(1, 10**6),
        "learning_rate": st.floats(0, 1),
        "output_dir": st.text("abc/ .#:'\"-null1", min_size=1, max_size=9).map(lambda t: f"r{t}"),
        "run_name": st.sampled_from(["null", "1:30", "no", "2024", "a=b", "- x", "#c", "ü", None]),
        "optim_args": st.sampled_from([None, "amsgrad=True", {"amsgrad": True}]),
        "save_steps": st.integers(1, 99) | st.floats(0.01, 0.99),
        "sdpa_backend": st.sampled_from([None, "math", ["math", "flash"]]),
        "resume_from_checkpoint": st.sampled_from([True, False, "best", "a/b"]),
        "seed": st.integers(-1, 2**32 - 1),
        "dataloader_drop_last": st.booleans(),
    }
    chosen = values.draw(st.sets(st.sampled_from(sorted(fitting))))
    made = cls(**{name: values.draw(fitting[name], label=name) for name in sorted(chosen)})
    again_comes_back(cls, made)
    words = []
    for name, value in made.changed().items():
        argument = arguments_of(cls)[name]
        plain_text = isinstance(value, str) and argument.kinds <= {str, type(None)}
        text = value if plain_text and value != "null" else json.dumps(value)
        if plain_text and value == "null" and type(None) in argument.kinds:
            continue  # on a command line null is None
        words += [f"--{name}", text] if not text.startswith("-") else [f"--{name}={text}"]
    trainer = {
        c: k for k, c in zip(["single", "ddp", "fsdp2", "pipeline", "accel"], LEAVES, strict=True)
    }[cls]
    line = parse_command_line([*words, "--trainer", trainer], OPTIONS)
    expected = {
        n: v
        for n, v in made.changed().items()
        if f"--{n}" in words or any(w.startswith(f"--{n}=") for w in words)
    }
    assert {n: v for n, v in line.values.items() if n != "trainer"} == json.loads(
        json.dumps(expected)
    )


def again_comes_back(cls: Any, made: Any) -> None:
    plain = made.to_dict()
    assert resolve_arguments(cls, plain).to_dict() == plain
    assert made.digest() == resolve_arguments(cls, plain).digest()
    assert resolve_arguments(cls, made.changed()).to_dict() == plain
    text = print_configuration(made.changed())
    assert resolve_arguments(cls, parse_value(text)).to_dict() == plain


def test_configurations_lie_over_each_other(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "max_steps: 3\nlr: 0.5\nlr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2}\n"
    )
    two.write_text("max_steps: 4\n")
    words = [
        "--config",
        str(one),
        str(two),
        "--lr_scheduler_kwargs.power=3.0",
        "--bf16",
        "output_dir=7",
    ]
    line = parse_command_line(words, OPTIONS)
    assert line.has_file and line.values == {
        "max_steps": 4,
        "lr": 0.5,
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": 3.0},
        "bf16": True,
        "output_dir": "7",
    }
    program = make_program(line)
    file = tmp_path / "all.yaml"
    file.write_text(program.to_yaml(everything=True))
    again = make_program(parse_command_line(["--config", str(file)], OPTIONS))
    assert (again.args, again.kind) == (program.args, program.kind)
    assert load_configuration(file)["adam_beta2"] == 0.999
