"""The configuration of a worker, which samples by itself."""

from mmrl.config import Config
from mmrl.generation.settings import RolloutWorkers


def without_workers(config: Config) -> Config:
    """Returns the configuration without workers, for a process that samples by itself."""
    if not isinstance(config.generator, RolloutWorkers):
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": None})})
