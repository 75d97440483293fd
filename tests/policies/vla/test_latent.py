"""The latent head: its decisions and their likelihoods by hand in double precision, what comes after an exit, what it
draws, and what demonstrations teach it."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence

from mmrl.errors import UserError
from mmrl.policies.vla.backbones.states_only import EmptyPrefix
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.rollouts import Prompt, Sample
from mmrl.sims import Observation
from mmrl.tasks.manipulation import rewards, tiny_model
from tests.policies.vla.conftest import CHUNK, KINDS
from tests.policies.vla.test_critics import quiet
from tests.policies.vla.test_policy import SEEDS, STARTS, stir

K, Z, STD = 3, 2, 0.3
EVERY = torch.ones(1, CHUNK, dtype=torch.bool)


@pytest.fixture
def made(make, tmp_path):
    tiny_model.build_states(tmp_path / "blind")

    def policy(**options):
        others = {name: options.pop(name) for name in ("temperature", "supervised") if name in options}
        head = {**KINDS["latent"], "last_gain": 1.0, "std": 0.5, **options}
        return stir(make(head, str(tmp_path / "blind"), sim=quiet(), **others), 0.2)

    return policy


def nothing(rows=1):
    return EmptyPrefix(rows, torch.device("cpu"))


def told(state, latents):
    """What the networks read when these latents are known, of one look: zeros for the others, and how many they are."""
    known = [number for z in latents for number in z]
    empty = torch.zeros((K - len(latents)) * Z).to(state)
    there = torch.tensor([1.0] * len(latents) + [0.0] * (K - len(latents))).to(state)
    return torch.cat([state, *(number[None] for number in known), empty, there])


class ByHand:
    """Distributions of one look's decisions in double precision, latent by latent, in the order in which they are
    made; None where there was nothing to decide any more."""

    def __init__(self, head, look, temperature):
        own = copy.deepcopy(head).double()
        state, count = look.state.double(), int(look.sampled["count"])
        latents = list(look.sampled["latents"].double()[:count])
        self.networks, self.made, self.values = own, [], []
        for k in range(K):
            inside = k < count
            self.made.append(Normal(own.reason(told(state, latents[:k])), temperature * STD) if inside else None)
            self.values.append(latents[k] if inside else None)
            if k < K - 1:
                logit = own.leave(told(state, latents[: k + 1]))[0] / temperature if inside else None
                self.made.append(Bernoulli(logits=logit) if inside else None)
                self.values.append(torch.tensor(float(count == k + 1), dtype=torch.float64))
        mean = own.layers(told(state, latents)).view(CHUNK, 1)
        self.made += [
            Normal(mean[i], temperature * own.log_std[i].exp()) if look.valid[i] else None for i in range(CHUNK)
        ]
        self.values += list(look.sampled["actions"].double())

    def each(self, number):
        """[decision] of number(distribution, value), summed over what a decision is, 0 where there was none."""
        pairs = zip(self.made, self.values, strict=True)
        return torch.stack([torch.zeros(()).double() if d is None else number(d, v).sum() for d, v in pairs])


def looks_of(rollouts):
    return [(b, s, look) for b, episode in enumerate(rollouts.inputs) for s, look in enumerate(episode)]


def at(values, b, s):
    """Of look s of rollout b."""
    return values[b].unflatten(0, (-1, 2 * K - 1 + CHUNK))[s]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_every_decision_is_as_likely_as_by_hand(made, temperature):
    """Log-likelihoods with signs, entropies, what counts, and the gradient of every weight: what was not decided has
    none."""
    policy = made(temperature=temperature)
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    found, head = policy.replay(rollouts, policy.module), policy.module.head
    counts, total = set(), torch.zeros(())
    weight = torch.linspace(0.5, 2, 2 * K - 1 + CHUNK)  # no two decisions can be taken for one another
    gradient = {}
    for b, s, look in looks_of(rollouts):
        known = ByHand(head, look, temperature)
        logp = known.each(lambda d, value: d.log_prob(value))
        torch.testing.assert_close(at(found.logp, b, s).double(), logp, rtol=1e-4, atol=1e-4)
        entropy = known.each(lambda d, _: d.entropy())
        torch.testing.assert_close(at(found.entropy, b, s).double(), entropy, rtol=1e-4, atol=1e-5)
        assert at(rollouts.mask, b, s).tolist() == [d is not None for d in known.made]
        (weight * logp).sum().backward()
        for name, parameter in known.networks.named_parameters():
            gradient[name] = gradient.get(name, 0) + (0 if parameter.grad is None else parameter.grad)
        counts.add(int(look.sampled["count"]))
        total = total + (weight * at(found.logp, b, s)).sum()
    assert counts == {1, 2, 3} and any(not look.valid.all() for _, _, look in looks_of(rollouts))
    total.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad.any(), name
        torch.testing.assert_close(parameter.grad.double(), gradient[name], rtol=2e-3, atol=2e-3, msg=name)


def test_what_counts_by_hand(made):
    head = made().module.head
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()
    chosen = {"count": torch.tensor([1, 2, 3, 3, 2]), "demonstrated": torch.tensor([0, 0, 0, 0, 1]).bool()}
    #    z e z e z  actions
    known = [
        [1, 1, 0, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1],  # the last latent is the last anyway
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 0],  # no latent was shown
    ]
    assert head.decision_mask(valid, chosen).int().tolist() == known and head.decisions == 9
    whole = made(level="chunk", early_exit=False).module.head
    chosen["count"] = torch.full((5,), 3)
    assert whole.decision_mask(valid, chosen).int().tolist() == [[1] * 4, [1] * 4, [1] * 4, [0] * 4, [0, 0, 0, 1]]
    assert made(steps=1).module.head.decision_mask(valid, {**chosen, "count": torch.ones(5)})[0].tolist() == [True] * 5
    assert not hasattr(whole, "leave")


@pytest.mark.parametrize("options", [{"level": "chunk"}, {"level": "token", "early_exit": False}, {"steps": 1}])
def test_other_decisions_sum_up_to_as_much(made, options):
    """A chunk's whole log-likelihood, however it is cut into decisions."""
    policy = made(**options)
    head, rollouts = policy.module.head, policy.rollout(STARTS, 2, SEEDS)
    found = policy.replay(rollouts, policy.module).logp.unflatten(1, (-1, head.decisions)).sum(-1)
    own = copy.deepcopy(head).double()
    for b, s, look in looks_of(rollouts):
        count, total = int(look.sampled["count"]), 0.0
        latents, state = look.sampled["latents"].double(), look.state.double()

        def read(k, latents=latents, state=state):
            there = (torch.arange(head.steps) < k).double()
            return torch.cat([state, (latents * there[:, None]).flatten(), there])

        for k in range(count):
            total += Normal(own.reason(read(k)), STD).log_prob(latents[k]).sum()
            if k < head.exits:
                p = own.leave(read(k + 1)).sigmoid()[0]
                total += (p if count == k + 1 else 1 - p).log()
        action = Normal(own.layers(read(count)).view(CHUNK, 1), own.log_std.exp())
        total += action.log_prob(look.sampled["actions"].double())[look.valid].sum()
        assert found[b, s].item() == pytest.approx(total.item(), rel=1e-4, abs=1e-4)


