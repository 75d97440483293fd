"""Methods whose numbers no test compares with those of public code, and why; `tests/joints/test_public_numbers.py`
checks that every shipped method is either here, or in `public_code`, or reconstructed."""

from __future__ import annotations

RECONSTRUCTED = "it was written without the authors' code"
NOT_FOUND = "no public code of it was found"
OWN = "it is mmrl's own"
TEXTBOOK = "it is a formula of textbooks"
ROLLOUTS = "it collects rollouts and computes no number"
# Titles of choices whose variants are parts of a job without numbers of their own.
PARTS = {
    "model": "it is a kind of model",
    "generator": "it says who samples",
    "task": "it is a task",
    "questions": "it is data",
    "prompts": "it is data",
    "video prompts": "it is data",
    "demonstrations": "it is data",
    "view": "it changes a prompt and computes no number",
    "window": "it selects steps of a chain, whose numbers are those of the transition",
    "teacher": "it says whose numbers the estimator of distillation compares",
}
# By title, the reason and the names of methods, separated by spaces.
REASONS: dict[str, dict[str, str]] = {
    "algorithm": {
        TEXTBOOK: "supervised",
        "its loss is minus the reward; its public code needs a pipeline and a reward model": "reward_gradient",
        "its losses are those of preference and stepwise_preference, which are compared": "offline_preference",
        NOT_FOUND: "tilt_matching",
    },
    "surrogate": {NOT_FOUND: "gaussian_weight", TEXTBOOK: "unclipped"},
    "baseline": {NOT_FOUND: "shrinkage quantile running", TEXTBOOK: "batch_mean"},
    "transform of rewards": {
        NOT_FOUND: "sequence_entropy inverse_likelihood",
        OWN: "rank",
        "Kimi k1.5 has no public code": "length",
    },
    "score of ranks": {TEXTBOOK: "win_rate"},
    "scale of advantages": {NOT_FOUND: "bucket_std quantile_bucket_std"},
    "components": {NOT_FOUND: "gated constrained"},
    "loss term": {
        TEXTBOOK: "entropy likelihood",
        "its weights are those of algorithm.type=advantage_weighted, which are compared": "advantage_weighted",
        "its weights are those of algorithm.type=implicit_q_learning, which are compared": "q_weighted",
        "its objective is that of the surrogate clip, which is compared": "replay_policy_gradient",
        "its values are those of algorithm.type=distillation, which are compared": "distillation",
        NOT_FOUND: "q_policy_gradient",
        "it sums what an action head computes": "head_cost",
    },
    "advantage shaper": {
        NOT_FOUND: "entropy step_gains stratified entropy_redistribution self_process shared_prefix span_returns",
        "its authors' repository, Shredded-Pork/TempFlow-GRPO at afe6d339, has no code": "branch_credit",
        "its authors' repository, RUC-NLPIR/ARPO at a95cd089, has no code of the hard estimate": "prefix_mean",
    },
    "mask": {OWN: "band", NOT_FOUND: "token_budget mastered best_of_group"},
    "other policy of kl": {
        "the term kl, which is compared, has it by default": "reference",
        "the authors' code averages weights inside its training loop and cannot be executed alone": "ema",
    },
    "weighting of kl": {"its weights are those of the shaper divergence_weight, which are compared": "divergence"},
    "estimator of distillation": {"its last entry, the rest of the vocabulary, is mmrl's own": "top_k"},
    "bonus by entropy": {NOT_FOUND: "doubt"},
    "lambda of estimates": {NOT_FOUND: "by_length"},
    "tail": {
        TEXTBOOK: "ode",
        "tests/samplers/test_chain.py compares it with diffusers": "dpm++",
    },
    "likelihood": {
        "its numbers are those of the transitions, which are compared": "chain",
        "its numbers are those of algorithm.type=contrast, which are compared": "contrast",
        "it computes no number, only the gradient of an image": "last_steps",
    },
    "likelihood of a masked response": {NOT_FOUND: "step_merge any_order"},
    "order of unmasking": {TEXTBOOK: "entropy random left_to_right"},
    "action head": {
        "it is a network of its own": "token flow regression bridge l1 horizons invertible latent steered residual"
    },
    "search": {TEXTBOOK: "best_of", "its public code resamples inside a pipeline and was not executed": "particles"},
    "prompt sampler": {
        TEXTBOOK: "permutation",
        NOT_FOUND: "success_weighted category_bandit task_quotas",
        RECONSTRUCTED: "success_window",
    },
    "source": {
        ROLLOUTS: (
            "branches demonstrations expert_labels extra_rollouts success_replay self_imitation stored_steps "
            "action_proposals"
        ),
    },
    "control": {TEXTBOOK: "constant linear cosine stages multiplier", OWN: "proportional staircase band"},
    "optimizer": {"it is PyTorch's": "adamw sgd"},
}


def reason_of(title: str, name: str, *, reconstructed: bool) -> str | None:
    """Returns why a method is not compared with public code; None if no reason is known."""
    if reconstructed:
        return RECONSTRUCTED
    if title in PARTS:
        return PARTS[title]
    reasons = REASONS.get(title, {})
    return next((reason for reason, names in reasons.items() if name in names.split()), None)
