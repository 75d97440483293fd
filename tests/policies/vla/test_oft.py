"""OpenVLA-OFT's L1 head and what takes the robot's state, from published pickles: tensors alone are opened, actions are
those of the architecture (`tiny_oft`), and what is trained goes back into the published files."""

import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributions import Normal

from mmrl.cli.main import main
from mmrl.errors import UserError
from mmrl.policies.vla.backbones import checkpoint_conversion
from mmrl.policies.vla.heads.gaussian_settings import L1Actions
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.policies.vla.statistics import load_state_quantiles
from mmrl.settings import make as made_section
from mmrl.sims import build
from tests.policies.vla import tiny_oft as reference
from tests.policies.vla.conftest import starts
from tests.whole_runs import parts as engine

STARTS, SEEDS = starts(0, 30), [1, 2, 3, 4]
CAMERAS = (["front"], ["front", "wrist"])
FILES = ("action_head.safetensors", "proprio_projector.safetensors")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """With and without what takes the state, converted: the folder, and weights in float64."""
    found = {}
    for state in (True, False):
        folder = tmp_path_factory.mktemp("oft")
        found[state] = folder, reference.write(folder, state=state)
        checkpoint_conversion.convert(folder, reference.CHUNK)
    return found


@pytest.fixture(scope="module")
def oft(make, checkpoints):
    def made(*, path=None, state=True, **options):
        folder = path or checkpoints[state][0]
        sim = options.pop("sim", None) or build("tests.policies.vla.tiny_oft:Arm", options.pop("rows", 4))
        own = {"prompt": None, "proprioception": state, "statistics": str(folder), "cameras": CAMERAS[1], **options}
        return make(own.pop("head", {"type": "l1"}), str(folder), sim=sim, **own)

    return made


def copy(checkpoints, folder, *, state=True, converted=True):
    shutil.copytree(checkpoints[state][0], folder)
    for name in FILES if not converted else ():
        (folder / name).unlink(missing_ok=True)
    return folder


def images_of(observation, row, cameras):
    return [observation.image(camera)[row] for camera in cameras]


# --- one conversion ---


