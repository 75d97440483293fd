"""Rules that carry a key of another system over where it is more than a new name. `mmrl/settings/their_keys.json` names
them; see `their_recipes`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.cli.convert import Converted, Settings, crop, weights
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
TRANSITIONS = {"sde": "flow_sde", "cps": "cps", "dance": "dance_sde"}
REWARDS = {  # of TRL, ms-swift and flow_grpo, by their names
    "accuracy_reward": "math",
    "accuracy": "math",
    "think_format_reward": "think_answer",
    "format": "think_answer",
    "clipscore": "clip_similarity",
    "jpeg_compressibility": "jpeg_compressibility",
    "jpeg_incompressibility": "jpeg_incompressibility",
    "aesthetic": "aesthetic",
    "pickscore": "pickscore",
    "geneval": "geneval",
    "ocr": "ocr",
}
DATA = "task.data"


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
        raise UserError(f"a batch of {total} responses is no multiple of num_generations={group}")
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


def passes(value: Any, converted: Converted, settings: Settings) -> None:
    if int(of(settings, "max_steps", "total_training_steps", default=None) or 0) > 0:
        return  # which counts where both are set
    converted.remarks.append(
        f"steps: they are batches of prompts here; {value} passes over the data are {value} x rows / rollout.prompts."
    )


def steps(value: Any, converted: Converted, settings: Settings) -> None:
    if value is not None and int(value) > 0:
        converted.ours["steps"] = int(value)


def warmup_share(value: Any, converted: Converted, settings: Settings) -> None:
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
        raise UserError(f"scale_rewards={value} is none of {', '.join(scales)}")
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
    levels = {"token": "decision", "sequence": "sequence"}
    if value in levels:
        converted.ours["algorithm.level"] = levels[value]
    else:
        converted.without["importance_sampling_level"] = str(value)


def filtered(value: Any, converted: Converted, settings: Settings) -> None:
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


# --- model and engine ---


def dtype(value: Any, converted: Converted, settings: Settings) -> None:
    kinds = {"bf16": "bfloat16", "bfloat16": "bfloat16", "true": "bfloat16", "fp32": "float32", "float32": "float32"}
    kind = kinds.get(str(value).lower().removeprefix("torch."))
    if kind is None and value not in (False, None, "auto", "no"):
        converted.without["dtype"] = f"{value}; model.dtype is bfloat16 or float32"
    elif kind is not None:
        converted.ours["model.dtype"] = kind


def attention(value: Any, converted: Converted, settings: Settings) -> None:
    kinds = {
        "flash_attn": "flash_attention_2",
        "flash_attention_2": "flash_attention_2",
        "sdpa": "sdpa",
        "eager": "eager",
    }
    if value in kinds:
        converted.ours["model.attention"] = kinds[value]


def adapters(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the LoRA of TRL (use_peft), ms-swift (train_type=lora), verl (lora_rank) and flow_grpo (use_lora)."""
    if value in (False, None, 0, "full"):
        return
    drawn = "pretrained.model" in settings
    rank = of(settings, "lora_r", "lora_rank", default=32 if drawn else 16 if value is True else 8)
    targets = of(settings, "lora_target_modules", "target_modules", default=None)
    converted.ours["model.lora"] = {
        "rank": int(rank),
        "alpha": int(of(settings, "lora_alpha", default=64 if drawn else 32)),
    }
    if targets not in (None, ["all-linear"]):
        converted.ours["model.lora"]["targets"] = targets
    elif drawn:
        names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        converted.ours["model.lora"]["targets"] = list(names)


def frozen(part: str) -> Rule:
    def freeze(value: Any, converted: Converted, settings: Settings) -> None:
        if value:
            converted.ours["model.freeze"] = [*converted.ours.get("model.freeze", []), part]

    return freeze


def zero(value: Any, converted: Converted, settings: Settings) -> None:
    match = re.search(r"zero_?([0-3])(_offload)?", str(value))
    if match is None:
        converted.remarks.append(f"engine.zero_stage: what {value} says.")
        return
    converted.ours["engine.zero_stage"] = int(match[1])
    if match[2]:
        converted.ours["engine.offload"] = "all" if match[1] == "3" else "optimizer"


