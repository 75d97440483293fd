"""What the model reads of responses in the states that they are scored in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.policies.discrete_diffusion.likelihoods import States, by_blocks
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.scorer import MaskScorer

Shown = Callable[[MaskedRecord, States, int], Tensor]  # [place] a response as it is read in a state


class StateCollator:
    """Lays out prompts and responses, on the model's device."""

    def __init__(self, layout: ResponseLayout, scorer: MaskScorer) -> None:
        self.layout, self.scorer = layout, scorer

    @property
    def device(self) -> torch.device:
        return next(self.scorer.parameters()).device

    def collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [row, token], padded behind, and where there is any."""
        ids = pad_sequence(list(rows), batch_first=True, padding_value=self.layout.vocabulary.pad)
        lengths = torch.tensor([len(row) for row in rows])
        there = torch.arange(ids.shape[1]) < lengths[:, None]
        return ids.to(self.device), there.to(self.device)

    def in_one_pass(self, records: list[MaskedRecord], orders: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, responses and as many mask tokens [row, token]; which tokens each of them sees [row, token, token];
        their positions [row, token]. A prompt sees itself, a token of a response the prompt and all that were filled
        no later, a mask token the prompt, all that were filled earlier, and itself. orders: [place] of each response,
        see `States.order`."""
        blank = torch.full((self.layout.length,), self.layout.vocabulary.mask)
        ids, there = self.collate([torch.cat([record.prompt, record.response, blank]) for record in records])
        seen = torch.eye(ids.shape[1], dtype=torch.bool).repeat(len(records), 1, 1)
        positions = torch.zeros(ids.shape, dtype=torch.long)
        for row, (record, order) in enumerate(zip(records, orders, strict=True)):
            prompt, n = len(record.prompt), self.layout.length
            earlier = order[None, :] < order[:, None]  # [place, place]
            seen[row, : prompt + 2 * n, :prompt] = True
            seen[row, prompt : prompt + n, prompt : prompt + n] = ~earlier.T
            seen[row, prompt + n : prompt + 2 * n, prompt : prompt + n] = earlier
            places = torch.arange(prompt, prompt + n)
            positions[row, : prompt + 2 * n] = torch.cat([torch.arange(prompt), places, places])
        return ids, seen.to(self.device), positions.to(self.device)

    def in_blocks(
        self, records: list[MaskedRecord], found: list[States], blocks: Tensor, shown: Shown
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, responses and responses with empty places [row, token], one row a state; which tokens each of them
        sees [row, token, token]; their positions [row, token]. See `by_blocks`."""
        rows = [
            torch.cat([record.prompt, record.response, shown(record, states, s)])
            for record, states in zip(records, found, strict=True)
            for s in range(len(states.weight))
        ]
        lengths = [len(record.prompt) for record in records for _ in range(len(found[0].weight))]
        return self.stepped(rows, lengths, blocks, noised=True)

    def stepped(
        self, rows: list[Tensor], prompts: list[int], blocks: Tensor, *, noised: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [row, token], what they see and their positions, as `by_blocks` has them. prompts: tokens of each."""
        ids, _ = self.collate(rows)
        known = [by_blocks(length, blocks, ids.shape[1], noised=noised) for length in prompts]
        seen, positions = (torch.stack(part).to(self.device) for part in zip(*known, strict=True))
        return ids, seen, positions

    def in_states(self, records: list[MaskedRecord], found: list[States], shown: Shown) -> tuple[Tensor, Tensor]:
        """Prompts and responses [row, token], one row a state, and where there is any."""
        rows = [
            torch.cat([self._hidden(record, states, s), shown(record, states, s)])
            for record, states in zip(records, found, strict=True)
            for s in range(len(states.weight))
        ]
        return self.collate(rows)

    def _hidden(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """[token] the prompt as it is read in a state."""
        if states.prompt_empty is None:
            return record.prompt
        return record.prompt.masked_fill(states.prompt_empty[state], self.layout.vocabulary.mask)