class TestWhatIsDrawn:
    def test_comes_from_the_seed_alone(self, made):
        """Latents, exits and actions by the noise of their seed, at a temperature; in a batch as alone."""
        head, seeds, states = made().module.head, list(range(40)), torch.linspace(-1, 1, 40)[:, None]
        with torch.no_grad():
            drawn = head.act(nothing(40), states, ActionSampling(seeds, 0.5))
        for i, seed in enumerate(seeds):
            own = torch.Generator().manual_seed(seed)
            noise, uniform = torch.randn(K, Z, generator=own), torch.rand(K - 1, generator=own)
            last, latents = torch.randn(CHUNK, 1, generator=own), []
            for k in range(K):
                mean = head.reason(told(states[i], latents))
                latents.append(mean + 0.5 * STD * noise[k])
                if k < K - 1 and uniform[k] < (head.leave(told(states[i], latents)) / 0.5).sigmoid():
                    break
            assert drawn["count"][i] == len(latents)
            torch.testing.assert_close(drawn["latents"][i, : len(latents)], torch.stack(latents), rtol=1e-4, atol=1e-5)
            assert not drawn["latents"][i, len(latents) :].any()
            actions = head.layers(told(states[i], latents)).view(CHUNK, 1) + 0.5 * head.log_std.exp() * last
            torch.testing.assert_close(drawn["actions"][i], actions, rtol=1e-4, atol=1e-4)
        assert set(drawn["count"].tolist()) == {1, 2, 3} and (drawn["temperature"] == 0.5).all()

    def test_ends_as_often_as_its_likelihood_says(self, made):
        head = made().module.head
        with torch.no_grad():
            head.leave[-1].weight.zero_()
            head.leave[-1].bias.fill_(-0.4)
            drawn = head.act(nothing(4000), torch.zeros(4000, 1), ActionSampling(range(4000), 0.5))
        p = 1 / (1 + math.exp(0.8))
        shares = torch.bincount(drawn["count"], minlength=4)[1:] / 4000
        for share, known in zip(shares.tolist(), [p, (1 - p) * p, (1 - p) ** 2], strict=True):
            assert share == pytest.approx(known, abs=4.5 * math.sqrt(known * (1 - known) / 4000))

    def test_the_likeliest_is_what_no_noise_draws(self, made):
        head, state = made().module.head, torch.tensor([[0.4]])
        for bias, count in ((0.3, 1), (-0.3, 3)):  # chances of 0.57 and 0.43
            with torch.no_grad():
                head.leave[-1].weight.zero_()
                head.leave[-1].bias.fill_(bias)
                drawn = head.act(nothing(20), state.expand(20, 1), ActionSampling(range(20), 0.0))
                latents = []
                for _ in range(count):
                    latents.append(head.reason(told(state[0], latents)))
                mean = head.layers(told(state[0], latents)).view(1, CHUNK, 1)
            assert drawn["count"].tolist() == [count] * 20 and drawn["temperature"].tolist() == [1.0] * 20
            torch.testing.assert_close(drawn["latents"][:, :count], torch.stack(latents).expand(20, -1, -1))
            torch.testing.assert_close(drawn["actions"], mean.expand(20, -1, -1))

    def test_nothing_is_computed_after_an_exit(self, made):
        head, rows = made().module.head, []
        head.reason.register_forward_hook(lambda module, given, out: rows.append(len(out)))
        with torch.no_grad():
            drawn = head.act(nothing(60), torch.zeros(60, 1), ActionSampling(range(60), 1.0))
        assert sum(rows) == drawn["count"].sum() < 60 * K

    def test_the_chance_to_end_is_that_which_was_asked_for(self, make, tmp_path):
        tiny_model.build_states(tmp_path / "blind")
        fresh = make({"type": "latent", "exit_chance": 0.3}, str(tmp_path / "blind"), sim=quiet()).module.head
        read = torch.randn(50, 1 + 4 * 9, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(fresh.leave(read).sigmoid(), torch.full((50, 1), 0.3), rtol=0, atol=0.01)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_its_divergence_from_others_is_exact(made, level):
    """By torch.distributions, KL(old || now), of every decision given what was decided before it; at a temperature."""
    policy = made(level=level, temperature=0.5)
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    head = policy.module.head
    with torch.no_grad():
        before = policy.replay(rollouts, policy.module)
        then = [ByHand(head, look, 0.5) for _, _, look in looks_of(rollouts)]
    rollouts = replace(rollouts, old_logp=before.logp, old_prediction=before.prediction)
    own = policy.replay(rollouts, policy.module)
    assert before.divergence is None and own.reference_kl is None and not own.divergence.any()
    stir(policy, 0.1)
    rollouts.ref_prediction = before.prediction
    found = policy.replay(rollouts, policy.module)
    for (b, s, look), old in zip(looks_of(rollouts), then, strict=True):
        now = ByHand(head, look, 0.5)
        pairs = zip(old.made, now.made, strict=True)
        zero = torch.zeros(()).double()
        known = torch.stack([zero if a is None else kl_divergence(a, d).sum() for a, d in pairs])
        if level == "chunk":
            known = torch.cat([known[: 2 * K - 1], known[2 * K - 1 :].sum()[None]])
        mine = found.divergence[b].unflatten(0, (-1, head.decisions))[s]
        torch.testing.assert_close(mine.double(), known, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.reference_kl, found.divergence)
    assert found.divergence.requires_grad and found.divergence[rollouts.mask].min() > 0


class TestDemonstrations:
    def shown(self, policy, actions):
        seen = Observation(np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 1), 0.3, np.float32), ["go"])
        return replace(STARTS[0], metadata={"observation": seen, "actions": np.array(actions, np.float32)[:, None]})

    def test_are_learned_through_latents_that_the_policy_draws(self, made):
        """log p(actions | z) by hand, and its gradient in the weights that make z; latents and exits count nothing."""
        policy = made(supervised=True)
        head, prompt = policy.module.head, self.shown(policy, [0.3, -0.2, 0.5])
        batch = policy.demonstrate([prompt] * 8, list(range(8)))
        replay = policy.replay(batch, policy.module)
        assert batch.mask.tolist() == [[False] * 5 + [True] * 3 + [False]] * 8
        assert not replay.logp[~batch.mask].any() and not replay.entropy[~batch.mask].any()
        own, total, counts = copy.deepcopy(head).double(), 0.0, set()
        for i in range(8):
            look = batch.inputs[i][0]
            noise = torch.randn(K, Z, generator=torch.Generator().manual_seed(i)).double()
            latents, state = [], look.state.double()
            for k in range(int(look.sampled["count"])):
                latents.append(own.reason(told(state, latents)) + STD * noise[k])
            known = Normal(own.layers(told(state, latents)).view(CHUNK, 1), own.log_std.exp())
            logp = known.log_prob(look.sampled["actions"].double())[:3, 0]
            torch.testing.assert_close(replay.logp[i, 5:8].double(), logp, rtol=1e-4, atol=1e-4)
            total, counts = total + logp.sum(), counts | {len(latents)}
        assert counts == {1, 2, 3}
        total.backward()
        replay.logp.sum().backward()
        for name, parameter in head.named_parameters():
            if name.startswith("leave"):
                assert parameter.grad is None or not parameter.grad.any()
            else:
                known = own.get_parameter(name).grad
                assert known.any()
                torch.testing.assert_close(parameter.grad.double(), known, rtol=2e-3, atol=2e-3, msg=name)

    def test_show_every_number_of_latents_as_often_whatever_the_noise(self, made):
        head = made(supervised=True).module.head
        taught = head.encode_demonstrations(torch.zeros(3000, CHUNK, 1), range(3000))
        assert taught["demonstrated"].all() and (taught["temperature"] == 1).all()
        for count in (1, 2, 3):
            of = taught["latents"][taught["count"] == count]
            assert len(of) / 3000 == pytest.approx(1 / 3, abs=4.5 * math.sqrt(2 / 9 / 3000))
            assert of.mean(0).abs().max() < 4.5 / math.sqrt(900) and of.std(0).sub(1).abs().max() < 0.12

    def test_are_done_whenever_reasoning_ends(self, made):
        policy = made(supervised=True, width=32)
        head, optimizer = policy.module.head, torch.optim.Adam(policy.module.parameters(), lr=1e-2)
        prompt = self.shown(policy, [0.6, -0.6, 0.2, 0.9])
        for step in range(200):
            batch = policy.demonstrate([prompt] * 8, [8 * step + i for i in range(8)])
            loss = -policy.replay(batch, policy.module).logp[batch.mask].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for bias in (5.0, 0.0, -5.0):
            with torch.no_grad():
                head.leave[-1].weight.zero_()
                head.leave[-1].bias.fill_(bias)
                actions = head.act(nothing(), torch.tensor([[0.3]]), ActionSampling([0], 0.0))["actions"]
            known = torch.tensor([0.6, -0.6, 0.2, 0.9]).view(1, CHUNK, 1)
            torch.testing.assert_close(actions, known, rtol=0, atol=0.2)


