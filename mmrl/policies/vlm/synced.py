"""Engines that generate for the model that is trained: they get its current weights, which are then verified."""

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
from mmrl.policies.vlm.proof import Arrivals, Gap, Limit
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.rollouts import Prompt

PROBE_TOKENS = 16


class Synced:
    """Generates by engines whose weights are verified to be the trained ones.

    After each synchronisation every engine returns the checksums of its tensors, which have to be those of the tensors
    that were sent. Then it answers `probes`, the same prompts with the same seeds every time, and the trained model
    computes the likelihoods of these answers: stale caches of earlier weights show there.
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
        """gather: the values of all ranks; every method but `close` is a collective. limit: of the probe, see `Limit`.
        adapters: after the first time engines get the LoRA alone, see `adapter_rank`. checksums: compare those too."""
        self.adapters, self.has_base = adapters, False
        self.policy, self.engine, self.probes, self.gather = policy, engine, list(probes), gather
        self.limit = Limit(limit, next(policy.module.parameters()).dtype)
        self.base, self.adapter = SentWeights(), SentWeights()
        self.arrivals = Arrivals() if checksums else None
        policy.engine = engine
        engine.sleep()

    @contextmanager
    def generation(self) -> Iterator[dict[str, float]]:
        """Wakes the engine inside the context, with the weights that the policy has now. Yields metrics."""
        self.engine.wake()
        yield self.sync_weights()
        self.engine.sleep()

    def sync_weights(self) -> dict[str, float]:
        """Sends the weights and verifies them; returns metrics. Raises UserError, on all ranks, if an engine does not
        compute with the policy's weights afterwards."""
        started, model = time.perf_counter(), self.policy.module.model
        if not (self.adapters and self.has_base):
            sent = weights(model, merged=not self.adapters)
            tensors = sent if self.arrivals is None else self.base.recorded(sent)
            self.engine.load(tensors)
            for _ in tensors:  # also those that no engine took: under ZeRO-3 each is gathered from all ranks
                pass
            self.has_base = True
        if self.adapters:
            if self.arrivals is not None:
                self.adapter.sent = adapter_checksums(model)
            self.engine.adapt(partial(write_adapter, model))
        self.engine.serve()
        loaded = time.perf_counter()
        counted = {} if self.arrivals is None else self.compare(self.arrivals)
        compared = time.perf_counter()
        gap = self.judge()
        return {
            "generation/probe_gap": gap,
            "generation/probe_limit": self.limit.value,
            "time/synchronise": loaded - started,
            "time/checksums": compared - loaded,
            "time/probe": time.perf_counter() - compared,
            **counted,
            **self.engine.measures(),
        }

    def compare(self, arrivals: Arrivals) -> dict[str, float]:
        """Returns counts of tensors. Raises UserError, on all ranks, if an engine has not the tensors that were
        sent."""
        problem: str | None
        counts: dict[str, float] = {}
        try:
            problem, counts = arrivals.judge(self.base.sent, self.adapter.sent, self.engine.arrived())
        except UserError as error:  # the other ranks wait
            problem = str(error)
        if message := next((problem for problem in self.gather(problem) if problem), None):
            raise UserError(message)
        return counts

    def judge(self) -> float:
        """Returns the gap of the worst engine of all ranks. Raises UserError, on all of them, if it is above the
        limit."""
        replica_gaps = [
            gap for gaps in self.gather([self.probe(engine) for engine in self.engine.replicas]) for gap in gaps
        ]
        worst = max(replica_gaps, key=lambda gap: math.inf if math.isnan(gap.mean) else gap.mean)
        if problem := self.limit.problem(worst, compared=self.arrivals is not None):
            raise UserError(problem)
        return worst.mean

    @torch.no_grad()
    def probe(self, engine: Answering) -> Gap:
        """Returns the gap between engine and model on the engine's answers to the probes."""
        policy, longest = self.policy, min(PROBE_TOKENS, self.policy.tokens.max_response_length)
        answers = policy.drafter.ask(engine, self.probes, 1, range(len(self.probes)), limit=longest)
        assert answers.behaviour_logp is not None
        difference = (policy.replay(answers, policy.module).logp.cpu() - answers.behaviour_logp).abs()
        images = torch.tensor([len(prompt.images) + len(prompt.videos) > 0 for prompt in self.probes])
        parts = [mean(difference[rows][answers.mask[rows]]) for rows in (images, ~images)]
        return Gap(float(difference[answers.mask].mean()), *parts)

    def close(self) -> None:
        self.engine.close()


def mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def describe(policy: VisionLanguagePolicy, folder: Path) -> None:
    """Saves all files that an engine reads of a policy except its weights."""
    core = transformers_model(policy.module.model)
    core.config.save_pretrained(folder)
    core.generation_config.save_pretrained(folder)
    save_processor(policy.tokens.processor, folder)


def adapter_rank(model: nn.Module) -> int:
    """Returns the rank of a model's LoRA that can be sent by itself.

    Raises UserError if it has none, or one of more than the language model: vLLM applies a LoRA to nothing else.
    """
    if not isinstance(model, peft.PeftModel):
        raise UserError(
            "rollout.generator.lora=adapter hands over a LoRA, and model.lora is not set; set it, or use merged"
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if other := sorted({part_of(name) for name in trained} - {"language"}):
        raise UserError(
            f"rollout.generator.lora=adapter is for the language model, and the LoRA trains {' and '.join(other)} too; "
            f"set model.freeze=[{', '.join(other)}], or rollout.generator.lora=merged"
        )
    return max(config.r for config in model.peft_config.values() if isinstance(config, peft.LoraConfig))


def write_adapter(model: nn.Module, folder: Path | None) -> None:
    """Saves the language model's LoRA in peft's format, where there is a folder. Under ZeRO-3 a collective."""
    parts = adapter_parts(model)
    with gathered_parameters(list(parts.values())):
        if folder is not None:
            assert isinstance(model, peft.PeftModel)  # `adapter_rank` refuses others
            model.save_pretrained(str(folder), state_dict=parts, save_embedding_layers=False)


def adapter_checksums(model: nn.Module) -> dict[str, Checksum]:
    """Returns checksums of the language model's LoRA by the names of peft's files, as engines use it: the second factor
    is scaled. Under ZeRO-3 a collective."""
    parts, checksums = adapter_parts(model), {}
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    with gathered_parameters(list(parts.values())):
        for name, value in parts.items():
            path, factor, adapter, _ = name.rsplit(".", 3)
            size = layers[path].scaling[adapter] if factor == "lora_B" else 1.0
            checksums[f"{path}.{factor}.weight"] = checksum(value.detach() * size)
    return checksums


def adapter_parts(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and part_of(name) == "language"
    }


def weights(model: nn.Module, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the transformers model by the name and in the layout of its published checkpoint, LoRA
    merged or left out, a tied one under each of its names.

    Under ZeRO-3 one module at a time is gathered, so the peak is one module's weights; a collective then.
    """
    core = transformers_model(model)
    adapted = {path for path, module in core.named_modules() if isinstance(module, LoraLayer)}
    for path, module in core.named_modules():
        if any(path.startswith(f"{above}.") for above in adapted):
            continue  # parts of an adapted layer
        parameters = list(module.parameters(recurse=path in adapted))
        if not parameters:
            continue
        with gathered_parameters(parameters):
            layer = module.get_base_layer() if isinstance(module, LoraLayer) else module
            tensors = {name: value.detach().clone() for name, value in layer.named_parameters(recurse=False)}
            for adapter in module.active_adapters if merged and isinstance(module, LoraLayer) else ():
                tensors["weight"] += module.get_delta_weight(adapter).detach()
        named = {f"{path}.{name}" if path else name: value for name, value in tensors.items()}
        yield from revert_weight_conversion(core, named).items()
