"""Builds the vLLM engines of a job from its settings."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.engine import Ranks
from mmrl.generation.settings import VLLMGenerator, VLLMServer
from mmrl.generation.vllm.engine import VLLM, EngineOptions, Generator, check_installed
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.policies.vlm.synced import Synced, adapter_rank, describe
from mmrl.protocols.parts import Source

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig


def synced(
    config: JobConfig, settings: VLLMGenerator, policy: VisionLanguagePolicy, source: Source, ranks: Ranks
) -> Synced:
    """Builds the vLLM engines of a job. The result sends them the policy's weights at each step, and checks that they
    compute with these.

    source: prompts; the first `settings.probes` of them are the probes of `Synced`. Raises UserError if an engine
    cannot start.
    """
    options = engine_options(config, settings, policy)
    if settings.routing_replay:
        policy.runner.replay_routing()
    if isinstance(settings, VLLMServer):
        from mmrl.generation.vllm.servers import Servers

        folder = Path(
            settings.exchange or Path(config.run_dir) / "engines"
        ).absolute()  # an engine may have another working directory
        engine: Generator = Servers(
            folder, options, describe=partial(describe, policy), gather=ranks.gather, rank=ranks.rank
        )
    else:
        check_installed()
        with tempfile.TemporaryDirectory(prefix="mmrl-engine-") as name:
            describe(policy, Path(name))
            engine = VLLM(Path(name), options)
    probes = [source[i] for i in range(min(settings.probes, len(source)))]
    return Synced(
        policy,
        engine,
        probes,
        gather=ranks.gather,
        limit=settings.probe_limit,
        adapters=settings.lora == "adapter",
        checksums=settings.checksums,
    )


def engine_options(config: JobConfig, settings: VLLMGenerator, policy: VisionLanguagePolicy) -> EngineOptions:
    """Returns the options with which vLLM starts: dtype, context length in tokens, images per conversation, LoRA
    rank."""
    positions = transformers_model(policy.module.model).config.get_text_config().max_position_embeddings
    conversations = policy.drafter.conversations
    return EngineOptions(
        observed=0 if conversations is None else conversations.settings.limits.max_images,
        context=min(policy.tokens.max_prompt_length + policy.max_decisions, positions),
        settings=settings,
        dtype=config.model.dtype,
        seed=config.seed,
        lora_rank=adapter_rank(policy.module.model) if settings.lora == "adapter" else 0,
    )
