"""Counts the FLOPs of sampling responses and of computing their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmrl.engine.flops import CallMeter, Flops, SequenceMeter, Tally
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.rollouts import Rollouts


class ResponseFlops:
    """Adds the FLOPs of forward and backward passes over prompts and responses to a tally; padding is not counted.

    FLOPs of the decoder are measured in its first passes and then computed from the number of tokens; FLOPs of the
    vision tower are measured in every pass. Images that vLLM reads are not counted.
    """

    def __init__(self, core: PreTrainedModel) -> None:
        """core: the transformers model, without its PEFT wrapper."""
        self.tally = Tally()
        self.decoder, head = core.get_decoder(), core.get_output_embeddings()
        self.meter, self._head = SequenceMeter(self.decoder), head
        for part in submodules_outside(core, self.decoder, head):
            CallMeter(part, self.tally)  # hooks itself into the module

    @property
    def head(self) -> Flops:
        """The FLOPs of the output layer for one token."""
        weight = self._head.weight
        # a weight that ZeRO-3 has partitioned has no shape
        forward = 2.0 * weight.numel() if weight.dim() == 2 else 0.0
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.decoder.parameters())
        # backward: a product for the gradient of the hidden states, and one for the gradient of the weight
        return Flops(forward, forward * (trained + weight.requires_grad))

    def replayed(self, rows: Sequence[RolloutTokens], prompts: Sequence[RolloutTokens] | None) -> None:
        """Adds the FLOPs of the pass that computed log-probabilities of `rows`. prompts: the distinct prompts, if each
        was computed once for all of its responses; None: if each row was computed with its prompt."""
        known = self.meter.known  # None: the operations of the decoder were never counted
        if known is None:
            return
        if prompts is None:
            parts = [known.for_sequence(len(row.prompt) + len(row.response)) for row in rows]
        else:
            parts = [known.for_sequence(len(row.prompt)) for row in prompts]
            # the last token of a response is no input, since no token is predicted from it
            parts += [known.for_extension(len(row.prompt), max(0, len(row.response) - 1)) for row in rows]
        decisions = sum(int(row.decision_mask.sum()) for row in rows)
        self.tally.add(sum(parts, self.head * decisions))

    @torch.no_grad()
    def sampled(
        self,
        rows: Sequence[RolloutTokens],
        prefilled: Sequence[RolloutTokens],
        sampled: Sequence[Tensor],
        *,
        shared: bool = False,
    ) -> None:
        """Adds the FLOPs of sampling the tokens sampled[i] after row i, token by token.

        prefilled: the distinct rows, each computed once for all rows equal to it. shared: whether each prompt of
        `prefilled` was computed once, and then the responses so far after it.
        """
        known = self.meter.known  # None: the operations of the decoder were never counted
        if known is None:
            return
        if shared:
            prompts = {id(row.prompt): len(row.prompt) for row in prefilled}
            parts = [known.for_sequence(length) for length in prompts.values()]
            parts += [known.for_extension(len(row.prompt), len(row.response)) for row in prefilled if len(row.response)]
        else:
            parts = [known.for_sequence(len(row.prompt) + len(row.response)) for row in prefilled]
        parts += [
            known.for_extension(len(row.prompt) + len(row.response), len(ids), one_by_one=True)
            for row, ids in zip(rows, sampled, strict=True)
        ]
        self.tally.add(sum(parts, self.head * sum(len(ids) for ids in sampled)))


def submodules_outside(core: nn.Module, decoder: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """Yields the largest submodules that contain neither the decoder nor the output layer, such as the vision tower."""
    for child in core.children():
        if any(part is decoder for part in child.modules()):
            if child is not decoder:
                yield from submodules_outside(child, decoder, head)
        elif child is not head:
            yield child


def token_units(rollouts: Rollouts) -> dict[str, int]:
    """Returns the number of tokens of prompts and responses together, and of responses alone."""
    response = sum(len(row.response) for row in rollouts.inputs)
    return {"tokens": response + sum(len(row.prompt) for row in rollouts.inputs), "response_tokens": response}
