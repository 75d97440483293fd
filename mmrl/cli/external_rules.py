"""Rules that carry a key of another system over where it is more than a new name: of batches and the algorithm.
`mmrl/settings/external_keys.json` names them; see `external_recipes`, and `external_part_rules` for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmrl.cli.convert import Converted, Settings
from mmrl.errors import UserError

Rule = Callable[[Any, Converted, Settings], None]
ESTIMATORS = {
    "low_var_kl": "k3",
    "low_var_kl+": "k3",
    "k3": "k3",
    "k3+": "k3",
    "kl": "k1",
    "k1": "k1",
    "abs": "absolute",
}
REDUCED = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "token": "token_mean",
    "seq": "sequence_mean",
}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.reduce": "sequence_mean"},
    "dapo": {"algorithm.reduce": "token_mean"},
    "bnpo": {"algorithm.reduce": "token_mean"},
    "dr_grpo": {"algorithm.reduce": "constant"},
    "luspo": {"algorithm.level": "sequence", "algorithm.reduce": "sequence_sum"},
}
WHITENED: dict[str, Any] = {"algorithm.scale": "none", "algorithm.shaping": ["whitening"]}


def of(settings: Settings, *names: str, default: Any = None) -> Any:
    """Returns the value of the first key that is, or ends in, one of these names."""
    for name in names:
        for key, value in settings.items():
            if key == name or key.endswith(f".{name}"):
                return value
    return default


def nothing(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets nothing: another key says the same, or asks for what is always so here."""


def never_zero(key: str) -> Rule:
    """Returns the rule of an interval in which 0 and below mean never."""

    def interval(value: Any, converted: Converted, settings: Settings) -> None:
        converted.ours[key] = max(0, int(value))

    return interval


def put(**ours: Any) -> Rule:
    """Returns the rule of a switch that sets keys, `__` for the dot, where it is on."""

    def switch(value: Any, converted: Converted, settings: Settings) -> None:
        if value:
            converted.ours |= {key.replace("__", "."): one for key, one in ours.items()}

    return switch


# --- batches ---


