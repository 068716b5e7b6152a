from __future__ import annotations

import math

import pytest
import torch
from ckpt_trainers.arguments import GPTArguments
from ckpt_trainers.model import VOCABULARY, ByteGPT, next_byte_loss

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


def test_blocks_that_are_computed_again_give_the_same_gradients() -> None:
    gradients = []
    for again in (False, True):
        torch.manual_seed(1)
        model = ByteGPT(GPTArguments(n_layer=2, n_head=2, n_embd=16, block_size=12, dropout=0.3))
        if again:
            model.gradient_checkpointing_enable()
        model(
            torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)
        ).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_loss_in_parts_is_the_loss() -> None:
    model = ByteGPT(TINY)
    text = torch.randint(VOCABULARY, (3, 13))
    parts = [next_byte_loss(model(part[:, :-1]), part[:, 1:], 36) for part in (text[:1], text[1:])]
    assert float(sum(parts).detach()) == pytest.approx(
        float(model(text[:, :-1], text[:, 1:]).loss.detach()), rel=1e-6
    )
