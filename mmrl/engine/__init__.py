"""DeepSpeed behind a few verbs: backward, step, sum and gather over ranks, save and load."""

from mmrl.engine.deepspeed import Engine, Ranks, gathered, learning_rate, memory_estimate
from mmrl.engine.shadow import Shadow, ramp, warmed_up

__all__ = ["Engine", "Ranks", "Shadow", "gathered", "learning_rate", "memory_estimate", "ramp", "warmed_up"]