def full_shard(value: Any, converted: Converted, settings: Settings) -> None:
    converted.ours["engine.zero_stage"] = 3 if value else 2


def offload(value: Any, converted: Converted, settings: Settings) -> None:
    if value and not converted.ours.get("engine.offload"):
        converted.ours |= {"engine.offload": "optimizer"}
        converted.ours.setdefault("engine.zero_stage", 2)


def engines(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the generator of TRL and ms-swift (use_vllm, vllm_mode) and of verl (rollout.name)."""
    if value in (False, None, "hf"):
        return
    server = of(settings, "vllm_mode", default="colocate" if "vllm_mode" not in settings else None) == "server"
    kind: dict[str, Any] = {"type": "vllm_server" if server else "vllm_colocated"}
    share = of(settings, "vllm_gpu_memory_utilization", "gpu_memory_utilization")
    parallel = of(
        settings, "vllm_tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_size", default=1
    )
    if share is not None:
        kind["memory"] = float(share)
    if server:
        kind["tensor_parallel"] = int(parallel)
    elif int(parallel) > 1:
        converted.without["tensor_parallel_size"] = (
            "engines beside training have a GPU each; rollout.generator=vllm_server"
        )
    converted.ours["rollout.generator"] = kind


# --- data and rewards ---


def files(part: str) -> Rule:
    """Returns the rule of files of questions, or NAME@SPLIT of a data set. part: train or eval."""

    def named(value: Any, converted: Converted, settings: Settings) -> None:
        several = list(value) if isinstance(value, list) else [value]
        if len(several) > 1:
            converted.remarks.append(f"{DATA}.{part}: the first of {len(several)} files; write them as one.")
        data = converted.ours.setdefault(DATA, {})
        name, at, split = str(several[0]).partition("@")
        if at or (not re.search(r"\.(parquet|jsonl?|csv|tsv)$", name) and not name.startswith(("/", ".", "$", "~"))):
            data |= {"type": "huggingface", "name": name, f"{part}_split": split or {"eval": "test"}.get(part, part)}
        else:
            data |= {"type": "files", part: name}

    return named


def data_set(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the data of TRL and ms-swift: one name, of which another split is held out."""
    names = value if isinstance(value, list) else [value]
    name = str(names[0]).partition("#")[0].removeprefix("modelscope::").removeprefix("hf::")
    if re.search(r"\.(parquet|jsonl?|csv|tsv)$", name):
        held_out = of(settings, "val_dataset", default=None)
        converted.ours[DATA] = {"type": "files", "train": name, "eval": held_out or name}
        if held_out is None:
            converted.remarks.append(f"{DATA}.eval is the file to train on: name held-out questions.")
    else:
        train = of(settings, "dataset_train_split", default="train")
        held_out = of(settings, "dataset_test_split", default="test")
        converted.ours[DATA] = {"type": "huggingface", "name": name, "train_split": train, "eval_split": held_out}
    if len(names) > 1:
        converted.remarks.append(f"{DATA}: the first of {len(names)} data sets; write them as one.")


def column(key: str, *usual: str) -> Rule:
    """Returns the rule of a column's name; one that the rows' shape says is left to it."""

    def named(value: Any, converted: Converted, settings: Settings) -> None:
        if value and value not in usual:
            converted.ours.setdefault(DATA, {})[key] = value

    return named


def prompts_of_flow(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the prompts of flow_grpo: files of its folder, in the format that prompt_fn names."""
    formats = {"general_ocr": "ocr" if str(value).rstrip("/").endswith("ocr") else "plain", "geneval": "geneval"}
    kind = formats.get(str(of(settings, "prompt_fn", default="general_ocr")))
    if kind is None:
        raise UserError(f"prompt_fn={of(settings, 'prompt_fn')} can not be converted; there are {', '.join(formats)}")
    names = ("train_metadata.jsonl", "test_metadata.jsonl") if kind == "geneval" else ("train.txt", "test.txt")
    converted.ours[DATA] = {"type": "prompts", "format": kind}
    converted.ours[DATA] |= {part: f"{value}/{name}" for part, name in zip(("train", "eval"), names, strict=True)}


def reward_names(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the rewards of TRL, ms-swift (a list of names) and flow_grpo (weights by name)."""
    weights = of(settings, "reward_weights", default=None)
    named = value if isinstance(value, Mapping) else dict.fromkeys([value] if isinstance(value, str) else value, 1.0)
    if isinstance(weights, list):
        named = dict(zip(named, weights, strict=True))
    rewards = []
    for name, weight in named.items():
        spec: dict[str, Any] = {"name": REWARDS.get(name, name)}
        if name not in REWARDS:
            spec = _function(name) | {"signature": "trl"}
            converted.remarks.append(
                f"task.rewards: {name} is a function of yours; {spec['name']} has to be importable."
            )
        rewards.append(spec | ({} if float(weight) == 1.0 else {"weight": float(weight)}))
    converted.ours["task.rewards"] = rewards
    judged = next((spec for spec in rewards if spec["name"] != "think_answer"), rewards[0])
    converted.ours["task.accuracy"] = {key: one for key, one in judged.items() if key != "weight"}


def _function(name: str) -> dict[str, Any]:
    """Returns the reward of a function, FILE.py:NAME, or package.NAME."""
    file, _, function = name.partition(".py:")
    if function:
        return {"name": f"{file.removeprefix('./').strip('/').replace('/', '.')}:{function}"}
    module, dot, function = name.rpartition(".")
    return {"name": f"{module}:{function}" if dot else f"rewards:{name}"}


def reward_function(signature: str, file: str, function: str, usual: str) -> Rule:
    """Returns the rule of one function in a file, of verl and EasyR1. file, function: their keys; usual: its name."""

    def named(value: Any, converted: Converted, settings: Settings) -> None:
        if not value:
            return
        written = str(value) if ".py:" in str(value) else f"{value}:{of(settings, function, default=usual)}"
        spec = _function(written) | {"signature": signature}
        converted.ours |= {"task.rewards": [spec], "task.accuracy": dict(spec)}
        converted.remarks.append(f"task.rewards: {spec['name']} has to be importable from the folder where you start.")

    return named


def optimizer_betas(value: Any, converted: Converted, settings: Settings) -> None:
    first, second = of(settings, "adam_beta1", default=0.9), of(settings, "adam_beta2", default=0.999)
    converted.ours["optim.betas"] = [float(first), float(second)]


def schedule(value: Any, converted: Converted, settings: Settings) -> None:
    kinds = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if value in kinds:
        converted.ours["optim.schedule"] = kinds[value]
    else:
        converted.without["lr_scheduler_type"] = f"{value}; optim.schedule is one of {', '.join(kinds.values())}"


# --- denoising ---


def transition(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the transition of flow_grpo: the kind and the noise together."""
    kind = str(of(settings, "sde_type", default="sde"))
    if kind not in TRANSITIONS:
        raise UserError(f"sde_type={kind} can not be converted; there are {', '.join(TRANSITIONS)}")
    noise = float(of(settings, "noise_level", default=0.7))
    converted.ours["denoising.likelihood.transition"] = {"type": TRANSITIONS[kind], "noise": noise}


def window(value: Any, converted: Converted, settings: Settings) -> None:
    size, bounds = of(settings, "sde_window_size", default=0), of(settings, "sde_window_range", default=None)
    if size and bounds:
        converted.ours["denoising.likelihood.window"] = {
            "type": "random",
            "size": int(size),
            "first": int(bounds[0]),
            "last": int(bounds[1]),
        }


def trained_share(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the last step that is trained: flow_grpo leaves out those beyond a share of the chain."""
    taken = int(float(value) * int(of(settings, "num_steps")))
    if float(value) < 1 and not of(settings, "sde_window_size", default=0):
        converted.ours["denoising.likelihood.window"] = {"type": "all", "last": taken}


def moving_average(value: Any, converted: Converted, settings: Settings) -> None:
    if value:
        converted.ours["optim.ema"] = 0.9  # flow_grpo's, every 8 updates; here it is every one


def sizes(value: Any, converted: Converted, settings: Settings) -> None:
    height, width = of(settings, "height"), of(settings, "width")
    converted.ours["denoising.resolution"] = [int(height), int(width)] if height and width else int(value)


# --- the run ---


def named_run(value: Any, converted: Converted, settings: Settings) -> None:
    if value and of(settings, "default_local_dir", "save_checkpoint_path", "output_dir") is None:
        converted.ours["run_dir"] = f"runs/{value}"


def tracked(value: Any, converted: Converted, settings: Settings) -> None:
    if "wandb" in (value if isinstance(value, list) else str(value)):
        converted.ours["log.wandb"] = str(of(settings, "project_name", default="mmrl"))


def pixels(value: Any, converted: Converted, settings: Settings) -> None:
    bounds = {name: of(settings, name) for name in ("min_pixels", "max_pixels")}
    converted.ours["model.processor"] = {name: int(bound) for name, bound in bounds.items() if bound}


# --- robots of RLinf ---


def robot_weights(value: Any, converted: Converted, settings: Settings) -> None:
    if value and "model.path" not in converted.ours:
        weights(value, converted, settings)


def robot_prompts(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets the start states of a step: groups at once times rollout_epoch."""
    group = int(of(settings, "group_size"))
    groups = of(settings, "num_group_envs", default=None)
    at_once = int(groups) if groups is not None else int(of(settings, "env.train.total_num_envs")) // group
    converted.ours["rollout.prompts"] = at_once * int(of(settings, "rollout_epoch", default=1))


RULES: dict[str, Rule] = {
    "nothing": nothing,
    "minibatches": minibatches,
    "device_batch": device_batch,
    "flow_batch": flow_batch,
    "passes": passes,
    "steps": steps,
    "warmup_share": warmup_share,
    "warmup_steps": warmup_steps,
    "evaluation": never_zero("evaluation.every"),
    "saving": never_zero("checkpoint.every"),
    "estimator": estimator,
    "divided": divided,
    "global_std": global_std,
    "reduced": reduced,
    "loss_kind": loss_kind,
    "clipped": clipped,
    "dual_clip": dual_clip,
    "beta": beta,
    "exact_beta": exact_beta,
    "kl_loss": kl_loss,
    "plain_kl": plain_kl,
    "kl_in_reward": kl_in_reward,
    "entropy": entropy,
    "level": level,
    "filtered": filtered,
    "masked": masked,
    "top_p": truncated_sampling("top_p"),
    "top_k": truncated_sampling("top_k"),
    "dtype": dtype,
    "attention": attention,
    "adapters": adapters,
    "freeze_vision": frozen("vision"),
    "freeze_connector": frozen("connector"),
    "freeze_language": frozen("language"),
    "zero": zero,
    "full_shard": full_shard,
    "offload": offload,
    "engines": engines,
    "train_files": files("train"),
    "eval_files": files("eval"),
    "data_set": data_set,
    "prompt_column": column("problem_field", "prompt", "problem"),
    "answer_column": column("answer_field", "answer"),
    "image_column": column("image_field", "images"),
    "prompts_of_flow": prompts_of_flow,
    "reward_names": reward_names,
    "verl_reward": reward_function("verl", "path", "custom_reward_function.name", "compute_score"),
    "easyr1_reward": reward_function("easyr1", "reward_function", "reward_function_name", "main"),
    "betas": optimizer_betas,
    "schedule": schedule,
    "transition": transition,
    "window": window,
    "trained_share": trained_share,
    "moving_average": moving_average,
    "sizes": sizes,
    "before": put(evaluation__before=True),
    "robot_prompts": robot_prompts,
    "robot_weights": robot_weights,
    "robot_crop": crop,
    "named_run": named_run,
    "tracked": tracked,
    "pixels": pixels,
}
