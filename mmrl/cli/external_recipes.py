"""Converts configurations of verl, EasyR1, TRL, ms-swift, flow_grpo and RLinf into mmrl's, key by key.

`mmrl/settings/external_keys.json` maps each of their keys to [library, key of mmrl, rule]. The rule is the name of a
function in RULES, for keys whose value changes too. The table may also hold a key without its first parts: the longest
ending that it has is used, and an entry SYSTEM:KEY wins over KEY. Messages about unknown keys read the same table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl import settings as settings_package
from mmrl.cli import external_part_rules as parts
from mmrl.cli import external_rules as rules
from mmrl.cli.convert import COMMON, Converted, Settings, crop, suite
from mmrl.cli.external_files import read_settings
from mmrl.cli.external_rules import Rule
from mmrl.errors import UserError

_PLAIN = re.compile(r"^[a-z_]+(\.[a-z_]+)*$")


@dataclass(frozen=True)
class System:
    """Another system. marks: any of these keys, or beginnings of keys that end in a dot, tell its files. defaults: its
    own values of keys that a file may leave out and whose values mmrl's differ from. skipped: beginnings of keys about
    parts that do not exist here, with why."""

    name: str
    marks: tuple[str, ...]
    defaults: Mapping[str, Any]
    common: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def fits(self, settings: Settings) -> bool:
        return any(
            key.startswith(mark) if mark.endswith(".") else key == mark for key in settings for mark in self.marks
        )


MEMORY = "how memory and processes are shared out; see engine and configs/scaling.md"
EVALUATION = "evaluation is greedy; evaluation.temperature"
ROBOT_PARTS = {"cluster.": MEMORY, "hydra.": "", "env.eval.": "task.eval_size and evaluation.prompts", "critic.": ""}
QUESTIONS: dict[str, Any] = {"task.type": "visual_qa", "engine.zero_stage": 2}
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SYSTEMS = (
    System(
        "verl",
        ("actor_rollout_ref.",),
        {
            "data.train_batch_size": 1024,
            f"{A}ppo_mini_batch_size": 256,
            f"{A}clip_ratio": 0.2,
            f"{A}loss_agg_mode": "token-mean",
            f"{A}kl_loss_coef": 1e-3,
            f"{A}optim.lr": 1e-6,
            f"{R}n": 1,
            "algorithm.norm_adv_by_std_in_grpo": True,
        },
        QUESTIONS,
        {
            "actor_rollout_ref.ref.": MEMORY,
            "critic.": "the critic of algorithm.type=ppo is a head of the policy",
            "reward_model.": "rewards are in task.rewards",
            "ray_init.": MEMORY,
            f"{R}val_kwargs.": EVALUATION,
        },
    ),
    System(
        "EasyR1",
        ("worker.",),
        {
            "worker.actor.clip_ratio_low": 0.2,
            "worker.actor.clip_ratio_high": 0.3,
            "worker.actor.clip_ratio_dual": 3.0,
            "worker.rollout.n": 1,
            "worker.rollout.name": "vllm",
        },
        QUESTIONS,
        {
            "worker.ref.": MEMORY,
            "worker.critic.": "the critic of algorithm.type=ppo is a head of the policy",
            "worker.rollout.val_override_config.": EVALUATION,
        },
    ),
    System("RLinf", ("runner.", "actor.model.num_action_chunks"), {}, COMMON, ROBOT_PARTS),
    System(
        "flow_grpo",
        ("pretrained.", "sample."),
        {
            "sample.noise_level": 0.7,
            "train.learning_rate": 3e-4,
            "train.clip_range": 1e-4,
            "train.beta": 0.0,
            "num_epochs": 100_000,
        },
        {"model.type": "diffusion", "task.type": "image_generation", "engine.zero_stage": 1},
    ),
    System(
        "ms-swift",
        ("rlhf_type", "train_type", "tuner_type", "swift_version"),
        {"num_generations": 8, "beta": 0.04, "epsilon": 0.2, "loss_type": "grpo", "max_completion_length": 512},
        QUESTIONS,
    ),
    System(
        "TRL",
        ("num_generations", "model_name_or_path", "max_completion_length"),
        {
            "num_generations": 8,
            "beta": 0.0,
            "epsilon": 0.2,
            "loss_type": "dapo",
            "learning_rate": 1e-6,
            "per_device_train_batch_size": 8,
            "max_completion_length": 256,
        },
        QUESTIONS,
    ),
)


def system_of(settings: Settings) -> System | None:
    """Returns the system whose file it is; None for a file of none of them."""
    if "actor_rollout_ref.model.vla" in settings or "extends" in settings:
        return None  # SimpleVLA-RL, and mmrl's own
    return next((system for system in SYSTEMS if system.fits(settings)), None)


def convert_theirs(path: Path) -> Converted | None:
    """Converts a configuration of one of SYSTEMS; None for a file of none of them. Raises UserError for a file that can
    not be read, and for values that have nothing like them here."""
    settings = read_settings(path)
    system = system_of(settings)
    if system is None:
        return None
    try:
        return converted_from(system, settings, Path(str(path).replace(".py:", "_")).stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def converted_from(system: System, settings: Settings, name: str) -> Converted:
    """Returns the configuration. name: of the run directory where the file names none."""
    table = external_key_table()
    converted = Converted(ours={"run_dir": f"runs/{name}", **system.common})
    filled = {key: value for key, value in system.defaults.items() if not _present(key, settings)}
    whole = settings | filled
    converted.remarks.append(f"The keys are {system.name}'s; task, data and rewards want a look.")
    if filled:
        listed = ", ".join(f"{key}={value}" for key, value in filled.items())
        converted.remarks.append(f"{system.name}'s own values of keys that the file leaves out: {listed}.")
    for key, value in whole.items():
        _carry(system, key, value, converted, whole, table)
    if system.name == "RLinf":
        _robots(whole, converted)
    _finish(system, whole, converted)
    return converted


def external_key_table() -> dict[str, list[str]]:
    """Returns the table of their keys: library, mmrl's key, and the name of a rule where there is one."""
    file = Path(settings_package.__file__).with_name("external_keys.json")
    table: dict[str, list[str]] = json.loads(file.read_text())
    return table


