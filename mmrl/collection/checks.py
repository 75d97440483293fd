"""Checks that a step's batch can be divided over ranks, minibatches and micro-batches."""

from __future__ import annotations

from mmrl.collection.extra_sources import ExtraSource
from mmrl.errors import UserError
from mmrl.generation.settings import RolloutWorkers
from mmrl.protocols.job import JobConfig
from mmrl.settings import kind_of


def prompts_at_once(config: JobConfig, world: int) -> int:
    """Returns the number of prompts whose rollouts a rank samples at once. world: number of ranks."""
    local_prompts, max_rollouts = config.rollout.prompts // world, config.rollout.generated_at_once
    return local_prompts if max_rollouts is None else min(local_prompts, max(1, max_rollouts // config.group_size))


def check_sources(config: JobConfig) -> None:
    """Raises ValueError if a part of the algorithm learns from a kind of rollouts that no source of the job makes."""
    algorithm, sources = config.algorithm, config.rollout.extra_sources
    learns_from = {f"algorithm.type={algorithm.type}": algorithm.learns_from}
    learns_from |= {f"algorithm.terms.{i} ({term.type})": term.learns_from for i, term in enumerate(algorithm.terms)}
    offered = {source.makes for source in sources}
    for key, kinds in learns_from.items():
        # None: a source that does not declare its kind may make any
        if kinds and None not in offered and not kinds & offered:
            fitting = [name for name in ExtraSource.kinds if kind_of(ExtraSource, name).makes in kinds]
            raise ValueError(
                f"{key} learns from rollouts of rollout.extras, which has no source of such rollouts; add one of "
                f"{', '.join(fitting)}"
            )


def check_batch(config: JobConfig, world: int) -> None:
    """Raises UserError where the batch cannot be divided over `world` ranks, minibatches and micro-batches."""
    rollout, minibatches = config.rollout, config.algorithm.minibatches
    shared = {"rollout.prompts": rollout.prompts}
    if config.generator is not None and config.generator.unfinished is not None:
        shared["rollout.generator.partial.oversample"] = config.generator.unfinished.oversample
    for key, count in shared.items():
        if count % world:
            raise UserError(f"{key}={count} cannot be divided over {world} ranks; set a multiple of {world}")
    for i, extra in enumerate(rollout.extra_sources):
        if extra.divided % world:
            unit = "rollouts" if extra.divided == extra.rollouts else "observations"
            raise UserError(
                f"rollout.extras.{i} ({extra.type}) has {extra.divided} {unit} per step, which cannot be divided over "
                f"{world} ranks; set a multiple of {world}"
            )
    workers, at_once = config.generator, prompts_at_once(config, world)
    if isinstance(workers, RolloutWorkers) and workers.count > at_once:
        raise UserError(
            f"rollout.workers.count={workers.count} is more than the {at_once} prompts that a rank samples at once "
            "(the smaller of rollout.prompts / ranks and rollout.micro_batch / rollout.group_size); lower "
            "rollout.workers.count"
        )
    if rollout.paired and config.generator is not None and config.generator.unfinished is not None:
        raise UserError(
            "rollout.generator.partial does not work with rollout.twins=true, which samples pairs of prompts; set "
            "rollout.twins=false, or rollout.generator.partial=null"
        )
    local, counted = config.rollouts_per_step // world, "rollout.prompts x rollout.group_size / ranks"
    if config.algorithm.learns_from:
        local = sum(extra.rollouts for extra in rollout.extra_sources) // world
        counted = "the sum over rollout.extras / ranks"
    if local % minibatches:
        raise UserError(
            f"{local} rollouts per rank ({counted}) cannot be divided into "
            f"algorithm.minibatches={minibatches} equal parts; change one of them"
        )
    if config.needs.whole_groups and config.engine.token_limit is not None:
        raise UserError(
            f"engine.micro_tokens splits groups over micro-batches, but algorithm.type={config.algorithm.type} needs "
            "whole groups; set engine.micro_tokens=null"
        )
    largest = config.group_size + sum(extra.in_group for extra in rollout.extra_sources)
    if config.needs.whole_groups and largest > config.engine.micro_batch:
        raise UserError(
            f"engine.micro_batch={config.engine.micro_batch} splits groups of {largest} rollouts, but "
            f"algorithm.type={config.algorithm.type} needs whole groups; set {largest} or more"
        )
