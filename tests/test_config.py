"""A configuration is valid as a whole or refused in one line that names the key to change."""

import pytest

from mmrl.config import configure, load, to_yaml, validate
from mmrl.errors import UserError
from tests.helpers.command_line import ROOT

CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))


@pytest.fixture
def config(tmp_path):
    """Writes the text of a YAML file, `run_dir: r` unless given, and loads it."""

    def load_text(*overrides, text="run_dir: r\n", name="run.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(path, list(overrides))

    return load_text


@pytest.fixture
def refusal(config):
    """The one line with which a configuration is refused."""

    def refuse(*overrides, **given):
        with pytest.raises(UserError) as error:
            config(*overrides, **given)
        assert len(str(error.value).splitlines()) == 1
        return str(error.value)

    return refuse


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("modle.path=x", "unknown key modle; did you mean model?"),
        ("Steps=3", "unknown key Steps; did you mean steps?"),
        ("optim.learning_rate=1", "unknown key optim.learning_rate; "),
        ("optim.lr_=1", "unknown key optim.lr_; did you mean optim.lr?"),
        ("rollout.groupsize=8", "unknown key rollout.groupsize; did you mean rollout.group_size?"),
        (
            "algorithm.terms=[{type: kl, coeficient: 1}]",
            "unknown key algorithm.terms.0.coeficient; did you mean algorithm.terms.0.coefficient?",
        ),
        ("algorithm.surrogate.hihg=1", "unknown key algorithm.surrogate.hihg; did you mean algorithm.surrogate.high?"),
        (
            "rollout.dynamic_sampling.max_round=2",
            "unknown key rollout.dynamic_sampling.max_round; did you mean rollout.dynamic_sampling.max_rounds?",
        ),
        ("model.lora.rnk=3", "unknown key model.lora.rnk; did you mean model.lora.rank?"),  # an optional section
        ("log.zzzz=1", "unknown key log.zzzz; valid keys: lines_every, samples_every, samples, tensorboard, wandb"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_valid_one(refusal, tmp_path, override, expected):
    assert refusal(override).startswith(f"{tmp_path / 'run.yaml'}: {expected}")


def test_a_misspelt_required_key_is_called_misspelt_not_missing(refusal):
    assert "unknown key rundir; did you mean run_dir?" in refusal(text="rundir: r\n")
    with pytest.raises(UserError, match="run_dir: Field required"):
        configure({"steps": 3})
    assert "run_dir" in refusal(text="run_dir: ???\n")  # the usual mark of a value to fill in


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=fast",
        "optim.lr=0",
        "optim.lr=nan",
        "optim.betas=0.9",
        "optim=3",
        "steps=1.5",
        "steps=0",
        "seed=-1",
        "rollout.top_p=1.5",
        "rollout.temperature=0",
        "rollout.group_size=many",
        "rollout.dynamic_sampling=perhaps",
        "rollout.dynamic_sampling.max_rounds=0",
        "algorithm.surrogate=clipp",
        "algorithm.surrogate.high=-1",
        "algorithm.terms=kl",
        "engine.zero_stage=4",
        "run_dir=3",
        "run_dir=${nothing.there}",
        "algorithm.surrogate={type: dual_clip, cap: high}",
    ],
)
def test_a_wrong_value_names_its_key(refusal, tmp_path, override):
    message = refusal(override)
    assert message.startswith(f"{tmp_path / 'run.yaml'}: ") and override.split("=")[0] in message


def test_null_unsets_a_key(config):
    made = config(
        "model=null",
        "optim.lr=null",
        "rollout.dynamic_sampling=null",
        text="run_dir: r\nmodel: {path: x, dtype: float32}\noptim: {lr: 3}\nrollout: {dynamic_sampling: {low: 0.1}}\n",
    )
    assert made.model.path is None and made.optim.lr == 1e-6 and made.rollout.dynamic_sampling is None


