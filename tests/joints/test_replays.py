"""Right rollouts of earlier steps: what is kept of them, which groups they join, their ratio, their batches."""

import json
import math
import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mmrl.collection.pending_batches import PendingBatch
from mmrl.collection.replay_buffer import SelfImitation
from mmrl.config import configure
from mmrl.errors import UserError
from tests.joints.parts import Table, close

REPLAY = "rollout.extras=[{type: success_replay%s}]"
BASE = ["rollout.prompts=1", "algorithm.scale=none", "steps=20"]


def rounds(rewards, logp=-1.0):
    """Groups of two, one a step, in this order whatever the prompt; the task has eight prompts, of which a sampler
    draws each once in eight steps."""
    flat = [reward for group in rewards for reward in group]
    return Table([[logp]] * len(flat), group=[row // 2 for row in range(len(flat))], rewards=flat)


def play(made, steps, first=0):
    """Steps without their updates, each with what the policy is then: the rollouts of each."""
    found = []
    for step in range(first, first + steps):
        rollouts = made.next(step)
        made.prepare(rollouts, step)
        made.trainer.collector.observe(made.batch)
        found.append(rollouts)
    return found


def only_prompt(made, index=3):
    """From now on the sampler draws one prompt alone."""
    made.trainer.collector.draws.sampler.__dict__["draw"] = lambda count: [index] * count


def replayed(rollouts):
    """Rows of the table that are replayed."""
    return [row for row, origin in zip(rollouts.inputs, rollouts.origin.tolist(), strict=True) if origin == 2]


def test_a_right_rollout_joins_its_prompts_next_group(given):
    """Prompts: one alone, then another. Row 0 is right; rows 2 and 3 are not, nor 4 and 5."""
    made = given(rounds([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), *BASE, REPLAY % "")
    only_prompt(made)
    first, second = play(made, 2)
    assert replayed(first) == [] and replayed(second) == [0]
    assert second.group.tolist() == [1, 1, 1] and second.prompt.tolist() == [3, 3, 3]
    close(second.advantages[:, 0], [-1 / 3, -1 / 3, 2 / 3])
    assert second.samples[2].prompt.id == "3" and second.accuracy.tolist() == [0, 0, 1]
    only_prompt(made, 5)
    (third,) = play(made, 1, first=2)
    assert replayed(third) == [] and len(third) == 2


def test_what_is_kept(given):
    """Four right rollouts, rows 0, 2, 4 and 6; the newest two are kept. Replayed ones are not kept again."""
    made = given(rounds([[1.0, 0.0]] * 4 + [[0.0, 0.0]]), *BASE, REPLAY % ", keep: 2, count: 5")
    only_prompt(made)
    found = play(made, 5)
    assert [sorted(replayed(rollouts)) for rollouts in found] == [[], [0], [0, 2], [2, 4], [4, 6]]


def test_prompts_that_were_right_last_stay(given):
    """Prompts 3, 4, 3 and 5 are right one after the other; two are kept, and each of them is asked again."""
    made = given(rounds([[1.0, 0.0]] * 4 + [[0.0, 0.0]] * 3), *BASE, REPLAY % ", prompts: 2")
    for step, prompt in enumerate((3, 4, 3, 5)):
        only_prompt(made, prompt)
        play(made, 1, first=step)
    found = []
    for step, prompt in enumerate((3, 4, 5), 4):
        only_prompt(made, prompt)
        found += [replayed(rollouts) for rollouts in play(made, 1, first=step)]
    assert [len(rows) for rows in found] == [1, 0, 1] and found[0][0] in (0, 4) and found[2] == [6]


def test_a_bound_of_accuracy(given):
    made = given(rounds([[0.5, 0.4], [0.0, 0.0]]), *BASE, REPLAY % ", accuracy: 0.5")
    only_prompt(made)
    assert replayed(play(made, 2)[1]) == [0]


def test_only_groups_that_failed(given):
    made = given(rounds([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), *BASE, REPLAY % ", groups: failed, keep: 1")
    only_prompt(made)
    assert [replayed(rollouts) for rollouts in play(made, 3)] == [[], [], [2]]


def test_as_many_as_are_asked_for_drawn_by_chance(given):
    drawn = set()
    for seed in range(8):
        options = [REPLAY % ", count: 2", f"seed={seed}"]
        made = given(rounds([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), *BASE, *options)
        only_prompt(made)
        (rows,) = [sorted(replayed(rollouts)) for rollouts in play(made, 3)[2:]]
        assert len(set(rows)) == 2 and set(rows) <= {0, 1, 2, 3}
        drawn.add(tuple(rows))
        made.close()
    assert len(drawn) > 2


def test_each_group_of_a_prompt_draws_anew(given):
    """Four right rollouts of one prompt are kept; of its later groups, all wrong, each gets one of them."""
    made = given(rounds([[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 6), *BASE, REPLAY % "")
    only_prompt(made)
    drawn = [row for rollouts in play(made, 8)[2:] for row in replayed(rollouts)]
    assert len(drawn) == 6 and len(set(drawn)) > 1


@pytest.mark.parametrize(("likelihoods", "ratio"), [("recorded", math.exp(0.2)), ("present", 1.0)])
def test_the_ratio_of_what_is_replayed(given, likelihoods, ratio):
    """The policy has moved by 0.2 since row 0 was made. Advantages: -1/3, -1/3, 2/3; three decisions."""
    made = given(rounds([[1.0, 0.0], [0.0, 0.0]]), *BASE, REPLAY % f", likelihoods: {likelihoods}")
    only_prompt(made)
    play(made, 1)
    made.move(logp=[[0.2], [0.0], [0.0], [0.0]])
    play(made, 1, first=1)
    close(made.learn(), (2 / 3 - ratio * 2 / 3) / 3)
    close(made.gradient()[:, 0] * 3, [-ratio * 2 / 3, 0.0, 1 / 3, 1 / 3])


def test_a_masked_or_unscored_rollout_is_not_kept(given):
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, math.nan, 0.0, 0.0], accuracy=[1.0, 1.0, 0.0, 0.0],
                  truncated=[True, False, False, False])  # fmt: skip
    for masks, kept in (("[]", [0]), ("[truncated]", [])):
        made = given(table, *BASE, REPLAY % "", f"algorithm.masks={masks}")
        only_prompt(made)
        assert replayed(play(made, 2)[1]) == kept
        made.close()


def test_ranks_keep_what_any_of_them_found(given):
    made = given(rounds([[1.0, 0.0], [0.0, 0.0]]), "rollout.prompts=2", *BASE[1:], REPLAY % ", count: 2", world=2)
    only_prompt(made)
    assert replayed(play(made, 2)[1]) == [0, 0]  # both ranks of the ledger hold the same


def test_it_goes_on_from_a_checkpoint(given):
    table = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    for source in (REPLAY % ", count: 1", "rollout.extras=[{type: self_imitation, count: 3}]"):
        made = given(rounds(table), *BASE, source)
        only_prompt(made)
        play(made, 2)
        shared, own = json.loads(json.dumps(made.trainer.collector.state()))
        expected = [(replayed(r), r.old_logp.tolist()) for r in play(made, 2, first=2)]
        made.close()
        again = given(rounds(table), *BASE, source)
        again.trainer.policy.asked = 2  # what the policy is asked next
        only_prompt(again)
        again.trainer.collector.load(shared, own)
        assert [(replayed(r), r.old_logp.tolist()) for r in play(again, 2, first=2)] == expected
        assert any(rows for rows, _ in expected)
        again.close()


def test_a_checkpoint_holds_what_the_step_before_left(given):
    """Also where the next batch is in the making: further sources have no part in that."""
    made = given(rounds([[1.0, 0.0], [0.0, 0.0]]), *BASE, REPLAY % "")
    only_prompt(made)
    play(made, 1)
    batches = made.trainer.collector
    batches.pending.batches.append(PendingBatch(({"drawn": 1, "sampler": {}, "extras": ["stale"]}, {}), Future()))
    shared, _ = batches.state()
    assert shared["drawn"] == 1 and shared["extras"][0]["prompts"] == [3]


IMITATION = [
    "rollout.extras=[{type: self_imitation, count: 2}]",
    "algorithm.terms=[{type: likelihood, of: replayed, coefficient: 0.5}]",
]


def test_imitation_of_what_was_right(given):
    """Two of the one row that was right; they have no advantage, and no part in the group's. Four decisions."""
    made = given(rounds([[1.0, 0.0], [0.0, 1.0]]), *BASE, *IMITATION)
    first, second = play(made, 2)
    assert replayed(first) == [] and replayed(second) == [0, 0]
    assert len(set(second.group[2:].tolist())) == 2 and max(second.group[2:]) < 0
    close(second.advantages[:, 0], [-0.5, 0.5, 0.0, 0.0])
    close(made.learn(), 0.5 * 2 / 4)
    close(made.gradient()[:, 0] * 4, [-1.0, 0.0, 0.5, -0.5])


def test_every_step_draws_anew_what_is_imitated(given):
    """Two of the two rows that were right, for 16 steps: all four ordered pairs come, each with chance 1 / 4."""
    made = given(rounds([[1.0, 1.0]]), *BASE, IMITATION[0])
    only_prompt(made)
    pairs = [tuple(replayed(rollouts)) for rollouts in play(made, 17)[1:]]
    assert set(pairs) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_is_imitated_has_no_advantage_whatever_the_baseline(given):
    made = given(rounds([[1.0, 0.0], [0.0, 1.0]]), *BASE, *IMITATION, "algorithm.baseline=none")
    close(play(made, 2)[1].advantages[:, 0], [0.0, 1.0, 0.0, 0.0])


def test_ranks_share_what_is_imitated(given):
    parts = []
    for rank in (0, 1):
        made = given(rounds([[1.0, 1.0], [0.0, 1.0]]), "rollout.prompts=2", *BASE[1:], *IMITATION, world=2, rank=rank)
        play(made, 1)
        (rollouts,) = play(made, 1, first=1)
        assert len(replayed(rollouts)) == 1
        parts += rollouts.group.tolist()[-1:]
        made.close()
    assert len(set(parts)) == 2 and max(parts) < 0


def test_each_rank_imitates_its_own_part_of_what_was_drawn(given):
    """Six of the two rows that were right: the first draw of the run, with its seed 11, three for each rank."""
    six = [option.replace("count: 2", "count: 6") for option in IMITATION]
    parts = []
    for rank in (0, 1):
        made = given(rounds([[1.0, 1.0], [0.0, 1.0]]), "rollout.prompts=2", *BASE[1:], *six, world=2, rank=rank)
        play(made, 1)
        (rollouts,) = play(made, 1, first=1)
        parts.append(replayed(rollouts))
        made.close()
    assert parts[0] != parts[1] and parts[0] + parts[1] == random.Random("11 1").choices([0, 1], k=6)


def test_a_policy_that_can_not_store_is_told():
    tree = {"run_dir": "unset", "model": {"type": "diffusion"}, "rollout": {"extras": ["success_replay"]}}
    with pytest.raises(UserError, match="needs rollouts that can be stored and restored"):
        configure(tree)


def test_replays_are_kept_in_the_order_of_their_draw_on_any_number_of_ranks():
    """The choice of what is imitated goes by this order. Groups are dealt to ranks in turns."""
    rows = [(group, prompt, {"state": group}) for group, prompt in enumerate((5, 4, 5, 6, 4))]
    states = []
    for gathered in (rows, rows[::2] + rows[1::2]):
        source = SelfImitation(count=1)
        source.start(SimpleNamespace())
        source.store(gathered)
        states.append(source.state())
    assert states[0] == states[1] and states[0]["prompts"] == [5, 6, 4]
    assert [[one["state"] for one in stored] for stored in states[0]["stored"]] == [[0, 2], [3], [1, 4]]
