"""Offers: what the decisions of a policy may support, and how error messages name each."""

from __future__ import annotations

from mmrl.protocols.abilities import SENTENCES

Offer = str | type  # a key of OFFERS, or an ability

OFFERS = {
    "entropy": "an entropy of each decision (that of a Gaussian step of fixed width is constant)",
    "square_sum": "the sum of squared probabilities of each decision's distribution",
    "tokens": "decisions that are tokens",
    "text": "responses in words",
    "lengths": "rollouts of different lengths",
    "distribution": "the whole distribution of each decision, kept from the policy that made the rollouts",
    "divergence": "the exact divergence of each decision from the old policy",
    "gaussian": "decisions that are Gaussian steps of a chain",
    "step_density": "Gaussian steps scored by their density (a transition cps with logp=density, or another one)",
    "velocity": "predictions of a denoiser",
    "steering": "chains that can be steered while they are drawn (model.type=diffusion)",
    "matching": "decisions that compare the final sample with a prediction",
    "source": "images to compare with those that were edited (denoising.likelihood.type=contrast or matching)",
    "contrast": "decisions that are errors of implicit policies (denoising.likelihood.type=contrast, or "
    "action.head.likelihood.type=contrast of a flow head)",
    "image_gradient": "images with their gradient (denoising.likelihood.type=last_steps)",
    "parts": "responses in parts, text before an image (model.type=prompt_rewriting, or rollout.reasoning_length "
    "of a model that writes codes)",
    "reference_ratio": "a likelihood that can be compared with the reference policy's",
    "single_sample_kl": "a KL divergence estimated from single samples",
    "critic": "a critic",
    "views": "prompts of which there are other views",
    "drafts": "responses that can be continued",
    "demonstrations": "answers that it can learn from beside its rollouts",
    "temperatures": "rollouts at a temperature of their own, made beside the others of a step",
    "turns": "turns of a conversation (task.environment)",
    "separate_chains": "chains apart from the others of the group (denoising.likelihood.shared_states=false)",
    "candidates": "steps from states that a group shares (denoising.likelihood.shared_states=true)",
    "distillation": "a sampler of few steps that is distilled beside it (model.type=few_step_diffusion)",
    "reference_rollouts": "responses of the reference policy (rollout.generator=transformers)",
    "information": "a code that tells a gate of the prompt (action.head.type=residual with noise above 0)",
    "displacement": "noise that it learns to draw (action.head.type=steered)",
    "imbalance": "horizons that share the work (action.head.type=horizons)",
    "nodes": "rollouts that share decisions, as leaves of a tree",
}


def describe_offer(offer: Offer) -> str:
    """Returns the text for an offer that follows "needs" in error messages."""
    return OFFERS[offer] if isinstance(offer, str) else SENTENCES.get(offer, offer.__name__)
