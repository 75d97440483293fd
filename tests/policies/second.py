"""A second engine that needs no vLLM: a copy of the model, with which transformers generates."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from mmrl.generation.sampling import Sampling
from mmrl.generation.transformers import generate
from mmrl.generation.vllm.responses import Answer
from mmrl.generation.weight_sync.checksums import Report, checksum
from mmrl.policies.vlm import policy as vlm
from mmrl.policies.vlm.scorer import set_checkpointing
from mmrl.policies.vlm.synced import adapter_checksums, weights


class Copy:
    """A second model with the same architecture, told its weights by name. adapters: with a LoRA of its own, told that
    too; else with what it merges to."""

    def __init__(self, policy: vlm.VisionLanguagePolicy, prompts, *, adapters: bool = False) -> None:
        self.adapters = adapters
        model = copy.deepcopy(policy.module.model)
        if hasattr(model, "merge_and_unload") and not adapters:
            model = model.merge_and_unload()
        self.own = vlm.VisionLanguagePolicy(model, policy.tokens.processor, sampling=policy.drafter.sampling)
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
        for tokens, request in zip(own.tokens.encode(prompts), requests, strict=True):
            more = len(request.ids) - len(tokens.prompt)
            assert torch.equal(request.ids[: len(tokens.prompt)], tokens.prompt)
            sequence = {name: pad(value, (0, more)) for name, value in tokens.sequence.items()}
            heat = sampling.temperature or 1.0
            rows.append(replace(tokens, prompt=request.ids, sequence=sequence, temperature=heat))
        set_checkpointing(own.module, False)
        drawn = generate(
            own.module.model,
            own.runner.collate(rows, padding_side="left"),
            sampling=sampling,
            seeds=[request.seed for request in requests],
            eos=eos,
            pad=own.tokens.pad,
            max_new_tokens=max(request.limit for request in requests),
        )
        set_checkpointing(own.module, True)
        rows = [replace(row, response=ids[: r.limit]) for row, ids, r in zip(rows, drawn, requests, strict=True)]
        with torch.no_grad():
            logp = own.replay(own.tokens.rollouts(prompts, rows, 1), own.module).logp
        return [Answer(row.response, found[: len(row.response)]) for row, found in zip(rows, logp, strict=True)]

    def load(self, weights):
        """Reads them as it would read a published checkpoint."""
        model = vlm.transformers_model(self.own.module.model)
        given, keep = dict(weights), {"dtype": model.dtype, "output_loading_info": True}
        read, found = type(model).from_pretrained(None, config=model.config, state_dict=given, **keep)
        assert not any(found.values()), found
        values = dict(read.named_parameters(remove_duplicate=False))
        for name, own in model.named_parameters(remove_duplicate=False):
            if "lora_" not in name:
                own.data.copy_(values[name.replace(".base_layer", "")])

    def adapt(self, write):
        """Reads a LoRA as peft would."""
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            peft.set_peft_model_state_dict(self.own.module.model, load_file(Path(folder) / "adapter_model.safetensors"))

    def arrived(self):
        """By the names of the published checkpoint."""
        model = self.own.module.model
        found = {name: checksum(value) for name, value in weights(model, merged=not self.adapters)}
        return [Report(found | (adapter_checksums(model) if self.adapters else {}))]

    def sleep(self):
        self.awake = False

    def wake(self):
        pass

    def serve(self):
        self.awake = True

    def close(self):
        pass


def moved(policy):
    """The same policy with other weights."""
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other
