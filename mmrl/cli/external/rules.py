"""Rules that convert settings of other libraries about batches and the algorithm.

A rule is a function (value, converted, source): the value of one key, the Converted configuration that it writes into,
and all settings of the other library by dotted keys. `mmrl/settings/external_keys.json` names the rule of a key;
`part_rules` has the rules of everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmrl.cli.convert import Converted, Settings
from mmrl.errors import UserError

Rule = Callable[[Any, Converted, Settings], None]
KL_ESTIMATORS = {
    "low_var_kl": "k3",
    "low_var_kl+": "k3",
    "k3": "k3",
    "k3+": "k3",
    "kl": "k1",
    "k1": "k1",
    "abs": "absolute",
}
REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "token": "token_mean",
    "seq": "sequence_mean",
}
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.reduce": "sequence_mean"},
    "dapo": {"algorithm.reduce": "token_mean"},
    "bnpo": {"algorithm.reduce": "token_mean"},
    "dr_grpo": {"algorithm.reduce": "constant"},
    "luspo": {"algorithm.level": "sequence", "algorithm.reduce": "sequence_sum"},
}
WHITENED: dict[str, Any] = {"algorithm.scale": "none", "algorithm.shaping": ["whitening"]}


def get_setting(source: Settings, *names: str, default: Any = None) -> Any:
    """Returns the value of the first of `names` that is set, or else `default`. A name stands for the key `name` and
    for every key that ends with `.name`."""
    for name in names:
        for key, value in source.items():
            if key == name or key.endswith(f".{name}"):
                return value
    return default


def ignore(value: Any, converted: Converted, source: Settings) -> None:
    """Sets nothing: another key sets the same, or mmrl always does this."""


def interval_rule(key: str) -> Rule:
    """Returns a rule that sets `key`, an interval in steps; values below 0, which mean never, become 0."""

    def set_interval(value: Any, converted: Converted, source: Settings) -> None:
        converted.settings[key] = max(0, int(value))

    return set_interval


def switch_rule(**settings: Any) -> Rule:
    """Returns a rule that sets `settings` if the value is true. `__` in their names stands for a dot."""

    def set_keys(value: Any, converted: Converted, source: Settings) -> None:
        if value:
            converted.settings |= {key.replace("__", "."): setting for key, setting in settings.items()}

    return set_keys


# --- batches ---


def set_minibatches(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the number of minibatches from their size in prompts."""
    prompts = get_setting(source, "train_batch_size", "rollout_batch_size")
    if prompts is None:
        converted.comments.append(f"algorithm.minibatches: set it to the prompts of a step divided by {value}.")
    else:
        converted.settings["algorithm.minibatches"] = max(1, int(prompts) // int(value))


def set_trl_batch(value: Any, converted: Converted, source: Settings) -> None:
    """Sets micro-batch, prompts and minibatches from the per-device batch size of TRL and ms-swift.

    Raises UserError if a generation batch is not a multiple of the group size.
    """
    accumulation = int(get_setting(source, "gradient_accumulation_steps", default=1))
    batches_per_generation = int(get_setting(source, "steps_per_generation", default=accumulation))
    num_processes, group_size = (
        int(get_setting(source, "num_processes", "nproc_per_node", default=1)),
        int(get_setting(source, "num_generations", default=8)),
    )
    total = get_setting(source, "generation_batch_size", default=int(value) * num_processes * batches_per_generation)
    if int(total) % group_size:
        raise UserError(
            f"a batch of {total} responses (generation_batch_size, or per_device_train_batch_size x processes x "
            f"steps_per_generation) is not a multiple of num_generations={group_size}; change one of these"
        )
    converted.settings |= {
        "engine.micro_batch": int(value),
        "rollout.prompts": int(total) // group_size,
        "algorithm.minibatches": max(1, batches_per_generation // accumulation),
    }
    if get_setting(source, "num_processes", "nproc_per_node", "generation_batch_size") is None:
        converted.comments.append(
            f"rollout.prompts={int(total) // group_size} is for one process; multiply it by the number of processes."
        )


def set_flow_grpo_batch(value: Any, converted: Converted, source: Settings) -> None:
    """Sets prompts, minibatches and micro-batch from the images of a batch on one GPU, as flow_grpo counts them."""
    num_batches, group_size = (
        int(get_setting(source, "num_batches_per_epoch")),
        int(get_setting(source, "num_image_per_prompt")),
    )
    accumulation, num_gpus = (
        int(get_setting(source, "gradient_accumulation_steps", default=1)),
        source.get("gpu_number"),
    )
    images = int(value) * num_batches * int(num_gpus or 1)
    converted.settings |= {
        "rollout.prompts": max(1, images // group_size),
        "algorithm.minibatches": max(1, num_batches // accumulation),
        "engine.micro_batch": int(value),
    }
    if num_gpus is None:
        converted.comments.append("rollout.prompts is for one GPU; multiply it by their number.")


def note_epochs(value: Any, converted: Converted, source: Settings) -> None:
    """Adds a comment on how epochs over the data become `steps`, unless the number of steps is set."""
    if int(get_setting(source, "max_steps", "total_training_steps", default=None) or 0) > 0:
        return  # the number of steps wins where both are set
    converted.comments.append(
        f"steps: a step is one batch of prompts here; {value} epochs are {value} x rows / rollout.prompts steps."
    )


def set_steps(value: Any, converted: Converted, source: Settings) -> None:
    if value is not None and int(value) > 0:
        converted.settings["steps"] = int(value)


def set_warmup_ratio(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the warmup steps from a ratio of all updates, if the number of updates is set; else adds a comment."""
    total = get_setting(source, "max_steps", "total_training_steps")
    if not value:
        return
    if total and int(total) > 0:
        converted.settings["optim.warmup_steps"] = round(float(value) * int(total))
    else:
        converted.comments.append(f"optim.warmup_steps: set it to {value} x the number of updates.")


def set_warmup_steps(value: Any, converted: Converted, source: Settings) -> None:
    if int(value) >= 0:
        converted.settings["optim.warmup_steps"] = int(value)


# --- the algorithm ---


def set_estimator(value: Any, converted: Converted, source: Settings) -> None:
    """Sets algorithm, baseline and scale from verl's adv_estimator. Raises UserError for an unknown one."""
    settings_by_estimator: dict[str, dict[str, Any]] = {
        "grpo": {},
        "rloo": {"algorithm.baseline": "leave_one_out", "algorithm.scale": "none"},
        "gae": {"algorithm.type": "ppo"},
        "reinforce_plus_plus": WHITENED | {"algorithm.baseline": "none"},
        "reinforce_plus_plus_baseline": WHITENED,
    }
    if value not in settings_by_estimator:
        choices = ", ".join(settings_by_estimator)
        raise UserError(f"adv_estimator={value} cannot be converted; choose one of {choices}; see mmrl methods")
    converted.settings |= settings_by_estimator[value]


def set_advantage_scale(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the scale of advantages from verl's norm_adv_by_std_in_grpo or TRL's scale_rewards."""
    scales = {"True": "group_std", "group": "group_std", "batch": "batch_std", "False": "none", "none": "none"}
    if str(value) not in scales:
        raise UserError(f"scale_rewards={value} cannot be converted; choose one of {', '.join(scales)}")
    if str(get_setting(source, "adv_estimator", default="grpo")) == "grpo":  # verl applies it to no other estimator
        converted.settings["algorithm.scale"] = scales[str(value)]


def set_global_std(value: Any, converted: Converted, source: Settings) -> None:
    converted.settings["algorithm.scale"] = "batch_std" if value else "group_std"


def set_loss_reduction(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the reduction of the loss from verl's loss_agg_mode. Raises UserError for an unknown one."""
    if value not in REDUCTIONS:
        raise UserError(f"loss_agg_mode={value} cannot be converted; choose one of {', '.join(REDUCTIONS)}")
    converted.settings["algorithm.reduce"] = REDUCTIONS[value]


def set_loss_type(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the reduction of the loss from TRL's loss_type; one that mmrl does not have goes to the unmatched keys."""
    if value in LOSS_TYPES:
        converted.settings |= LOSS_TYPES[value]
    else:
        converted.unmatched["loss_type"] = f"{value}; see algorithm.surrogate and configs/coming_from.md"


def set_clip_range(value: Any, converted: Converted, source: Settings) -> None:
    """Sets both clip bounds of the ratio to `value`, except a bound that has a key of its own."""
    low = get_setting(source, "clip_ratio_low", "epsilon_low", default=value)
    high = get_setting(source, "clip_ratio_high", "epsilon_high", default=value)
    converted.settings |= {"algorithm.surrogate.low": float(low), "algorithm.surrogate.high": float(high or value)}


def set_dual_clip(value: Any, converted: Converted, source: Settings) -> None:
    if value:
        converted.settings |= {"algorithm.surrogate.type": "dual_clip", "algorithm.surrogate.cap": float(value)}


def add_term(converted: Converted, term_type: str, coefficient: Any, **options: Any) -> None:
    """Adds a loss term, unless its coefficient is 0."""
    if float(coefficient):
        term = {"type": term_type, "coefficient": float(coefficient), **options}
        converted.settings.setdefault("algorithm.terms", []).append(term)


def add_k3_kl(value: Any, converted: Converted, source: Settings) -> None:
    add_term(converted, "kl", value or 0.0, estimator="k3")


def add_exact_kl(value: Any, converted: Converted, source: Settings) -> None:
    add_term(converted, "kl", value or 0.0, estimator="exact")


def add_kl_loss(value: Any, converted: Converted, source: Settings) -> None:
    """Adds the KL term of verl and EasyR1, if use_kl_loss puts it into the loss."""
    if get_setting(source, "disable_kl", default=False) or not value:
        return
    if not get_setting(source, "use_kl_loss", default=False):
        return
    term_type = str(get_setting(source, "kl_loss_type", "kl_penalty", default="low_var_kl"))
    if term_type not in KL_ESTIMATORS:
        raise UserError(f"kl_loss_type={term_type} cannot be converted; choose one of {', '.join(KL_ESTIMATORS)}")
    add_term(converted, "kl", value, estimator=KL_ESTIMATORS[term_type])


def set_kl_in_reward(value: Any, converted: Converted, source: Settings) -> None:
    """Adds a KL penalty on rewards if the value is true, with the coefficient of kl_ctrl."""
    if value:
        coefficient = float(get_setting(source, "kl_ctrl.kl_coef", default=1e-3))
        converted.settings["algorithm.transforms"] = [{"type": "kl_penalty", "kl": {"coefficient": coefficient}}]


def add_kl(value: Any, converted: Converted, source: Settings) -> None:
    add_term(converted, "kl", value or 0.0)


def add_entropy(value: Any, converted: Converted, source: Settings) -> None:
    add_term(converted, "entropy", value or 0.0)


def set_ratio_level(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the level of the importance ratio: token or sequence."""
    levels = {"token": "decision", "sequence": "sequence"}
    if value in levels:
        converted.settings["algorithm.level"] = levels[value]
    else:
        converted.unmatched["importance_sampling_level"] = str(value)


def set_dynamic_sampling(value: Any, converted: Converted, source: Settings) -> None:
    """Enables dynamic sampling, with bounds on the mean reward of a group."""
    if value:
        low = get_setting(source, "filter_low", "rewards_lower_bound", default=0.0)
        high = get_setting(source, "filter_high", "rewards_upper_bound", default=1.0)
        # RLinf bounds the reward after it is multiplied by reward_coef, mmrl bounds the reward itself
        scale = float(get_setting(source, "reward_coef", default=1.0))
        converted.settings["rollout.dynamic_sampling"] = {"low": float(low) / scale, "high": float(high) / scale}


def set_truncation_mask(value: Any, converted: Converted, source: Settings) -> None:
    if value:
        converted.settings["algorithm.masks"] = ["truncated"]


def truncation_rule(key: str) -> Rule:
    """Returns a rule that sets rollout.top_p or rollout.top_k, unless the value turns it off: 1 for top_p, 0 or -1 for
    top_k."""

    def set_truncation(value: Any, converted: Converted, source: Settings) -> None:
        is_off = value is None or (float(value) >= 1 if key == "top_p" else int(value) <= 0)
        if not is_off:
            converted.settings |= {f"rollout.{key}": value, "rollout.allow_truncated_sampling": True}

    return set_truncation
