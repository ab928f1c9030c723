"""Which columns of a padded batch hold tokens, and which are padding."""

from __future__ import annotations

import torch

from .config import refused


class Columns:
    """The columns that the layers of a cache have seen. Padding is never stored: a row's keys lie and are attended to
    as in a batch of one."""

    def __init__(self):
        self.length = 0
        self.held: torch.Tensor | None = None  # bool [batch, length] on the CPU; None: no column is padding
        self._checked: list[tuple] = []  # steps by their mask: layers are given the same one after the other

    def step(self, mask: torch.Tensor | None, batch: int, begin: int, tokens: int) -> torch.Tensor | None:
        """Which of the columns from `begin` on hold tokens, bool [batch, tokens] on the CPU; None: all do."""
        if mask is None and self.held is None:
            return None
        for checked, at, real in self._checked:
            if checked is mask and at == (batch, begin, tokens):
                return real
        given = self._given(mask, batch, begin + tokens)
        known = min(self.length, begin + tokens)
        if self.held is not None and not torch.equal(given[:, :known], self.held[:, :known]):
            row, column = (given[:, :known] != self.held[:, :known]).nonzero()[0].tolist()
            raise refused(
                "the attention mask must say of earlier columns what it said before, and be given again if it hid "
                f"some; it says otherwise of column {column} in row {row}"
            )
        if self.held is None and not given[:, :known].all():
            row, column = (~given[:, :known]).nonzero()[0].tolist()
            raise refused(f"the attention mask hides column {column} in row {row}, which holds a token already")
        real = given[:, begin:].clone()
        real = None if real.all() else real
        self._checked = [entry for entry in self._checked if entry[1] == (batch, begin, tokens)]
        self._checked.append((mask, (batch, begin, tokens), real))
        return real

    @staticmethod
    def _given(mask: torch.Tensor | None, batch: int, end: int) -> torch.Tensor:
        if mask is None:
            return torch.ones(batch, end, dtype=torch.bool)
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < end:
            raise refused(f"the attention mask must be [{batch}, at least {end}], got {list(mask.shape)}")
        return mask[:, :end].to(device="cpu", dtype=torch.bool)

    def record(self, batch: int, begin: int, tokens: int, real: torch.Tensor | None) -> None:
        """A layer has stored these columns."""
        if begin + tokens <= self.length:
            return
        if self.held is not None or real is not None:
            held = torch.ones(batch, begin, dtype=torch.bool) if self.held is None else self.held
            real = torch.ones(batch, tokens, dtype=torch.bool) if real is None else real
            self.held = torch.cat([held, real], dim=1)
        self.length = begin + tokens

    def tokens(self, batch: int, begin: int, end: int) -> list[int]:
        """How many tokens each row has in these columns."""
        if self.held is None:
            return [end - begin] * batch
        return self.held[:, begin:end].sum(1).tolist()

    def crop(self, length: int) -> None:
        self.length = length
        self._checked = []
        if self.held is not None:
            self.held = self.held[:, :length].contiguous()
            if self.held.all():
                self.held = None

    def select(self, rows: list[int]) -> None:
        self._checked = []
        if self.held is not None:
            self.held = self.held[rows]

    def __deepcopy__(self, memo: dict) -> Columns:
        other = memo[id(self)] = Columns()  # one for all layers of the copy
        other.length, other.held = self.length, self.held  # never written, only replaced
        return other