def minibatches(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the number of minibatches from their size in prompts."""
    prompts = of(settings, "train_batch_size", "rollout_batch_size")
    if prompts is None:
        converted.remarks.append(f"algorithm.minibatches: prompts of a step over {value}, which no key says here.")
    else:
        converted.ours["algorithm.minibatches"] = max(1, int(prompts) // int(value))


def device_batch(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets micro-batch, prompts and minibatches of TRL and ms-swift, whose batches are counted by process."""
    accumulation = int(of(settings, "gradient_accumulation_steps", default=1))
    generated = int(of(settings, "steps_per_generation", default=accumulation))
    processes, group = (
        int(of(settings, "num_processes", "nproc_per_node", default=1)),
        int(of(settings, "num_generations", default=8)),
    )
    total = of(settings, "generation_batch_size", default=int(value) * processes * generated)
    if int(total) % group:
        raise UserError(f"a batch of {total} responses is not a multiple of num_generations={group}")
    converted.ours |= {
        "engine.micro_batch": int(value),
        "rollout.prompts": int(total) // group,
        "algorithm.minibatches": max(1, generated // accumulation),
    }
    if of(settings, "num_processes", "nproc_per_node", "generation_batch_size") is None:
        converted.remarks.append(
            f"rollout.prompts={int(total) // group} is for one process; multiply it by the number that was launched."
        )


def flow_batch(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets prompts, minibatches and micro-batch of flow_grpo, whose batches are counted by GPU."""
    rounds, group = int(of(settings, "num_batches_per_epoch")), int(of(settings, "num_image_per_prompt"))
    accumulation, gpus = int(of(settings, "gradient_accumulation_steps", default=1)), settings.get("gpu_number")
    images = int(value) * rounds * int(gpus or 1)
    converted.ours |= {
        "rollout.prompts": max(1, images // group),
        "algorithm.minibatches": max(1, rounds // accumulation),
        "engine.micro_batch": int(value),
    }
    if gpus is None:
        converted.remarks.append("rollout.prompts is for one GPU; multiply it by their number.")


def epochs(value: Any, converted: Converted, settings: Settings) -> None:
    """Remarks how epochs over the data become `steps`, unless the other system's own number of steps is set."""
    if int(of(settings, "max_steps", "total_training_steps", default=None) or 0) > 0:
        return  # the number of steps wins where both are set
    converted.remarks.append(
        f"steps: a step is one batch of prompts here; {value} epochs are {value} x rows / rollout.prompts steps."
    )


def steps(value: Any, converted: Converted, settings: Settings) -> None:
    if value is not None and int(value) > 0:
        converted.ours["steps"] = int(value)


def warmup_share(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the warmup's steps from a share of all updates, where their number is known."""
    total = of(settings, "max_steps", "total_training_steps")
    if not value:
        return
    if total and int(total) > 0:
        converted.ours["optim.warmup_steps"] = round(float(value) * int(total))
    else:
        converted.remarks.append(f"optim.warmup_steps: {value} of all updates, whose number is not known here.")


def warmup_steps(value: Any, converted: Converted, settings: Settings) -> None:
    if int(value) >= 0:
        converted.ours["optim.warmup_steps"] = int(value)


# --- the algorithm ---


def estimator(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets algorithm, baseline and scale of verl's adv_estimator. Raises UserError for an unknown one."""
    kinds: dict[str, dict[str, Any]] = {
        "grpo": {},
        "rloo": {"algorithm.baseline": "leave_one_out", "algorithm.scale": "none"},
        "gae": {"algorithm.type": "ppo"},
        "reinforce_plus_plus": WHITENED | {"algorithm.baseline": "none"},
        "reinforce_plus_plus_baseline": WHITENED,
    }
    if value not in kinds:
        raise UserError(f"advantages by {value} can not be converted; there are {', '.join(kinds)}; see mmrl methods")
    converted.ours |= kinds[value]


def divided(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the scale of advantages of verl's norm_adv_by_std_in_grpo and TRL's scale_rewards."""
    scales = {"True": "group_std", "group": "group_std", "batch": "batch_std", "False": "none", "none": "none"}
    if str(value) not in scales:
        raise UserError(f"scale_rewards={value} is not one of {', '.join(scales)}")
    if str(of(settings, "adv_estimator", default="grpo")) == "grpo":  # verl divides no other one by it
        converted.ours["algorithm.scale"] = scales[str(value)]


def global_std(value: Any, converted: Converted, settings: Settings) -> None:
    converted.ours["algorithm.scale"] = "batch_std" if value else "group_std"


def reduced(value: Any, converted: Converted, settings: Settings) -> None:
    if value not in REDUCED:
        raise UserError(f"a loss that is averaged as {value} can not be converted; there are {', '.join(REDUCED)}")
    converted.ours["algorithm.reduce"] = REDUCED[value]


def loss_kind(value: Any, converted: Converted, settings: Settings) -> None:
    if value in LOSSES:
        converted.ours |= LOSSES[value]
    else:
        converted.without["loss_type"] = f"{value}; see algorithm.surrogate and configs/coming_from.md"


def clipped(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets both bounds of the ratio to one number, but for those that have keys of their own."""
    low = of(settings, "clip_ratio_low", "epsilon_low", default=value)
    high = of(settings, "clip_ratio_high", "epsilon_high", default=value)
    converted.ours |= {"algorithm.surrogate.low": float(low), "algorithm.surrogate.high": float(high or value)}


def dual_clip(value: Any, converted: Converted, settings: Settings) -> None:
    if value:
        converted.ours |= {"algorithm.surrogate.type": "dual_clip", "algorithm.surrogate.cap": float(value)}


def add_term(converted: Converted, kind: str, coefficient: Any, **more: Any) -> None:
    if float(coefficient):
        term = {"type": kind, "coefficient": float(coefficient), **more}
        converted.ours.setdefault("algorithm.terms", []).append(term)


def beta(value: Any, converted: Converted, settings: Settings) -> None:
    add_term(converted, "kl", value or 0.0, estimator="k3")


def exact_beta(value: Any, converted: Converted, settings: Settings) -> None:
    add_term(converted, "kl", value or 0.0, estimator="exact")


def kl_loss(value: Any, converted: Converted, settings: Settings) -> None:
    """Adds the divergence of verl and EasyR1, where they have it in the loss."""
    if of(settings, "disable_kl", default=False) or not value:
        return
    if not of(settings, "use_kl_loss", default=False):
        return
    kind = str(of(settings, "kl_loss_type", "kl_penalty", default="low_var_kl"))
    if kind not in ESTIMATORS:
        raise UserError(f"a divergence of kind {kind} can not be converted; there are {', '.join(ESTIMATORS)}")
    add_term(converted, "kl", value, estimator=ESTIMATORS[kind])


def kl_in_reward(value: Any, converted: Converted, settings: Settings) -> None:
    if value:
        coefficient = float(of(settings, "kl_ctrl.kl_coef", default=1e-3))
        converted.ours["algorithm.transforms"] = [{"type": "kl_penalty", "kl": {"coefficient": coefficient}}]


def plain_kl(value: Any, converted: Converted, settings: Settings) -> None:
    add_term(converted, "kl", value or 0.0)


def entropy(value: Any, converted: Converted, settings: Settings) -> None:
    add_term(converted, "entropy", value or 0.0)


def level(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the level of the importance ratio: token or sequence."""
    levels = {"token": "decision", "sequence": "sequence"}
    if value in levels:
        converted.ours["algorithm.level"] = levels[value]
    else:
        converted.without["importance_sampling_level"] = str(value)


def filtered(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets dynamic sampling, with its bounds on the mean reward of a group."""
    if value:
        low = of(settings, "filter_low", "rewards_lower_bound", default=0.0)
        high = of(settings, "filter_high", "rewards_upper_bound", default=1.0)
        scale = float(of(settings, "reward_coef", default=1.0))
        converted.ours["rollout.dynamic_sampling"] = {"low": float(low) / scale, "high": float(high) / scale}


def masked(value: Any, converted: Converted, settings: Settings) -> None:
    if value:
        converted.ours["algorithm.masks"] = ["truncated"]


def truncated_sampling(key: str) -> Rule:
    """Returns the rule of top_p and top_k, which are off at 1 and at 0 or -1."""

    def cut(value: Any, converted: Converted, settings: Settings) -> None:
        off = value is None or (float(value) >= 1 if key == "top_p" else int(value) <= 0)
        if not off:
            converted.ours |= {f"rollout.{key}": value, "rollout.allow_truncated_sampling": True}

    return cut
