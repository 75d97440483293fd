"""The job that a worker does, which samples by itself."""

from mmrl.config import Config
from mmrl.generation.settings import RolloutWorkers


def without_workers(config: Config) -> Config:
    """The same job where the process itself samples, as in a worker, and with weights that are finished."""
    if not isinstance(config.generator, RolloutWorkers):
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": None})})
