"""Robot methods beside the code that people run: numbers that public functions gave for the same inputs.

`robot_numbers.json` holds, by repository, the commit, the files, the inputs, and what their functions returned:
advantages, or losses and their gradients by what the networks say. Networks are replaced by tables of these inputs."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl.algorithms.algorithm import Algorithm
from mmrl.measurements.q_values import QLearner, Transitions
from mmrl.protocols.abilities import SampledActions, SampledNoise
from mmrl.protocols.auxiliary import AuxiliaryModule
from mmrl.protocols.measurement import ReplayedContext
from mmrl.protocols.trajectory import EpisodeTail, RewardsToGo
from mmrl.rollouts import REPLAYED, Column, Prompt, Replay, Rollouts, Sample
from mmrl.settings import choose
from mmrl.terms.losses.q_gradient import NoiseQFunctions
from tests.joints.parts import Table, close, steps

PUBLIC = json.loads((Path(__file__).parent / "robot_numbers.json").read_text())
RLINF, SAC, DSRL = (
    PUBLIC["RLinf_RLinf"]["numbers"],
    PUBLIC["huggingface_lerobot"]["numbers"]["SACAlgorithm"],
    PUBLIC["nakamotoo_dsrl_pi0"]["numbers"]["update_critic"],
)
NOISE = PUBLIC["vyseian_stable-baselines3-dsrl_dp"]["numbers"]["update_noise_critic"]  # a copy of DSRL's own code
# The methods that this shows, by title of the choice and name, with the repositories.
SHOWN = {
    ("algorithm", "implicit_q_learning"): {"RLinf/RLinf"},
    ("algorithm", "advantage_conditioned"): {"RLinf/RLinf"},
    ("algorithm", "soft_actor_critic"): {"huggingface/lerobot"},
    ("loss term", "q_gradient"): {"huggingface/lerobot", "vyseian/stable-baselines3-dsrl_dp"},
}
DIFFERENT = {
    ("algorithm", "advantage_conditioned"): {"RLinf/RLinf"},
    ("algorithm", "soft_actor_critic"): {"RLinf/RLinf", "huggingface/lerobot", "nakamotoo/dsrl_pi0"},
}
STILL = "members: 2, lr: 1.0e-12, tau: 0.5"  # one update changes no number that is compared
NOW, NEXT, CHOSEN = 0, 10, 20  # the first feature of a row: its number, plus what the row is of


class Listed(torch.nn.Module):
    """A network whose output at x [row, number] is the entry x[:, 0] of a table, plus slope times x[:, -1]."""

    def __init__(self, slope=0.0, **columns):
        super().__init__()
        table = torch.zeros(30, dtype=torch.float64)
        for first, values in columns.items():
            table[int(first[1:]) : int(first[1:]) + len(values)] = torch.tensor(values, dtype=torch.float64)
        self.table, self.slope = torch.nn.Parameter(table), slope

    def forward(self, x):
        return self.table[x[:, 0].long()] + self.slope * x[:, -1].double()


class GivenModules:
    """Networks of a run by the last word of their name, and the gradients of their updates. others: number of rows of
    other ranks, which have no gradients."""

    def __init__(self, others=0, **networks):
        self.networks, self.others, self.sums = networks, others, []

    def get(self, name, make, lr):
        return AuxiliaryModule(self.networks.get(name.rpartition(" ")[2]) or make(), lr)

    def sum(self, values):
        self.sums.append(values.clone())
        return values + self.others if values.dtype == torch.int64 else values

    @property
    def gradients(self):
        return [values[:5] for values in self.sums if values.shape == (30,)]


def ensemble(online, targets, slopes=(0.0, 0.0)):
    """Q networks that say `online` and `targets`, lists of keyword arguments of `Listed`."""
    from mmrl.core.values import QEnsemble

    made = QEnsemble(2, 4, 2, seed=0)
    made.online = torch.nn.ModuleList(Listed(s, **column) for s, column in zip(slopes, online, strict=True))
    made.targets = torch.nn.ModuleList(Listed(**column) for column in targets).requires_grad_(False)
    return made


def transitions(inputs, *, next_logp=None, terminated=None, discount=None):
    def rows(first):
        return (torch.arange(5) + first)[:, None].double()

    terminated = torch.tensor(terminated).bool()
    return Transitions(
        rows(NOW),
        torch.zeros(5, 1),
        torch.tensor(inputs["reward"], dtype=torch.float64),
        torch.full((5,), discount or inputs["discount"], dtype=torch.float64),
        terminated,
        torch.ones(5, dtype=torch.bool),
        rows(NEXT),
        torch.ones(5, dtype=torch.int64),
        torch.zeros(5, 1) if next_logp else None,
        torch.tensor(next_logp, dtype=torch.float64) if next_logp else None,
    )


def learn(measurement, modules, rows):
    """The estimates of `rows` and their losses, by the update that the trainer makes."""
    policy = SimpleNamespace(off_policy=SimpleNamespace(encoding_sizes=(1, 3), noise_size=1))
    context = SimpleNamespace(policy=policy, modules=modules, sum=modules.sum, seed=0, step=0, micro_batches=[])
    return QLearner(measurement, context)._update(rows, torch.zeros(0, 2))[0]


def stored(count=5):
    """Rollouts of one decision, which are stored policy steps."""
    samples = [Sample(Prompt(str(row), "", metadata={"tail": None})) for row in range(count)]
    return Rollouts(
        samples=samples,
        inputs=list(range(count)),
        group=-1 - torch.arange(count),
        mask=torch.ones(count, 1, dtype=torch.bool),
        origin=torch.full((count,), REPLAYED),
    )


# --- GAE where the time ends ---


@pytest.mark.parametrize("normalized", [False, True])
def test_advantages_of_episodes_that_end_and_that_are_cut(given, normalized):
    public = RLINF["compute_gae_advantages_and_returns"]
    inputs = public["inputs"]
    one = Table([[-1.0] * 4] * 3, group=[0, 1, 2], rewards=[0.0] * 3, value=inputs["values"])
    ppo = f"gamma: {inputs['gamma']}, lam: {inputs['lam']}, simulator_reward: 1.0"
    when = "batch" if normalized else "minibatch"
    made = given(one, "rollout={prompts: 3, group_size: 1}", f"algorithm={{type: ppo, {ppo}, standardise: {when}}}")
    rollouts = one.rollouts()

    def last(values):
        return [[0.0] * 3 + [float(value)] for value in values]

    rollouts.extras["steps"] = steps(
        one,
        values=inputs["values"],
        rewards=inputs["rewards"],
        terminated=last(inputs["terminated"]),
        bootstrap=last(inputs["final_values"]),
    )
    made.prepare(rollouts)
    close(rollouts.extras["steps"].returns, public["returns"], atol=2e-6)
    # 1e-5 is added to the standard deviation there, 1e-6 here
    close(rollouts.advantages, public["normalized" if normalized else "advantages"], atol=3e-5)


# --- implicit Q-learning ---


def test_expectile_targets_and_weights():
    public = RLINF["EmbodiedIQLFSDPPolicy"]
    inputs = public["inputs"]
    algorithm = choose(
        Algorithm,
        {
            "type": "implicit_q_learning",
            "q": {"members": 2, "lr": 1e-12, "tau": 0.5, "expectile": inputs["expectile"]},
            "weights": {"temperature": 1 / inputs["temperature"], "most": inputs["most"]},
        },
    )
    value = Listed(_0=inputs["value"], _10=inputs["next_value"])
    q = ensemble([{"_0": row} for row in inputs["q"]], [{"_0": row} for row in inputs["target_q"]])
    modules = GivenModules(value=value, q=q)
    found = learn(algorithm.measurement, modules, transitions(inputs, terminated=[not mask for mask in inputs["mask"]]))
    of_value, *of_q = modules.gradients
    close(of_value, public["value_gradient"])
    close(torch.stack(of_q), public["q_gradient"])
    close(2 * found[:, 2].mean(), public["q_loss"])  # there a sum over the two networks, here their mean is reported
    micro, logp = stored(), torch.tensor(inputs["logp"], requires_grad=True)
    micro.extras[algorithm.measurement.name] = Column(found.float())
    loss = algorithm.loss(micro, Replay(logp[:, None]))[0].mean()
    loss.backward()
    close(loss.detach(), public["actor_loss"])
    close(logp.grad, public["actor_gradient"])


# --- soft actor-critic ---


def soft(entropy=True, target=None):
    bonus = {"temperature": SAC["inputs"]["temperature"], "target": target, "lr": 1e-12} if entropy else None
    return choose(
        Algorithm,
        {"type": "soft_actor_critic", "q": {"members": 2, "lr": 1e-12, "tau": 0.5, "entropy": bonus}},
    )


def soft_updates(algorithm, *, logp="next_logp", terminated=None, discount=None):
    inputs = SAC["inputs"]
    q = ensemble([{"_0": row} for row in inputs["q"]], [{"_0": [0.0], "_10": row} for row in inputs["next_q"]])
    modules = GivenModules(q=q)
    rows = transitions(inputs, next_logp=inputs[logp], terminated=terminated or inputs["done"], discount=discount)
    return modules, learn(algorithm.actor.values_of_actions.values, modules, rows)


@pytest.mark.parametrize(
    ("public", "entropy", "members"),
    [
        (SAC, True, 1),
        (RLINF["EmbodiedSACFSDPPolicy use_dsrl"], True, 2),  # the mean over networks there, their sum here
        (DSRL["min backup_entropy=True"], True, 2),
        (DSRL["min backup_entropy=False"], False, 2),
    ],
    ids=["lerobot", "rlinf", "dsrl", "dsrl without entropy"],
)
def test_soft_targets_of_q(public, entropy, members):
    discount = public["gamma"] ** public["chunk"] if "chunk" in public else None
    modules, found = soft_updates(soft(entropy), discount=discount)
    close(torch.stack(modules.gradients) / members, public["q_gradient"])
    close(2 * found[:, 2].mean() / members, public["q_loss"], atol=4e-6)


def test_the_weight_of_the_entropy():
    """There the loss has the weight, here its logarithm: the gradient by the logarithm lacks the factor weight."""
    inputs = SAC["inputs"]
    modules, _ = soft_updates(soft(target=inputs["target_entropy"]), logp="policy_logp", terminated=[0.0] * 5)
    slope = next(values for values in modules.sums if values.dtype == torch.float64)  # the first update is the weight's
    close(slope * inputs["temperature"], SAC["temperature_gradient"][0])


@pytest.mark.parametrize(
    ("public", "of"),
    [
        (SAC, "least"),
        (RLINF["EmbodiedSACFSDPPolicy use_dsrl"], "least"),
        (DSRL["min backup_entropy=True"], "least"),
        (DSRL["mean backup_entropy=True"], "mean"),
    ],
    ids=["lerobot", "rlinf", "dsrl", "dsrl mean"],
)
def test_the_policy_s_loss(public, of):
    inputs, slopes = SAC["inputs"], (3.0, 7.0)
    algorithm = soft().model_copy(update={"of": of})
    logp, actions = torch.tensor(inputs["policy_logp"], requires_grad=True), torch.zeros(5, 1, requires_grad=True)

    def resample(rollouts, rows, seeds, *, logp_=logp, **_):
        return SampledActions((torch.tensor(rows) + CHOSEN)[:, None].float(), actions[rows], logp_[rows])

    q = ensemble([{"_20": row} for row in inputs["policy_q"]], [{}, {}], slopes)
    policy = SimpleNamespace(off_policy=SimpleNamespace(resample=resample))
    micro, measurement = stored(), algorithm.actor.values_of_actions
    replay = Replay(torch.zeros(5, 1))
    replay.extras[measurement.name] = measurement.measure(micro, ReplayedContext(policy, None, 0, 0, GivenModules(q=q)))
    loss = algorithm.loss(micro, replay)[0].mean()
    loss.backward()
    close(loss.detach(), public["actor_loss"])
    close(logp.grad, public["actor_gradient_logp"])
    if "actor_gradient_q" in public:
        close(actions.grad[:, 0], torch.tensor(slopes) @ torch.tensor(public["actor_gradient_q"]))


@pytest.mark.parametrize("others", [0, 15])
def test_q_of_the_noise(others):
    """Half of each squared error there. The networks of the noise say what those of the policy's actions say above.
    The mean is over the observations of all ranks."""
    inputs = SAC["inputs"]
    actor = soft().actor
    distilled = actor.model_copy(update={"q": actor.q.model_copy(update={"noise": NoiseQFunctions()})}).distilled
    modules = GivenModules(
        others,
        q=ensemble([{"_0": row} for row in inputs["q"]], [{}, {}]),
        noise_q=ensemble([{"_0": row} for row in inputs["policy_q"]], [{}, {}]),
    )

    def denoise_prior(observations, seeds):
        rows = torch.tensor(observations)[:, None].float()
        return SampledNoise(rows, torch.zeros(len(rows), 1), torch.zeros(len(rows), 3), None)

    off_policy = SimpleNamespace(encoding_sizes=(1, 3), noise_size=1, denoise_prior=denoise_prior)
    policy = SimpleNamespace(off_policy=off_policy)
    context = SimpleNamespace(
        policy=policy, modules=modules, sum=modules.sum, seed=0, step=0, micro_batches=[[0, 1], [2, 3, 4]]
    )
    micro = stored()
    for row, sample in enumerate(micro.samples):
        sample.prompt.metadata["observation"] = row
    found = distilled.measure(micro, context).values
    close(torch.stack(modules.gradients) / 2 * (5 + others) / 5, NOISE["gradient"])
    close(2 * found.mean() / 2, NOISE["loss"])


# --- labels of RECAP ---


@pytest.mark.parametrize("case", ["between", "tie"])
def test_labels_of_good_steps(case):
    """With a reward of -1 a step the returns are those of the public file. At the bound itself a step is good there."""
    public = RLINF["apply_boolean_label"]
    inputs, rows = public["inputs"], []

    class Tail(EpisodeTail):
        def observation(self, step):
            raise AssertionError("returns need no observation")

    for number, (length, success) in enumerate(inputs["episodes"]):
        rewards = np.full(length, -1.0, np.float32)
        rewards[-1] = 0.0
        whole = RewardsToGo(rewards, np.arange(length), 0.0 if success else inputs["failure_reward"])
        rows += [(f"{number}-{t}", Tail(whole.after(t), actions=length - t, terminated=True)) for t in range(length)]
    prompts = [Prompt(name, "", metadata={"tail": tail}) for name, tail in rows[: public[case]["steps"]]]
    values = torch.tensor(sum(inputs["values"], []))[: len(prompts), None]

    class Critic:
        advantage_labels, module = ("good", "bad"), None

        def demonstrate(self, prompts, seeds):
            return prompts

        def replay(self, rollouts, model):
            return SimpleNamespace(value=values)

    algorithm = choose(
        Algorithm,
        {
            "type": "advantage_conditioned",
            "positive": inputs["positive"],
            "dropout": 1e-9,
            "returns": {"gamma": inputs["gamma"], "simulator_reward": 1.0},
        },
    )
    algorithm.start(Critic(), None)
    close(algorithm.returns.of(prompts), sum(public["returns"], [])[: len(prompts)])
    labels = [prompt.metadata["label"] == "good" for prompt in algorithm.prepare_demonstrations(prompts)]
    differences = np.array(sum(public["returns"], [])[: len(prompts)]) - values[:, 0].numpy()
    at_bound = np.isclose(differences, public[case]["threshold"], atol=1e-6)
    assert int(at_bound.sum()) == (case == "tie")
    assert labels == [label and not same for label, same in zip(public[case]["labels"], at_bound, strict=True)]
