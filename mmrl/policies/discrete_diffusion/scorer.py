"""Likelihoods of tokens at chosen positions of a response, under a masked language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kernels import token_logprob
from mmrl.policies.vlm.critic import TokenCritic


@dataclass(frozen=True)
class Vocabulary:
    """Token ids with a meaning, and those that are never drawn."""

    mask: int  # stands at empty positions
    pad: int
    end: int | None  # ends a response; None: responses fill all of their positions
    suppressed: Tensor  # [n] int64, ids that are never drawn
    outside: Tensor | None = None  # [n] int64, ids that are never drawn as image tokens, where text comes before these


class MaskScorer(nn.Module):
    """Computes likelihoods at chosen positions; this is the module that the engine wraps."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, *, causal: bool, shifted: bool) -> None:
        """causal: the model's own attention is causal, and is made bidirectional. shifted: see `MaskedModel`."""
        super().__init__()
        self.model, self.causal, self.shifted = model, causal, shifted
        self.critic: TokenCritic | None = None  # to be set before the engine wraps this module
        self.register_buffer("suppressed", vocabulary.suppressed, persistent=False)
        nothing = torch.zeros(0, dtype=torch.long)
        self.register_buffer("outside", nothing if vocabulary.outside is None else vocabulary.outside, persistent=False)

    def logits(
        self,
        ids: Tensor,
        mask: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """Returns fp32 logits [position, vocabulary] at column[i] of row row[i]. ids, mask: [row, token], token ids and
        attention mask; or mask [row, token, token], with positions [row, token]. is_image: [position] bool, which
        positions hold image tokens, where others hold text."""
        return self._read(ids, mask, row, column, positions, is_image, states=False)[0]

    def _read(
        self,
        ids: Tensor,
        mask: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None,
        is_image: Tensor | None,
        *,
        states: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `logits`, and with `states` the last hidden states of the same positions, [position, width]."""
        options: dict[str, Any] = {"output_hidden_states": True} if states else {}
        if positions is not None:
            options |= {"attention_mask": mask[:, None], "position_ids": positions}
        elif self.causal:
            bidirectional = mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
            options["attention_mask"] = bidirectional.bool()
        else:
            options["attention_mask"] = mask.long()
        outputs = self.model(input_ids=ids, **options)
        index = (row, column - 1 if self.shifted else column)  # shifted: a position predicts the next token
        unrestricted = outputs.logits[index].float()
        logits = unrestricted.index_fill(-1, self.suppressed, -torch.inf)
        if is_image is not None:
            logits = unrestricted.index_fill(-1, self.outside, -torch.inf).where(is_image[:, None], logits)
        return logits, outputs.hidden_states[-1][index] if states else None

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        row: Tensor,
        column: Tensor,
        targets: Tensor,
        temperature: Tensor,
        distributions: bool = False,
        old: Tensor | None = None,
        positions: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns logp, entropy and sum of squared probabilities of tokens `targets`, [position] fp32 each.
        temperature: [position] too. distributions: also the log-probabilities of all tokens, [position, vocabulary]
        without gradient. old: those of another policy; then also the cross-entropy to it, [position]. Where there is a
        critic, the value of the state comes last, [position]."""
        logits, hidden = self._read(ids, mask, row, column, positions, is_image, states=self.critic is not None)
        scores = self._scores(logits / temperature[:, None], targets, distributions, old)
        return scores if self.critic is None or hidden is None else (*scores, self.critic(hidden))

    def _scores(self, logits: Tensor, targets: Tensor, distributions: bool, old: Tensor | None) -> tuple[Tensor, ...]:
        """Returns log-probability, entropy and sum of squared probabilities of targets [n] under logits [n,
        vocabulary]; with `distributions` all log-probabilities too, and with `old` [n, vocabulary] the cross entropy
        from it."""
        selected = token_logprob(logits, targets)
        scores = (selected.logp, selected.entropy, selected.square_sum)
        if not distributions:
            return scores
        logp = logits.log_softmax(-1)
        if old is None:
            return *scores, logp.detach()
        possible = old > -torch.inf
        cross = -(old.exp() * logp.where(possible, 0.0)).sum(-1)
        return *scores, logp.detach(), cross