IMAGES = """run_dir: r
model: {type: diffusion, path: m}
task: {type: image_generation, data: {type: digits, careless: 0.25}, second_scorer: {name: ocr}}
denoising: {steps: 3, likelihood: {type: chain}}
algorithm: {surrogate: {low: 0.5}}
"""


def test_null_unsets_what_the_file_says(config):
    assert config(text=IMAGES).task.second_scorer.name == "ocr"
    made = config("task.second_scorer=null", "denoising.steps=null", "task.data.careless=null", text=IMAGES)
    assert made.task.second_scorer is None and made.task.data.careless == 0.0
    assert made.section("denoising").steps == config(text="run_dir: r\nmodel: {type: diffusion}\n").denoising.steps != 3


def test_null_unsets_what_the_job_does_not_have_after_another_type(refusal, config):
    other = ["model.type=vision_language", "task.type=visual_qa"]
    assert "unknown key denoising" in refusal(*other, text=IMAGES)
    made = config(*other, "denoising=null", "task.second_scorer=null", text=IMAGES)
    assert made.task.type == "visual_qa" and "denoising" not in type(made).model_fields
    assert config("denoising=null", *other, text=IMAGES) == config(*other, "denoising=null", text=IMAGES)
    made = config("algorithm.type=supervised", "denoising.steps=null", "denoising.likelihood=null", text=IMAGES)
    assert made.algorithm.type == "supervised" and made.section("denoising").draws == 4
    made = config("algorithm.surrogate=cispo", "algorithm.surrogate.low=null", text=IMAGES)
    assert made.algorithm.surrogate.low.value == 0.2
    made = config("algorithm.surrogate=reinforce", "algorithm.surrogate.low=null", text=IMAGES)
    assert to_yaml(made).count("surrogate: reinforce") == 1


def test_null_in_a_file_unsets_what_the_file_that_it_extends_says(config, tmp_path):
    (tmp_path / "base.yaml").write_text(IMAGES)
    made = config(
        text="extends: base.yaml\nmodel: {type: vision_language}\ndenoising: null\n" + "task: {type: visual_qa}"
    )
    assert made.task.type == "visual_qa" and made.algorithm.surrogate.low.value == 0.5


@pytest.mark.parametrize(
    "override",
    ["optm=null", "rollout.group_siz=null", "algorithm.surrogate.hig=null", "denoising=null", "task.cells=null"],
)
def test_null_for_a_key_that_never_was_is_refused(refusal, override):
    assert f"unknown key {override.removesuffix('=null')}; " in refusal(override)


@pytest.mark.parametrize("override", ["optim.lr", "lr 3", "optim.lr=[1,", "optim.lr={", "optim.lr=", "=3"])
def test_an_override_that_is_none_is_quoted(refusal, override):
    assert refusal(override).startswith(f"override {override!r}")


def test_overrides_apply_in_order_over_the_file(config):
    made = config(
        "optim.lr=1e-5", "optim.lr=2e-5", "model.freeze=[vision]", "model.path=a=b", text="run_dir: r\noptim: {lr: 1}"
    )
    assert made.optim.lr == 2e-5 and made.model.freeze == ["vision"] and made.model.path == "a=b"
    assert made.steps == 100 and made.optim.betas == (0.9, 0.999)


@pytest.mark.parametrize("written", ["1e-5", "1E-5", "1.0e-5", "0.00001"])
def test_scientific_notation_is_a_number(config, written):
    assert config(f"optim.lr={written}").optim.lr == 1e-5
    assert config(text=f"run_dir: r\noptim:\n  lr: {written}\n").optim.lr == 1e-5


