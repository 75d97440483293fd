"""Faults of responses that branch and of their credit. Entries are as in `planted_spans.py`."""

from __future__ import annotations

JOINT, TURNS, WHOLE = (
    ("joints/test_branches.py",),
    ("policies/test_turns_branching.py",),
    ("whole_runs/test_branches.py",),
)
SOURCE, POINTS = "mmrl/collection/branches/source.py", "mmrl/collection/branches/points.py"
CREDIT, SHAPERS = "mmrl/core/credit.py", "mmrl/terms/shapers/trees.py"
BEGUN = ("policies/test_beginnings.py",)
GENERATION, RUNNER = "mmrl/generation/transformers.py", "mmrl/policies/vlm/responses/runner.py"

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("trees: the surest tokens branch", POINTS, "(-float(h), row, t)", "(float(h), row, t)", JOINT),
    ("trees: the first token branches", POINTS, "if t > 0", "if t >= 0", JOINT),
    ("trees: points are side by side", POINTS, "abs(t - cut) >= self.apart", "abs(t - cut) >= 1", JOINT),
    ("trees: segments end a token late", POINTS, "range(self.every, len(values), self.every)", "range(self.every + 1, len(values), self.every)", JOINT),
    ("trees: a segment's end is the response's", POINTS, "range(self.every, len(values), self.every)", "range(self.every, len(values) + 1, self.every)", JOINT),
    ("trees: the segment before counts", POINTS, "[cut : cut + self.every]", "[:cut]", JOINT),
    ("trees: the surest segments branch", POINTS, "key=next_segment_entropy, reverse=True", "key=next_segment_entropy", JOINT),
    ("trees: segments are not drawn", POINTS, "return rng.sample(points, len(points))", "return points", JOINT),
    ("trees: a fall of entropy branches", POINTS, "rng.random() - self.weight * rise", "rng.random() + self.weight * rise", TURNS),
    ("trees: nats are not divided", POINTS, "/ math.log(self.vocabulary)", "/ 1.0", TURNS),
    ("trees: the whole turn counts", POINTS, "values[turn == k][: self.first].mean()", "values[turn == k].mean()", TURNS),
    ("trees: the opening is the whole response", POINTS, "values[turn == 0][: self.first]", "values[: len(values)]", TURNS),
    ("trees: any observation branches", POINTS, "k == 0 or conversation.turns[k - 1].tool is None", "k == 0", TURNS),
    ("trees: the turn that called the tool is said anew", POINTS, "int((turn < k).sum())", "max(1, int((turn < k - 1).sum()))", TURNS),
    ("trees: later turns come first", POINTS, "for _, row, cut in sorted(points)", "for _, row, cut in sorted(points, reverse=True)", TURNS),
    ("trees: a point may be used again", SOURCE, "if state not in used:", "if True:", JOINT),
    ("trees: points that are shared are two", SOURCE, "state = (int(members.group[row]), node, length)", "state = (int(members.group[row]), row, length)", JOINT),
    ("trees: a point has one branch", SOURCE, "for i in range(self.width)][:num_branches]", "for i in range(1)][:num_branches]", JOINT),
    ("trees: later rounds begin from the first", SOURCE, "members = Rollouts.concat([members, fill_in_columns(new, members)])",
     "members = Rollouts.concat([members, fill_in_columns(new, members)]) if number + 1 == self.rounds else members", JOINT),
    ("trees: branches are of the first row's group", SOURCE, "new.group, new.prompt, new.version = parents.group,", "new.group, new.prompt, new.version = parents.group * 0,", JOINT),
    ("trees: branches are fresh", SOURCE, "torch.full((len(new),), EXTRA)", "torch.full((len(new),), 0)", JOINT),
    ("trees: nothing is shared", SOURCE, "resize_columns(parents.nodes, shared.shape[1]).where(shared, own_node)", "resize_columns(parents.nodes, shared.shape[1]).where(shared & False, own_node)", JOINT),
    ("trees: all is shared", SOURCE, "resize_columns(parents.nodes, shared.shape[1]).where(shared, own_node)", "resize_columns(parents.nodes, shared.shape[1])", JOINT),
    ("trees: the decision that is drawn anew is shared", SOURCE, "torch.cumsum(mask, 1) <= lengths[:, None]", "torch.cumsum(mask, 1) <= lengths[:, None] + 1", JOINT),
    ("trees: what was read is not shared", SOURCE, "torch.cumsum(mask, 1) <= lengths[:, None]", "mask & (torch.cumsum(mask, 1) <= lengths[:, None])", TURNS + JOINT),
    ("trees: an engine's likelihoods of a beginning are lost", SOURCE, "new.behaviour_logp is not None and parents.behaviour_logp is not None", "False", WHOLE),
    ("trees: the seed of the run is left out", SOURCE, "seed = self._context.seed + SEED_OFFSET", "seed = SEED_OFFSET", JOINT),
    ("trees: all branches have one seed", SOURCE, "continuation_seeds(seed, group, m, length, i + 1)[i]", "continuation_seeds(seed, 0, 0, 0, 1)[0]", JOINT),
    ("trees: seeds of other continuations", SOURCE, "seed = self._context.seed + SEED_OFFSET + zlib.crc32(self.key.encode())", "seed = self._context.seed", JOINT),
    ("trees: entropies of other rows", SOURCE, "self.at.rank_points(group_members, entropy[rows], rng)", "self.at.rank_points(group_members, entropy.flip(0)[rows], rng)", JOINT),
    ("trees: no whole response fills a group", SOURCE, "branches += [(0, 0, len(rows) + i) for i in range(num_branches - len(branches))]", "branches += []", JOINT),
    ("trees: padding is a node", CREDIT, "return ids.where(ids >= 0, -1 - row)", "return ids", JOINT),
    ("trees: the group is no subtree", CREDIT, "torch.cat([whole_group, ids == ids[i]], 1)", "(ids == ids[i])", JOINT),
    ("trees: one alone is a subtree", CREDIT, "if int(member.sum()) > 1]", "if int(member.sum()) > 0]", JOINT),
    ("trees: subtrees count by their size", CREDIT, 'len(s) if weights == "size" else 1', "len(s)", JOINT),
    ("trees: subtrees count alike", CREDIT, 'len(s) if weights == "size" else 1', "1", JOINT),
    ("trees: the others are compared with it", CREDIT, "group_rewards[i] - s.mean()", "s.mean() - group_rewards[i]", JOINT),
    ("trees: the unscored are in the mean", CREDIT, "shared = (ids == ids[i]) & ~group_values.isnan()[:, None]", "shared = ids == ids[i]", JOINT),
    ("trees: shared decisions have the sum", CREDIT, "total / shared.sum(0).clamp(min=1)", "total", JOINT),
    ("trees: advantages are not divided", SHAPERS, 'scale=self.scale)', 'scale="none")', JOINT),
    ("trees: weights of subtrees are left out", SHAPERS, "weights=self.weights", 'weights="alike"', JOINT),
    ("trees: credit without a tree", SHAPERS, 'Needs(offers=frozenset({"nodes"}))', "Needs()", JOINT),
    ("trees: any baseline compares nodes", "mmrl/config.py", "offers=offered.offers.union(*added)", "offers=offered.offers", JOINT),
    ("beginnings: a shorter one is at another place", GENERATION, "position_ids = self.next_position[:, None] + (mask.cumsum(1) - 1).clamp_min(0)",
     "position_ids = self.next_position[:, None] + torch.arange(width, device=device)", BEGUN),
    ("beginnings: padding is read", GENERATION, "(torch.arange(width, device=device) >= width - lengths[:, None]).to(self.mask)", "torch.ones(len(begun), width).to(self.mask)", BEGUN),
    ("beginnings: what follows is too far", GENERATION, "self.next_position + lengths", "self.next_position + width", BEGUN),
    ("beginnings: who begins with nothing goes on from padding", GENERATION, "hidden[:, -1].where((lengths > 0)[:, None], self.last)", "hidden[:, -1]", BEGUN),
    ("beginnings: a limit is the longest one's", GENERATION, "| (token_limits[active] == step + 1)", "| (max_limit == step + 1)", BEGUN),
    ("beginnings: what siblings begin with is read for each", RUNNER, "(*row.response.tolist(),)))", "(number,)))", BEGUN),
    ("beginnings: equal prompts of different pictures are one", RUNNER, "number if row.observed_images else -1", "-1", BEGUN),
    ("beginnings: pictures between turns are not read", RUNNER, "        if any(row.observed_images for row in rows):\n", "        if False:\n", BEGUN),
]
