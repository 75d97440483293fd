"""Coefficients that follow a measurement."""

from __future__ import annotations


class AdaptiveKL:
    """KL coefficient that steers the measured KL to a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

        error = clip(kl / target - 1, -0.2, 0.2)        coefficient *= 1 + error * rollouts / horizon

    `target` is in nats, `horizon` in rollouts. Raises ValueError if a constant is not positive.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: float) -> None:
        if min(coefficient, target, horizon) <= 0:
            raise ValueError(f"coefficient {coefficient}, target {target} and horizon {horizon} must be positive")
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rollouts: int) -> float:
        """The coefficient after a step over that many rollouts with this mean KL."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * rollouts / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Target and horizon belong to the configuration; only the coefficient is state."""
        self.coefficient = state["coefficient"]
