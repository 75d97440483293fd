"""Errors of implicit policies by hand."""

import pytest
import torch

from mmrl.core.contrast import implicit_errors
from mmrl.rollouts import MatchingTargets


def matching(prediction, *, old, noisy, data, sigma, signal, noise_space):
    """Of one rollout with one decision about two numbers."""
    numbers = [torch.tensor([[values]]) for values in (noisy, prediction, old, data)]
    return MatchingTargets(*numbers, torch.tensor([[sigma]]), torch.tensor([[signal]]), noise_space)


def test_of_a_velocity_by_hand():
    """x = (1, 2), s = 0.5, old = (1, 0), v = (2, 0), b = 0.5: the implicit predictions are (1.5, 0) and (0.5, 0), which
    lead to (0.25, 2) and (0.75, 2). From the data (0, 1) they are (0.25, 1) and (0.75, 1) away: mean squares 0.53125
    and 0.78125, over mean sizes 0.625 and 0.875."""
    one = matching([2.0, 0], old=[1.0, 0], noisy=[1.0, 2], data=[0.0, 1], sigma=0.5, signal=0.5, noise_space=False)
    positive, negative = implicit_errors(one, 0.5)
    assert positive.shape == negative.shape == (1, 1)
    assert positive.item() == pytest.approx(0.53125 / 0.625) and negative.item() == pytest.approx(0.78125 / 0.875)


def test_of_a_noise_by_hand():
    """x = 1, s = 0.6, signal 0.8, old = 0, e = 1, b = 0.5: predictions 0.5 and -0.5 lead to 0.7 / 0.8 and 1.3 / 0.8;
    from the data 0.5 that is 0.375 and 1.125, whose square over their size is their size."""
    one = matching([1.0, 1], old=[0.0, 0], noisy=[1.0, 1], data=[0.5, 0.5], sigma=0.6, signal=0.8, noise_space=True)
    assert [error.item() for error in implicit_errors(one, 0.5)] == pytest.approx([0.375, 1.125])


def test_the_size_is_not_differentiated():
    """The error e is e^2 / |e|, of slope 2 e / |e| times d e / d v = -s b (1 at a distance of one number in two)."""
    one = matching([2.0, 0], old=[1.0, 0], noisy=[1.0, 2], data=[0.0, 1], sigma=0.5, signal=0.5, noise_space=False)
    one.prediction.requires_grad_()
    positive, negative = implicit_errors(one, 0.5)
    (towards,) = torch.autograd.grad(positive.sum(), one.prediction, retain_graph=True)
    (away,) = torch.autograd.grad(negative.sum(), one.prediction)
    assert towards.flatten().tolist() == pytest.approx([0.25 * -0.25 / 0.625, 1 * -0.25 / 0.625])
    assert away.flatten().tolist() == pytest.approx([0.75 * 0.25 / 0.875, 1 * 0.25 / 0.875])
