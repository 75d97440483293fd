"""`mmrl check --model`: families that pass it, and a planted fault for each of its lines."""

import json

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mmrl.cli.main import main
from mmrl.preflight import model_trials
from mmrl.preflight.conformance import ModelCheck, Trial, table
from tests.helpers.tiny_models import CHECKED, FAMILIES, PAD, build

# With tests of their own, or like another one
BESIDE = [pytest.param(family, marks=pytest.mark.slow) for family in (*FAMILIES, "llava_next")]
QUICK = [family for family in CHECKED if family != "llava_next"]
LINES = [
    *("configuration", "processor", "template", "placeholders", "weights", "end tokens", "policy"),
    *("images", "sampling", "padding", "positions", "gradient", "save and load", "LoRA"),
]


@pytest.fixture
def llava(tmp_path):
    return build("llava", tmp_path / "llava")


def failed(folder, **options):
    """The reasons by line, of those that fail."""
    return {trial.name: trial.text for trial in ModelCheck(str(folder), **options).run() if trial.passed is False}


def changed(folder, name, **keys):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize("family", [*QUICK, *BESIDE])
def test_a_family_passes(family, tmp_path):
    trials = ModelCheck(str(build(family, tmp_path))).run()
    assert [trial.name for trial in trials] == LINES
    assert [trial.text for trial in trials if not trial.passed] == []


def test_numbers_of_a_model_by_hand(llava):
    lines = {trial.name: trial.text for trial in ModelCheck(str(llava)).run()}
    # 32 x 32 pixels in patches of 8
    assert lines["placeholders"] == "an image of 64 x 48 pixels becomes 16 tokens, two others 32"
    assert lines["end tokens"] == "'<|im_end|>'" and lines["configuration"] == "llava, 2048 tokens at most"
    assert lines["template"] == "content as a list of parts, system role"
    # q, k, v, o, gate, up and down of two layers; q, k, v, out and two of the MLP of three; two of the projector
    assert lines["LoRA"] == "all-linear adapts 14 layers of language, 18 layers of vision, 2 layers of connector"


def test_random_weights_where_there_are_none(tmp_path):
    folder = build("gemma3", tmp_path)
    (folder / "model.safetensors").unlink()
    assert "safetensors" in failed(folder)["weights"]
    assert failed(folder, random=True) == {}


def test_families_that_are_not_there_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_vl"}))
    reason = failed(tmp_path)["configuration"]
    assert "`kimi_vl`" in reason and "does not recognize" in reason and "\n" not in reason
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    folder = build("idefics3", tmp_path / "smolvlm")
    changed(folder, "processor_config.json", processor_class="SmolVLMProcessor")
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps({"video_processor_type": "SmolVLMVideoProcessor"})
    )
    assert "num2words" in failed(folder)["processor"]


# --- planted faults ---


def test_a_text_model_is_named(tmp_path):
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **tiny)).save_pretrained(tmp_path)
    trials = ModelCheck(str(tmp_path)).run()
    assert "qwen2 model, which does not read images" in trials[0].text
    assert trials[0].passed is False and {trial.passed for trial in trials[1:]} == {None}


def test_a_template_that_drops_images(llava):
    (llava / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}")
    assert "drops images" in failed(llava)["template"]


def test_an_image_token_of_another_model(llava):
    changed(llava, "config.json", image_token_index=7)
    assert "becomes 0 tokens 7, the image token in config.json" in failed(llava)["placeholders"]


def test_a_processor_of_another_count(llava):
    changed(llava, "processor_config.json", patch_size=16)  # 4 tokens, and the model makes 16 features
    found = failed(llava)
    assert "tokens" in found["images"] and "placeholders" not in found


def test_an_end_that_the_template_does_not_write(llava):
    changed(llava, "generation_config.json", eos_token_id=0)
    changed(llava, "tokenizer_config.json", eos_token=PAD)
    assert "closes a response with '<|im_end|>', but generation stops only at" in failed(llava)["end tokens"]


def planted(monkeypatch, change):
    """Changes each policy that a check makes."""
    make = model_trials.policy_of

    def policy_of(model, processor):
        policy = make(model, processor)
        change(policy)
        return policy

    monkeypatch.setattr(model_trials, "policy_of", policy_of)


def after_projector(policy, change):
    policy.module.model.model.multi_modal_projector.register_forward_hook(lambda module, inputs, out: change(out))


def test_images_that_do_not_count(llava, monkeypatch):
    planted(monkeypatch, lambda policy: after_projector(policy, lambda out: out * 0))
    found = failed(llava)
    assert "another image does not change log-probabilities" in found["images"] and "vision" in found["gradient"]


def test_a_gradient_that_stops_at_the_images(llava, monkeypatch):
    planted(monkeypatch, lambda policy: after_projector(policy, lambda out: out.detach()))
    assert failed(llava) == {"gradient": "no gradient reaches the vision part"}


@pytest.mark.parametrize(("factor", "reason"), [(float("nan"), "is not finite"), (1e6, "no step is small enough")])
def test_a_gradient_that_is_no_step(llava, monkeypatch, factor, reason):
    def hooked(out):
        if out.requires_grad:
            out.register_hook(lambda grad: grad * factor)
        return out

    planted(monkeypatch, lambda policy: after_projector(policy, hooked))
    found = failed(llava)
    assert found.keys() == {"gradient"} and reason in found["gradient"]


def test_scores_that_depend_on_padding(llava, monkeypatch):
    def change(policy):
        collate = policy.runner.collate
        blind = lambda batch: batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}  # noqa: E731
        monkeypatch.setattr(policy.runner, "collate", lambda rows, **more: blind(collate(rows, **more)))

    planted(monkeypatch, change)
    found = failed(llava)
    assert "padding on the left and on the right differ" in found["padding"] and "sampling" in found


def test_scores_of_another_temperature(llava, monkeypatch):
    def change(policy):
        score = policy.replay

        def replay(rollouts, model, **more):
            result = score(rollouts, model, **more)
            result.logp = result.logp * 1.01
            return result

        monkeypatch.setattr(policy, "replay", replay)

    planted(monkeypatch, change)
    assert "padded batch and of a plain forward differ by up to 0.0" in failed(llava)["positions"]


def test_weights_that_are_lost_in_saving(llava, monkeypatch):
    def change(policy):
        save = policy.save
        policy.save = lambda folder, state: save(folder, {k: v * (1 + ("lm_head" in k)) for k, v in state.items()})

    planted(monkeypatch, change)
    assert failed(llava).keys() == {"save and load"}


# --- the command ---


def test_the_command_prints_a_table_and_ends_with_its_code(llava, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(llava)])
    lines = capsys.readouterr().out.splitlines()
    assert not ended.value.code and len(lines) == len(LINES) + 1
    assert lines[-1] == "it passes: it can be trained" and lines[0].startswith("passed     configuration  llava")
    (llava / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(llava)])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and lines[4].startswith("failed     weights")
    assert lines[5].startswith("not tried") and lines[-1].startswith("it does not pass: weights, ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [([], "needs the name of a configuration, or --model"), (["x.yaml", "--model", "y"], "leave out either x.yaml")],
)
def test_the_command_refuses_what_does_not_go_together(arguments, line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2 and line in capsys.readouterr().err


def test_a_table_says_what_was_not_tried():
    trials = [
        Trial("a", True, "x"),
        Trial("long", None, "y"),
        Trial("b", False, "z"),
    ]
    assert table(trials) == [
        "passed     a     x",
        "not tried  long  y",
        "failed     b     z",
        "it does not pass: long, b",
    ]