class TestConversion:
    def test_tensors_are_those_of_the_pickles(self, checkpoints, tmp_path, capsys):
        folder = copy(checkpoints, tmp_path / "c", converted=False)
        assert command("convert", folder, "--chunk", 4) == 0
        assert [f"written {folder / name}" for name in FILES] == capsys.readouterr().out.splitlines()
        for name, published in zip(FILES, reference.parts().values(), strict=True):
            made = load_file(folder / name)
            assert made.keys() == published.keys()
            assert all(torch.equal(made[key], value) for key, value in published.items())
        with safe_open(folder / FILES[0], "pt") as opened:
            assert opened.metadata()["chunk"] == "4"

    def test_types_are_kept_and_names_may_lack_their_beginning(self, checkpoints, tmp_path):
        folder = copy(checkpoints, tmp_path / "c", converted=False)
        halved = {name: t.bfloat16() for name, t in reference.parts()[reference.HEAD].items()}
        torch.save(halved, folder / reference.HEAD)
        checkpoint_conversion.convert(folder, 4)
        made = load_file(folder / FILES[0])
        assert all(
            torch.equal(made[name], value) and made[name].dtype == torch.bfloat16 for name, value in halved.items()
        )

    @pytest.mark.parametrize("kind", ["torch", "plain", "hidden"])
    @pytest.mark.parametrize("file", [reference.HEAD, reference.PROJECTOR])
    def test_a_pickle_that_would_run_something_is_refused_before_it_does(self, checkpoints, tmp_path, kind, file):
        folder, trap = copy(checkpoints, tmp_path / "c", converted=False), tmp_path / "trap"
        given = {f"module.{name}": t for name, t in reference.parts()[file].items()}
        given["module.more" if kind != "hidden" else next(iter(given))] = Trap(trap)
        if kind == "plain":
            (folder / file).write_bytes(pickle.dumps({"module.more": Trap(trap)}, protocol=2))
        else:
            torch.save(given, folder / file)
        said = (
            f"{file} cannot be opened safely, since pickles of more than tensors can run code: it would import io.open"
        )
        with pytest.raises(UserError, match=said) as refusal:
            checkpoint_conversion.convert(folder, 4)
        assert "\n" not in str(refusal.value)
        assert not trap.exists() and not any((folder / name).exists() for name in FILES)
        torch.load(folder / file, weights_only=False) if kind != "plain" else pickle.loads((folder / file).read_bytes())
        assert trap.exists()  # it was a trap

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x02}q\x00."])
    def test_other_files_are_refused(self, checkpoints, tmp_path, content):
        folder = copy(checkpoints, tmp_path / "c", converted=False)
        (folder / reference.HEAD).write_bytes(content)
        with pytest.raises(UserError, match=rf"^\S*{reference.HEAD} (cannot be opened safely|is not a head)"):
            checkpoint_conversion.convert(folder, 4)

    def test_a_tensor_that_is_larger_than_its_data_takes_no_memory(self, checkpoints, tmp_path):
        """A file of 1 KB that would become four terabytes."""
        folder = copy(checkpoints, tmp_path / "c", converted=False)
        given = {f"module.{name}": t for name, t in reference.parts()[reference.HEAD].items()}
        given["module.model.fc2.bias"] = torch.zeros(1).expand(10**12)
        torch.save(given, folder / reference.HEAD)
        said = rf"{reference.HEAD} holds a tensor module\.model\.fc2\.bias of shape \[1000000000000\], which is larger"
        with pytest.raises(UserError, match=said):
            checkpoint_conversion.convert(folder, 4)

    def test_what_is_not_known_is_named(self, checkpoints, tmp_path):
        def refused(message, chunk=4, **files):
            folder = copy(checkpoints, tmp_path / str(len(list(tmp_path.iterdir()))), converted=False)
            for name, content in files.items():
                torch.save(content, folder / (name + "--150000_checkpoint.pt"))
            with pytest.raises(UserError, match=message):
                checkpoint_conversion.convert(folder, chunk)
            assert not any((folder / name).exists() for name in FILES)

        head, projector = reference.parts().values()
        refused("noisy_action_projector--150000_checkpoint.pt: its actions are denoised", noisy_action_projector={})
        refused(r"vision_backbone--.*: its image features are conditioned on the words \(FiLM\)", vision_backbone={})
        refused(
            "not a head of OpenVLA-OFT's L1 regression", action_head={"noise_predictor.fc1.weight": torch.ones(2, 2)}
        )
        lacking = {name: t for name, t in head.items() if name != "model.fc1.bias"}
        refused(r"action_head--.* lacks the tensor model\.fc1\.bias", action_head=lacking)
        refused(r"action_head--.* has an unknown tensor model\.more", action_head=head | {"model.more": torch.ones(1)})
        refused(
            r"layer_norm1\.bias must have shape \[96\], but it has \[1\]",
            action_head=head | {"model.layer_norm1.bias": torch.ones(1)},
        )
        refused(
            r"proprio_projector--.* lacks the tensor fc2\.bias", proprio_projector=dict(list(projector.items())[:3])
        )
        refused("holds something else than a mapping from names to tensors", proprio_projector=[1])
        refused("holds something else than a mapping from names to tensors", proprio_projector={"fc1.weight": 1})
        refused("no file says how many actions a chunk has; give it, such as --chunk 8", chunk=None)
        folder = copy(checkpoints, tmp_path / "two", converted=False)
        shutil.copy(folder / reference.HEAD, folder / "action_head--50000_checkpoint.pt")
        with pytest.raises(
            UserError, match="holds action_head--150000_checkpoint.pt and action_head--50000_checkpoint"
        ):
            checkpoint_conversion.convert(folder, 4)
        with pytest.raises(UserError, match="has no action_head--STEP_checkpoint.pt or proprio_projector--STEP"):
            checkpoint_conversion.convert(checkpoints[True][0] / "..", 4)

    @pytest.mark.parametrize(("action", "state", "chunk"), [(7, 8, 8), (7, 7, 5), (7, None, None), (14, 14, None)])
    def test_chunks_are_those_of_the_robots_of_the_paper(self, tmp_path, action, state, chunk):
        from mmrl.policies.vla.backbones import oft

        with torch.random.fork_rng():
            head = {f"model.{name}": t for name, t in oft.ActionNetwork(4, action).state_dict().items()}
            torch.save(head, tmp_path / reference.HEAD)
            if state is not None:
                torch.save(oft.ProprioProjector(4, state).state_dict(), tmp_path / reference.PROJECTOR)
        if chunk is None:
            with pytest.raises(UserError, match="no file says" if state is None else "14 numbers are ALOHA's"):
                checkpoint_conversion.convert(tmp_path, None)
        else:
            assert checkpoint_conversion.convert(tmp_path, None).chunk == chunk
            assert checkpoint_conversion.convert(tmp_path, 3).chunk == 3

    def test_options_of_the_other_conversion_are_refused(self, checkpoints, tmp_path, capsys):
        folder = copy(checkpoints, tmp_path / "c", converted=False)
        assert command("convert", folder, "--out", "x") == 2
        assert "--out is for configurations" in capsys.readouterr().err
        (tmp_path / "recipe.sh").write_text("x")
        assert command("convert", tmp_path / "recipe.sh", "--chunk", 4) == 2
        assert "--chunk is for the folder of a checkpoint" in capsys.readouterr().err


