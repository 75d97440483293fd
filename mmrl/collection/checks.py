"""Checks that a step's batch can be divided over ranks, minibatches and micro-batches."""

from __future__ import annotations

from mmrl.errors import UserError
from mmrl.generation.settings import RolloutWorkers
from mmrl.protocols.job import JobConfig


def prompts_at_once(config: JobConfig, world: int) -> int:
    """Returns the number of prompts that a rank samples at once."""
    share, most = config.rollout.prompts // world, config.rollout.generated_at_once
    return share if most is None else min(share, max(1, most // config.group_size))


def check_batch(config: JobConfig, world: int) -> None:
    """Raises UserError where the batch can not be divided."""
    rollout, minibatches = config.rollout, config.algorithm.minibatches
    shared = {"rollout.prompts": rollout.prompts}
    if config.generator is not None and config.generator.unfinished is not None:
        shared["rollout.generator.partial.oversample"] = config.generator.unfinished.oversample
    shared |= {f"rollout.extras.{i}": extra.rollouts for i, extra in enumerate(rollout.extra_sources)}
    for key, count in shared.items():
        if count % world:
            raise UserError(f"{key}={count} can not be shared by {world} ranks; make it a multiple")
    workers = config.generator
    if isinstance(workers, RolloutWorkers) and workers.count > (most := prompts_at_once(config, world)):
        raise UserError(
            f"rollout.workers.count={workers.count} is more than the {most} prompts that a rank samples at once "
            "(rollout.prompts / ranks, rollout.micro_batch / group_size); lower it"
        )
    if rollout.paired and config.generator is not None and config.generator.unfinished is not None:
        raise UserError(
            "rollout.generator.partial can not sample the pairs of prompts of rollout.twins; set it to false"
        )
    local = config.rollouts_per_step // world
    if local % minibatches:
        raise UserError(
            f"{local} rollouts a rank (rollout.prompts x group_size / ranks) can not be cut into "
            f"algorithm.minibatches={minibatches} equal parts"
        )
    if config.needs.whole_groups and config.engine.token_limit is not None:
        raise UserError(
            f"engine.micro_tokens cuts groups, which algorithm.type={config.algorithm.type} needs whole; set it to null"
        )
    largest = config.group_size + sum(extra.in_group for extra in rollout.extra_sources)
    if config.needs.whole_groups and largest > config.engine.micro_batch:
        raise UserError(
            f"engine.micro_batch={config.engine.micro_batch} cuts groups of {largest}, which "
            f"algorithm.type={config.algorithm.type} needs whole; raise it"
        )
