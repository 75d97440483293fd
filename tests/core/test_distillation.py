"""Divergences of a student from a teacher, against sums over a whole distribution and torch's own gradient."""

import pytest
import torch

from mmrl.core.regularizers import sampled_kl_loss, top_k_kl


def distributions(count=6):
    random = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(count, generator=random, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher


def exact(logits, teacher, direction):
    p, q = logits.softmax(0), teacher.softmax(0)
    return (p * (p / q).log()).sum() if direction == "reverse" else (q * (q / p).log()).sum()


def slope(value, logits):
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_whole_list_gives_the_divergence_and_its_gradient(direction):
    logits, teacher = distributions()
    ours = top_k_kl(logits.log_softmax(0), teacher.log_softmax(0), direction=direction, complete=True)
    torch.testing.assert_close(ours, exact(logits, teacher, direction))
    torch.testing.assert_close(slope(ours, logits), slope(exact(logits, teacher, direction), logits))


def test_alternatives_that_are_not_listed_are_one_more():
    """Listed .5 and .3 of the student, .2 and .2 of the teacher; .2 and .6 are left."""
    student, teacher = torch.tensor([0.5, 0.3]).log(), torch.tensor([0.2, 0.2]).log()
    expected = 0.5 * torch.tensor(2.5).log() + 0.3 * torch.tensor(1.5).log() + 0.2 * torch.tensor(1 / 3).log()
    torch.testing.assert_close(top_k_kl(student, teacher, direction="reverse"), expected)
    forward = 0.2 * torch.tensor(0.4).log() + 0.2 * torch.tensor(2 / 3).log() + 0.6 * torch.tensor(3.0).log()
    torch.testing.assert_close(top_k_kl(student, teacher, direction="forward"), forward)


def test_the_list_is_a_lower_bound_that_grows_to_the_divergence():
    logits, teacher = distributions()
    student, teacher = logits.detach().log_softmax(0), teacher.log_softmax(0)
    best = teacher.argsort(descending=True)
    bounds = [float(top_k_kl(student[best[:k]], teacher[best[:k]], direction="reverse")) for k in range(1, 6)]
    whole = float(exact(student, teacher, "reverse"))
    assert all(one <= other + 1e-12 for one, other in zip(bounds, bounds[1:], strict=False)) and bounds[0] < bounds[-1]
    assert bounds[-1] == pytest.approx(whole)  # with five of six the rest is the sixth


def test_a_sure_student_has_a_finite_divergence():
    sure = torch.tensor([0.0, -40.0], requires_grad=True)
    value = top_k_kl(sure.log_softmax(0), torch.tensor([-0.1, -3.0]), direction="reverse")
    assert value.isfinite() and slope(value, sure).isfinite().all()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("stale", [False, True])
def test_samples_have_the_divergence_and_its_gradient_in_expectation(direction, stale):
    """Summed over every token that could have been sampled, with its probability; also where another policy sampled."""
    logits, teacher = distributions()
    sampling = logits.detach() + (torch.linspace(-1, 1, len(logits), dtype=torch.float64) if stale else 0)
    logp, old, teacher_logp = logits.log_softmax(0), sampling.log_softmax(0), teacher.log_softmax(0)
    values, estimate = sampled_kl_loss(logp, old, teacher_logp, direction=direction)
    whole = exact(logits, teacher, direction)
    torch.testing.assert_close((old.exp() * estimate).sum(), whole.detach())
    torch.testing.assert_close(slope((old.exp() * values).sum(), logits), slope(whole, logits))
