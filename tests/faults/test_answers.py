"""Answers that do not belong to the question or to the weights, from a server that speaks vLLM's protocol: each is
refused by name, whatever the server's tokens look like."""

import re

import pytest

from tests.whole_runs.bad_servers import tried


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("another prompt", "vLLM encodes prompt p[0-9] as 3 tokens and the trainer as 1 different"),  # out of step
        ("a placeholder", "holds the token 7, which must not be sampled"),
        ("two versions", "sampled with the weights other, not [0-9a-f]+-1"),  # written while it was read
    ],
)
def test_an_answer_that_does_not_belong(kind, words):
    found = tried(kind)
    assert found.how == "named" and re.search(words, found.words)
