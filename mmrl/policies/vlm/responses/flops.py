"""Operations of sampling and replaying responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmrl.engine.flops import CallMeter, Flops, SequenceMeter, Tally
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.rollouts import Rollouts


class ResponseFlops:
    """Adds passes over prompts and responses to a tally, by their tokens: padding is not work. The decoder is counted
    in its first passes; what reads images, in each. What an engine reads of images is not counted."""

    def __init__(self, core: PreTrainedModel) -> None:
        self.tally = Tally()
        self.decoder, head = core.get_decoder(), core.get_output_embeddings()
        self.meter, self._head = SequenceMeter(self.decoder), (head,)  # in a tuple: it is not part of this
        for part in beside(core, self.decoder, head):
            CallMeter(part, self.tally)

    @property
    def head(self) -> Flops:
        """The operations of the output layer for one token."""
        weight = self._head[0].weight
        forward = 2.0 * weight.numel() if weight.dim() == 2 else 0.0
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.decoder.parameters())
        return Flops(forward, forward * (trained + weight.requires_grad))

    def replayed(self, rows: Sequence[RolloutTokens], prompts: Sequence[RolloutTokens] | None) -> None:
        """Adds the pass that scored responses. prompts: those that were read once for all of their responses; None:
        every row was read as a whole."""
        known = self.meter.known
        if known is None:
            return
        if prompts is None:
            parts = [known.for_sequence(len(row.prompt) + len(row.response)) for row in rows]
        else:
            parts = [known.for_sequence(len(row.prompt)) for row in prompts]
            parts += [known.for_extension(len(row.prompt), max(0, len(row.response) - 1)) for row in rows]
        decisions = sum(int(row.chosen.sum()) for row in rows)
        self.tally.add(sum(parts, self.head * decisions))

    @torch.no_grad()
    def sampled(
        self,
        rows: Sequence[RolloutTokens],
        read: Sequence[RolloutTokens],
        drawn: Sequence[Tensor],
        *,
        shared: bool = False,
    ) -> None:
        """Adds the drawing of tokens behind each of `rows`, one by one. read: the rows that were read for it, of which
        several may have gone on from the same one; shared: each of their prompts was read once."""
        known = self.meter.known
        if known is None:
            return
        if shared:
            prompts = {id(row.prompt): len(row.prompt) for row in read}
            parts = [known.for_sequence(length) for length in prompts.values()]
            parts += [known.for_extension(len(row.prompt), len(row.response)) for row in read if len(row.response)]
        else:
            parts = [known.for_sequence(len(row.prompt) + len(row.response)) for row in read]
        parts += [
            known.for_extension(len(row.prompt) + len(row.response), len(ids), one_by_one=True)
            for row, ids in zip(rows, drawn, strict=True)
        ]
        self.tally.add(sum(parts, self.head * sum(len(ids) for ids in drawn)))


def beside(core: nn.Module, decoder: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """Yields the largest parts of a model that hold neither its decoder nor its output layer."""
    for child in core.children():
        if any(part is decoder for part in child.modules()):
            if child is not decoder:
                yield from beside(child, decoder, head)
        elif child is not head:
            yield child


def token_units(rollouts: Rollouts) -> dict[str, int]:
    """Returns the tokens of prompts and responses, and those of responses alone."""
    response = sum(len(row.response) for row in rollouts.inputs)
    return {"tokens": response + sum(len(row.prompt) for row in rollouts.inputs), "response_tokens": response}