def test_extends_is_overridden_key_by_key(config, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.yaml").write_text("run_dir: a\nsteps: 3\noptim: {lr: 1, eps: 2}\n")
    (tmp_path / "base" / "b.yaml").write_text("extends: a.yaml\nsteps: 4\n")  # relative to the file it stands in
    made = config("steps=5", text="extends: base/b.yaml\noptim: {lr: 7}\n")
    assert (made.run_dir, made.steps, made.optim.lr, made.optim.eps) == ("a", 5, 7, 2)
    made = config(text="extends: base/b.yaml\n")
    assert made.steps == 4 and "extends" not in to_yaml(made)


@pytest.mark.parametrize("text", ["extends: run.yaml", "extends: 3", "extends: [a, b]", "extends: nowhere.yaml"])
def test_extends_that_leads_nowhere_is_refused(refusal, text):
    message = refusal(text=text)
    assert "extends" in message or "nowhere.yaml" in message


def test_extends_in_a_circle_is_refused(refusal, tmp_path):
    (tmp_path / "other.yaml").write_text("extends: run.yaml\n")
    assert refusal(text="extends: other.yaml").startswith(f"{tmp_path / 'other.yaml'}: extends: run.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "- 1\n- 2\n",
        "3\n",
        "just a word\n",
        "",
        "a: [1,\n",
        "steps: 1\nsteps: 2\n",
        "a: b: c\n",
        b"run_dir: \xff\xfe",
        b"\0",
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(refusal, tmp_path, text):
    assert refusal(text=text).startswith(f"{tmp_path / 'run.yaml'}: ")


def test_a_missing_file_is_refused_by_name(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match=f"^no configuration file {path}$"):
            load(path)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_what_is_printed_loads_as_the_same_configuration(path, tmp_path):
    lora = ["model.lora.rank=4"] if "lora" in type(load(path).model).model_fields else []
    made = load(path, ["optim.lr=1.25e-7", "algorithm.masks=[truncated]", *lora])
    (tmp_path / "printed.yaml").write_text(to_yaml(made))
    assert load(tmp_path / "printed.yaml") == made
    assert made.optim.lr == 1.25e-7 and (not lora or made.model.lora.rank == 4) and made.task == load(path).task


def test_there_are_recipes():
    assert len(CONFIGS) >= 2


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length_weighted", "shrinkage"])
def test_a_group_of_one_with_a_group_baseline_is_refused(refusal, config, baseline):
    alone = ["rollout.group_size=1", f"algorithm.baseline={baseline}"]
    message = refusal(*alone)
    assert "rollout.group_size=1" in message and f"algorithm.baseline={baseline}" in message
    assert config("algorithm.type=supervised").group_size == 1  # where there are no groups
    assert config(*alone, "algorithm.baseline=none").rollouts_per_step == 16


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_truncated_sampling_has_to_be_allowed_by_name(refusal, config, override):
    assert "rollout.allow_truncated_sampling=true" in refusal(override)
    config(override, "rollout.allow_truncated_sampling=true")


def test_half_precision_needs_master_weights(refusal, config):
    message = refusal("model.dtype=bfloat16")
    assert "model.dtype=bfloat16" in message and "engine.zero_stage" in message
    assert config("model.dtype=bfloat16", "engine.zero_stage=1").model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.path=a", "model.build=b:c"], "model: path and build"),
        (["model.path=a", "model.warm_start=b.yaml"], "model: path and warm_start"),
        (["rollout.dynamic_sampling={low: 0.5, high: 0.4}"], "rollout.dynamic_sampling: low=0.5 is above high=0.4"),
        (["optim.hold_steps=3"], "optim: hold_steps=3 lets only optim.groups learn at first, but there are none"),
        (
            ["rollout.max_response_length={type: additive, start: 9, metric: m, target: 1, rate: 1, low: 4}"],
            "rollout: max_response_length has no upper bound; set its `high`",
        ),
        (["engine.offload=all", "engine.zero_stage=2"], "engine.zero_stage=3"),
        (["engine.offload=optimizer"], "does not work with engine.zero_stage=0; set that to 1, 2 or 3"),
        (["model.lora.dropout=0.1"], "model.lora: dropout"),
    ],
)
def test_values_that_exclude_each_other_are_refused(refusal, overrides, key):
    assert key in refusal(*overrides)


def test_a_configuration_can_not_be_changed_by_those_who_read_it():
    with pytest.raises(ValueError, match="frozen"):
        validate({"run_dir": "r"}, "here").optim.lr = 3


