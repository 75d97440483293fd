"""The records that flow through a training step: a prompt, a scored sample, and the batch of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question put to a policy.

    `text` may hold `<image>` once per picture, at the place where the picture belongs; without any marker the
    pictures come first, in order. `answer` is what a verifier compares with; `metadata` is for rewards and tables.
    """

    id: str
    text: str
    images: tuple[Image.Image, ...] = ()
    answer: Any = None
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """What became of one attempt in a simulator. Lengths count executed actions."""

    instruction: str
    success: bool  # at any time
    success_at_end: bool
    length: int
    reward: float  # the simulator's own, summed
    lost: bool = False  # the simulator failed; nothing of this episode counts
    frames: NDArray[np.uint8] | None = None  # [frame, height, width, 3], where they were asked for


@dataclass(frozen=True)
class Sample:
    """What a reward function sees of one rollout: the prompt, and the response, picture or episode it led to."""

    prompt: Prompt
    response: str = ""
    response_length: int = 0  # tokens, the end token included
    truncated: bool = False  # reached max_response_length without an end token
    max_response_length: int = 0
    image: Tensor | None = None  # [channel, height, width] fp32 on the CPU, 0 to 1 in gamut, as decoded: not clamped
    episode: Episode | None = None


@dataclass
class Rollouts:
    """A batch of rollouts, whatever the policy: B rollouts, at most T decisions each, K reward components.

    Where decisions are made in an environment it moves in at most S steps, of T / S decisions each; what a critic needs
    is kept by step. `inputs` belongs to the policy that made the batch (tokens and pictures, latents, observations);
    nobody else looks inside. Fields that are filled in later are None until then.
    """

    samples: list[Sample]  # B
    inputs: list[Any]  # B, private to the policy
    group: Tensor  # [rollout] int64, which prompt a rollout answers
    mask: Tensor  # [rollout, decision] bool, True where a decision counts
    rewards: Tensor | None = None  # [rollout, component] float32, NaN where a component could not be scored
    accuracy: Tensor | None = None  # [rollout] float32, the task's own measure of success, NaN where unknown
    advantages: Tensor | None = None  # [rollout] float32, or [rollout, decision] where credit differs by decision
    nodes: Tensor | None = None  # [rollout, decision] int64: equal ids in a group made that decision together (a tree)
    old_logp: Tensor | None = None  # [rollout, decision] float32, under the policy that made the rollout
    behaviour_logp: Tensor | None = None  # [rollout, decision] float32, as the engine that sampled it has it
    version: Tensor | None = None  # [rollout] int64, finished steps behind the oldest weights that made decisions of it
    ref_logp: Tensor | None = None  # [rollout, decision] float32, under the reference policy
    old_prediction: Tensor | None = None  # [rollout, decision, ...] float32, what `Replay.prediction` was then
    ref_prediction: Tensor | None = None  # [rollout, decision, ...] float32, what it is under the reference policy
    step_mask: Tensor | None = None  # [rollout, step] bool, True where the episode was still on
    step_rewards: Tensor | None = None  # [rollout, step] float32, the simulator's own
    step_values: Tensor | None = None  # [rollout, step] float32, what the critic expected before the step
    step_terminated: Tensor | None = None  # [rollout, step] bool, the episode ended in it for a reason of its own
    step_bootstrap: Tensor | None = None  # [rollout, step] float32, the critic's value of where the time limit cut it
    step_returns: Tensor | None = None  # [rollout, step] float32, what the critic shall learn

    def __len__(self) -> int:
        return len(self.samples)

    def select(self, index: Tensor) -> Rollouts:
        """The rollouts at `index` ([n] int64, or [rollout] bool), in that order."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        rows = index.tolist()
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list):
                chosen[f.name] = [value[row] for row in rows]
            else:
                chosen[f.name] = None if value is None else value[index]
        return Rollouts(**chosen)

    @staticmethod
    def concat(parts: list[Rollouts]) -> Rollouts:
        """All rollouts of `parts`, decisions and steps padded to the longest.

        A field must be filled in all parts or in none.

        Raises ValueError naming a field for which that does not hold.
        """
        joined: dict[str, Any] = {}
        for f in fields(Rollouts):
            values = [getattr(part, f.name) for part in parts]
            if isinstance(values[0], list):
                joined[f.name] = [item for value in values for item in value]
            elif all(value is None for value in values):
                joined[f.name] = None
            elif any(value is None for value in values):
                raise ValueError(f"{f.name} is filled in some of the batches and None in others")
            elif f.name in PADDED:
                width = max(value.shape[1] for value in values)
                joined[f.name] = torch.cat([F.pad(value, (0, width - value.shape[1])) for value in values])
            else:
                joined[f.name] = torch.cat(values)
        return Rollouts(**joined)


PADDED = {"mask", "old_logp", "behaviour_logp", "ref_logp"}
PADDED |= {f.name for f in fields(Rollouts) if f.name.startswith("step_")}


@dataclass
class Replay:
    """What a policy says of a batch of rollouts now; all [rollout, decision], float32."""

    logp: Tensor
    entropy: Tensor | None = None  # None where it is constant (a Gaussian step of fixed variance)
    log_ratio: Tensor | None = None  # given where the policy has a more exact form than logp - old_logp
    divergence: Tensor | None = None  # exact KL to the old policy, where there is one
    reference_kl: Tensor | None = None  # to the reference policy, where rollouts.ref_prediction is given
    prediction: Tensor | None = None  # [rollout, decision, ...] detached: what old and reference are compared by
    std: Tensor | None = None  # of a Gaussian step
    weight: Tensor | None = None  # detached, of the decision in the loss; None: all alike
    segments: Tensor | None = None  # int64, the unit of level "segment" that a decision belongs to
    errors: tuple[Tensor, Tensor] | None = None  # of the implicit positive and negative policy (DiffusionNFT)
    value: Tensor | None = None  # [rollout, step], of a policy with a critic
    # Share of the replayed experts of the token before it that routers would not choose; NaN where none are
    routing_differs: Tensor | None = None
