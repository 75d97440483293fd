"""Model inputs of responses in the states in which they are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.policies.discrete_diffusion.likelihoods import States, by_blocks
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.scorer import MaskScorer

# Returns the response as it is read in state i, [position].
ResponseInState = Callable[[MaskedRecord, States, int], Tensor]


class StateCollator:
    """Lays out prompts and responses as model inputs, on the model's device."""

    def __init__(self, layout: ResponseLayout, scorer: MaskScorer) -> None:
        self.layout, self.scorer = layout, scorer

    @property
    def device(self) -> torch.device:
        return next(self.scorer.parameters()).device

    def collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns tokens, padded behind, and their attention mask, [row, token] each."""
        ids = pad_sequence(list(rows), batch_first=True, padding_value=self.layout.vocabulary.pad)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return ids.to(self.device), mask.to(self.device)

    def in_one_pass(self, records: list[MaskedRecord], orders: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns prompts, responses and as many mask tokens [row, token], their attention mask [row, token, token] and
        position ids [row, token]. A prompt sees itself; a token of a response sees the prompt and all tokens that were
        filled no later; a mask token sees the prompt, all tokens that were filled earlier, and itself. orders:
        [position] of each response, see `States.order`."""
        blank = torch.full((self.layout.length,), self.layout.vocabulary.mask)
        ids, _ = self.collate([torch.cat([record.prompt, record.response, blank]) for record in records])
        attention = torch.eye(ids.shape[1], dtype=torch.bool).repeat(len(records), 1, 1)
        positions = torch.zeros(ids.shape, dtype=torch.long)
        for row, (record, order) in enumerate(zip(records, orders, strict=True)):
            prompt, n = len(record.prompt), self.layout.length
            earlier = order[None, :] < order[:, None]  # [position, position]
            attention[row, : prompt + 2 * n, :prompt] = True
            attention[row, prompt : prompt + n, prompt : prompt + n] = ~earlier.T
            attention[row, prompt + n : prompt + 2 * n, prompt : prompt + n] = earlier
            response_positions = torch.arange(prompt, prompt + n)
            positions[row, : prompt + 2 * n] = torch.cat([torch.arange(prompt), response_positions, response_positions])
        return ids, attention.to(self.device), positions.to(self.device)

    def in_blocks(
        self, records: list[MaskedRecord], states: list[States], blocks: Tensor, response_in_state: ResponseInState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns prompts, responses and noised responses [row, token], one row a state, their attention mask [row,
        token, token] and position ids [row, token]. See `by_blocks`."""
        rows = [
            torch.cat([record.prompt, record.response, response_in_state(record, row_states, s)])
            for record, row_states in zip(records, states, strict=True)
            for s in range(len(row_states.weight))
        ]
        lengths = [len(record.prompt) for record in records for _ in range(len(states[0].weight))]
        return self.with_block_mask(rows, lengths, blocks, noised=True)

    def with_block_mask(
        self, rows: list[Tensor], prompts: list[int], blocks: Tensor, *, noised: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows [row, token] with the attention mask and position ids of `by_blocks`. prompts: the number of
        tokens of each."""
        ids, _ = self.collate(rows)
        masks = [by_blocks(length, blocks, ids.shape[1], noised=noised) for length in prompts]
        attention, positions = (torch.stack(part).to(self.device) for part in zip(*masks, strict=True))
        return ids, attention, positions

    def in_states(
        self, records: list[MaskedRecord], states: list[States], response_in_state: ResponseInState
    ) -> tuple[Tensor, Tensor]:
        """Returns prompts and responses [row, token], one row a state, and their attention mask."""
        rows = [
            torch.cat([self._prompt_in_state(record, row_states, s), response_in_state(record, row_states, s)])
            for record, row_states in zip(records, states, strict=True)
            for s in range(len(row_states.weight))
        ]
        return self.collate(rows)

    def _prompt_in_state(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """Returns the prompt as it is read in a state, [token]."""
        if states.prompt_empty is None:
            return record.prompt
        return record.prompt.masked_fill(states.prompt_empty[state], self.layout.vocabulary.mask)