def command(*arguments):
    """What `mmrl ARGUMENTS` exits with."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in arguments])
    return ended.value.code or 0


class Trap:
    """Pickled, it is an order to make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


# --- its actions ---


@pytest.mark.parametrize("cameras", CAMERAS)
@pytest.mark.parametrize("state", [True, False])
def test_the_arm_gets_the_actions_of_the_architecture(oft, checkpoints, cameras, state):
    """The first look of evaluation's episodes, from the simulator's observation to what the simulator is told."""
    policy = oft(state=state, cameras=cameras, rows=2)
    seen = policy.sim.reset([0, 30], ["go", "go"])
    policy.respond(STARTS, SEEDS[:2])
    told = policy.sim.simulator.told[0]
    assert told.shape == (2, reference.CHUNK, reference.ACTION)
    for row in range(2):
        ids = policy.module.backbone._ids(policy.module.backbone.format_prompt(seen.instructions[row]), 1)
        numbers = seen.state[row] if state else None
        normalised = reference.actions(*checkpoints[state][1], images_of(seen, row, cameras), ids, numbers)
        np.testing.assert_allclose(told[row], reference.to_robot(normalised), rtol=1e-3, atol=1e-4)
        assert normalised.abs().max() > 1 and normalised.std(0).min() > 0.01


def test_what_the_state_is_matters_and_how_the_cameras_are_ordered(oft):
    policy, other = oft(rows=1), oft(rows=1, cameras=CAMERAS[1][::-1])
    seen = policy.sim.reset([30], ["go"])
    means = [mean(policy, seen), mean(policy, replace(seen, state=seen.state + 0.1)), mean(other, seen)]
    assert all((a - b).abs().max() > 1e-3 for a, b in [(means[0], means[1]), (means[0], means[2])])


def mean(policy, seen):
    """[row, chunk, action]"""
    module = policy.module
    with torch.no_grad():
        reading = module.encode(policy.collate(policy.prepare(seen)))
        chosen = module.head.act(reading, torch.zeros(len(seen), 0), ActionSampling([0] * len(seen), 0.0, False))
    return chosen["actions"]


def test_prompts_of_two_lengths_are_read_as_alone(oft, checkpoints):
    policy = oft(rows=2)
    seen = replace(policy.sim.reset([0, 30], ["go", "go"]), instructions=["go", "take to the robot"])
    both = mean(policy, seen)
    for row in range(2):
        torch.testing.assert_close(mean(policy, seen.select(np.array([row])))[0], both[row], rtol=1e-4, atol=1e-5)
    assert len({len(look.ids) for look in policy.prepare(seen)}) == 2


def test_states_are_scaled_by_hand(checkpoints):
    found = load_state_quantiles(str(checkpoints[True][0]), None, 2)
    scaled = found.normalize(np.array([[0.0, 0.25], [1.5, 0.3], [-9.0, 0.2]], np.float32))
    np.testing.assert_allclose(scaled, [[-0.5, -1], [1, 1], [-1, -1]], atol=1e-6)


def test_actions_are_not_clipped_as_tokens_are(oft):
    policy = oft()
    told = policy.normalizer.to_robot(np.array([[3.0, -2.0, 4.0]]))
    np.testing.assert_allclose(told, [[0.4, -3.0, 4.0]], atol=1e-12)
    assert oft(head={"type": "l1"}, state=False).normalizer.bounded is False


def test_tokens_read_a_state_through_the_projector_too(oft, checkpoints, tmp_path):
    folder = copy(checkpoints, tmp_path / "c")
    (folder / FILES[0]).unlink()
    (folder / reference.HEAD).unlink()
    policy = oft(path=folder, head={"type": "token", "decoding": "bidirectional"}, cameras=["front"])
    assert policy.module.head.state.project is None
    seen = policy.sim.reset([0], ["go"])
    with torch.no_grad():
        reading, other = (
            policy.module.encode(policy.collate(policy.prepare(s)))
            for s in (seen, replace(seen, state=seen.state + 0.1))
        )
        assert not torch.equal(reading.last, other.last)


