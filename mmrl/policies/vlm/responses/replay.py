"""Log-probabilities of responses under a model: the policy, the reference, or a teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmrl.policies.models import Scorer
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.policies.vlm.responses.features import ImageInputs
from mmrl.policies.vlm.responses.runner import ModelRunner, distinct_prompts
from mmrl.policies.vlm.routing import collate_routes
from mmrl.policies.vlm.scorer import PrefixContinuations
from mmrl.protocols.choices import WholeVocabulary
from mmrl.rollouts import ALTERNATIVES, ROUTING_DIFFERS, SEGMENTS, Replay, Rollouts, get_alternatives


class Layout(NamedTuple):
    """Model inputs of responses, and the position in its row at which each decision (sampled token) is predicted."""

    inputs: dict[str, Tensor]
    continuations: PrefixContinuations | None
    column: Tensor  # [decision] int64; with continuations, 0 is the last token of the prompt
    images: list[ImageInputs] | None  # images whose kept features replace pixels; None: the inputs hold pixels


class ResponseReplay:
    """Computes log-probabilities of the tokens of responses."""

    def __init__(self, runner: ModelRunner, segment: int | None) -> None:
        """segment: tokens of a segment, for ratios by segment; None: no segments."""
        self.runner, self.segment = runner, segment

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool, padding_side: str = "right") -> Replay:
        """Returns the log-probabilities of responses and further columns of a replay; see
        `VisionLanguagePolicy.replay`."""
        runner, routing = self.runner, self.runner.routing
        rows: list[RolloutTokens] = rollouts.inputs
        if reference:
            rows = [replace(tokens, experts=None) for tokens in rows]
        row, decision, targets, temperature = self._decisions(rows)
        routes = None if routing is None else collate_routes(runner.with_dummy(rows), padding_side, runner.device)
        inputs, continuations, column, images = self._layout(rows, row, decision, routes is not None, padding_side)
        packs = continuations is None and routing is None and runner.should_pack(lengths_of(rows))
        alternatives = self._others(rollouts, row, decision)
        with nullcontext() if routing is None else routing.replayed(routes):
            chunks = self._chunks(len(targets))
            scored = model(
                inputs,
                continuations,
                row,
                column,
                targets,
                chunks,
                temperature,
                alternatives,
                packs=packs,
                images=images,
            )
        runner.flops.replayed(rows, None if continuations is None else distinct_prompts(rows)[0])
        blank = torch.zeros(rollouts.mask.shape, device=runner.device)
        index, columns = (row, decision), list(scored)
        other_logp = None if alternatives is None else columns.pop()
        logp, entropy, square_sum, *value = (blank.index_put(index, values) for values in columns)
        replay = Replay(logp, entropy, square_sum, value=value[0] if value else None)
        if other_logp is not None:
            replay.extras[ALTERNATIVES.name] = (
                blank[..., None].repeat(1, 1, other_logp.shape[1]).index_put(index, other_logp)
            )
        if self.segment is not None:
            replay.extras[SEGMENTS.name] = self.segments(rollouts)
        if routing is not None and routes is not None:
            differing = routing.differences().view(routes.shape[:2])[row, column]
            replay.extras[ROUTING_DIFFERS.name] = blank.index_put(index, differing)
        return replay

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the index of the segment of each token, [rollout, decision] int64. Raises TypeError if
        rollout.segment is null."""
        if self.segment is None:
            raise TypeError("rollout.segment is null, so responses have no segments; set it to their length")
        segments = torch.arange(rollouts.mask.shape[1], device=self.runner.device) // self.segment
        return segments.expand(rollouts.mask.shape)

    def _others(self, rollouts: Rollouts, row: Tensor, decision: Tensor) -> Tensor | None:
        """Returns the ids of alternative tokens whose logp a method of the algorithm needs too: [decision, k], or [k]
        if they are the same for all decisions, such as the full vocabulary; None if no method needs any."""
        listed, alternatives = rollouts.extras.get(ALTERNATIVES.name), get_alternatives(rollouts)
        if isinstance(listed, WholeVocabulary):
            return listed.ids.to(self.runner.device)
        return None if alternatives is None else alternatives.to(self.runner.device)[row, decision]

    def top_k(self, rollouts: Rollouts, model: Scorer, count: int) -> Tensor:
        """Returns the likeliest token ids of each decision; see `VisionLanguagePolicy.top_k`."""
        rows: list[RolloutTokens] = rollouts.inputs
        row, decision, targets, temperature = self._decisions(rows)
        inputs, continuations, column, images = self._layout(rows, row, decision, False, "right")
        (ids,) = model(inputs, continuations, row, column, targets, None, temperature, None, count, images=images)
        blank = torch.zeros((*rollouts.mask.shape, count), dtype=torch.int64, device=self.runner.device)
        return blank.index_put((row, decision), ids).cpu()

    def _decisions(self, rows: list[RolloutTokens]) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
        """Returns four values per decision, [decision] each: its row, its index in the response, its token id, and its
        temperature, which is a single number if it is the same for all."""
        device = self.runner.device
        targets = torch.cat([tokens.response[tokens.decision_mask] for tokens in rows]).to(device)
        mask = nn.utils.rnn.pad_sequence([tokens.decision_mask for tokens in rows], batch_first=True).to(device)
        row, decision = mask.nonzero().unbind(1)
        temperatures = [tokens.temperature for tokens in rows]
        temperature = temperatures[0] if len(set(temperatures)) == 1 else torch.tensor(temperatures, device=device)[row]
        return row, decision, targets, temperature

    def _layout(
        self, rows: list[RolloutTokens], row: Tensor, decision: Tensor, routed: bool, padding_side: str
    ) -> Layout:
        """Returns the model inputs, with each distinct prompt once where the model can share it between its responses.

        row, decision: row and index in the response of each decision, [decision]. routed: whether experts are replayed;
        prompts are then not shared.
        """
        runner = self.runner
        prompts, prompt_index = distinct_prompts(rows)
        shared = len(prompts) < len(rows) and not any(tokens.observed_images for tokens in rows)
        if not routed and shared and runner.shares_prompts(training=True):
            images = runner.reusable_images(prompts)
            inputs = runner.collate(prompts, padding_side=padding_side, pixels=images is None)
            # position 0 is the last token of the prompt, so decision i is predicted at position i
            return Layout(inputs, self._continuations(rows, prompt_index), decision, images)
        images = runner.reusable_images(rows)
        inputs = runner.collate(runner.with_dummy(rows), padding_side=padding_side, pixels=images is None)
        length = inputs["input_ids"].shape[1]
        response_start = [length - len(t.response) if padding_side == "left" else len(t.prompt) for t in rows]
        # A token is predicted at the position before it
        column = torch.tensor(response_start, device=runner.device)[row] + decision - 1
        return Layout(inputs, None, column, images)

    def _continuations(self, rows: list[RolloutTokens], prompt_index: list[int]) -> PrefixContinuations:
        """Returns responses as continuations of shared prompts. prompt_index: [row], the index of each row's prompt."""
        device, pad = self.runner.device, self.runner.tokens.pad
        ids = [tokens.response[:-1] for tokens in rows]
        return PrefixContinuations(
            prompt=torch.tensor(prompt_index, device=device),
            ids=nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad).to(device),
            mask=nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(device),
        )

    def _chunks(self, num_targets: int) -> int | None:
        """Returns the number of passes through the output layer, the maximum of all ranks, if ZeRO-3 gathers it for
        each pass; else None."""
        lockstep, module = self.runner.lockstep, self.runner.module
        if lockstep is None or module.fused is not None:
            return None
        return lockstep.max(math.ceil(num_targets / module.chunk))


def lengths_of(rows: Sequence[RolloutTokens]) -> list[int]:
    """Returns the number of tokens of prompt and response of each row."""
    return [len(row.prompt) + len(row.response) for row in rows]
