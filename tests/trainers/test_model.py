from __future__ import annotations

import math

import pytest
import torch
from ckpt_trainers.arguments import GPTArguments, InvalidArgument, TrainingArguments
from ckpt_trainers.model import VOCABULARY, ByteGPT
from ckpt_trainers.schedule import warmup_cosine

TINY = GPTArguments(n_layer=2, n_head=2, n_embd=16, block_size=12, dropout=0.0)


def test_a_byte_never_sees_what_follows_it() -> None:
    torch.manual_seed(0)
    model = ByteGPT(TINY)
    text = torch.randint(VOCABULARY, (1, 12))
    other = text.clone()
    other[0, 7:] = (other[0, 7:] + 1) % VOCABULARY
    left, right = model(text).logits, model(other).logits
    assert torch.equal(left[:, :7], right[:, :7])
    assert (left[:, 7:] != right[:, 7:]).any(-1).all()


def test_embedding_and_head_are_one_parameter() -> None:
    model = ByteGPT(TINY)
    assert model.head.weight is model.embedding.weight
    assert {"head.weight", "embedding.weight"} <= model.state_dict().keys()
    assert "head.weight" not in dict(model.named_parameters())


def test_loss_is_the_cross_entropy_and_starts_near_that_of_a_guess() -> None:
    torch.manual_seed(0)
    model = ByteGPT(TINY)
    text = torch.randint(VOCABULARY, (3, 13))
    logits, loss = model(text[:, :-1], text[:, 1:])
    by_hand = -logits.log_softmax(-1).gather(-1, text[:, 1:, None]).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_dropout_acts_in_training_only() -> None:
    model = ByteGPT(GPTArguments(n_layer=1, n_head=1, n_embd=8, block_size=4, dropout=0.5))
    text = torch.zeros(1, 4, dtype=torch.long)
    assert not torch.equal(model(text).logits, model(text).logits)
    model.eval()
    assert torch.equal(model(text).logits, model(text).logits)


def test_schedule_is_a_ramp_and_a_cosine() -> None:
    factor = warmup_cosine(4, 12)
    assert [factor(t) for t in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert factor(6) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert factor(8) == pytest.approx(0.5)
    assert factor(12) == factor(99) == 0.0
    assert [warmup_cosine(0, 2)(t) for t in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    assert warmup_cosine(5, 5)(5) == 1.0


def test_schedule_drives_lambda_lr_and_leaves_no_function_in_its_state() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(2, 6))
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2 * warmup_cosine(2, 6)(t) for t in range(6)])
    assert scheduler.state_dict()["lr_lambdas"] == [None]


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("save_steps", 0, "give a whole number from 1 up"),
        ("save_steps", 2.5, "not a whole number"),
        ("gradient_accumulation_steps", -1, "out of range"),
        ("per_device_train_batch_size", True, "not a whole number"),
        ("save_total_limit", 0, "None keeps all"),
        ("learning_rate", float("nan"), "not a finite number"),
        ("learning_rate", -1.0, "give a number from 0"),
        ("max_grad_norm", 0.0, "None does not clip"),
        ("adam_beta2", 1.0, "below 1"),
        ("num_train_epochs", 0.0, "or set max_steps"),
        ("seed", -2, "from -1 to 4294967295"),
        ("seed", 2**32, "out of range"),
        ("eval_strategy", "epoch", "no, steps"),
        ("report_to", "all", "none, tensorboard"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(name: str, value: object, advice: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        TrainingArguments(**{name: value})  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"{name}={value!r}: ") and advice in str(raised.value)
    assert raised.value.name == name


def test_model_arguments_are_checked_too() -> None:
    with pytest.raises(InvalidArgument, match="n_embd=10: not a multiple of n_head=4"):
        GPTArguments(n_embd=10)
    with pytest.raises(InvalidArgument, match=r"dropout=1\.0"):
        GPTArguments(dropout=1.0)
    assert TrainingArguments(model={"n_layer": 2}).model == GPTArguments(n_layer=2)  # type: ignore[arg-type]


def test_digest_of_arguments_tells_what_is_computed_not_where() -> None:
    one = TrainingArguments(output_dir="a", save_steps=5)
    assert one.digest() == TrainingArguments(output_dir="b", save_steps=9, resume_from_checkpoint=False).digest()
    other = TrainingArguments(weight_decay=0.1, model=GPTArguments(dropout=0.2))
    assert one.digest() != other.digest()
    changed = other.differences(one.as_dict())
    assert changed[0] == "weight_decay 0.1 (was 0.0)" and changed[1].startswith("model ")
    assert one.differences(one.as_dict()) == []
