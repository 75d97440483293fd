"""The bonus of T-GRPO, from its key through the trainer's own rollouts to the advantages."""

import pytest

from mmrl.algorithms.reward_transforms.view_agreement import _normalized_answer
from mmrl.errors import UserError
from tests.joints.parts import Table, close

BARE = ["algorithm.baseline=none", "algorithm.scale=none", "rollout.group_size=2"]
CONTRAST = "algorithm.transforms=[{{type: view_contrast, view: no_text{}}}]"

# Groups 0 and 1 are the step's rollouts; 2 and 3 answer the same prompts without their words.
REWARDS = [1.0, 3.0, 2.0, 5.0, 0.0, 0.0, 0.0, 0.0]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]


def advantages(given, accuracy, more="", rewards=REWARDS):
    table = Table([[-1.0]] * 8, group=GROUPS, rewards=rewards, accuracy=accuracy)
    made = given(table, *BARE, CONTRAST.format(more))
    rollouts = made.prepare(made.next())
    assert len(rollouts) == 4  # what answered under the view is not learned from
    return made, rollouts.advantages[:, 0]


def test_right_answers_earn_more_where_the_view_takes_something_away(given):
    # Of group 0 half are right, under the view all: 0.5 < 0.8. Of group 1 half are right, and half under the view.
    made, found = advantages(given, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    close(found, [1, 3, 2.3, 5])
    close(made.metrics.result()["view_contrast/accuracy_under_view"], 0.75)
    asked = [call for call in made.trainer.policy.calls if call.what == "rollout"]
    assert len(asked) == 2 and asked[0].seeds == asked[1].seeds


def test_answers_under_the_view_count_for_their_own_prompt(given):
    # Under the view all answers to the first prompt are right, and none to the second: 0.5 < 0.8 x 1, 0.5 >= 0.8 x 0.
    close(advantages(given, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])[1], [1, 3, 2.3, 5])


def test_margin_and_bonus(given):
    accuracy = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    close(advantages(given, accuracy, ", margin: 0.5, bonus: 2")[1], [3, 3, 4, 5])
    close(advantages(given, accuracy, ", margin: 1.01")[1], [1, 3, 2, 5])


def test_what_was_not_judged_earns_nothing_more(given):
    nan = float("nan")
    close(advantages(given, [1.0, 0.0, 1.0, nan, nan, nan, nan, 1.0])[1], [1, 3, 2.3, 5])


def test_a_prompt_without_a_clip_has_no_frames_to_shuffle(given):
    with pytest.raises(UserError, match="has no video"):  # before the start
        given(Table([[-1.0]] * 8, group=GROUPS, rewards=REWARDS), *BARE, "algorithm.transforms=[view_contrast]")


# --- agreement with what is said under a view ---

AGREEMENT = "algorithm.transforms=[{type: view_agreement, view: no_text%s}]"


def agreeing(given, more="", responses=("0", "1", "2", "2", "0", "0", "2", "5"), rewards=REWARDS):
    """A response is the number of a row, by which the stand-in finds its reward."""
    table = Table([[-1.0]] * 8, group=GROUPS, rewards=rewards, responses=list(responses))
    made = given(table, *BARE, AGREEMENT % more)
    return made, made.prepare(made.next()).advantages[:, 0]


def test_an_answer_earns_what_is_matched_of_it(given):
    # "0" is said once, and twice under the view; "1" never under it; "2" twice, and once under it.
    made, found = agreeing(given)
    close(found, [1 + 1, 3, 2 + 0.5, 2 + 0.5])
    close(made.metrics.result()["view_agreement/matched"], 0.5)
    close(agreeing(given, ", bonus: 3")[1], [4, 3, 3.5, 3.5])


@pytest.mark.parametrize("swaps", ["'5': '2'", "'2': '5'"])
def test_answers_under_the_view_are_translated_back(given, swaps):
    """Both ways: what was 2 under it is 5, so that one of two is matched again; 0 stays 0."""
    close(agreeing(given, f", swaps: {{{swaps}}}")[1], [2, 3, 2.5, 2.5])
    close(agreeing(given, f", swaps: {{{swaps}}}", ("0", "1", "2", "2", "0", "0", "5", "5"))[1], [2, 3, 3, 3])


def test_tags_and_case_do_not_count():
    assert _normalized_answer("so <answer> Left  ARROW </answer>", {"left": "right"}) == "right arrow"


def test_what_joined_the_group_is_matched_too(given):
    """A demonstration is not a response under the view, and its prompt's group was asked."""
    table = Table([[-1.0]] * 10, group=[*GROUPS, 4, 4], rewards=[*REWARDS, 7.0, 7.0], responses=[*"01220025", "0", "0"])
    made = given(table, *BARE, AGREEMENT % "", "rollout.extras=[guided_groups]")
    rollouts = made.prepare(made.next())
    assert rollouts.group.tolist() == [0, 0, 1, 1, 0, 1]
    close(rollouts.advantages[:, 0], [1 + 1, 3, 2.5, 2.5, 1 + 1, 1])
