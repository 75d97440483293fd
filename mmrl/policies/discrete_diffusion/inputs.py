"""Builds the model inputs of responses in the states in which they are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.policies.discrete_diffusion.likelihoods import States, block_attention
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.scorer import MaskScorer

# Returns the token ids of a response in state i, [position]; see `DiscreteDiffusionPolicy._noised_response`
NoisedResponse = Callable[[MaskedRecord, States, int], Tensor]


class StateCollator:
    """Builds batches of prompts and responses, on the device of the model."""

    def __init__(self, layout: ResponseLayout, scorer: MaskScorer) -> None:
        self.layout, self.scorer = layout, scorer

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.scorer.parameters()).device

    def collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns token ids, padded on the right, and their attention mask, [row, token] each."""
        ids = pad_sequence(list(rows), batch_first=True, padding_value=self.layout.vocabulary.pad)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return ids.to(self.device), mask.to(self.device)

    def collate_one_pass(self, records: list[MaskedRecord], orders: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows of prompt, response and as many mask tokens as the response has: token ids [row, token],
        attention mask [row, token, token] and position ids [row, token].

        Prompt tokens attend to the prompt. A response token also attends to response tokens that were filled in the
        same step or earlier. A mask token attends to the prompt, to response tokens that were filled before its
        position, and to itself. orders: the step in which each position was filled, [position] per row.
        """
        mask_tokens = torch.full((self.layout.length,), self.layout.vocabulary.mask)
        ids, _ = self.collate([torch.cat([record.prompt, record.response, mask_tokens]) for record in records])
        attention = torch.eye(ids.shape[1], dtype=torch.bool).repeat(len(records), 1, 1)
        positions = torch.zeros(ids.shape, dtype=torch.long)
        for row, (record, order) in enumerate(zip(records, orders, strict=True)):
            prompt, n = len(record.prompt), self.layout.length
            earlier = order[None, :] < order[:, None]  # [position, position]
            attention[row, : prompt + 2 * n, :prompt] = True  # all tokens but padding attend to the prompt
            # a response token attends to position j unless j was filled later, a mask token only if earlier
            attention[row, prompt : prompt + n, prompt : prompt + n] = ~earlier.T
            attention[row, prompt + n : prompt + 2 * n, prompt : prompt + n] = earlier
            response_positions = torch.arange(prompt, prompt + n)
            positions[row, : prompt + 2 * n] = torch.cat([torch.arange(prompt), response_positions, response_positions])
        return ids, attention.to(self.device), positions.to(self.device)

    def collate_blocks(
        self, records: list[MaskedRecord], states: list[States], blocks: Tensor, noised_response: NoisedResponse
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows of prompt, response and noised response, one per record and state: token ids [row, token],
        attention mask [row, token, token] and position ids [row, token]; see `block_attention`. states: one per record.
        blocks: [position], the block of each position of the response. noised_response: returns the token ids of a
        response in one of its states."""
        rows = [
            torch.cat([record.prompt, record.response, noised_response(record, row_states, s)])
            for record, row_states in zip(records, states, strict=True)
            for s in range(len(row_states.weight))
        ]
        lengths = [len(record.prompt) for record in records for _ in range(len(states[0].weight))]
        return self.with_block_mask(rows, lengths, blocks, noised=True)

    def with_block_mask(
        self, rows: list[Tensor], prompt_lengths: list[int], blocks: Tensor, *, noised: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token ids [row, token] with the attention mask and position ids of `block_attention`.

        prompt_lengths: in tokens, one per row. blocks: [position], the block of each. noised: rows end with a noised
        copy of the response.
        """
        ids, _ = self.collate(rows)
        masks = [block_attention(length, blocks, ids.shape[1], noised=noised) for length in prompt_lengths]
        attention, positions = (torch.stack(part).to(self.device) for part in zip(*masks, strict=True))
        return ids, attention, positions

    def collate_states(
        self, records: list[MaskedRecord], states: list[States], noised_response: NoisedResponse
    ) -> tuple[Tensor, Tensor]:
        """Returns rows of prompt and noised response, one per record and state: token ids and attention mask, [row,
        token] each. noised_response: returns the token ids of a response in one of its states."""
        rows = [
            torch.cat([self._masked_prompt(record, row_states, s), noised_response(record, row_states, s)])
            for record, row_states in zip(records, states, strict=True)
            for s in range(len(row_states.weight))
        ]
        return self.collate(rows)

    def _masked_prompt(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """Returns the token ids of the prompt in a state, [token]; some may be masked."""
        if states.prompt_masked is None:
            return record.prompt
        return record.prompt.masked_fill(states.prompt_masked[state], self.layout.vocabulary.mask)