def _present(key: str, settings: Settings) -> bool:
    """Returns whether a key, or one that decides the same, is set."""
    last = key.rpartition(".")[2]
    instead = {"clip_ratio": "clip_ratio_low", "epsilon": "epsilon_low", "num_epochs": "max_steps"}
    return any(other == key or other.rpartition(".")[2] in (last, instead.get(last)) for other in settings)


def _carry(
    system: System, key: str, value: Any, converted: Converted, settings: Settings, table: Mapping[str, list[str]]
) -> None:
    """Carries one key of another system over by its table: into a key of mmrl, by a rule, or to the list of keys
    without a counterpart."""
    why = next((why for beginning, why in system.skipped.items() if key.startswith(beginning)), None)
    entry = _entry(system, key, table) if why is None else None
    if why is not None:
        converted.without[key] = why
    elif entry is None:
        converted.without[key] = ""
    elif len(entry) > 2:
        RULES[entry[2]](value, converted, settings)
    elif _PLAIN.match(entry[1]):
        if value is not None:
            converted.ours[entry[1]] = value
    else:
        converted.without[key] = f"is {entry[1]} here" if value not in (None, False) else ""


def _entry(system: System, key: str, table: Mapping[str, list[str]]) -> list[str] | None:
    parts = key.split(".")
    endings = [".".join(parts[start:]) for start in range(len(parts))]
    names = [name for ending in endings for name in (f"{system.name}:{ending}", ending)]
    return next((table[name] for name in names if name in table), None)


def _finish(system: System, settings: Settings, converted: Converted) -> None:
    """Fills in what a configuration needs and the file does not say, and says so."""
    if system.common.get("task.type") == "visual_qa":
        data = converted.ours.setdefault("task.data", {})
        if "type" not in data:
            data |= {"type": "files", "train": "train.jsonl", "eval": "eval.jsonl"}
            converted.remarks.append("task.data: the file names none; name your files of questions.")
        if data["type"] == "files" and "eval" not in data:
            data["eval"] = data["train"]
            converted.remarks.append("task.data.eval is the file to train on: name held-out questions.")
        if "task.rewards" not in converted.ours:
            converted.ours |= {"task.rewards": [{"name": "math"}], "task.accuracy": {"name": "math"}}
            converted.remarks.append(f"task.rewards: the file names none, and {system.name}'s own follows the data.")
    for key, value in converted.ours.items():
        if isinstance(value, str) and "$" in value:
            converted.remarks.append(f"{key}={value}: the file does not say what that is.")