# --- learning ---


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("fixed", [True, False])
def test_on_policy_ratio_is_exactly_one(oft, level, fixed):
    policy = oft(head={"type": "l1", "level": level, "fixed": fixed}, temperature=0.7, critic=True)
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    now = policy.replay(replace(rollouts, old_logp=old.logp, old_prediction=old.prediction), policy.module)
    assert rollouts.mask.any() and torch.equal(now.logp, old.logp) and now.logp[rollouts.mask].isfinite().all()
    now.logp[rollouts.mask].sum().backward()
    moved = {n for n, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"head.model.fc1.weight", "backbone.proprio.fc1.weight", "backbone.model.projector.fc1.weight"} <= moved
    assert ("head.log_std" in moved) != fixed


def test_likelihoods_are_those_around_the_published_actions(oft):
    policy = oft(head={"type": "l1", "std": 0.2, "level": "chunk"}, temperature=0.5, rows=1)
    rollouts = policy.rollout(STARTS[:1], 1, SEEDS[:1])
    look, around = rollouts.inputs[0][0], mean(policy, policy.sim.reset([0], ["go"]))[0]
    known = Normal(around.double(), 0.1).log_prob(look.sampled["actions"].double())[look.valid].sum()
    with torch.no_grad():
        found = policy.replay(rollouts, policy.module).logp[0, 0]
    assert found.item() == pytest.approx(known.item(), rel=1e-4)
    drawn = (look.sampled["actions"] - around).square().mean().sqrt()
    assert 0.03 < drawn < 0.3


def test_a_fixed_spread_has_no_entropy_to_learn():
    assert (
        "entropy" in made_section(L1Actions, {}).offers
        and "entropy" not in made_section(L1Actions, {"fixed": True}).offers
    )


def test_what_a_frozen_connector_holds(oft):
    policy = oft(freeze=["connector"])
    assert not any(p.requires_grad for p in policy.module.backbone.proprio.parameters())
    assert all(p.requires_grad for p in policy.module.head.parameters())


def of_run(folder, head):
    """Options of a run from a checkpoint, with two updates a step at a temperature."""
    return [
        *("model.build=null", f"model.path={folder}", f"action.statistics={folder}", "action.prompt=null"),
        *("task.simulator=tests.policies.vla.tiny_oft:Arm", "action.cameras=[front, wrist]", "action.head=null"),
        *(f"action.head={head}", "rollout.temperature=0.7", "steps=2", "algorithm.epochs=2", "optim.lr=1e-2"),
        *("task.rewards=[{name: random}]", "rollout.max_prompt_length=64"),
    ]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        pytest.param(0, [], marks=pytest.mark.slow),
        (1, ["model.dtype=bfloat16", "model.lora={rank: 2, alpha: 4}"]),
        pytest.param(2, ["algorithm={type: ppo, epochs: 2}"], marks=pytest.mark.slow),
    ],
)
def test_it_trains_and_plays_on_from_what_is_saved(checkpoints, tmp_path, stage, more):
    """Two updates a step: before the first one the ratio is exactly 1, at a temperature too."""
    folder = checkpoints[True][0]
    options = [*of_run(folder, "{type: l1}"), f"engine.zero_stage={stage}", *more]
    trainer = engine.make(tmp_path / "run", *options, base=engine.ROBOTS)
    gaps = engine.ratio_gaps(trainer)
    before = {name: p.detach().clone() for name, p in trainer.policy.module.named_parameters()}
    trainer.train()
    assert gaps[0, 0] == gaps[1, 0] == 0 < min(gaps[0, 1], gaps[1, 1])
    after = dict(trainer.policy.module.named_parameters())
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert {"head.log_std", "head.model.fc2.weight", "backbone.proprio.fc2.weight"} <= moved
    known = trainer.policy.module.state_dict()
    engine.release(trainer)
    saved = torch.load(tmp_path / "run" / "final" / "action_head--latest_checkpoint.pt", weights_only=True)
    assert all(torch.equal(saved[f"module.model.{n}"], known[f"head.model.{n}"]) for n in ("fc1.bias", "fc2.weight"))
    again = engine.make(tmp_path / "again", *options, f"model.path={tmp_path / 'run' / 'final'}", base=engine.ROBOTS)
    found = again.policy.module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in known.items())
    engine.release(again)


