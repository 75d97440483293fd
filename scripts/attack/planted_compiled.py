"""Faults of updates that torch.compile compiles. Each entry has a name, a file, a string that occurs once in the file,
its replacement, and the tests that should then fail."""

from __future__ import annotations

C, D = "mmrl/engine/compilation.py", "mmrl/engine/deepspeed.py"
BLOCKS = ("engine/test_compilation.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("compile: sampling too", C, "if not self.blocks.active or kwargs", "if kwargs", BLOCKS),
    ("compile: nothing", C, "before, self.active = self.active, True", "before, self.active = self.active, False", BLOCKS),
    ("compile: backward passes recompute plainly", D, "with nullcontext() if self._compiled is None else self._compiled.running():",
     "with nullcontext():", BLOCKS),
    ("compile: caches are compiled", C, ' or kwargs.get("past_key_values") is not None', "", BLOCKS),
    ("compile: old likelihoods by other code", C, "with torch.enable_grad():", "if True:", BLOCKS),
    ("compile: old likelihoods keep their graph", C, "return tree_map_only(Tensor, Tensor.detach, output)", "return output", BLOCKS),
    ("compile: a version for each length", C, "dynamic=True", "dynamic=False", BLOCKS),
    ("compile: passes without gradients count as ones with", C, "return _recording and torch.is_grad_enabled()",
     "return torch.is_grad_enabled()", BLOCKS),
    ("compile: counted operations are kept for the backward pass", C, "with torch.autograd.graph.saved_tensors_hooks(_same, _same):", "if True:", BLOCKS),
    ("compile: functions apart are traced", C, "in _apart:", "in ():", BLOCKS),
    ("compile: any machine", "mmrl/job.py", "    check_compiler(config.engine.compile)\n", "", BLOCKS),
    ("compile: weights of stage 3", "mmrl/engine/settings.py", 'if self.compile != "none" and self.zero_stage == 3:', "if False:", BLOCKS),
]
# fmt: on
