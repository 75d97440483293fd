"""A tiny masked policy with weights that say something, and what it says worked out by hand."""

import itertools
import math

import torch

from mmrl.config import validate
from mmrl.rollouts import Prompt
from mmrl.tasks.text_sums import tiny_model

PROMPT = Prompt("sum", "27+4=", answer="31")


def policy_of(folder, *, perturbed=0.2, length=3, rollout=None, algorithm="grpo", build=True, **options):
    """options: `unmasking` and `noising` of the configuration, others are the model's. Weights that are trained are
    those of a fresh model, made large."""
    if build:
        tiny_model.build(folder, seed=3, width=32, layers=2)
    supervised = (algorithm if isinstance(algorithm, str) else algorithm["type"]) in (
        "supervised",
        "offline_preference",
    )
    sections = {name: options.pop(name) for name in ("unmasking", "noising") if name in options}
    tree = {
        "run_dir": "unset",
        "model": {"type": "discrete_diffusion", "path": str(folder), **options},
        "task": {"type": "text_sums"},
        "algorithm": {"type": algorithm} if isinstance(algorithm, str) else algorithm,
        "rollout": {"response_length": length, **({} if supervised else {"temperature": 1.0}), **(rollout or {})},
        **{name: section for name, section in sections.items() if section is not None},
    }
    config = validate(tree, "test")
    policy = config.model.load(config, None, str(folder))
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter += perturbed * torch.randn(parameter.shape, generator=random)
    return policy


def forget_end(policy):
    """From now on nothing ends a response, so that every place counts."""
    policy.layout.vocabulary = type(policy.layout.vocabulary)(**{**vars(policy.layout.vocabulary), "end": None})
    return policy


def given(policy, responses, steps=None, seeds=None, prompt=PROMPT):
    """Rollouts of these token ids."""
    made = policy.rollout([prompt] * len(responses), 1, seeds or list(range(len(responses))))
    for i, record in enumerate(made.inputs):
        fields = vars(record) | {"response": torch.tensor(responses[i])}
        if steps is not None:
            fields["steps"] = torch.tensor(steps[i])
        made.inputs[i] = type(record)(**fields)
    made.mask = torch.ones_like(made.mask)
    return made


class Exact:
    """log p(token | what is written elsewhere) of one prompt, straight from the transformers model."""

    def __init__(self, policy, length, prompt=PROMPT):
        self.policy, self.length, self.prompt, self._known = policy, length, policy.layout.encode(prompt), {}

    def table(self, written):
        """[place, vocabulary] log-probabilities where `written` [place] holds ids, or None for an empty place."""
        key = tuple(written)
        if key not in self._known:
            ids = [self.policy.layout.vocabulary.mask if i is None else i for i in written]
            with torch.no_grad():
                whole = torch.cat([self.prompt, torch.tensor(ids)])[None]
                logits = self.policy.module.model(input_ids=whole).logits[0, -self.length :].double()
            logits[:, self.policy.layout.vocabulary.suppressed] = -math.inf
            self._known[key] = logits.log_softmax(-1)
        return self._known[key]

    def by_order(self, response, order):
        """log p of writing `response` one place at a time in this order."""
        written, total = [None] * self.length, 0.0
        for place in order:
            total += float(self.table(written)[place, response[place]])
            written[place] = response[place]
        return total

    def orders(self, response):
        return [self.by_order(response, order) for order in itertools.permutations(range(self.length))]

    def logp(self, response):
        """Of a response whose places are filled one at a time in any order."""
        return float(torch.tensor(self.orders(response), dtype=torch.double).exp().mean().log())

    def elbo(self, response):
        return sum(self.orders(response)) / math.factorial(self.length)