@pytest.mark.usefixtures("alone")
def test_a_residual_head_learns_around_the_published_one(checkpoints, tmp_path):
    """It adds nothing at first, and what it adds is all that learns; the published head goes back into its own file."""
    folder = checkpoints[True][0]
    options = of_run(folder, "{type: residual, base: {type: l1}, experts: 2, width: 16}")
    published = engine.make(tmp_path / "l1", *of_run(folder, "{type: l1}"), base=engine.ROBOTS)
    trainer = engine.make(tmp_path / "run", *options, base=engine.ROBOTS)
    assert trainer.policy.normalizer.bounded is False
    alone, seen = (run.policy.sim.reset([0, 30], ["go", "go"]) for run in (published, trainer))
    assert torch.equal(mean(trainer.policy, seen), mean(published.policy, alone))
    engine.release(published)
    before = {name: p.detach().clone() for name, p in trainer.policy.module.named_parameters()}
    gaps = engine.ratio_gaps(trainer)
    trainer.train()
    assert gaps[0, 0] == gaps[1, 0] == 0 < min(gaps[0, 1], gaps[1, 1])
    known = trainer.policy.module.state_dict()
    moved = {name for name, values in before.items() if not torch.equal(values, known[name])}
    assert {"head.log_std", "head.encode.weight", "head.experts.0.2.weight"} <= moved
    assert not any(name.startswith(("head.base.", "backbone.")) for name in moved)
    engine.release(trainer)
    final = tmp_path / "run" / "final"
    assert all(torch.equal(t, load_file(folder / FILES[0])[n]) for n, t in load_file(final / FILES[0]).items())
    again = engine.make(tmp_path / "again", *options, f"model.path={final}", base=engine.ROBOTS)
    assert all(torch.equal(again.policy.module.state_dict()[name], value) for name, value in known.items())
    engine.release(again)


# --- saved ---


def stirred(policy):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0, "targets": "all-linear"}])
def test_saved_and_loaded_alike(oft, tmp_path, lora):
    policy = stirred(oft(critic=True, lora=lora))
    rollouts = policy.rollout(STARTS, 1, SEEDS[:2])
    policy.save(tmp_path / "s", policy.module.state_dict())
    again = oft(path=tmp_path / "s", critic=True, statistics=policy.action.statistics)
    with torch.no_grad():
        old, new = (p.replay(rollouts, p.module) for p in (policy, again))
    assert torch.equal(old.logp, new.logp) and torch.equal(old.value, new.value)
    assert set(load_file(tmp_path / "s" / "vla.safetensors")) >= {"head.log_std"}
    assert not any(name.startswith("head.model.") for name in load_file(tmp_path / "s" / "vla.safetensors"))


def test_saved_as_published(oft, tmp_path):
    """As OpenVLA-OFT opens its own files: one for each part has its name and the word checkpoint in its name, and holds
    tensors behind a beginning that it takes away."""
    policy = stirred(oft())
    policy.save(tmp_path / "s", policy.module.state_dict())
    state = policy.module.state_dict()
    for part, beginning in (("action_head", "head."), ("proprio_projector", "backbone.proprio.")):
        (file,) = [f for f in (tmp_path / "s").iterdir() if part in f.name and "checkpoint" in f.name]
        written = torch.load(file, weights_only=True)
        assert all(name.startswith("module.") for name in written)
        found = {name.removeprefix("module."): t for name, t in written.items()}
        assert found.keys() == reference.parts()[{"action_head": reference.HEAD}.get(part, reference.PROJECTOR)].keys()
        assert all(torch.equal(t, state[beginning + name]) for name, t in found.items())
    bare = tmp_path / "bare"
    shutil.copytree(tmp_path / "s", bare)
    for name in (*FILES, "vla.json", "vla.safetensors"):
        (bare / name).unlink()
    checkpoint_conversion.convert(bare, 4)
    again = oft(path=bare)
    seen = policy.sim.reset([0, 30], ["go", "go"])
    assert torch.equal(mean(again, seen), mean(policy, seen)) and again.normalizer.to_robot(np.ones((1, 3)))[0, 2] == 1


# --- what does not fit ---


def unreadable(folder):
    """Weights that would be complained of if they were read."""
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


