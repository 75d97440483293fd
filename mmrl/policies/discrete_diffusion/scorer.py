"""The module that DeepSpeed wraps: log-probabilities of tokens at given positions, under a masked language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kernels import token_logprob
from mmrl.policies.vlm.critic import TokenCritic


@dataclass(frozen=True)
class Vocabulary:
    """Ids of special tokens, and of tokens that are never sampled."""

    mask: int  # the mask token
    pad: int
    end: int | None  # ends a text; None: responses have only image tokens
    suppressed: Tensor  # [n] int64, ids that are never sampled
    # [n] int64, ids that are never sampled as image tokens, if responses have text and an image; `suppressed` is for
    # text
    image_suppressed: Tensor | None = None


class MaskScorer(nn.Module):
    """Computes log-probabilities of tokens at given positions; the module that DeepSpeed wraps."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, *, causal: bool, shifted: bool) -> None:
        """causal: the model has causal attention, which is made bidirectional. shifted: the output at a position
        predicts the next token (Dream), not the token at the position."""
        super().__init__()
        self.model, self.causal, self.shifted = model, causal, shifted
        self.critic: TokenCritic | None = None  # to be set before the engine wraps this module
        self.register_buffer("suppressed", vocabulary.suppressed, persistent=False)
        no_ids = torch.zeros(0, dtype=torch.long)
        image_suppressed = no_ids if vocabulary.image_suppressed is None else vocabulary.image_suppressed
        self.register_buffer("image_suppressed", image_suppressed, persistent=False)

    def logits(
        self,
        ids: Tensor,
        mask: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """Returns fp32 logits [position, vocabulary] for the token at column column[i] of row row[i].

        ids: [row, token]. mask: attention mask, [row, token] with positions None, or [row, token, token] with position
        ids `positions` [row, token]. row, column: [position]. is_image: [position] bool, true for image tokens; None:
        all tokens of responses are of one kind, text or image.
        """
        return self._logits_and_hidden(ids, mask, row, column, positions, is_image, hidden=False)[0]

    def _logits_and_hidden(
        self,
        ids: Tensor,
        mask: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None,
        is_image: Tensor | None,
        *,
        hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `logits`, and if `hidden` the last hidden states at the same positions [position, width], else
        None."""
        options: dict[str, Any] = {"output_hidden_states": True} if hidden else {}
        if positions is not None:
            options |= {"attention_mask": mask[:, None], "position_ids": positions}
        elif self.causal:
            bidirectional = mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
            options["attention_mask"] = bidirectional.bool()
        else:
            options["attention_mask"] = mask.long()
        outputs = self.model(input_ids=ids, **options)
        # a shifted model predicts a token at the position before it
        index = (row, column - 1 if self.shifted else column)
        all_logits = outputs.logits[index].float()
        logits = all_logits.index_fill(-1, self.suppressed, -torch.inf)
        if is_image is not None:
            image_logits = all_logits.index_fill(-1, self.image_suppressed, -torch.inf)
            logits = image_logits.where(is_image[:, None], logits)
        return logits, outputs.hidden_states[-1][index] if hidden else None

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
        """Returns logp of the targets, entropy and sum of squared probabilities, [position] fp32 each; then what the
        options add, in this order.

        ids, mask, row, column, positions, is_image: see `logits`. targets: token ids, [position]. temperature:
        [position]. distributions: adds the log-probabilities of all tokens [position, vocabulary], without gradient.
        old: log-probabilities of all tokens under the old policy [position, vocabulary]; adds the cross-entropy to it,
        [position]. A critic adds the value of the state, [position].
        """
        with_critic = self.critic is not None
        logits, hidden = self._logits_and_hidden(ids, mask, row, column, positions, is_image, hidden=with_critic)
        scores = self._scores(logits / temperature[:, None], targets, distributions, old)
        return scores if self.critic is None or hidden is None else (*scores, self.critic(hidden))

    def _scores(self, logits: Tensor, targets: Tensor, distributions: bool, old: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the results of `forward`, except the critic's value, from logits [position, vocabulary] that are
        already divided by the temperature."""
        selected = token_logprob(logits, targets)
        scores = (selected.logp, selected.entropy, selected.square_sum)
        if not distributions:
            return scores
        logp = logits.log_softmax(-1)
        if old is None:
            return *scores, logp.detach()
        not_suppressed = old > -torch.inf  # at suppressed tokens both are -inf, and 0 x -inf would be NaN
        cross_entropy = -(old.exp() * logp.where(not_suppressed, 0.0)).sum(-1)
        return *scores, logp.detach(), cross_entropy
