"""A second engine that needs no vLLM: a copy of the model, with which transformers generates."""

import copy
from dataclasses import replace

import torch
from torch.nn.functional import pad

from mmrl.generation.sampling import Sampling
from mmrl.generation.transformers import generate
from mmrl.generation.vllm import Answer
from mmrl.policies import vlm


class Copy:
    """A second model with the same architecture, told its weights by name."""

    def __init__(self, policy: vlm.VisionLanguagePolicy, prompts) -> None:
        model = copy.deepcopy(policy.module.model)
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        self.own = vlm.VisionLanguagePolicy(model, policy.processor, sampling=policy.sampling)
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.awake = True

    @property
    def replicas(self):
        return (self,)

    def measures(self):
        return {}

    def generate(self, requests, *, sampling: Sampling, eos):
        own, prompts = self.own, [self.prompts[request.name] for request in requests]
        rows = []
        for tokens, request in zip(own.encode(prompts), requests, strict=True):
            more = len(request.ids) - len(tokens.prompt)
            assert torch.equal(request.ids[: len(tokens.prompt)], tokens.prompt)
            rows.append(
                replace(tokens, prompt=request.ids, sequence={k: pad(v, (0, more)) for k, v in tokens.sequence.items()})
            )
        own._recompute(False)
        drawn = generate(
            own.module.model,
            own.collate(rows, padding_side="left"),
            sampling=sampling,
            seeds=[request.seed for request in requests],
            eos=eos,
            pad=own.pad,
            max_new_tokens=max(request.limit for request in requests),
        )
        own._recompute(True)
        rows = [replace(row, response=ids[: r.limit]) for row, ids, r in zip(rows, drawn, requests, strict=True)]
        with torch.no_grad():
            logp = own.replay(own._rollouts(prompts, rows, 1), own.module).logp
        return [Answer(row.response, found[: len(row.response)]) for row, found in zip(rows, logp, strict=True)]

    def load(self, weights):
        """Reads them as it would read a published checkpoint."""
        model = self.own.module.model
        given, keep = dict(weights), {"dtype": model.dtype, "output_loading_info": True}
        read, found = type(model).from_pretrained(None, config=model.config, state_dict=given, **keep)
        assert not any(found.values()), found
        values = dict(read.named_parameters(remove_duplicate=False))
        for name, own in model.named_parameters(remove_duplicate=False):
            own.data.copy_(values[name])

    def sleep(self):
        self.awake = False

    def wake(self):
        self.awake = True

    def close(self):
        pass
