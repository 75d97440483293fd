"""A reward that a model of random weights earns in part, so that an example has something to learn from at once."""

from __future__ import annotations

from mmrl.rollouts import Sample


def share_of_digits(sample: Sample, longest: int = 8) -> float:
    """The share of the response's characters that are digits, 0 to 1; 0 where it has more than `longest` of them."""
    response = sample.response.strip()
    if not response or len(response) > longest:
        return 0.0
    return sum(character.isdigit() for character in response) / len(response)
