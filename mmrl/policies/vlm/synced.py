"""Sends the trained model's current weights to the vLLM engines that sample for it, and checks that they use them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from mmrl.engine import gathered_parameters
from mmrl.errors import UserError
from mmrl.generation.vllm.engine import Answering, Generator
from mmrl.generation.weight_sync.checksums import Checksum, SentWeights, checksum
from mmrl.policies.vlm.loading import part_of
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.prompts import save_processor
from mmrl.policies.vlm.proof import ChecksumComparison, Gap, GapLimit
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.rollouts import Prompt

PROBE_TOKENS = 16  # response tokens of a probe


class Synced:
    """Sends the trained weights to the engines of a rank, and checks that the engines compute with them.

    After the weights are sent, each engine returns checksums of its tensors, which must equal those of the sent
    tensors. Then it answers the probes (fixed prompts with fixed seeds), and the trained model computes the
    log-probabilities of these answers too: the two differ if the engine still uses caches of earlier weights.
    """

    def __init__(
        self,
        policy: VisionLanguagePolicy,
        engine: Generator,
        probes: Sequence[Prompt],
        *,
        gather: Callable[[Any], list[Any]],
        limit: float | None = None,
        adapters: bool = False,
        checksums: bool = True,
    ) -> None:
        """Makes `engine` generate for `policy`; it is asleep at first. All ranks must call each method together, except
        `close`.

        gather: returns the values of all ranks. limit: largest gap in log-probabilities, see `GapLimit`; None: derived
        from the first gap. adapters: whether the base weights are sent once and then only the LoRA. checksums: whether
        checksums are compared.
        """
        self.adapters, self.has_base = adapters, False
        self.policy, self.engine, self.probes, self.gather = policy, engine, list(probes), gather
        self.limit = GapLimit(limit, next(policy.module.parameters()).dtype)
        self.base, self.adapter = SentWeights(), SentWeights()
        self.comparison = ChecksumComparison() if checksums else None
        policy.engine = engine
        engine.sleep()

    @contextmanager
    def generation(self) -> Iterator[dict[str, float]]:
        """Wakes the engine for the duration of the context, with the current weights of the policy. Yields metrics."""
        self.engine.wake()
        yield self.sync_weights()
        self.engine.sleep()

    def sync_weights(self) -> dict[str, float]:
        """Sends the weights and checks the engines; returns metrics. Raises UserError, on all ranks, if an engine does
        not compute with the policy's weights afterwards."""
        started, model = time.perf_counter(), self.policy.module.model
        if not (self.adapters and self.has_base):
            sent = weights(model, merged=not self.adapters)
            tensors = sent if self.comparison is None else self.base.recorded(sent)
            self.engine.load(tensors)
            for _ in tensors:  # the tensors that no engine loaded: under ZeRO-3 all ranks must gather each of them
                pass
            self.has_base = True
        if self.adapters:
            if self.comparison is not None:
                self.adapter.sent = adapter_checksums(model)
            self.engine.adapt(partial(write_adapter, model))
        self.engine.serve()
        loaded = time.perf_counter()
        tensor_counts = {} if self.comparison is None else self.compare(self.comparison)
        compared = time.perf_counter()
        gap = self.check_gap()
        return {
            "generation/probe_gap": gap,
            "generation/probe_limit": self.limit.value,
            "time/synchronise": loaded - started,
            "time/checksums": compared - loaded,
            "time/probe": time.perf_counter() - compared,
            **tensor_counts,
            **self.engine.measures(),
        }

    def compare(self, comparison: ChecksumComparison) -> dict[str, float]:
        """Compares the checksums of sent tensors with checksums that the engines computed. Returns how many tensors
        were compared, as metrics. Raises UserError, on all ranks, if an engine does not have the tensors that were
        sent."""
        problem: str | None
        counts: dict[str, float] = {}
        try:
            problem, counts = comparison.compare(self.base.sent, self.adapter.sent, self.engine.arrived())
        except UserError as error:  # raised below, after all ranks have called `gather`
            problem = str(error)
        if message := next((problem for problem in self.gather(problem) if problem), None):
            raise UserError(message)
        return counts

    def check_gap(self) -> float:
        """Returns the largest mean gap in log-probabilities among the engines of all ranks. Raises UserError, on all
        ranks, if it is above the limit."""
        rank_gaps = self.gather([self.probe(engine) for engine in self.engine.replicas])
        engine_gaps = [gap for gaps in rank_gaps for gap in gaps]
        worst = max(engine_gaps, key=lambda gap: math.inf if math.isnan(gap.mean) else gap.mean)
        if problem := self.limit.problem(worst, compared=self.comparison is not None):
            raise UserError(problem)
        return worst.mean

    @torch.no_grad()
    def probe(self, engine: Answering) -> Gap:
        """Has the engine answer the probes. Returns the gap in log-probabilities between engine and model on these
        answers."""
        policy, max_tokens = self.policy, min(PROBE_TOKENS, self.policy.tokens.max_response_length)
        answers = policy.drafter.ask(engine, self.probes, 1, range(len(self.probes)), limit=max_tokens)
        assert answers.behaviour_logp is not None
        difference = (policy.replay(answers, policy.module).logp.cpu() - answers.behaviour_logp).abs()
        has_images = torch.tensor([len(prompt.images) + len(prompt.videos) > 0 for prompt in self.probes])
        with_images, without_images = (mean(difference[rows][answers.mask[rows]]) for rows in (has_images, ~has_images))
        return Gap(float(difference[answers.mask].mean()), with_images, without_images)

    def close(self) -> None:
        self.engine.close()


