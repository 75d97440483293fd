"""The recipes for GPUs fit an 80 GiB one, by parts that sum to less than 72: weights, gradients, optimizer, activations
at the real shapes, encoders, averages, vLLM's share, simulators. Nothing is computed: the meta device counts."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from mmrl.cli.main import main
from mmrl.config import load
from mmrl.doctor import memory_plan
from mmrl.doctor.checks import IMAGES
from mmrl.doctor.memory_plan import Gpu, Peaks, Plan, fit_overrides, memory_lines, memory_saving_overrides, plan_job
from mmrl.engine.memory import GIB, MemoryModel, peak_activations, static_memory
from mmrl.errors import UserError
from mmrl.settings import plain
from mmrl.settings.recipes import shipped
from mmrl.tasks.image_generation.tiny.pipeline import build_digits

CONFIGS = Path(__file__).parents[2] / "configs"
BIG = Gpu.parse("80")
PEAKS = Peaks()  # of all tests
SD35, FLUX, KONTEXT = (
    "stabilityai/stable-diffusion-3.5-medium",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.1-Kontext-dev",
)
JANUS = "deepseek-community/Janus-Pro-1B"
QWEN3, QWEN7 = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"
# Recipe, model, billions of weights as published; adapters come on top.
TABLE = [
    ("visual_qa_geometry3k", QWEN3, 3.75),
    ("visual_qa_geometry3k", QWEN7, 8.29),
    ("visual_qa_mmk12", QWEN3, 3.75),
    ("visual_qa_charts", QWEN3, 3.75),
    ("image_sd35_ocr", SD35, 2.24),
    ("image_detector", SD35, 2.24),
    ("image_janus", JANUS, 2.07),
    ("image_janus", "deepseek-community/Janus-Pro-7B", 7.42),
    ("image_flux_ocr", FLUX, 11.9),
    ("image_flux_ocr", KONTEXT, 11.9),
    ("image_flux2_klein", "black-forest-labs/FLUX.2-klein-4B", 3.88),
    ("image_zimage", "Tongyi-MAI/Z-Image-Turbo", 6.15),
    ("video_wan21", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.42),
    ("manipulation_maniskill_pickcube", QWEN3, 3.75),
    ("manipulation_libero_spatial", "openvla/openvla-7b", 7.54),
    ("manipulation_libero_oft", "openvla/openvla-7b", 7.71),
    ("manipulation_libero_smolvla", "lerobot/smolvla_base", 0.45),
    ("manipulation_libero_smolvla", "lerobot/pi0", 4.03),
    ("manipulation_libero_smolvla", "lerobot/pi05_base", 4.14),
]


def maker(recipe, path, *overrides):
    def make(more=()):
        return load(shipped()[recipe], [f"model.path={path}", *overrides, *more])

    return make


QUICK = {("manipulation_libero_smolvla", "lerobot/smolvla_base")}


def header(recipe):
    """What a recipe's first lines say that a rank takes, in GiB, and the command behind it."""
    lines = (shipped()[recipe]).read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if "GiB a rank" in line)
    return float(lines[place].split(" GiB a rank")[0].split()[-1]), lines[place + 1].lstrip("# ").split()


def cases():
    for recipe, path, billions in TABLE:
        marks = [] if (recipe, path) in QUICK else [pytest.mark.slow]
        yield pytest.param(recipe, path, billions, id=f"{recipe}-{path.split('/')[1]}", marks=marks)


@pytest.mark.parametrize(("recipe", "path", "billions"), cases())
def test_a_recipe_fits_an_80_gib_gpu_and_says_so(recipe, path, billions):
    if path.startswith("openvla"):
        pytest.importorskip("timm")
    config = maker(recipe, path)()
    made = config.model.memory_model(config, path)
    weights = sum(p.numel() for p in made.module.parameters()) / 1e9
    assert weights == pytest.approx(billions, rel=0.03)
    found = plan_job(config, path, 8, BIG, PEAKS)
    print("\n".join(found.lines()))
    assert found.fits(BIG) and found.max_bytes < 72 * GIB
    assert sum(found.training.values()) > weights * 1e9 / 8  # at ZeRO-3 a rank has its share
    assert found.training["activations"] > 0
    said, command = header(recipe)
    if f"model.path={path}" in command:
        assert found.max_bytes / GIB == pytest.approx(said, abs=0.06)


