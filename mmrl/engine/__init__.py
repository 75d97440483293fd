"""DeepSpeed behind a few verbs: backward, step, sum and gather over ranks, save and load."""

from mmrl.engine.deepspeed import Engine, Ranks, learning_rate, memory_estimate

__all__ = ["Engine", "Ranks", "learning_rate", "memory_estimate"]
