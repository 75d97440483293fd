"""Faults of what ranks do for one another, and of what is written while training goes on. A name, a file, a text that
it holds once, what takes its place, and the tests that could notice."""

from __future__ import annotations

SWAPS, PLANS, JOINTS = ("core/test_balance.py",), ("test_balance.py",), ("joints/test_balance.py",)
RUNS = ("engine/test_balance.py",)
PARTITION, CUTS = "mmrl/core/partition.py", ("core/test_partition.py",)
CORE, B, P = "mmrl/core/balance.py", "mmrl/balance.py", "mmrl/preparation.py"
PLAN = ("test_gpu_memory.py::test_a_bound_on_tokens_is_a_bound_on_long_responses",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("balance: groups of any size change places", CORE,
     "larger = larger.where(size[held[here]][:, None] == size[held[there]], top).flatten()",
     "larger = larger.flatten()", SWAPS),
    ("balance: what can not move weighs nothing", CORE, "    loads = fixed.index_add(0, rank, cost)\n    most",
     "    loads = torch.zeros_like(fixed).index_add(0, rank, cost)\n    most", SWAPS),
    ("balance: the first place of the wrong rank", CORE, "here[best // len(there)], there[best % len(there)]",
     "here[best % len(here)], there[best // len(here)]", SWAPS),
    ("balance: shortest rollouts first", CORE, "(-length[rows]).tolist()", "length[rows].tolist()", SWAPS),
    ("balance: groups that must stay whole are mixed", CORE, "if len(counts.unique()) > 1:", "if False:", SWAPS),
    ("balance: halves of a group part", B, "stays = len(own) < int((group == one).sum()) or ", "stays = ", PLANS),
    ("balance: a table shows groups of others", B, " or bool(staying[own].any())", "", (*PLANS, *JOINTS)),
    ("balance: minibatches mix", B, "Piece(minibatch, len(own)", "Piece(0, len(own)", PLANS),
    ("balance: minibatches are waited for together", B, "if m == minibatch) for listed", ") for listed", PLANS),
    ("balance: rows of the wrong piece are sent", B, "rows[move.number] for move in moves if",
     "rows[move.place] for move in moves if", JOINTS),
    ("balance: what arrives takes the wrong rows", B, "rows[move.place] for move in moves if",
     "rows[move.number] for move in moves if", JOINTS),
    ("balance: parcels are taken in another order than places", B, "key=lambda move: (move.source, move.target)",
     "key=lambda move: (-move.source, move.target)", RUNS),
    ("balance: none balances too", P, ' and engine.balance == "lengths"', "", JOINTS),
    ("balance: similar lengths are not replayed together", P, "[longest_first(part, rollouts.group, lengths) for part "
     "in parts]", "parts", JOINTS),
    ("balance: a table of the step before", P, "(step + 1) % log.samples_every == 0", "step % log.samples_every == 0",
     JOINTS),
    ("balance: responses alone are weighed", "mmrl/policies/vlm/policy.py", "len(tokens.prompt) + len(tokens.response)",
     "len(tokens.response)", RUNS),
    ("micro_tokens: ranks make as many micro-batches as the least", P, "counts = [max(told)", "counts = [min(told)",
     JOINTS),
    ("micro_tokens: rollouts are not counted", PARTITION, "if found and len(found[-1]) < rows and (", "if found and (",
     CUTS),
    ("micro_tokens: the last rollout is the longest", PARTITION, "longest = max(longest, int(length[row]))",
     "longest = int(length[row])", CUTS),
    ("micro_tokens: the longest of the one before", PARTITION, "            longest = int(length[row])\n", "", CUTS),
    ("micro_tokens: the one with most rollouts falls apart", PARTITION, "len(part) * int(length[part].max()) if",
     "len(part) if", CUTS),
    ("micro_tokens: only where ranks balance", P, "if not self.balances and tokens is None:", "if not self.balances:",
     JOINTS),
    ("micro_tokens: cuts groups that are needed whole", "mmrl/batches.py",
     'if config.needs.whole_groups and vars(config.engine).get("micro_tokens") is not None:', "if False:", JOINTS),
    ("parcels: a part is sent with the whole", "mmrl/engine/parcels.py", "> obj.numel() * obj.element_size()",
     "> 1e12", RUNS),
    ("parcels: as many bytes come as go", "mmrl/engine/deepspeed.py", "coming.tolist(), sizes, group",
     "sizes, sizes, group", RUNS),
    ("background: the renaming waits for the disk", "mmrl/checkpoints/writing.py", "            files.sync(path)",
     "            #", ("test_checkpoints.py",)),
    ("plan: a bound on tokens counts for nothing", "mmrl/policies/vlm/settings.py",
     "return rows if self.micro_tokens is None else", "return rows if True else", PLAN),
    ("plan: activations of all rollouts", "mmrl/policies/vlm/blueprint.py",
     "read(model, engine.longest_at_once(rows, length)",
     "read(model, rows", PLAN),
    ("plan: fewer tokens are not offered", "mmrl/memory_plan.py", "micro_tokens={engine['micro_tokens'] // 2}",
     "micro_tokens={engine['micro_tokens']}", PLAN),
    ("plan: the dry run hides the bound", "mmrl/cli.py", '"" if tokens is None else', '"" if True else',
     ("test_cli.py",)),
]
