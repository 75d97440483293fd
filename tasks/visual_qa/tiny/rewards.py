"""A reward that a randomly initialised model already gets in part, so that an example learns from the first step."""

from __future__ import annotations

from mmrl.rollouts import Sample


def share_of_digits(sample: Sample, max_length: int = 8) -> float:
    """Returns the share of the response's characters that are digits, 0 to 1; 0 if it has more than `max_length`
    characters."""
    response = sample.response.strip()
    if not response or len(response) > max_length:
        return 0.0
    return sum(character.isdigit() for character in response) / len(response)
