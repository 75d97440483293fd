"""The rewards that need packages or weights beyond the default installation, as `mmrl rewards` lists them."""

from __future__ import annotations

from dataclasses import dataclass

QWEN_7B = "the base model Qwen/Qwen2-VL-7B-Instruct"
RATE_THE_IMAGE = '"{prompt}" is the prompt of this image. Rate how well the image shows it and its quality'


@dataclass(frozen=True)
class WeightFile:
    """A file or a repository of weights. gigabytes, license: None if they are not known."""

    name: str
    gigabytes: float | None = None
    license: str | None = None


@dataclass(frozen=True)
class CatalogueEntry:
    """Requirements of a reward: options, weights and packages.

    reward: its name in `task.rewards`. options: YAML of its options, one line each. weights: the files that its options
    name, or that are downloaded at the first use. extras: optional dependencies of mmrl that it needs. requirements:
    pinned packages of an environment of its own; empty for a reward that runs in the trainer's. environment: the
    environment's name; rewards of the same name share one. serve: the arguments, after the environment's python, of a
    server that has to run before training; "" if the environment's python itself is named in the recipe, as `python`.
    python_below: the first Python version for which the packages have no wheels.
    """

    reward: str
    options: tuple[str, ...] = ()
    weights: tuple[WeightFile, ...] = ()
    extras: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    environment: str = ""
    serve: str = ""
    python_below: tuple[int, int] | None = None


VLLM = ("vllm==0.32.0", "transformers==5.19.0")
SERVER = "-m vllm.entrypoints.cli.main serve {model} --host 127.0.0.1 --port 8100"


def _served(reward: str, model: str, gigabytes: float, license: str | None, *options: str) -> CatalogueEntry:
    """Returns the entry of a reward whose model runs in a vLLM server. gigabytes, license: size and license of
    the model's weights. options: further lines of the reward's options."""
    return CatalogueEntry(
        reward,
        ('base_url: "http://localhost:8100/v1"', f"model: {model}", *options),
        (WeightFile(model, gigabytes, license),),
        requirements=VLLM,
        environment="vllm",
        serve=SERVER.format(model=model),
    )


CATALOGUE: dict[str, CatalogueEntry] = {
    "clip_similarity": CatalogueEntry(
        "clip_similarity",
        ("model: openai/clip-vit-large-patch14",),
        (WeightFile("openai/clip-vit-large-patch14", 1.7),),
    ),
    "pickscore": CatalogueEntry(
        "pickscore", ("model: yuvalkirstain/PickScore_v1",), (WeightFile("yuvalkirstain/PickScore_v1", 3.9),)
    ),
    "hpsv2": CatalogueEntry(
        "hpsv2",
        ("weights: HPS_v2_compressed.pt",),
        (WeightFile("HPS_v2_compressed.pt", None, "Apache-2.0"),),
        extras=("diffusion",),
    ),
    "aesthetic": CatalogueEntry(
        "aesthetic",
        ("head: sac+logos+ava1-l14-linearMSE.pth",),
        (
            WeightFile("sac+logos+ava1-l14-linearMSE.pth", None, "Apache-2.0"),
            WeightFile("openai/clip-vit-large-patch14", 1.7),
        ),
    ),
    "image_reward": CatalogueEntry(
        "image_reward",
        ("weights: ImageReward.pt",),
        (
            WeightFile("ImageReward.pt", 1.8, "Apache-2.0"),
            WeightFile("the tokenizer google-bert/bert-base-uncased", None, "Apache-2.0"),
        ),
    ),
    "hpsv3": CatalogueEntry(
        "vlm_reward",
        (
            "model: Qwen/Qwen2-VL-7B-Instruct",
            "weights: HPSv3.safetensors",
            "instruction: hpsv3.txt",
            'tokens: {"<|Reward|>": 1.0}',
        ),
        (WeightFile("HPSv3.safetensors", None, "MIT"), WeightFile(QWEN_7B, 16.6, "Apache-2.0")),
    ),
    "videoalign": CatalogueEntry(
        "vlm_reward",
        (
            "model: Qwen/Qwen2-VL-2B-Instruct",
            "weights: model.pth",
            "instruction: videoalign.txt",
            'tokens: {"<|VQ_reward|>": 1.0, "<|MQ_reward|>": 1.0, "<|TA_reward|>": 1.0}',
        ),
        (
            WeightFile("model.pth of KwaiVGI/VideoReward"),
            WeightFile("the base model Qwen/Qwen2-VL-2B-Instruct", 4.4, "Apache-2.0"),
        ),
    ),
    "editreward": CatalogueEntry(
        "vlm_reward",
        (
            "model: Qwen/Qwen2.5-VL-7B-Instruct",
            "weights: EditReward.safetensors",
            "instruction: {head_0: follows.txt, head_1: quality.txt}",
            'tokens: {"<|Reward|>": 1.0}',
            "source: true",
        ),
        (
            WeightFile("the published file of TIGER-Lab/EditReward-Qwen2.5-7B-VL"),
            WeightFile("the base model Qwen/Qwen2.5-VL-7B-Instruct", 16.6, "Apache-2.0"),
        ),
    ),
    "deqa": CatalogueEntry(
        "deqa",
        ("model: zhiyuanyou/DeQA-Score-Mix3",),
        (WeightFile("zhiyuanyou/DeQA-Score-Mix3", None, "MIT"),),
        requirements=(
            "torch==2.2.2",
            "torchvision==0.17.2",
            "transformers==4.36.1",
            "tokenizers==0.15.0",
            "sentencepiece==0.2.0",
            "protobuf==4.25.3",
            "accelerate==0.25.0",
            "einops==0.6.1",
            "icecream==2.1.3",
            "numpy==1.26.4",
            "pillow==10.2.0",
            "pydantic==2.7.4",
            "safetensors==0.4.2",
            "huggingface-hub==0.20.3",
        ),
        environment="deqa",
        python_below=(3, 13),
    ),
    "unified_reward": _served(
        "written_score",
        "CodeGoat24/UnifiedReward-qwen-7b",
        16.6,
        "MIT",
        f"question: '{RATE_THE_IMAGE}, from 1 to 5, after \"Final Score:\".'",
        'after: "Final Score:"',
        "low: 1",
        "high: 5",
    ),
    "omni_verifier": _served(
        "written_score",
        "comin/OmniVerifier-7B",
        16.6,
        None,
        'question: \'This image was generated from "{prompt}". Are all objects, attributes and relations in it right? '
        'Answer in JSON: {"answer": true or false, "explanation": the main error}\'',
        "after: '\"answer\":'",
        "words: {true: 1, false: 0}",
    ),
    "geneval2": _served("soft_tifa", "Qwen/Qwen3-VL-8B-Instruct", 17.5, "Apache-2.0"),
    "ocr": CatalogueEntry("ocr", extras=("ocr",)),
    "geneval": CatalogueEntry(
        "geneval",
        ("detector: {kind: transformers, path: PekingU/rtdetr_r50vd}",),
        (WeightFile("PekingU/rtdetr_r50vd, or another detector of COCO's classes", None, "Apache-2.0"),),
    ),
    "brisque": CatalogueEntry("brisque", extras=("guards",)),
    "safe_for_work": CatalogueEntry("safe_for_work", extras=("guards",)),
    "chart_code": CatalogueEntry("chart_code", extras=("charts",)),
    "svg_code": CatalogueEntry("svg_code", extras=("svg",)),
    "solid_code": CatalogueEntry("solid_code", extras=("solids",)),
}
