"""Features that the decisions of a policy may offer to algorithms, and their descriptions for error messages."""

from __future__ import annotations

from mmrl.protocols.abilities import DESCRIPTIONS

Offer = str | type  # a key of OFFERS, or an ability

OFFERS = {
    "entropy": "an entropy of each decision (that of a Gaussian step of fixed width is constant)",
    "square_sum": "the sum of squared probabilities of each decision's distribution",
    "tokens": "decisions that are tokens",
    "text": "responses that are text",
    "lengths": "rollouts of different lengths",
    "distribution": "the whole distribution of each decision, kept from the policy that made the rollouts",
    "divergence": "the exact divergence of each decision from the old policy",
    "gaussian": "decisions that are Gaussian steps of a chain",
    "step_density": "Gaussian steps scored by their density (a transition cps with logp=density, or another one)",
    "velocity": "predictions of a denoiser",
    "steering": "chains that can be steered while they are sampled (model.type=diffusion)",
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
    "views": "prompts that can be changed into another view, such as one with a masked image",
    "drafts": "responses that can be generated over several steps",
    "demonstrations": "known answers that it can be trained on beside its rollouts",
    "temperatures": "further rollouts of a step at another temperature",
    "turns": "turns of a conversation (set task.environment)",
    "separate_chains": "a separate denoising chain for each rollout (denoising.likelihood.shared_states=false)",
    "candidates": "denoising steps from states that a group shares (denoising.likelihood.shared_states=true)",
    "distillation": "a few-step sampler that is distilled at the same time (model.type=few_step_diffusion)",
    "reference_rollouts": "responses of the reference policy (rollout.generator=transformers)",
    "information": "a noisy code of the prompt that gates the residual (action.head.type=residual with noise above 0)",
    "displacement": "a learned distribution of the initial noise (action.head.type=steered)",
    "noise": "noise that a trained network samples for a frozen flow (action.head.type=steered)",
    "imbalance": "a mixture of action horizons (action.head.type=horizons)",
    "nodes": "rollouts that share their first decisions, as branches of a tree",
}


def describe_offer(offer: Offer) -> str:
    """Returns what error messages write after "needs" for a key of `OFFERS` or an ability."""
    return OFFERS[offer] if isinstance(offer, str) else DESCRIPTIONS.get(offer, offer.__name__)
