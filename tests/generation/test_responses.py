"""Responses of a vLLM server as they are read."""

import pytest

from mmrl.generation.vllm.responses import BadAnswer, versions


def test_all_versions_of_the_weights_that_sampled_a_response_are_read():
    """The first response was sampled while the weights changed."""
    parts = [["a", "b"], ["b"]]
    answer = {"choices": [{"weight_versions": [{"version": name} for name in names]} for names in parts]}
    assert versions(answer) == {"a", "b"}
    with pytest.raises(BadAnswer, match="does not name the version"):
        versions({"choices": [{"weight_versions": [{"version": "a"}]}, {}]})
