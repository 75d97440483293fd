"""Kinds of model that hold a second network, around a tiny Stable Diffusion 3 with LoRA."""

import pytest
import torch

from mmrl.build import build_policy, build_task
from mmrl.config import validate
from mmrl.doctor.memory_plan import Gpu, memory_lines
from mmrl.errors import UserError
from mmrl.tasks.image_generation.tiny import rewriter

PROMPTS = ["two red cats on a box", "7"]
REWRITTEN = {
    "model": {"type": "prompt_rewriting", "writer": {"template": "Draw: {}"}},
    "rollout": {"max_response_length": 4},
    "denoising": {"likelihood": {"transition": {"type": "flow_sde", "noise": 0.7}}},
}
FEW = {
    "model": {"type": "few_step_diffusion", "sampler": {"steps": 2}},
    "rollout": {},
    "denoising": {"likelihood": {"type": "matching", "draws": 2}},
    "algorithm": {"type": "matching", "terms": [{"type": "sampler_distillation"}]},
}
KINDS = {"rewritten": REWRITTEN, "few_step": FEW}


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    rewriter.build(folder, 0)
    return folder


def config_of(kind, path, writer, folder, **model):
    tree = KINDS[kind]
    own = {**tree["model"], "path": str(path), "lora": {"rank": 2, "alpha": 4.0}, **model}
    if kind == "rewritten":
        own["writer"] = {**own["writer"], **({"path": str(writer)} if writer is not None else {})}
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    data = {"type": "prompts", "train": str(folder / "prompts.txt"), "eval": str(folder / "prompts.txt")}
    return validate(
        {
            **tree,
            "run_dir": str(folder / "run"),
            "model": own,
            "task": {
                "type": "image_generation",
                "data": data,
                "rewards": [{"name": "random"}],
                "accuracy": {"name": "random"},
            },
            "rollout": {"prompts": 2, "group_size": 2, **tree["rollout"]},
            "denoising": {"steps": 4, "evaluation_steps": 4, **tree["denoising"]},
        },
        "test",
    )


def policy_of(config):
    task = build_task(config)
    torch.manual_seed(0)  # of the adapters
    return build_policy(config, task), task


def state_of(policy):
    return {name: p.detach().clone() for name, p in policy.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_both_networks_learn_and_are_saved(folder_of, writer, tmp_path, kind):
    """What is replayed is what was drawn, bit for bit; each of the two has a gradient; what is saved and read again
    draws the same."""
    policy, task = policy_of(config_of(kind, folder_of("sd3"), writer, tmp_path))
    prompts = [task.train[0], task.train[1]]
    with torch.no_grad():
        for parameter in policy.module.parameters():  # a fresh adapter would leave the pipeline as it is
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    batch = policy.rollout(prompts, 2, [1, 2, 3, 4])
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
    now = policy.replay(batch, policy.module)
    assert torch.equal(now.logp, old.logp) and now.logp[batch.mask].isfinite().all()
    extras = [part.sum() for part in now.extras.values() if isinstance(part, torch.Tensor)]
    (now.logp[batch.mask].sum() + sum(extras)).backward()
    for part, network in policy.module.parts.items():
        found = [p.grad for p in network.parameters() if p.requires_grad]
        assert any(grad is not None and grad.abs().sum() > 0 for grad in found), part
    policy.save(tmp_path / "saved", policy.module.state_dict())
    again, _ = policy_of(config_of(kind, tmp_path / "saved", None, tmp_path))
    before, after = state_of(policy), state_of(again)
    assert before.keys() == after.keys() and before
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    for one, other in zip(policy.respond(prompts, [5, 6]), again.respond(prompts, [5, 6]), strict=True):
        assert torch.equal(one.image, other.image)


def test_texts_that_are_written_have_no_embeddings(folder_of, writer, tmp_path):
    with pytest.raises(UserError, match="model.embeddings holds embeddings of prompts that are known before"):
        config_of("rewritten", folder_of("sd3"), writer, tmp_path, embeddings="said")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_two_networks_is_not_estimated(folder_of, writer, tmp_path, kind):
    config = config_of(kind, folder_of("sd3"), writer, tmp_path)
    with pytest.raises(
        UserError, match=f"memory cannot be estimated for model.type={config.model.type}, which has two"
    ):
        memory_lines(lambda overrides: config, 1, [Gpu.parse("80")])
