"""A whole step of every kind of policy with its weights on a pretend GPU: nothing of host and device is mixed, and what
crosses between them, or waits, stays within a budget."""

from pathlib import Path

import pytest
import torch

from mmrl import build
from mmrl.config import load, to_yaml
from mmrl.report.run import Run
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics
from tests.helpers.pretend import DEVICE, MixedDevices, Pretended, moved, pretending
from tests.joints.parts import Ledger as Plain
from tests.whole_runs.parts import TINY

HERE = Path(__file__).parents[1] / "whole_runs"
KL = "algorithm.terms=[{type: kl, coefficient: 0.1}]"
TWICE = ["algorithm.minibatches=2", "kernels.backend=torch", "rollout.prompts=2"]
LORA = "model.lora={rank: 4, alpha: 8, targets: all-linear}"
ROBOTS, IMAGES = HERE / "tiny_robots.yaml", HERE / "tiny_images.yaml"
FLOW = "action.head={type: flow, width: 32, depth: 1, steps: 4, evaluation_steps: 4"


JOBS = {
    "vlm, lora": [TINY, KL, LORA],
    "vlm, frozen tower, checkpointing": [
        TINY,
        "model.freeze=[vision, connector]",
        "model.activation_checkpointing=true",
    ],
    "images, chain": [IMAGES],
    "robots, tokens": [ROBOTS, KL],
    "robots, autoregressive, parts of looks": [
        ROBOTS,
        "action.head.decoding=autoregressive",
        "engine.steps_at_once=3",
    ],
    "robots, regression": [ROBOTS, "action.head=null", "action.head={type: regression}"],
    "robots, bridge": [ROBOTS, "action.head=null", "action.head={type: bridge, width: 32, depth: 2, queries: 3}"],
    "robots, latent": [ROBOTS, "action.head=null", "action.head={type: latent, width: 32, latent: 3}"],
    "robots, flow": [ROBOTS, "action.head=null", f"{FLOW}, likelihood: {{type: chain}}}}"],
    "robots, flow, learned": [ROBOTS, "action.head=null", f"{FLOW}, likelihood: learned}}"],
    "robots, flow, matching": [ROBOTS, "action.head=null", f"{FLOW}, likelihood: matching}}"],
    "robots, ppo": [ROBOTS, "algorithm.type=ppo"],
}


# How often a micro-batch's update may wait for the device, and copy something to it: as often as it did when this was
# written. One wait is the optimizer step's; those of vision-language models are transformers' own, which reads where
# images lie, and those of action tokens are the temperatures of their rows.
BUDGETS = {
    "vlm, lora": (22.5, 26),
    "vlm, frozen tower, checkpointing": (31.5, 20),
    "images, chain": (1, 14),  # of them the predictions that were kept, in place of a pass of the network
    "robots, tokens": (3, 18),
    "robots, autoregressive, parts of looks": (9, 20),
    "robots, regression": (1, 16),
    "robots, bridge": (1, 16),
    "robots, latent": (1, 16),
    "robots, flow": (1, 34),
    "robots, flow, learned": (1, 18),
    "robots, flow, matching": (1, 22),
    "robots, ppo": (3, 19),
}


class OneRank(Plain):
    """Steps down the gradient and reads its norm once, as DeepSpeed does."""

    def __call__(self, *given, **options):
        return self.module(*given, **options)

    def backward(self, loss):
        loss.backward()

    def step(self):
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        with torch.no_grad():
            for p in self.module.parameters():
                if p.grad is not None:
                    p -= self.lr * p.grad
                    p.grad = None
        return True, float(norm)


def trainer(folder, base, *overrides):
    config = load(base, [f"run_dir={folder}", *TWICE, *overrides])
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    moved(policy.module)
    run = Run(Path(folder), to_yaml(config), writes=True)
    return Trainer(config, policy, task, OneRank(policy.module, 1e-3), run)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.quick("vlm, lora", "images, chain", "robots, autoregressive, parts of looks", "robots, flow")
def test_a_step_mixes_no_devices_and_stays_within_its_budget(job, tmp_path, monkeypatch):
    shuffle = torch.Generator().manual_seed(0)
    with pretending(monkeypatch) as ledger:
        made = trainer(tmp_path, *JOBS[job])
        before = [p.inner.clone() for p in made.policy.module.parameters()]
        metrics = Metrics(made.engine)
        rollouts = made.collector.next(0, metrics)
        minibatches, _ = made.preparation.minibatches(rollouts, 0, shuffle, metrics)
        ledger.clear()
        for minibatch in minibatches:
            for micro in minibatch:  # whose rewards may be equal
                micro.advantages = torch.randn(len(micro), 1).expand(micro.mask.shape)
            made.update(minibatch, metrics)
        count = sum(map(len, minibatches))
        waits, copies = (ledger.times[kind] / count for kind in ("wait", "to the device"))
        told = f"{job}: {waits:.2f} waits, {copies:.2f} copies to the device a micro-batch; {ledger.places}"
        ledger.clear()
        values = metrics.result()
        assert ledger.times["wait"] <= 1 and ledger.times["from the device"] == 0  # of all metrics of the step
        made.log(rollouts, Metrics(made.engine))
        made.evaluate()
    made.run.close()
    assert values["grad_norm"] > 0 and values["updates_skipped"] == 0
    now = [p.inner for p in made.policy.module.parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(before, now, strict=True))
    assert waits <= BUDGETS[job][0] and copies <= BUDGETS[job][1], told


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: here[there.argsort()],
        lambda there, here: there.index_put((torch.tensor([0]),), here[:1]),
        lambda there, here: torch.where(here > 0, there, there),
        lambda there, here: there.numpy(),
    ],
)
def test_the_pretended_device_refuses_what_cuda_refuses(mix, monkeypatch):
    with pretending(monkeypatch):
        there, here = torch.arange(3.0).to(DEVICE), torch.arange(3.0)
        with pytest.raises(MixedDevices):
            mix(there, here)


def test_the_pretended_device_allows_and_counts_what_cuda_allows(monkeypatch):
    with pretending(monkeypatch) as ledger:
        there = torch.arange(3.0).to(DEVICE)
        assert isinstance(there, Pretended) and there.device == DEVICE
        assert ledger.times == {"to the device": 1} and ledger.bytes == {"to the device": 12}
        total = (there * torch.tensor(2.0))[torch.tensor([0, 2])].sum()  # a number, and an index of the CPU
        assert ledger.times == {"to the device": 2}
        assert float(total) == 4.0 and there[there > 0].shape == (2,) and there.tolist() == [0, 1, 2]
        assert ledger.times == {"to the device": 2, "wait": 3}
        assert torch.equal(there.cpu(), torch.arange(3.0))
        assert ledger.times["from the device"] == 1 and ledger.bytes["from the device"] == 12
    assert not isinstance(torch.arange(3.0), Pretended)