@pytest.mark.parametrize("recipe", sorted({recipe for recipe, _, _ in TABLE}))
def test_a_recipe_names_the_command_behind_its_estimate(recipe):
    _, words = header(recipe)
    assert words[:2] == ["mmrl", "train"] and (CONFIGS.parent / words[2]).samefile(shipped()[recipe])
    assert words[4:] == ["--dry-run", "--gpu", "80", "--ranks", "8"]
    assert any(words[3] == f"model.path={path}" for r, path, _ in TABLE if r == recipe)


def test_every_recipe_for_gpus_is_in_the_table():
    """Those whose first lines say that they are for GPUs; of SmolLM2 weights are made on the machine."""
    found = set()
    for file in CONFIGS.rglob("*.yaml"):
        lines = [line for line in file.read_text().splitlines() if line.startswith("#")]
        if any("GPU" in line for line in lines):
            found.add(file.stem)
    assert {recipe for recipe in found if not recipe.startswith("visual_qa_smollm")} == {
        recipe for recipe, _, _ in TABLE
    }


# --- what is counted, by hand ---


def test_two_linear_layers_hold_their_outputs_and_what_a_backward_pass_makes():
    layers = nn.Sequential(nn.Linear(3, 5, device="meta"), nn.Linear(5, 2, device="meta"))
    given = torch.empty(7, 3, device="meta")
    outputs = 7 * (5 + 2) * 4
    assert peak_activations(layers, lambda: layers(given), trains=False) == outputs
    # The gradients of both outputs, and of the second layer's weights until they are counted elsewhere.
    assert peak_activations(layers, lambda: layers(given)) == outputs + 7 * (2 + 5) * 4 + (5 * 2 + 2) * 4
    layers.requires_grad_(False)
    assert peak_activations(layers, lambda: layers(given), trains=False) == outputs


def test_gradients_of_weights_are_counted_elsewhere_once_they_are_complete():
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False, device="meta") for _ in range(4)))
    given = torch.empty(1, 100, device="meta")
    one = 100 * 100 * 4
    assert one < peak_activations(layers, lambda: layers(given)) < 2 * one


def test_checkpoints_hold_their_inputs_and_one_block():
    width, depth, rows = 64, 12, 32
    blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(width, width, False) for _ in range(8))) for _ in range(depth))
    blocks.to("meta")
    one = rows * width * 4

    def run(again):
        x = torch.empty(rows, width, device="meta", requires_grad=True)
        for block in blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x

    plain, again = peak_activations(blocks, lambda: run(False)), peak_activations(blocks, lambda: run(True))
    assert plain >= (8 * depth + 1) * one
    assert (depth + 8) * one <= again <= (depth + 8 + 5) * one + width * width * 4


def test_attention_holds_no_matrix():
    rows, length, size = 2, 512, 8
    query = torch.empty(rows, 4, length, size, device="meta", requires_grad=True)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    own, sums = rows * 4 * length * size * 4, rows * 4 * length * 4
    found = peak_activations(nn.Module(), attend)
    assert own + sums < found <= 6 * own + sums  # output, its gradient, three gradients and their sum
    assert found < rows * 4 * length * length * 4  # a matrix


