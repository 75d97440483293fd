"""Faults of tools, of conversations from files and of environments of other packages. Each entry has a name, a file, a
string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

TOOLS = ("sims/test_tools.py",)
TALKS = ("tasks/test_conversations.py",)
OTHERS = ("sims/test_other_environments.py",)
C, E = "tasks/visual_qa/data/conversations.py", "sims/turns/openenv.py"
P, S = "sims/turns/images.py", "sims/turns/settings.py"
PICTURES, L, D = (
    ("tasks/test_still_lifes.py",),
    "tasks/visual_qa/data/still_lifes.py",
    "tasks/visual_qa/data/still_life_scene.py",
)
CLUSTER = ("scripts/test_cluster.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("ocr tool: reads the whole image", P, "fitted(_part(whole, box), pixels)", "fitted(whole, pixels)", TOOLS),
    ("ocr tool: reads what is shown, not the original", P,
     "whole = scene.image(image)\n        box = 0.0", "whole = scene.shown[image]\n        box = 0.0", TOOLS),
    ("ocr tool: half a box is not a box", P, "elif (left, top, right, bottom) != (None, None, None, None):",
     "elif None not in (left, top, right, bottom):", TOOLS),
    ("ocr tool: tells all that it read", P, "if len(content) > characters:", "if len(content) > 10 * characters:", TOOLS),
    # --- conversations from files ---
    ("files: only the last response is learned from", "mmrl/policies/vlm/turns.py",
     "draft.append(ids, torch.zeros(len(ids)), None)",
     "draft.append(ids, torch.zeros(len(ids)), None); draft.tokens.decided[: (number == 0) * len(ids)] = False", TALKS),
    ("files: results of tools are learned from", "mmrl/policies/vlm/prompts.py",
     "extended = self.extended(observation.prompt, decided=False)", "extended = self.extended(observation.prompt, decided=True)", TALKS),
    ("files: images of the column in another order", C, "image_column = enumerate(images if isinstance(images,",
     "image_column = enumerate(images[::-1] if isinstance(images,", TALKS),
    ("files: calls are dropped", C, "        if not calls:\n            return text",
     "        if calls or not calls:\n            return text", TALKS),
    ("files: images that have no place are passed over", C, "if (left := len(list(image_column))) > 0:",
     "if (left := len(list(image_column))) > 9:", TALKS),
    ("files: nulls of tables are arguments", C, "for key, inner in value.items() if inner is not None}",
     "for key, inner in value.items()}", TALKS),
    # --- environments of other packages ---
    ("openenv: a step's reward is lost", E, "float(result.reward or 0.0)", "0.0", OTHERS),
    ("openenv: every game is the same", E, 'seed=prompt.metadata["seed"]', "seed=0", OTHERS),
    ("openenv: success needs no end", E, "float(done and self.earned >= self.settings.won)",
     "float(self.earned >= self.settings.won or done)", OTHERS),
    ("games: the expert names the other rule", "sims/turns/cards.py", "if rule == 'count' else colour}",
     "if rule == 'colour' else colour}", ("sims/test_games.py",)),
    ("learning: the best without a tool is not the best", "scripts/bench/turns_learning.py",
     "        return max(share for", "        return min(share for", ("scripts/test_bench_scripts.py",)),
    ("ocr tool: its engine is missed late", S, "            try:\n                tool.check()",
     "            try:\n                tool.check  # noqa: B018", TOOLS),
    # --- still lifes ---
    ("still lifes: the zoom shows another card than is read", L, "zoom, str(still_life.digits[shown])]", "zoom, answer]", PICTURES),
    ("still lifes: a repeated question has the same demonstration", L, "self.seed, number, repeat])", "self.seed, number])", PICTURES),
    ("still lifes: another object is asked about", L, "*others[: self.objects - 1]]", "*others[: self.objects - 1]][::-1]", PICTURES),
    ("still lifes: held-out pictures are the training ones", L,
     "rng = np.random.default_rng([SPLITS.index(self.split), self.seed, number])", "rng = np.random.default_rng([0, self.seed, number])",
     PICTURES),
    ("still lifes: rays are not turned by the camera", D, "rays = rays @ rotation.T", "rays = rays @ rotation", PICTURES),
    ("still lifes: objects stand before their cards", D, "+ (0, IN_FRONT)", "- (0, IN_FRONT)", PICTURES),
    ("still lifes: objects hide cards", D, "(down >= 2)).all()", "(down >= 1)).all()", PICTURES),
    ("still lifes: the digits of cards are mixed", D, 'model.material(f"card{digit}").id', 'model.material(f"card{9 - digit}").id', PICTURES),
    ("still lifes: corners are brighter", D, "light *= (1 - rng", "light *= (1 + rng", PICTURES),
    # --- the job for Slurm ---
    ("slurm: the run directory of the command line is not looked at", "scripts/cluster/slurm.sh", "run=${word#run_dir=} ;;", ": ;;", CLUSTER),
    ("slurm: a reader that ends early ends the job", "scripts/cluster/slurm.sh", 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
     'hosts=("$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)")', CLUSTER),
    ("slurm: srun gives each task one processor", "scripts/cluster/slurm.sh", "export SRUN_CPUS_PER_TASK=", "export UNUSED=", CLUSTER),
    ("slurm: torchrun kills ranks after 30 seconds", "scripts/cluster/slurm.sh", "SHUTDOWN_TIMEOUT=270", "SHUTDOWN_TIMEOUT=30", CLUSTER),
]
# fmt: on
