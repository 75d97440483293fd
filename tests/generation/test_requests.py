"""Requests to vLLM, as mappings without an engine."""

import torch

from mmrl.generation.sampling import Sampling
from mmrl.generation.vllm.engine import NEVER, EngineOptions, Request, sampling_parameters


def test_every_option_of_sampling_reaches_vllm_under_its_own_name():
    request = Request("p", [1, 2], (), torch.tensor([1, 2]), seed=11, limit=7, count=3)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, suppressed=(4, 6), vocabulary=20)
    assert sampling_parameters(request, sampling, (8, 9)) == {
        "n": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 11,
        "logit_bias": {4: NEVER, 6: NEVER},
        "stop_token_ids": [8, 9],
        "ignore_eos": True,
        "max_tokens": 7,
        "logprobs": 0,
        "detokenize": False,
    }
    assert NEVER <= -100


def test_an_engine_gives_log_probabilities_of_the_distribution_that_it_samples_from():
    """Those before temperature, top_p and suppressed tokens would give other ratios. Nothing of how an engine samples
    is taken from the checkpoint's generation_config.json."""
    arguments = EngineOptions(context=8, seed=5, dtype="bfloat16").arguments()
    assert (arguments["logprobs_mode"], arguments["generation_config"]) == ("processed_logprobs", "vllm")
    assert (arguments["max_model_len"], arguments["seed"], arguments["dtype"]) == (8, 5, "bfloat16")