@pytest.mark.parametrize(
    ("stage", "gradients", "weights", "optimizer"), [(0, 30, 46, 180), (1, 30, 46, 45), (2, 15, 46, 45)]
)
def test_what_zero_shares_out_over_four_ranks(stage, gradients, weights, optimizer):
    """15 weights are trained, 8 are not."""
    module = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 2)])
    module[1].requires_grad_(False)
    found = static_memory(module, stage, 4, "bfloat16")
    assert found == {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    assert static_memory(module, 3, 4, "float32") == {"weights": 23.0, "gradients": 15.0, "optimizer": 30.0}
    assert static_memory(module, 3, 4, "float32", moments=0)["optimizer"] == 0.0
    assert (
        static_memory(module, 0, 4, "bfloat16", moments=1)["optimizer"] == 120.0
    )  # one moment, and copies of the weights


def parts(*overrides):
    return plan_job(maker("image_sd35_ocr", SD35, *overrides)(), SD35, 8, BIG, PEAKS)


def test_the_parts_of_stable_diffusion_by_hand():
    """18.87M weights of LoRA are trained, of 2.262 billion."""
    config = maker("image_sd35_ocr", SD35)()
    module = config.model.memory_model(config, SD35).module
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    every = sum(p.numel() for p in module.parameters())
    found = parts()
    assert found.training["weights"] == found.sampling["weights"] == every * 2
    assert found.training["gradients"] == trained * 2 and "gradients" not in found.sampling
    assert found.training["optimizer"] == trained * 12 / 8
    assert found.training["averages"] == trained * (4 + 2)
    assert found.training["reference"] == trained * (2 + 2)
    assert found.training["fp32 gradients of a step"] == 6 * trained / 8
    assert found.sampling["encoder T5-XXL"] == 4.762e9 * 2 and "encoder T5-XXL" not in found.training
    more = parts("optim.ema=null", "algorithm.terms=[]", "engine.offload=optimizer", "model.encoders=stay")
    assert more.training["averages"] == more.training["reference"] == more.training["optimizer"] == 0
    assert more.training["encoder T5-XXL"] == 4.762e9 * 2


def test_the_larger_phase_decides():
    assert (Plan({"a": 1.0, "b": 1.0}, {"a": 3.0}, ()).max_bytes, Plan({"a": 4.0}, {"a": 3.0}, ()).max_bytes) == (
        3.0,
        4.0,
    )


def test_a_peak_is_computed_again_where_settings_differ(monkeypatch):
    """What ZeRO shares out leaves the peak of a micro-batch as it was; the window does not."""
    asked = []
    monkeypatch.setattr(
        memory_plan, "peak_activations", lambda module, compute, trains: asked.append(trains) or float(len(asked))
    )
    made, peaks = MemoryModel(nn.Linear(1, 1), lambda rows: None, sample=lambda: None), Peaks()
    changes = ([], ["engine.zero_stage=1"], ["denoising.likelihood.window.size=3"], [])
    jobs = [maker("image_sd35_ocr", SD35, *change)() for change in changes]
    assert [peaks.compute(job, made, trains=True) for job in jobs] == [1.0, 1.0, 2.0, 1.0]
    assert [peaks.compute(job, made, trains=False) for job in jobs[:2]] == [3.0, 3.0]


def test_suggestions_add_up(monkeypatch):
    """A job that takes 100 GiB: checkpoints take half of it off, and each halving of the micro-batch a fifth."""

    def shown(config, *_):
        told = plain(config)
        size = 100 * GIB * (0.5 if told["model"]["activation_checkpointing"] else 1.0)
        return Plan({"all": size * {4: 1.0, 2: 0.8, 1: 0.64}[told["engine"]["micro_batch"]]}, {}, ())

    monkeypatch.setattr(memory_plan, "plan_job", shown)
    rows = ["engine.micro_batch=4", "engine.micro_tokens=null"]
    make = maker("visual_qa_geometry3k", QWEN3, "model.activation_checkpointing=false", *rows)
    chosen, found = fit_overrides(make, QWEN3, 8, Gpu.parse("40"), PEAKS)
    assert chosen == ["model.activation_checkpointing=true", "engine.micro_batch=1"] and found.max_bytes == 32 * GIB


def test_rows_of_a_micro_batch_are_its_steps_too(tmp_path):
    """Two rollouts of four steps are as many rows as four of two."""
    build_digits(str(tmp_path / "model"), seed=0)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(IMAGES))

    def activations(micro, window, *more):
        limits = [f"engine.micro_batch={micro}", f"denoising.likelihood.window={{type: random, size: {window}}}", *more]
        config = load(tmp_path / "recipe.yaml", [*limits, "denoising.steps=8", "run_dir=none"])
        return plan_job(config, str(tmp_path / "model"), 1, BIG, PEAKS).training["activations"]

    assert activations(2, 4) == pytest.approx(activations(4, 2), rel=0.01)
    assert activations(4, 2) == pytest.approx(2 * activations(2, 2), rel=0.1)
    parted = [activations(4, window, "engine.steps_at_once=4") for window in (2, 6)]  # of 8 rows, and of 24
    assert parted[0] == parted[1] == activations(2, 2)


