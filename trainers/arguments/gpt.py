"""Size of the byte-level GPT that the demonstrations and tests train."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidArgument, real, whole

__all__ = ["GPTArguments"]


@dataclass
class GPTArguments:
    """Size of the byte-level GPT."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            whole(name, getattr(self, name), at_least=1)
        real("dropout", self.dropout, 0.0, 1.0, below_high=True)
        if self.n_embd % self.n_head:
            raise InvalidArgument(
                "n_embd", self.n_embd, f"not a multiple of n_head={self.n_head}", "make it one"
            )