def _robots(settings: Settings, converted: Converted) -> None:
    """Sets the simulator and the policy of an embodied RLinf recipe. Raises UserError for those that do not exist
    here."""
    named = settings.get("env.train.task_suite_name") or _default_environment(settings.get("defaults"))
    if named is None:
        raise UserError(
            "no env/train among its defaults, so it is not a recipe for a robot; those for reasoning are not read"
        )
    suite(re.sub(r"_(grpo|ppo).*$", "", str(named)), converted, settings)
    converted.ours["action.head"] = {"type": "token", "decoding": _decoding(settings)}
    converted.ours.setdefault("action.center_crop", 1.0)


def _default_environment(defaults: Any) -> str | None:
    """Returns the training environment among Hydra's defaults: `env/train: NAME`, or `env/NAME@env.train`."""
    for one in defaults if isinstance(defaults, list) else []:
        if isinstance(one, Mapping) and "env/train" in one:
            return str(one["env/train"])
        if isinstance(one, str) and one.startswith("env/") and one.endswith("@env.train"):
            return one.removeprefix("env/").removesuffix("@env.train")
    return None


def _decoding(settings: Settings) -> str:
    kind = str(next((value for key, value in settings.items() if key.endswith(("model_name", "model_type"))), ""))
    kinds = {"openvla_oft": "bidirectional", "openvla": "autoregressive"}
    if kind not in kinds:
        raise UserError(f"a policy of kind {kind or 'unknown'} can not be converted; there are {', '.join(kinds)}")
    return kinds[kind]


RULES: dict[str, Rule] = {
    "nothing": rules.nothing,
    "minibatches": rules.minibatches,
    "device_batch": rules.device_batch,
    "flow_batch": rules.flow_batch,
    "epochs": rules.epochs,
    "steps": rules.steps,
    "warmup_share": rules.warmup_share,
    "warmup_steps": rules.warmup_steps,
    "evaluation": rules.never_zero("evaluation.every"),
    "saving": rules.never_zero("checkpoint.every"),
    "estimator": rules.estimator,
    "divided": rules.divided,
    "global_std": rules.global_std,
    "reduced": rules.reduced,
    "loss_kind": rules.loss_kind,
    "clipped": rules.clipped,
    "dual_clip": rules.dual_clip,
    "beta": rules.beta,
    "exact_beta": rules.exact_beta,
    "kl_loss": rules.kl_loss,
    "plain_kl": rules.plain_kl,
    "kl_in_reward": rules.kl_in_reward,
    "entropy": rules.entropy,
    "level": rules.level,
    "filtered": rules.filtered,
    "masked": rules.masked,
    "top_p": rules.truncated_sampling("top_p"),
    "top_k": rules.truncated_sampling("top_k"),
    "dtype": parts.dtype,
    "attention": parts.attention,
    "adapters": parts.adapters,
    "freeze_vision": parts.frozen("vision"),
    "freeze_connector": parts.frozen("connector"),
    "freeze_language": parts.frozen("language"),
    "zero": parts.zero,
    "full_shard": parts.full_shard,
    "offload": parts.offload,
    "engines": parts.engines,
    "train_files": parts.files("train"),
    "eval_files": parts.files("eval"),
    "data_set": parts.data_set,
    "prompt_column": parts.column("problem_field", "prompt", "problem"),
    "answer_column": parts.column("answer_field", "answer"),
    "image_column": parts.column("image_field", "images"),
    "prompts_of_flow": parts.prompts_of_flow,
    "reward_names": parts.reward_names,
    "verl_reward": parts.reward_function("verl", "path", "custom_reward_function.name", "compute_score"),
    "easyr1_reward": parts.reward_function("easyr1", "reward_function", "reward_function_name", "main"),
    "betas": parts.optimizer_betas,
    "schedule": parts.schedule,
    "transition": parts.transition,
    "window": parts.window,
    "trained_share": parts.trained_share,
    "moving_average": parts.moving_average,
    "sizes": parts.sizes,
    "before": rules.put(evaluation__before=True),
    "robot_prompts": parts.robot_prompts,
    "robot_weights": parts.robot_weights,
    "robot_crop": crop,
    "named_run": parts.named_run,
    "tracked": parts.tracked,
    "pixels": parts.pixels,
}