def test_steps_in_parts_are_offered_where_a_micro_batch_is_one_image(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(IMAGES))
    part = "engine.steps_at_once=1"
    for keys, offered in (["engine.micro_batch=2"], False), (["engine.micro_batch=1"], True), ([part], False):
        config = load(tmp_path / "recipe.yaml", ["run_dir=none", "engine.micro_batch=1", *keys])
        assert (part in memory_saving_overrides(config, 1)) == offered


@pytest.mark.slow
def test_a_micro_batch_counts_its_window_and_checkpoints_help():
    one, two = (parts(f"engine.micro_batch={n}").training["activations"] for n in (4, 8))
    assert two == pytest.approx(2 * one, rel=0.1)
    wide = parts("engine.micro_batch=4", "denoising.likelihood.window.size=4").training["activations"]
    assert wide == pytest.approx(two, rel=0.01)  # 4 x 4 rows are as many as 8 x 2
    assert parts("model.activation_checkpointing=false").training["activations"] > 10 * two


def test_vllm_takes_its_share_while_rollouts_are_made():
    make = maker("visual_qa_geometry3k", QWEN3, "rollout.generator={type: vllm_colocated, memory: 0.3}")
    found = plan_job(make(), QWEN3, 8, BIG, PEAKS)
    assert found.sampling["vLLM's share"] == 0.3 * 80 * GIB and "vLLM's share" not in found.training
    assert found.sampling["keys and values"] == found.sampling["activations"] == 0
    own = plan_job(maker("visual_qa_geometry3k", QWEN3, "rollout.generator=transformers")(), QWEN3, 8, BIG, PEAKS)
    # 64 responses of 3072 tokens: keys and values of 36 layers, 2 heads of 128 numbers of 2 bytes.
    assert own.sampling["keys and values"] == 64 * 3072 * 2 * 36 * 2 * 128 * 2
    # 1024 tokens' logits and their gradient, fp32, over the vocabulary.
    assert own.training["logits chunk"] == 1024 * 151936 * 4 * 2


def test_a_bound_on_tokens_is_a_bound_on_long_responses():
    """The longest response is of 3072 tokens, prompt included."""
    make = maker("visual_qa_geometry3k", QWEN3, "engine.micro_batch=4")
    told = {
        setting: plan_job(make([setting]), QWEN3, 8, BIG, PEAKS).training
        for setting in (
            "engine.micro_batch=1",
            "engine.micro_tokens=3072",
            "engine.micro_batch=2",
            "engine.micro_tokens=7000",
        )
    }
    assert told["engine.micro_tokens=3072"] == told["engine.micro_batch=1"]
    assert told["engine.micro_tokens=7000"] == told["engine.micro_batch=2"]
    assert told["engine.micro_batch=2"]["activations"] > told["engine.micro_batch=1"]["activations"]
    shipped = plan_job(maker("visual_qa_geometry3k", QWEN3)(), QWEN3, 8, BIG, PEAKS).training
    assert shipped == plan_job(make(["engine.micro_tokens=null"]), QWEN3, 8, BIG, PEAKS).training  # four of the longest
    assert "engine.micro_tokens=3500" in memory_saving_overrides(make(["engine.micro_tokens=7000"]), 8)
    assert not [move for move in memory_saving_overrides(make(["engine.micro_tokens=1"]), 8) if "micro_tokens" in move]


@pytest.mark.slow
def test_looks_are_computed_in_parts():
    pytest.importorskip("timm")
    make = maker("manipulation_libero_spatial", "openvla/openvla-7b")
    config = make()
    at_once = config.engine.steps_at_once
    part = plan_job(config, "openvla/openvla-7b", 8, BIG, PEAKS).training["activations"]
    every = plan_job(make(["engine.steps_at_once=28"]), "openvla/openvla-7b", 8, BIG, PEAKS)
    assert every.training["activations"] > 0.9 * 28 / at_once * part and not every.fits(BIG)


# --- what is suggested ---


@pytest.mark.slow
def test_settings_that_fit_are_found_and_do():
    make = maker("visual_qa_geometry3k", QWEN7, "model.activation_checkpointing=false")
    small = Gpu.parse("48")
    assert not plan_job(make(), QWEN7, 8, small, PEAKS).fits(small)
    chosen, found = fit_overrides(make, QWEN7, 8, small, PEAKS)
    assert found.fits(small) and "model.activation_checkpointing=true" in chosen
    again = plan_job(make(chosen), QWEN7, 8, small, PEAKS)
    assert again == found


