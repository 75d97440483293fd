"""Faults of counted work, of sums over micro-batches and of checksums. Each entry has a name, a file, a string that
occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

F, C = "mmrl/engine/flops.py", "mmrl/generation/weight_sync/checksums.py"
FLOPS, SUMS, BALANCE = ("engine/test_flops.py",), ("engine/test_gradient_sums.py",), ("joints/test_balance.py",)
RATES, CHECKSUMS = ("training/test_throughput.py",), ("generation/test_checksums.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("work: a bias is a factor", F, "first = 1 if packet in ADDING else 0", "first = 0", FLOPS),
    ("work: recomputation counts", F, "if in_backward() or thread in self._threads:", "if thread in self._threads:", FLOPS),
    ("work: a token does not attend to itself", F, "(cached + (length + 1) / 2)", "(cached + (length - 1) / 2)", FLOPS),
    ("work: rows are not counted", F, "known[rows] = counter.total * (1 / rows)", "known[rows] = counter.total", FLOPS),
    ("work: what a prompt's rollouts share counts for each", "mmrl/policies/vlm/responses/replay.py",
     "None if continuations is None else distinct_prompts(rows)[0]", "None", FLOPS),
    ("rates: of all ranks together", "mmrl/training/throughput.py", "total * passes / ranks / phase_seconds",
     "total * passes / phase_seconds", RATES),
    ("rates: epochs are one", "mmrl/training/throughput.py", 'epochs if phase == "update" else 1', "1", RATES),
    ("gradients: bf16 sums", "mmrl/engine/memory.py", 'dtype == "bfloat16" and zero_stage == 2', "False", SUMS),
    ("lengths: one rank sorts nothing", "mmrl/training/preparation.py", "if not self.sorts and tokens is None:",
     "if not self.balances and tokens is None:", BALANCE),
    ("checksums: blocks weigh alike", C, "(first + head) // BLOCK + start", "0", CHECKSUMS),
    ("checksums: parts begin at a block", C, "index_weights[offset : offset + stop - start]", "index_weights[: stop - start]", CHECKSUMS),
]
# fmt: on
