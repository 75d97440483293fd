"""Rules as in `external_rules`, of the model, data, rewards, denoising and robots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmrl.cli.convert import Converted, Settings, weights
from mmrl.cli.external_rules import Rule, of
from mmrl.errors import UserError

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


# --- model and engine ---


def dtype(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets model.dtype to bfloat16 or float32."""
    kinds = {"bf16": "bfloat16", "bfloat16": "bfloat16", "true": "bfloat16", "fp32": "float32", "float32": "float32"}
    kind = kinds.get(str(value).lower().removeprefix("torch."))
    if kind is None and value not in (False, None, "auto", "no"):
        converted.without["dtype"] = f"{value}; model.dtype is bfloat16 or float32"
    elif kind is not None:
        converted.ours["model.dtype"] = kind


def attention(value: Any, converted: Converted, settings: Settings) -> None:
    """Sets model.attention where the kind is known."""
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
    """Sets ZeRO stage and offload from the name of a DeepSpeed file, such as zero3_offload."""
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
    """Sets the generator of TRL and ms-swift (use_vllm, vllm_mode), and of verl's name of an engine."""
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
    """Sets the learning rate's schedule where the kind is known."""
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
    """Sets flow_grpo's random window of stochastic steps."""
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