def test_a_task_that_pays_for_fewer_latents_gets_fewer(made):
    """A few steps of policy gradients, whose only reward is what reasoning costs."""
    policy = made()
    head, optimizer = policy.module.head, torch.optim.Adam(policy.module.parameters(), lr=1e-2)
    used = []
    for step in range(40):
        with torch.no_grad():
            chosen = head.act(nothing(64), torch.zeros(64, 1), ActionSampling(range(64 * step, 64 * step + 64), 1.0))
        cost = -chosen["count"].float()
        used.append(-cost.mean().item())
        logp = head.score(nothing(64), torch.zeros(64, 1), chosen, EVERY.expand(64, -1), None, None)["logp"]
        optimizer.zero_grad()
        (-(cost - cost.mean()) * logp.sum(1)).mean().backward()
        optimizer.step()
    assert used[0] > 1.4 and sum(used[-3:]) / 3 < 1.2


class TestHowMuchItReasoned:
    def test_is_known_of_every_episode(self, made):
        policy = made()
        rollouts = policy.rollout(STARTS, 2, SEEDS)
        for sample, episode in zip(rollouts.samples, rollouts.inputs, strict=True):
            mean = sum(int(look.sampled["count"]) for look in episode) / len(episode)
            assert sample.episode.reasoning == pytest.approx(mean)
            assert rewards.reasoning(sample) == pytest.approx(mean)
        assert len({sample.episode.reasoning for sample in rollouts.samples}) > 1
        with torch.no_grad():
            policy.module.head.leave[-1].weight.zero_()
            policy.module.head.leave[-1].bias.fill_(3.0)
        assert [sample.episode.reasoning for sample in policy.respond(STARTS, [1, 2, 3])] == [1.0] * 3

    def test_is_not_known_of_lost_episodes_nor_of_other_heads(self, made, make):
        sample = made().respond(STARTS[:1], [1])[0]
        assert rewards.reasoning(replace(sample, episode=replace(sample.episode, lost=True))) is None
        other = make("gaussian").respond(STARTS[:1], [1])[0]
        assert other.episode.reasoning is None
        with pytest.raises(UserError, match="it needs action.head.type=latent"):
            rewards.reasoning(other)


def test_saved_and_loaded_alike(made, make, tmp_path):
    policy = made()
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    policy.save(tmp_path / "final", policy.module.state_dict())
    again = make({**KINDS["latent"], "exit_chance": 0.9, "std": 0.1}, str(tmp_path / "final"), sim=quiet())
    with torch.no_grad():
        one, other = (p.replay(rollouts, p.module) for p in (policy, again))
    assert torch.equal(one.logp, other.logp)
    for changed in (
        {"steps": 4},
        {"latent": 3},
        {"early_exit": False},
        {"latent_std": 0.2},
        {"width": 8},
        {"layers": 2},
    ):
        ((name, value),) = changed.items()
        with pytest.raises(UserError, match=f"action.head.{name}={value}, but .* was trained with"):
            make({**KINDS["latent"], **changed}, str(tmp_path / "final"), sim=quiet())


def test_a_lost_episode_drew_nothing(made):
    from mmrl.policies.vla.episodes import EpisodeRecord

    record = EpisodeRecord(Prompt("a", "go"), samples_latents=True)
    assert math.isnan(record.sample.episode.reasoning)
    assert isinstance(record.sample, Sample) and record.sample.episode.lost
