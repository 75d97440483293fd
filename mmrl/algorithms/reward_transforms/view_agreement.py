"""A bonus for answers that also occur under another view of the prompt."""

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
    """An answer earns a bonus by how often it also occurs among answers to the same prompt under a view, after these
    are translated back, such as left to right for mirrored images. No label is needed."""

    equation: ClassVar[str] = (
        "r <- r + bonus min(n, m) / n, n and m how often the group gives the answer, and how often it is given under "
        "the view: the share of it that an optimal transport between both matches where equal answers cost nothing"
    )
    source: ClassVar[str] = "reconstructed from OT-GRPO: matching of paired groups under flips and swaps"
    test: ClassVar[str] = "tests/joints/test_view_contrast.py"
    type: str = "view_agreement"
    view: View = option(Mirrored(), "under which the prompt is answered again, by as many responses")
    bonus: float = option(1.0, "for an answer that is wholly matched", gt=0)
    swaps: dict[str, str] = option({}, "words of an answer under the view, and what they mean without it; both ways")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}), measurements=(ViewAnswers(self.view),))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        import torch

        responses = batch.measured(ViewAnswers(self.view)).responses
        answers = [_plain(text, {}) for text in batch.responses()]
        swaps = self.swaps | {after: before for before, after in self.swaps.items()}
        under = [[_plain(text, swaps) for text in texts] for texts in batch.gather_list(responses)]
        group, matched = batch.column("group"), torch.zeros_like(rewards)
        for g in group.unique():
            rows = (group == g).nonzero().flatten().tolist()
            counts, counts_under = Counter(answers[row] for row in rows), Counter(under[rows[0]])
            for row in rows:
                matched[row] = min(counts[answers[row]], counts_under[answers[row]]) / counts[answers[row]]
        batch.report({"view_agreement/matched": float(matched[~rewards.isnan()].mean())})
        return rewards + self.bonus * matched


def _plain(text: str, swaps: dict[str, str]) -> str:
    """Returns the answer in lower case with single spaces, its words swapped."""
    from mmrl.rewards.parsing.responses import extract_answer

    return " ".join(swaps.get(word, word) for word in extract_answer(text).lower().split())
