"""What a masked language model says of chosen places of a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kernels import token_logprob
from mmrl.policies.vlm.critic import TokenCritic


@dataclass(frozen=True)
class Vocabulary:
    """What tokens mean to a policy."""

    mask: int  # stands in empty places
    pad: int
    end: int | None  # ends a response; None: responses fill all of their places
    suppressed: Tensor  # [n] int64, ids that are never drawn
    outside: Tensor | None = None  # [n] int64, ids that are never drawn as codes, where text comes before these


class MaskScorer(nn.Module):
    """What a model says of chosen places; this is the module that the engine wraps."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, *, causal: bool, shifted: bool) -> None:
        """causal: the model would look at earlier tokens only, and is made to look at all. shifted: see
        `MaskedModel`."""
        super().__init__()
        self.model, self.causal, self.shifted = model, causal, shifted
        self.critic: TokenCritic | None = None  # whoever sets it does so before the engine wraps this
        self.register_buffer("suppressed", vocabulary.suppressed, persistent=False)
        nothing = torch.zeros(0, dtype=torch.long)
        self.register_buffer("outside", nothing if vocabulary.outside is None else vocabulary.outside, persistent=False)

    def logits(
        self,
        ids: Tensor,
        there: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> Tensor:
        """[place, vocabulary] fp32, at position column[i] of row row[i]. ids, there: [row, token], what is read and
        where there is anything to read; or there: [row, token, token], which tokens each of them sees, with positions
        [row, token]. codes: [place] bool, which places are of codes, where others are of text."""
        return self._read(ids, there, row, column, positions, codes, states=False)[0]

    def _read(
        self,
        ids: Tensor,
        there: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None,
        codes: Tensor | None,
        *,
        states: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`logits`, and with `states` what the model made of the places that they are said at, [place, width]."""
        options: dict[str, Any] = {"output_hidden_states": True} if states else {}
        if positions is not None:
            options |= {"attention_mask": there[:, None], "position_ids": positions}
        elif self.causal:
            seen = there[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
            options["attention_mask"] = seen.bool()
        else:
            options["attention_mask"] = there.long()
        found = self.model(input_ids=ids, **options)
        place = (row, column - 1 if self.shifted else column)
        said = found.logits[place].float()
        logits = said.index_fill(-1, self.suppressed, -torch.inf)
        if codes is not None:
            logits = said.index_fill(-1, self.outside, -torch.inf).where(codes[:, None], logits)
        return logits, found.hidden_states[-1][place] if states else None

    def forward(
        self,
        ids: Tensor,
        there: Tensor,
        row: Tensor,
        column: Tensor,
        targets: Tensor,
        temperature: Tensor,
        whole: bool = False,
        old: Tensor | None = None,
        positions: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """logp, entropy and sum of squared probabilities of tokens `targets`, [place] fp32 each. temperature: [place]
        too. whole: the logarithms of all probabilities besides, [place, vocabulary] without gradient. old: those of
        another policy; then the cross-entropy to it besides, [place]. Where there is a critic, the value of the state
        comes last, [place]."""
        said, hidden = self._read(ids, there, row, column, positions, codes, states=self.critic is not None)
        known = self._known(said / temperature[:, None], targets, whole, old)
        return known if self.critic is None or hidden is None else (*known, self.critic(hidden))

    def _known(self, logits: Tensor, targets: Tensor, whole: bool, old: Tensor | None) -> tuple[Tensor, ...]:
        found = token_logprob(logits, targets)
        known = (found.logp, found.entropy, found.square_sum)
        if not whole:
            return known
        logp = logits.log_softmax(-1)
        if old is None:
            return *known, logp.detach()
        possible = old > -torch.inf
        cross = -(old.exp() * logp.where(possible, 0.0)).sum(-1)
        return *known, logp.detach(), cross
