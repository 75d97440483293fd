"""Chooses the stochastic, trained steps of a chain: once per group and training step, never per rollout."""

from __future__ import annotations

from torch import Tensor

from mmrl.samplers.settings import Window


def window_steps(window: Window, std: Tensor, iteration: int, seed: int) -> list[int]:
    """Returns the window's steps, rising, at training step `iteration` for the group whose seed is `seed`; std [steps]:
    of the chosen transition. Raises ValueError where `usable_steps` does, and where the window does not fit at its
    start."""
    usable = usable_steps(window, std)
    width = window.width(len(usable))
    start = window.start(len(usable), len(std), iteration, seed)
    if not 0 <= start <= len(usable) - width:
        raise ValueError(
            f"window.type={window.type} begins at usable step {start}; {width} of {len(usable)} steps fit only from 0 "
            f"to {len(usable) - width}"
        )
    return list(usable[start : start + width])


def usable_steps(window: Window, std: Tensor) -> range:
    """Returns the steps that a window may hold, for the stds [steps] of the chosen transition.

    By default these are all but the last one, whose noise would stay in the sample. Raises ValueError where `first` and
    `last` ask for a step without noise, or leave fewer steps than the window is wide.
    """
    random = [int(i) for i in (std > 0).nonzero()]
    last = min(random[-1] + 1, len(std) - 1) if window.last is None and random else window.last
    if last is None or not random:
        raise ValueError("no step of this chain has noise: raise transition.noise or choose another transition")
    if last > len(std):
        raise ValueError(f"window.last={last}, but the chain has only {len(std)} steps")
    deterministic = [i for i in range(window.first, last) if i not in random]
    if deterministic:
        raise ValueError(
            f"the window reaches step {deterministic[0]}, which has std 0; set window.first and window.last inside "
            f"{random[0]} to {random[-1] + 1}"
        )
    need = window.width(last - window.first)
    if last - window.first < need:
        raise ValueError(f"a window of {need} steps does not fit into steps {window.first} to {last}")
    return range(window.first, last)
