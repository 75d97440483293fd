"""Faults of the tabletop, of disturbed demonstrations, of what policies of states import, of flows and OpenVLA."""

from __future__ import annotations

C, D = "sims/mujoco/control.py", "tasks/manipulation/episodes.py"
T = "sims/mujoco/tasks.py"
SMALL, LOOKS = "mmrl/policies/vla/small.py", ("policies/vla/test_small.py",)
FLOWS, OPENVLA = "mmrl/policies/vla/flows.py", "mmrl/policies/vla/openvla.py"
CONTRAST, PICTURES = ("policies/vla/test_contrast.py",), ("policies/vla/test_openvla.py",)
CONTROLS, SHOWN = ("sims/test_tabletop.py",), ("tasks/test_manipulation.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("control: places are not clipped", C, "(np.clip(action[:3], -1, 1) + 1)", "(action[:3] + 1)", CONTROLS),
    ("control: places of another box", C, "+ 1) / 2 * (HIGH", "+ 1) * (HIGH", CONTROLS),
    ("control: a place is reached at once", C, "min(1.0, longest / max", "min(1.0, 1e9 / max", CONTROLS),
    ("control: a step of each axis", C, "1.0 / max(float(np.linalg.norm(way)), 1e-9)",
     "1.0 / max(float(np.abs(way).max()), 1e-9)", CONTROLS),
    ("control: always moves", "sims/mujoco/tabletop.py", "CONTROLS[control]", 'CONTROLS["delta"]', CONTROLS),
    ("control: experts always show moves", "sims/mujoco/tabletop.py", "self.control.action(self.setpoint",
     'CONTROLS["delta"].action(self.setpoint', CONTROLS),
    ("control: a move of any task goes 3 cm", C, "setpoint + step * np", "setpoint + STEP * np", CONTROLS),
    ("control: places of any task are 3 cm apart", C, "(HIGH - LOW), step)", "(HIGH - LOW), STEP)", CONTROLS),
    ("push: as fast as the rest", T, "push_expert, PUSH_STEP)", "push_expert)", CONTROLS),
    ("push: the expert thinks in steps of 3 cm", "sims/mujoco/tabletop.py", "(self.view()), self.task.step)",
     "(self.view()), 0.03)", CONTROLS),
    ("push: beyond the pad", T, "view.goal[:2] - ahead * PUSH_SHORT", "view.goal[:2] + ahead * PUSH_SHORT", CONTROLS),
    ("push: from in front of the cube too", T, "PUSH_LOW and along < 0 and", "PUSH_LOW and", CONTROLS),
    ("push: from on high", T, "view.tip[2] < PUSH_LOW and along", "along", CONTROLS),
    ("push: from aside", T, " and float(np.linalg.norm(aside)) < PUSH_ASIDE", "", CONTROLS),
    ("perturbation: another one begins while one lasts", D, "(self.left == 0) & (self.rng",
     "(self.left >= 0) & (self.rng", SHOWN),
    ("perturbation: one action too few", D, "self.left[begins] = how.length",
     "self.left[begins] = how.length - 1", SHOWN),
    ("perturbation: it never ends", D, "np.maximum(self.left - 1, 0)", "np.maximum(self.left, 0)", SHOWN),
    ("perturbation: a new action at each step", D, "np.where(begins[:, None, None], drawn,",
     "np.where(True, drawn,", SHOWN),
    ("perturbation: what is executed is shown", D, "observation.state[row], wanted[row, 0]",
     "observation.state[row], executed[row, 0].astype(np.float32)", SHOWN),
    ("perturbation: of another length than asked for", "tasks/manipulation/settings.py",
     "self.perturbation, self.perturbation_length)", "self.perturbation)", SHOWN),
    ("small networks: they bring transformers along", "tasks/manipulation/tiny_model.py",
     "import small, states_only", "import small, states_only, vision_language", ("policies/vla/test_states.py",)),
    ("normalise: what the prompt made of it", SMALL,
     "h = (F.instance_norm(h) if self.config.normalise else h) * (1 + scale) + shift",
     "h = F.instance_norm(h * (1 + scale) + shift) if self.config.normalise else h * (1 + scale) + shift", LOOKS),
    ("normalise: not where places are read", SMALL, "F.instance_norm(h) if self.config.normalise",
     "F.instance_norm(h) if self.config.normalise and layer < 2", LOOKS),
    ("normalise: nothing", SMALL, "F.instance_norm(h) if self.config.normalise", "h if self.config.normalise", LOOKS),
    ("normalise: always", SMALL, "F.instance_norm(h) if self.config.normalise else h", "F.instance_norm(h)", LOOKS),
    ("normalise: from the start on", SMALL, "normalise: bool = False", "normalise: bool = True", LOOKS),
    ("contrast: the old policy is the present one", FLOWS, '"old_velocity": v.detach() if old is None else old.to(v)',
     '"old_velocity": v.detach()', CONTRAST),
    ("contrast: what was not executed counts", FLOWS, "part.where(counted, 0)", "part", CONTRAST),
    ("contrast: signal and noise exchanged", "mmrl/policies/vla/policy.py", "sigma=sigma, signal=1 - sigma",
     "sigma=1 - sigma, signal=sigma", CONTRAST),
    ("openvla: another filter", OPENVLA, "Image.Resampling.LANCZOS", "Image.Resampling.BICUBIC", PICTURES),
    ("openvla: no JPEG", OPENVLA, "seen = np.asarray(Image.open(file)).astype", "seen = image.astype", PICTURES),
    ("openvla: a coarser JPEG", OPENVLA, "quality=95", "quality=75", PICTURES),
    ("openvla: cameras of other rows", OPENVLA, '"(n c) p w -> n (c p) w"', '"(c n) p w -> n (c p) w"', PICTURES),
    ("openvla: patches of one camera are counted", OPENVLA, "len(ids) + cameras * vit", "len(ids) + vit", PICTURES),
    ("eval: a flow is played twice", "mmrl/cli.py", 'EpisodeEvaluation) else "sampled"',
     'EpisodeEvaluation) else "both"', ("test_evaluation_lines.py",)),
]