@pytest.mark.slow
def test_what_can_not_fit_is_said_to():
    lines = memory_lines(maker("image_flux_ocr", FLUX), 1, [Gpu.parse("16")])
    assert "16 GiB: does not fit" in lines[-1] and "no known setting makes it fit" in lines[-1]


def test_a_plan_by_hand():
    plan = Plan({"weights": 3 * GIB, "activations": 70 * GIB}, {"weights": 3 * GIB}, ())
    assert plan.max_bytes == 73 * GIB and not plan.fits(BIG) and plan.fits(Gpu.parse("h200"))
    assert plan.lines()[-1].split() == ["sum", "73.00", "3.00"]
    assert Plan({"weights": 72 * GIB}, {"weights": 72 * GIB}, ()).fits(BIG)


@pytest.mark.parametrize("text", ["", "-3", "h1000", "nan", "1e9"])
def test_a_gpu_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="GiB"):
        Gpu.parse(text)


def test_a_small_network_and_a_model_without_a_path_are_refused(tmp_path):
    with pytest.raises(UserError, match="model.path is not set"):
        memory_lines(maker("image_sd35_ocr", "null"), 8, [BIG])
    (tmp_path / "mmrl_diffusion.json").write_text("{}")
    from mmrl.policies.diffusion import small

    (tmp_path / small.CONFIG).write_text("{}")
    make = maker("image_digits_flow", str(tmp_path), "model.warm_start=null")
    with pytest.raises(UserError, match="small network"):
        memory_lines(make, 1, [BIG])


def test_the_command_line_prints_parts_and_what_fits(capsys):
    recipe = str(CONFIGS / "vla" / "manipulation_libero_smolvla.yaml")
    arguments = ["train", recipe, "model.path=lerobot/smolvla_base", "--dry-run", "--ranks", "8", "--gpu"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "80,rtx4090"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and lines[0] == "estimated memory of each of 8 ranks, computed without weights:"
    table = {line[:28].strip(): line.split()[-2:] for line in lines[2:-4]}
    assert table["weights"] == ["0.84", "0.84"] and table["sum"] == ["8.76", "5.37"]
    assert lines[-3].startswith("80 GiB: fits (8.8 of 72.0 GiB") and lines[-2].startswith("rtx4090: fits")
    assert "s an update (" in lines[-1] and lines[-1].startswith("rtx4090: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "80"], "need --dry-run"),
        (["--dry-run", "--ranks", "2"], "--ranks needs --gpu"),
        (["--dry-run", "--gpu", "80,h1000"], "--gpu=h1000 is not known; give the GPU's memory in GiB"),
    ],
)
def test_a_wrong_question_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(CONFIGS / "vla" / "manipulation_libero_smolvla.yaml"), "model.path=x", *words])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and err.count("\n") == 1


def test_simulators_by_rule_of_thumb():
    libero = maker("manipulation_libero_spatial", "x")()
    assert memory_plan.simulator_bytes(libero) == 16 * memory_plan.RENDERER
    pickcube = maker("manipulation_maniskill_pickcube", "x")()
    assert memory_plan.simulator_bytes(pickcube) == memory_plan.PHYSX + 256 * 224 * 224 * 12
    assert memory_plan.simulator_bytes(maker("image_sd35_ocr", "x")()) == 0


def test_teachers_lie_beside_the_policy(tmp_path):
    """Qwen2.5-VL-7B has 8292166656 weights, by its published index of files; one that two tags name is there once."""
    tagged = f"{{by_tag: {{a: {{path: {QWEN7}}}, b: {{path: {QWEN7}}}}}}}"
    for teacher in (f"{{path: {QWEN7}}}", tagged):
        config = load(
            "visual_qa_geometry3k", [f"run_dir={tmp_path}", f"algorithm={{type: distillation, teacher: {teacher}}}"]
        )
        assert memory_plan.teacher_weights(config) == 8_292_166_656
    assert memory_plan.teacher_weights(load("visual_qa_geometry3k", [f"run_dir={tmp_path}"])) == 0
