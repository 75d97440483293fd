"""Likelihoods of responses by the model that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmrl.policies.models import Scorer
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.policies.vlm.responses.runner import ModelRunner
from mmrl.policies.vlm.routing import collate_routes
from mmrl.policies.vlm.scorer import PrefixContinuations
from mmrl.rollouts import ALTERNATIVES, ROUTING_DIFFERS, SEGMENTS, Replay, Rollouts, alternatives_of


class Layout(NamedTuple):
    """What the model reads of responses, and at which position of a row each of their decisions is predicted."""

    inputs: dict[str, Tensor]
    continuations: PrefixContinuations | None
    column: Tensor  # [decision]


class ResponseReplay:
    """Says how likely the tokens of responses are. segment: tokens of a segment of a response; None: it has none."""

    def __init__(self, runner: ModelRunner, segment: int | None) -> None:
        self.runner, self.segment = runner, segment

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool, padding_side: str = "right") -> Replay:
        """See `VisionLanguagePolicy.replay`."""
        runner, routing = self.runner, self.runner.routing
        rows: list[RolloutTokens] = rollouts.inputs
        if reference:
            rows = [replace(tokens, experts=None) for tokens in rows]
        row, decision, targets, heat = self._decisions(rows)
        routes = None if routing is None else collate_routes(runner.with_ballast(rows), padding_side, runner.device)
        inputs, continuations, column = self._layout(rows, row, decision, routes is not None, padding_side)
        known = alternatives_of(rollouts)
        others = None if known is None else known.to(runner.device)[row, decision]
        with nullcontext() if routing is None else routing.replayed(routes):
            scored = model(inputs, continuations, row, column, targets, self._chunks(len(targets)), heat, others)
        blank = torch.zeros(rollouts.mask.shape, device=runner.device)
        place, columns = (row, decision), list(scored)
        said = None if others is None else columns.pop()
        logp, entropy, square_sum, *value = (blank.index_put(place, values) for values in columns)
        found = Replay(logp, entropy, square_sum, value=value[0] if value else None)
        if said is not None:
            found.extras[ALTERNATIVES.name] = blank[..., None].repeat(1, 1, said.shape[1]).index_put(place, said)
        if self.segment is not None:
            places = torch.arange(rollouts.mask.shape[1], device=runner.device) // self.segment
            found.extras[SEGMENTS.name] = places.expand(rollouts.mask.shape)
        if routing is not None and routes is not None:
            differing = routing.differences().view(routes.shape[:2])[row, column]
            found.extras[ROUTING_DIFFERS.name] = blank.index_put(place, differing)
        return found

    def likeliest(self, rollouts: Rollouts, model: Scorer, count: int) -> Tensor:
        """See `VisionLanguagePolicy.likeliest`."""
        rows: list[RolloutTokens] = rollouts.inputs
        row, decision, targets, heat = self._decisions(rows)
        inputs, continuations, column = self._layout(rows, row, decision, False, "right")
        (ids,) = model(inputs, continuations, row, column, targets, None, heat, None, count)
        blank = torch.zeros((*rollouts.mask.shape, count), dtype=torch.int64, device=self.runner.device)
        return blank.index_put((row, decision), ids).cpu()

    def _decisions(self, rows: list[RolloutTokens]) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
        """[decision] each: its row, its place in the response, the token that was decided, and the temperature, which
        is one number where that is the same for all."""
        device = self.runner.device
        targets = torch.cat([tokens.response[tokens.chosen] for tokens in rows]).to(device)
        chosen = nn.utils.rnn.pad_sequence([tokens.chosen for tokens in rows], batch_first=True).to(device)
        row, decision = chosen.nonzero().unbind(1)
        heats = [tokens.temperature for tokens in rows]
        heat = heats[0] if len(set(heats)) == 1 else torch.tensor(heats, device=device)[row]
        return row, decision, targets, heat

    def _layout(
        self, rows: list[RolloutTokens], row: Tensor, decision: Tensor, routed: bool, padding_side: str
    ) -> Layout:
        """row, decision: [decision], where decisions stand. routed: rows read their prompts each for itself."""
        runner = self.runner
        prompts, which = distinct_prompts(rows)
        shared = len(prompts) < len(rows) and not any(tokens.read_images for tokens in rows)
        if not routed and shared and runner.shares_prompts(training=True):
            inputs = runner.collate(prompts, padding_side=padding_side)
            return Layout(inputs, self._continuations(rows, which), decision)
        inputs = runner.collate(runner.with_ballast(rows), padding_side=padding_side)
        length = inputs["input_ids"].shape[1]
        first = [length - len(t.response) if padding_side == "left" else len(t.prompt) for t in rows]
        return Layout(inputs, None, torch.tensor(first, device=runner.device)[row] + decision - 1)

    def _continuations(self, rows: list[RolloutTokens], which: list[int]) -> PrefixContinuations:
        device, pad = self.runner.device, self.runner.tokens.pad
        ids = [tokens.response[:-1] for tokens in rows]
        return PrefixContinuations(
            prompt=torch.tensor(which, device=device),
            ids=nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad).to(device),
            mask=nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(device),
        )

    def _chunks(self, targets: int) -> int | None:
        """Passes through the output layer, where ranks gather it for each of them."""
        lockstep, module = self.runner.lockstep, self.runner.module
        if lockstep is None or module.fused is not None:
            return None
        return lockstep.max(-(-targets // module.chunk))


def distinct_prompts(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """Each prompt once, without a response, and for each row its prompt's place. Rollouts of one `rollout` call hold
    the same tensor; equal prompts that were encoded apart stay apart."""
    place: dict[int, int] = {}
    which = [place.setdefault(id(tokens.prompt), len(place)) for tokens in rows]
    firsts = [rows[which.index(number)] for number in range(len(place))]
    return [tokens.asked() for tokens in firsts], which
