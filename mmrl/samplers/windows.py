"""Selects the stochastic, trained steps of a chain: once per group and training step, so that all rollouts of a group
share them."""

from __future__ import annotations

from torch import Tensor

from mmrl.samplers.settings import Window


def window_steps(window: Window, std: Tensor, iteration: int, seed: int) -> list[int]:
    """Returns the steps of a window, in rising order.

    std: [steps], standard deviations of the transition. iteration: the training step. seed: the group's first
    seed. Raises ValueError if the window reaches beyond the usable steps, and as `usable_steps` does.
    """
    usable = usable_steps(window, std)
    width = window.width(len(usable))
    start = window.start(len(usable), len(std), iteration, seed)
    if not 0 <= start <= len(usable) - width:
        raise ValueError(
            f"window: type {window.type} would begin at step {start} of the {len(usable)} steps "
            f"that it may contain, but {width} steps fit only from 0 to {len(usable) - width}; begin earlier or select "
            "fewer steps"
        )
    return list(usable[start : start + width])


def usable_steps(window: Window, std: Tensor) -> range:
    """Returns the steps that a window may contain. std: [steps], standard deviations of the transition.

    By default these are all steps with noise except the last one, whose noise would stay in the sample. Raises
    ValueError if `first` and `last` include a step without noise, or leave fewer steps than the window has.
    """
    stochastic = [int(i) for i in (std > 0).nonzero()]
    last = min(stochastic[-1] + 1, len(std) - 1) if window.last is None and stochastic else window.last
    if last is None or not stochastic:
        raise ValueError("no step of this chain has noise: raise transition.noise or choose another transition")
    if last > len(std):
        raise ValueError(f"window.last={last}, but the chain has only {len(std)} steps; lower it")
    deterministic = [i for i in range(window.first, last) if i not in stochastic]
    if deterministic:
        raise ValueError(
            f"the window reaches step {deterministic[0]}, which has std 0 (no noise); set window.first and window.last "
            f"inside {stochastic[0]} to {stochastic[-1] + 1}"
        )
    width = window.width(last - window.first)
    if last - window.first < width:
        raise ValueError(
            f"a window of {width} steps does not fit into steps {window.first} to {last}; "
            "lower window.size, or widen window.first and window.last"
        )
    return range(window.first, last)