BAD = {
    "chunk": ({"chunk": 3}, {}, r"action\.chunk=3, but .*action_head\.safetensors was trained on chunks of 4"),
    "no projector": (
        {},
        {FILES[1]: None, reference.PROJECTOR: None},
        "has no proprio_projector.safetensors, through",
    ),
    "no head": (
        {},
        {FILES[0]: None, reference.HEAD: None},
        "action.head.type=l1, but .* has no action_head.safetensors",
    ),
    "pickles": (
        {},
        {FILES[0]: None},
        r"holds action_head--150000_checkpoint\.pt, a pickle, which mmrl train never opens",
    ),
    "state's pickle": ({}, {FILES[1]: None}, r"holds proprio_projector--.*, a pickle, which mmrl train never opens"),
    "diffusion": ({}, {"noisy_action_projector--1_checkpoint.pt": b""}, "its actions are denoised"),
    "film": ({}, {"vision_backbone--1_checkpoint.pt": b""}, r"the words \(FiLM\), which is not supported"),
    "torn": ({}, {FILES[0]: b"torn"}, r"action_head\.safetensors: .*header"),
    "state is not asked for": (
        {"proprioception": False},
        {},
        "action.proprioception=false, but .* reads the robot's state",
    ),
    "another head": (
        {"head": "token"},
        {},
        "holds an L1 regression head, action_head.safetensors, but action",
    ),
    "no statistics": (
        {"statistics": None},
        {},
        "action.statistics is not set, but model.path=.* was trained on scaled actions",
    ),
    "another data set": (
        {"statistics_key": "leg"},
        {},
        "action.statistics_key=leg does not name one data set of .*; it holds arm",
    ),
    "twice scaled": ({"standardise": True}, {}, "action.standardise=true, but OpenVLA-OFT scales the state"),
    "flash": ({"attention": "flash_attention_2"}, {}, "which action.head.type=l1 needs; set it to sdpa or eager"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named_before_weights_are_read(oft, checkpoints, tmp_path, name):
    options, files, message = BAD[name]
    folder = unreadable(copy(checkpoints, tmp_path / "c"))
    for file, content in files.items():
        (folder / file).unlink(missing_ok=True)
        if content is not None:
            (folder / file).write_bytes(content)
    if options.get("head") == "token":
        options = {**options, "head": {"type": "token", "decoding": "bidirectional"}}
    with pytest.raises(UserError, match=message) as said:
        oft(path=folder, **options)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("proprio", None, "arm.proprio is missing"),
        ("proprio", {"q01": [0.0], "q99": [1.0]}, "arm.proprio.q01 has 1 numbers, but the simulator's state has 2"),
        ("action", {"q01": [0.0], "q99": [1.0]}, "arm.action.q01 has 1 numbers, but the robot takes 3"),
    ],
)
def test_statistics_must_fit(oft, checkpoints, tmp_path, kind, change, message):
    folder = unreadable(copy(checkpoints, tmp_path / "c"))
    told = {name: dict(held) for name, held in reference.STATISTICS["arm"].items()}
    told.pop(kind)
    if change is not None:
        told[kind] = change
    (folder / "dataset_statistics.json").write_text(json.dumps({"arm": told}))
    with pytest.raises(UserError, match=message):
        oft(path=folder)


def test_sizes_of_another_robot_are_named(make, checkpoints, tmp_path):
    folder = unreadable(copy(checkpoints, tmp_path / "c"))
    line = {"action": {"q01": [0.0], "q99": [1.0]}, "proprio": {"q01": [0.0], "q99": [1.0]}}
    (folder / "dataset_statistics.json").write_text(json.dumps({"line": line}))
    with pytest.raises(
        UserError, match=r"action_head\.safetensors makes actions of 3 numbers, but the simulator takes 1"
    ):
        make({"type": "l1"}, str(folder), statistics=str(folder), prompt=None)
    (folder / FILES[0]).unlink()
    (folder / reference.HEAD).unlink()
    with pytest.raises(
        UserError, match=r"proprio_projector\.safetensors takes a state of 2 numbers, but the simulator's has 1"
    ):
        make({"type": "token", "decoding": "bidirectional"}, str(folder), statistics=str(folder), prompt=None)


def test_it_is_for_openvla_alone(make):
    with pytest.raises(UserError, match=r"action\.head\.type=l1 is for OpenVLA-OFT, which model\.path=.* is not"):
        make({"type": "l1"})
