"""States of a masked likelihood that every epoch of updates draws anew, from the keys of a recipe to numbers that
transformers' own logits give."""

import pytest
import torch
import yaml

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.tasks.text_sums import tiny_model
from mmrl.training.metrics import Metrics
from tests.whole_runs.parts import make, release

pytestmark = pytest.mark.usefixtures("alone")
TREE = {
    "run_dir": "unset",
    "steps": 1,
    "threads": 1,
    "model": {"type": "discrete_diffusion"},
    "task": {"type": "text_sums", "rewards": [{"name": "tests.whole_runs.parts:spread"}]},
    "rollout": {"prompts": 4, "group_size": 2, "response_length": 4},
    "unmasking": {"likelihood": {"type": "one_step", "prompt_mask": 0.5}},
    "algorithm": {"epochs": 3, "minibatches": 2, "terms": [{"type": "kl", "coefficient": 0.1}]},
    "engine": {"micro_batch": 4},
    "evaluation": {"every": 0, "prompts": 4, "before": False},
    "checkpoint": {"best": False},
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer whose policy has left the reference."""
    folder = tmp_path_factory.mktemp("masked")
    tiny_model.build(folder / "model", seed=3, width=32, layers=1)
    recipe = folder / "redraw.yaml"
    recipe.write_text(yaml.safe_dump(TREE | {"model": {**TREE["model"], "path": str(folder / "model")}}))
    trainer = make(folder / "run", base=recipe)
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    yield trainer
    release(trainer)


@pytest.fixture(scope="module")
def rollouts(trainer):
    return trainer.collector.next(0, Metrics(trainer.engine))


def epochs(trainer, rollouts, brought=None):
    """The micro-batches of every epoch, as the trainer gets them."""
    rollouts.old_logp, shuffle = brought, torch.Generator().manual_seed(0)
    preparation, metrics = trainer.preparation, Metrics(trainer.engine)
    found = list(preparation.epochs(preparation.minibatches(rollouts, 0, shuffle, metrics)[0], shuffle))
    assert len(found) == 6
    return [[micro for minibatch in found[i : i + 2] for micro in minibatch] for i in (0, 2, 4)]


def row_of(micros, response):
    """The micro-batch and row of a response."""
    return next((m, i) for m in micros for i, r in enumerate(m.inputs) if torch.equal(r.response, response))


@torch.no_grad()
def logp(policy, record):
    """log p of a response's tokens with all of them and some tokens of the prompt masked, by transformers' logits."""
    mask = policy.layout.vocabulary.mask
    prompt = record.prompt.masked_fill(policy.scoring_states(record).prompt_masked[0], mask)
    row = torch.cat([prompt, torch.full_like(record.response, mask)])[None]
    logits = policy.module.model(input_ids=row).logits[0, -len(record.response) :]
    logits[:, policy.layout.vocabulary.suppressed] = -torch.inf
    return logits.log_softmax(-1).gather(1, record.response[:, None])[:, 0]


def test_every_epoch_masks_the_prompt_anew_for_all_policies(trainer, rollouts):
    policy, found = trainer.policy, epochs(trainer, rollouts)
    differ = 0
    for sampled in rollouts.inputs:
        of_epochs = [row_of(micros, sampled.response) for micros in found]
        masks = {tuple(policy.scoring_states(m.inputs[i]).prompt_masked[0].tolist()) for m, i in of_epochs}
        differ += len(masks) == 3
        advantages = [m.advantages[i] for m, i in of_epochs]
        assert torch.equal(advantages[0], advantages[1]) and torch.equal(advantages[0], advantages[2])
        for micro, i in of_epochs:
            torch.testing.assert_close(micro.old_logp[i], logp(policy, micro.inputs[i]), rtol=0, atol=2e-5)
        with trainer.reference.applied():
            for micro, i in of_epochs:
                torch.testing.assert_close(micro.ref_logp[i], logp(policy, micro.inputs[i]), rtol=0, atol=2e-5)
        assert (of_epochs[0][0].ref_logp - of_epochs[0][0].old_logp).abs().max() > 0.05
    assert differ >= 6  # of 8; short prompts may have the same tokens masked twice
    for micro in (micro for micros in found for micro in micros):
        with torch.no_grad():
            assert torch.equal(policy.replay(micro, trainer.engine).logp, micro.old_logp)  # the first ratio is 1


def test_rollouts_that_bring_their_likelihood_stay_in_their_states(trainer, rollouts):
    """The policy that made them is gone: it can not score them elsewhere."""
    brought = torch.full(rollouts.mask.shape, torch.nan)
    brought[0] = -1.5
    found = epochs(trainer, rollouts, brought)
    for position, sampled in enumerate(rollouts.inputs):
        for micros in found[1:]:
            micro, i = row_of(micros, sampled.response)
            assert (micro.inputs[i].seed == sampled.seed) == (position == 0)
            assert (micro.old_logp[i] == -1.5).all() == (position == 0)


def test_without_redraw_epochs_share_their_states(trainer, rollouts, monkeypatch):
    kept = trainer.policy.likelihood.model_copy(update={"redraw": False})
    monkeypatch.setattr(trainer.policy, "likelihood", kept)
    found = epochs(trainer, rollouts)
    assert {id(micro) for micro in found[0]} == {id(micro) for micro in found[1]} == {id(micro) for micro in found[2]}


def test_what_is_measured_in_the_first_epochs_states_is_refused():
    likelihood = {"type": "one_step"}
    tree = TREE | {"model": {**TREE["model"], "path": "unread"}, "unmasking": {"likelihood": likelihood}}
    tree["algorithm"] = {
        "epochs": 2,
        "terms": [{"type": "kl", "against": {"type": "view", "view": "no_text"}, "coefficient": 0.1}],
    }
    with pytest.raises(
        UserError, match="are computed only in the states of the first epoch; set unmasking.likelihood.redraw=false"
    ) as error:
        validate(tree, "test")
    assert "\n" not in str(error.value)
    likelihood["redraw"] = False
    validate(tree, "test")


# --- uniform diffusion ---

UNIFORM = {
    **{key: value for key, value in TREE.items() if key != "unmasking"},
    "model": {"type": "uniform_diffusion"},
    "noising": {"steps": 2, "draws": 1},
    "algorithm": {"epochs": 3, "minibatches": 2},
}


@torch.no_grad()
def noised_logp(policy, record):
    """log p of a response's tokens where some of them are others, by transformers' logits."""
    states = policy.scoring_states(record)
    tokens = policy.allowed[(states.noise[0] * len(policy.allowed)).long()]
    row = torch.cat([record.prompt, torch.where(states.masked[0], tokens, record.response)])[None]
    logits = policy.module.model(input_ids=row).logits[0, -len(record.response) :]
    logits[:, policy.layout.vocabulary.suppressed] = -torch.inf
    return logits.log_softmax(-1).gather(1, record.response[:, None])[:, 0]


def test_every_epoch_noises_a_response_anew(tmp_path):
    tiny_model.build(tmp_path / "model", seed=3, width=32, layers=1)
    recipe = tmp_path / "redraw.yaml"
    recipe.write_text(yaml.safe_dump(UNIFORM | {"model": {**UNIFORM["model"], "path": str(tmp_path / "model")}}))
    trainer = make(tmp_path / "run", base=recipe)
    policy, rollouts = trainer.policy, trainer.collector.next(0, Metrics(trainer.engine))
    found, differ = epochs(trainer, rollouts), 0
    for sampled in rollouts.inputs:
        of_epochs = [row_of(micros, sampled.response) for micros in found]
        assert of_epochs[0][0].inputs[of_epochs[0][1]].seed == sampled.seed
        differ += len({tuple(policy.scoring_states(m.inputs[i]).noise[0].tolist()) for m, i in of_epochs}) == 3
        for micro, i in of_epochs:
            torch.testing.assert_close(micro.old_logp[i], noised_logp(policy, micro.inputs[i]), rtol=0, atol=2e-5)
    assert differ == len(rollouts.inputs)
    policy.noising = policy.noising.model_copy(update={"redraw": False})
    found = epochs(trainer, rollouts)
    assert {id(micro) for micro in found[0]} == {id(micro) for micro in found[1]} == {id(micro) for micro in found[2]}
    release(trainer)


def test_what_is_measured_in_the_first_noise_is_refused():
    tree = UNIFORM | {"model": {**UNIFORM["model"], "path": "unread"}, "noising": {"draws": 1}}
    tree["algorithm"] = {"epochs": 2, "terms": [{"type": "kl", "against": {"type": "view", "view": "no_text"}}]}
    with pytest.raises(UserError, match="noising.redraw=true every epoch scores responses in new states"):
        validate(tree, "test")
    tree["noising"]["redraw"] = False
    validate(tree, "test")


def test_minibatches_of_every_epoch_are_prepared(trainer, rollouts):
    """The algorithm adds 1 to the advantages of each minibatch before the first update."""

    def one_more(minibatch, total):
        for micro in minibatch:
            micro.advantages = micro.advantages + 1

    trainer.algorithm.__dict__["prepare_minibatch"] = one_more
    try:
        found = epochs(trainer, rollouts)
    finally:
        del trainer.algorithm.__dict__["prepare_minibatch"]
    for row, sampled in enumerate(rollouts.inputs):
        for micros in found:
            micro, i = row_of(micros, sampled.response)
            assert torch.equal(micro.advantages[i], rollouts.advantages[row] + 1)
