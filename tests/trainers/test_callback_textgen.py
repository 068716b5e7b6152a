"""Texts that a model writes while it is trained; training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ckpt_trainers.callbacks import ResumableSummaryWriter, TextgenCallback, textgen
from ckpt_trainers.callbacks.textgen import undisturbed
from torch import nn

from .parallel.texts import language_model, tokenizer
from .test_callback_tensorboard import text

PROMPTS = ["w1 w2 w3", "w4"]


@pytest.mark.parametrize(
    "prompts", [5, ["a", 5], {"a": "b"}, b"text"], ids=["number", "numbers", "dict", "bytes"]
)
def test_prompts_are_texts(prompts: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a list of texts"):
        TextgenCallback(None, prompts)
    if isinstance(prompts, list | dict):
        path = tmp_path / "prompts.yaml"
        path.write_text(yaml.safe_dump(prompts))
        with pytest.raises(ValueError, match=r"prompts \(.*prompts.yaml\): give"):
            TextgenCallback(None, str(path))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("- one\n- 'two: three'\n")
    assert TextgenCallback(None, str(tmp_path / "p.yaml")).prompts == ["one", "two: three"]
    with pytest.raises(FileNotFoundError):
        TextgenCallback(None, "no/such/file")


def writing(tiny: Any, run: str, *, callback: bool = True, die_at: int | None = None) -> Any:
    """A run of 12 steps, evaluated at every third, that writes texts at 3, 9."""
    writer = ResumableSummaryWriter(str(tiny.root(run) / "tb"))
    texts = TextgenCallback(writer, PROMPTS, generation_steps=5, max_new_tokens=6)
    notes = tiny.notes()
    notes.die_at = die_at
    trainer = tiny.trainer(
        run,
        notes=notes,
        callbacks=(texts, writer) if callback else (),
        model_init=language_model,
        compute_loss_func=None,
        processing_class=tokenizer(),
        max_steps=12,
        eval_strategy="steps",
        eval_steps=3,
    )
    return trainer, notes, texts


def test_training_is_the_same_and_a_resumed_run_writes_the_same(tiny: Any) -> None:
    trainer, plain, _ = writing(tiny, "plain", callback=False)
    trainer.train()
    trainer, notes, texts = writing(tiny, "whole")
    trainer.train()
    assert notes.steps == plain.steps
    found = text(tiny.root("whole") / "tb", "eval-text")
    assert [step for step, _ in found] == [3, 9] and texts.next_step == 14
    for _, both in found:
        for prompt, written in zip(PROMPTS, both.split("\n\n---\n\n"), strict=True):
            given, completion = written.split(" [START] ")
            words = completion.split()
            assert given == prompt and 0 < len(words) <= 6
            assert all(word[0] == "w" and 0 <= int(word[1:]) < 256 for word in words)
    assert found[0][1] != found[1][1]
    # Killed between the two, and after the second one is written but not in a checkpoint.
    for run, step in (("early", 5), ("late", 9)):
        trainer, *_ = writing(tiny, run, die_at=step)
        with pytest.raises(tiny.died):
            trainer.train()
        trainer, resumed, _ = writing(tiny, run)
        assert trainer.train().resumed_from is not None
        assert resumed.steps == {n: facts for n, facts in plain.steps.items() if n > step}
        assert text(tiny.root(run) / "tb", "eval-text") == found


class Failing(nn.Module):
    """Has no idea how to generate; and what it is while it tries."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.frozen = nn.Dropout()
        self.frozen.eval()


def test_all_is_as_it_was_also_after_an_error() -> None:
    model = Failing()
    call = model._call_impl
    model._compiled_call_impl = call  # as after model.compile()
    trainer = type("Any", (), {"model": model, "wrapped": model, "device": torch.device("cpu")})
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no idea"), undisturbed(trainer, 5):
        assert model._compiled_call_impl is None and not torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())
        first = torch.rand(2)
        raise RuntimeError("no idea")
    assert model._compiled_call_impl is call and torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), before)
    with undisturbed(trainer, 5):
        assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize("what", ["processing_class", "transformers", "generate"])
def test_what_is_missing_is_said_once(
    what: str, tiny: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: dict[str, Any] = {"model_init": language_model, "compute_loss_func": None}
    said = {
        "processing_class": "the trainer has no processing_class",
        "transformers": "transformers is not installed",
        "generate": "ByteGPT has no method generate",
    }[what]
    if what == "transformers":
        monkeypatch.setattr(textgen, "transformers", None)
    trainer = tiny.trainer(
        callbacks=(TextgenCallback(None, PROMPTS),),
        processing_class=None if what == "processing_class" else tokenizer(),
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        **({} if what == "generate" else parts),
    )
    assert trainer.train().global_step == 3
    messages = [r.getMessage() for r in caplog.records if "TextgenCallback" in r.getMessage()]
    assert len(messages) == 1 and messages[0].startswith(f"TextgenCallback is off: {said}")
