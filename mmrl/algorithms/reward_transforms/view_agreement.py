"""A bonus for answers that agree with answers to a changed prompt (a view)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.measurements.answers import ViewAnswers
from mmrl.prompts.counterfactual_views import Mirrored
from mmrl.prompts.views import View
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class ViewAgreement(Transform):
    """A bonus for an answer by how often it occurs among answers to a view of the prompt, such as a mirrored image.

    In answers to the view, words such as left and right are swapped first (`swaps`). No label is needed.
    """

    equation: ClassVar[str] = (
        "r <- r + bonus min(n, m) / n, n and m the number of times that the answer occurs in the group and under the "
        "view: the fraction that an optimal transport between the two sets matches if equal answers cost nothing"
    )
    source: ClassVar[str] = "reconstructed from OT-GRPO: matching of paired groups under flips and swaps"
    test: ClassVar[str] = "tests/joints/test_view_contrast.py"
    type: str = "view_agreement"
    view: View = option(
        Mirrored(), "change of the prompt; the policy answers the changed prompt too, as often as the original one"
    )
    bonus: float = option(1.0, "bonus of an answer that is fully matched", gt=0)
    swaps: dict[str, str] = option({}, "words that swap their meaning under the view, such as {left: right}")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}), measurements=(ViewAnswers(self.view),))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the rewards plus bonus x min(n, m) / n, where n and m count the rollout's answer among those of its
        group and among the answers to the view; [rollout of all ranks]."""
        import torch

        view_responses = batch.gather_list(batch.measured(ViewAnswers(self.view)).responses)
        answers = [_normalized_answer(text, {}) for text in batch.responses()]
        swaps = self.swaps | {second: first for first, second in self.swaps.items()}
        view_answers = [[_normalized_answer(text, swaps) for text in texts] for texts in view_responses]
        group, matched = batch.column("group"), torch.zeros_like(rewards)
        for g in group.unique():
            rows = (group == g).nonzero().flatten().tolist()
            # every row of the group holds the same answers to the view
            counts, view_counts = Counter(answers[row] for row in rows), Counter(view_answers[rows[0]])
            for row in rows:
                answer = answers[row]
                matched[row] = min(counts[answer], view_counts[answer]) / counts[answer]
        batch.report({"view_agreement/matched": float(matched[~rewards.isnan()].mean())})
        return rewards + self.bonus * matched


def _normalized_answer(text: str, swaps: dict[str, str]) -> str:
    """Returns the answer of a response in lower case with single spaces, with words replaced by `swaps`."""
    from mmrl.rewards.parsing.responses import extract_answer

    return " ".join(swaps.get(word, word) for word in extract_answer(text).lower().split())