def test_numbers_of_a_run():
    tree = {"run_dir": "r", "steps": 5, "algorithm": {"epochs": 2, "minibatches": 3}, "rollout": {"prompts": 6}}
    made = validate(tree, "here")
    assert (made.group_size, made.rollouts_per_step, made.total_updates) == (8, 48, 30)


COLOCATED, SERVER = ["rollout.generator=vllm_colocated"], ["rollout.generator=vllm_server"]
PARTIAL = ["rollout.generator.partial={oversample: 4, segment: 64}"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.type=diffusion", *COLOCATED], "unknown key rollout.generator"),
        (["algorithm.type=supervised", *COLOCATED], "unknown key rollout.generator"),
        (["rollout.generator=vllm_servr"], "rollout.generator.type=vllm_servr is unknown (did you mean vllm_server?)"),
        ([*COLOCATED, "rollout.generator.memroy=0.5"], "did you mean rollout.generator.memory?"),
        ([*COLOCATED, "rollout.generator.memory=1.5"], "rollout.generator.memory"),
        ([*COLOCATED, "rollout.generator.correction.weight.level=word"], "rollout.generator.correction.weight.level"),
        ([*COLOCATED, "rollout.generator.correction.weight.cap=0.5"], "rollout.generator.correction.weight.cap"),
        ([*COLOCATED, "rollout.generator.correction.reject.low=1.5"], "rollout.generator.correction.reject.low"),
        ([*COLOCATED, "rollout.generator.correction.reject.high=0.5"], "rollout.generator.correction.reject.high"),
        ([*COLOCATED, "rollout.temperature=3"], "rollout.temperature=3: vLLM accepts at most 2"),
        (
            [*COLOCATED, "rollout.temperature={type: linear, start: 1, end: 2.5, steps: 9}"],
            "rollout.temperature=2.5: vLLM accepts at most 2",
        ),
        ([*COLOCATED, "rollout.generator.async_steps=1"], "unknown key rollout.generator.async_steps"),
        (["rollout.generator.partial.oversample=4"], "unknown key rollout.generator.partial"),
        (
            [*COLOCATED, "rollout.generator.partial.oversample=17"],
            "rollout.generator.partial.oversample=17 is more than rollout.prompts=16",
        ),
        (
            [*COLOCATED, "rollout.generator.partial.oversample=4"],
            "rollout.generator.partial.segment=256 is not below rollout.max_response_length=",
        ),
        ([*COLOCATED, *PARTIAL, "rollout.micro_batch=8"], "set rollout.micro_batch=null"),
        (
            [*SERVER, *PARTIAL, "rollout.generator.async_steps=1", "rollout.generator.partial.max_staleness=1"],
            "rollout.generator: partial.max_staleness=1 must be more than async_steps=1",
        ),
        ([*COLOCATED, "rollout.generator.servers=2"], "unknown key rollout.generator.servers"),
        ([*COLOCATED, "rollout.generator.ray=auto"], "unknown key rollout.generator.ray"),
        (
            [*SERVER, "rollout.generator.ray=auto", "rollout.generator.addresses=[http://host:80]"],
            "rollout.generator: ray=auto starts engines, but addresses names running ones; remove one",
        ),
        ([*SERVER, "rollout.generator.addresses=[host:80]"], "'host:80' is not an address; write http"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_generator_that_does_not_fit_the_job_is_refused(refusal, overrides, expected):
    assert expected in refusal(*overrides)


def test_a_generator_that_fits_is_taken(config):
    made = config(*SERVER, *PARTIAL, "rollout.generator.async_steps=1", "rollout.generator.partial.max_staleness=2")
    assert made.generator.steps_ahead == 1 and made.generator.unfinished.oversample == 4
    assert made.correction.weight.cap == 2 and config().generator.unfinished is None


def test_the_script_of_another_library_is_no_configuration(refusal):
    script = "set -x\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_epochs=15\n"
    told = refusal(text=script, name="run.sh")
    assert "run.sh: expected a mapping at the top level, not a string; mmrl convert reads scripts" in told
    assert "total_epochs" not in told
