"""Faults of what is told of GPUs without one. Each entry has a name, a file, a string that occurs once in the file, its
replacement, and the tests that should then fail."""

from __future__ import annotations

M, P, B = "mmrl/engine/memory.py", "mmrl/doctor/memory_plan.py", "mmrl/policies/"
D = "mmrl/doctor/"
DOCTOR = ("doctor/test_doctor_gpu.py",)
MEMORY = ("doctor/test_gpu_memory.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("memory: what is let go of is still counted", M, "self.current -= size", "self.current -= 0", MEMORY),
    ("memory: the end and not the peak", M, "return live.peak", "return live.now", MEMORY),
    ("memory: no backward pass", M, "torch.autograd.backward([t for t in outputs if t.requires_grad], _meta_gradients(outputs))",
     "pass", MEMORY),
    ("memory: gradients of weights stay", M, "parameter.grad = None  # `static", "pass  # `static", MEMORY),
    ("memory: attention keeps its matrices", M, "F.scaled_dot_product_attention = _attention  #",
     "F.scaled_dot_product_attention = usual  #", MEMORY),
    ("memory: gradients are shared out by ZeRO 1", M, "dtype) else width) / shards[2]", "dtype) else width) / shards[1]", MEMORY),
    ("plan: only training decides", P, "return max(sum(self.training.values()), sum(self.sampling.values()))",
     "return sum(self.training.values())", MEMORY),
    ("plan: a GPU is filled to the brim", P, "MAX_FILL = 0.9", "MAX_FILL = 1.0", MEMORY),
    ("plan: vLLM's share of 80 GiB always", P, "config.generator.memory * gpu.size", "config.generator.memory * 8e10",
     MEMORY),
    ("plan: averages without their stand-in", P, "num_averages * num_local * (4 + bytes_per_weight)", "num_averages * num_local * 4", MEMORY),
    ("plan: a reference also where none is needed", P, "2 * num_local * bytes_per_weight if config.needs.reference else 0.0",
     "2 * num_local * bytes_per_weight", MEMORY),
    ("plan: offloaded optimizers stay", P, 'both_phases["optimizer"] = 0.0', 'both_phases["optimizer"] = both_phases["optimizer"]', MEMORY),
    ("plan: a peak of other settings is taken", P, 'key = f"{trains} {relevant}"', 'key = f"{trains}"', MEMORY),
    ("plan: suggestions do not add up", P, "overrides, config, best_plan = candidate_overrides, candidate, candidate_plan",
     "overrides, config, best_plan = [override], candidate, candidate_plan", MEMORY),
    ("blueprint: the window is not counted", "mmrl/policies/diffusion/memory_estimate.py", "predict(min(rows * steps, max_rows))",
     "predict(rows)", MEMORY),
    ("blueprint: parts of a replay are not counted", "mmrl/policies/diffusion/memory_estimate.py",
     "predict(min(rows * steps, max_rows))", "predict(rows * steps)", MEMORY),
    ("blueprint: responses without their prompts", "mmrl/policies/vlm/memory_estimate.py",
     "length = rollout.max_prompt_length + response", "length = response", MEMORY),
    ("blueprint: half of keys and values", "mmrl/policies/vlm/memory_estimate.py", "memory.cache = 2 * bytes_per_number", "memory.cache = bytes_per_number",
     MEMORY),
    ("blueprint: all looks at once", "mmrl/policies/vla/memory_estimate.py", "    if total <= steps_at_once:", "    if True:", MEMORY),
    # --- mmrl doctor --gpu ---
    ("doctor: what failed is not looked at again", D + "run.py",
     'if all(result.status != "fails" for result in earlier):',
     "if earlier:", DOCTOR),
    ("doctor: what works is looked at again", D + "run.py",
     'if all(result.status != "fails" for result in earlier):',
     "if not earlier:", DOCTOR),
    ("doctor: another machine's findings are kept", D + "run.py",
     "if rerun or not machine_file.is_file() or json.loads(machine_file.read_text()) != dict(machine):",
     "if rerun or not machine_file.is_file():", DOCTOR),
    ("doctor: a check that died is passed over", D + "run.py", "    if not results:\n",
     "    if not results and problem is None:\n", DOCTOR),
    ("doctor: children outlive the time limit", D + "run.py", "        child.kill()\n",
     "        child.running.kill()\n", DOCTOR),
    ("doctor: a renderer is not a name", D + "checks.py", '["mujoco"].text', '["mujoco"]', DOCTOR),
    ("doctor: NCCL works without a GPU", D + "checks.py", "    if not gpus:\n", "    if gpus < 0:\n", DOCTOR),
    ("doctor: ranks on one GPU are well", D + "checks.py", "if len(set(uuids)) < len(uuids):",
     "if len(set(uuids)) > len(uuids):", DOCTOR),
    ("doctor: an estimate that is too low is well", D + "checks.py", "if measured > 1.05 * estimated:",
     "if measured > 1.5 * estimated:", DOCTOR),
    ("doctor: two steps are enough", D + "checks.py", "if len(steps) < STEPS:", "if len(steps) < STEPS - 1:", DOCTOR),
    ("doctor: the report says nothing of what to do", D + "run.py", "for f in results if f.advice]",
     "for f in []]", DOCTOR),
    # --- prompts of many ---
    ("success_weighted: what is known is not spread out", "mmrl/prompts/curriculum.py",
     "rates = values_by_prompt(self._rates, self._size, self.prior)", "rates = values_by_prompt({}, self._size, self.prior)",
     ("prompts/test_curriculum.py",)),
    ("volatility: the least come first", "mmrl/prompts/curriculum.py", "self._size), -score)", "self._size), score)",
     ("prompts/test_curriculum.py",)),
]