def mean(values: Tensor) -> float | None:
    """Returns the mean of values; None for an empty tensor."""
    return float(values.mean()) if len(values) else None


def describe(policy: VisionLanguagePolicy, folder: Path) -> None:
    """Saves the files besides weights from which vLLM starts: configuration, generation config and processor."""
    core = transformers_model(policy.module.model)
    core.config.save_pretrained(folder)
    core.generation_config.save_pretrained(folder)
    save_processor(policy.tokens.processor, folder)


def adapter_rank(model: nn.Module) -> int:
    """Returns the rank of a model's LoRA, for rollout.generator.lora=adapter.

    Raises UserError if the model has no LoRA, or trains one outside the language model, where vLLM applies none.
    """
    if not isinstance(model, peft.PeftModel):
        raise UserError(
            "rollout.generator.lora=adapter sends a LoRA to vLLM, but model.lora is not set; set it, or set "
            "rollout.generator.lora=merged"
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if other_parts := sorted({part_of(name) for name in trained} - {"language"}):
        raise UserError(
            "rollout.generator.lora=adapter works for a LoRA of the language model alone, but this one trains "
            f"{' and '.join(other_parts)} too; set model.freeze=[{', '.join(other_parts)}], or "
            "rollout.generator.lora=merged"
        )
    return max(config.r for config in model.peft_config.values() if isinstance(config, peft.LoraConfig))


def write_adapter(model: nn.Module, folder: Path | None) -> None:
    """Saves the LoRA of the language model in PEFT's format. folder: None on ranks that do not write. A collective call
    under ZeRO-3."""
    parts = adapter_parts(model)
    with gathered_parameters(list(parts.values())):
        if folder is not None:
            assert isinstance(model, peft.PeftModel)  # `adapter_rank` refuses others
            model.save_pretrained(str(folder), state_dict=parts, save_embedding_layers=False)


def adapter_checksums(model: nn.Module) -> dict[str, Checksum]:
    """Returns checksums of the LoRA of the language model, by the names in PEFT's files. As in vLLM, the factor B is
    scaled by alpha / rank. A collective call under ZeRO-3."""
    parts, checksums = adapter_parts(model), {}
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    with gathered_parameters(list(parts.values())):
        for name, value in parts.items():
            path, factor, adapter, _ = name.rsplit(".", 3)  # such as LAYER.lora_B.default.weight
            scale = layers[path].scaling[adapter] if factor == "lora_B" else 1.0
            checksums[f"{path}.{factor}.weight"] = checksum(value.detach() * scale)
    return checksums


def adapter_parts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the LoRA parameters of the language model by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and part_of(name) == "language"
    }


def weights(model: nn.Module, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters of the transformers model, with the names and in the layout of its published checkpoint. A
    tied parameter is yielded under each of its names.

    merged: whether the LoRA is merged into its layers; False: the LoRA is left out. Under ZeRO-3 this is a collective
    call, which gathers one module at a time.
    """
    core = transformers_model(model)
    lora_layers = {path for path, module in core.named_modules() if isinstance(module, LoraLayer)}
    for path, module in core.named_modules():
        if any(path.startswith(f"{layer}.") for layer in lora_layers):
            continue  # a part of a LoRA layer; all weights of that layer are yielded together
        parameters = list(module.parameters(recurse=path in lora_layers))
        if not parameters:
            continue
        with gathered_parameters(parameters):
            base_layer = module.get_base_layer() if isinstance(module, LoraLayer) else module
            tensors = {name: value.detach().clone() for name, value in base_layer.named_parameters(recurse=False)}
            for adapter in module.active_adapters if merged and isinstance(module, LoraLayer) else ():
                tensors["weight"] += module.get_delta_weight(adapter).detach()
        state = {f"{path}.{name}" if path else name: value for name, value in tensors.items()}
        yield from revert_weight_conversion(core, state).items()
