"""Which configuration of mmrl gives the numbers of which function of which repository in `public_numbers.json`."""

import json
from pathlib import Path

FILE = json.loads((Path(__file__).parent / "public_numbers.json").read_text())
INPUTS, PUBLIC = FILE["inputs"], FILE["repositories"]


def grpo(*options):
    return f"algorithm={{{', '.join(('type: grpo', *options))}}}"


def plain(*options):
    """Advantages are the rewards."""
    return grpo("baseline: none, scale: none", *options)


def clip(kind, more=""):
    return f"surrogate: {{type: {kind}, low: 0.2, high: 0.28{more}}}"


def kl(estimator):
    return grpo(f"terms: [{{type: kl, coefficient: 1.0, estimator: {estimator}}}]")


KL = {("loss term", "kl")}
MEAN = "reduce: sequence_mean"
# By a name of ours: the configuration, and the methods whose numbers it shows, by the title of the choice and name.
CONFIGURATIONS = {
    "grpo": ("algorithm=grpo", {("algorithm", "grpo"), ("scale of advantages", "group_std")}),
    "group_std": ("algorithm=grpo", {("scale of advantages", "group_std")}),
    "dr_grpo": (grpo("scale: none"), {("baseline", "mean"), ("scale of advantages", "none")}),
    "rloo": (grpo("baseline: leave_one_out"), {("baseline", "leave_one_out")}),
    "opo": (grpo("baseline: length_weighted"), {("baseline", "length_weighted")}),
    "reinforce++ baseline": (grpo("scale: none, shaping: [whitening]"), {("advantage shaper", "whitening")}),
    "reinforce++": (plain("shaping: [whitening]"), {("advantage shaper", "whitening"), ("baseline", "none")}),
    "best_only": (
        plain("transforms: [{type: best_only, divide: false}]"),
        {("transform of rewards", "best_only")},
    ),
    "best_only divided": (plain("transforms: [best_only]"), {("transform of rewards", "best_only")}),
    "pass_at_k_analytic": (
        plain("transforms: [{type: pass_at_k_analytic, k: 2}]"),
        {("transform of rewards", "pass_at_k_analytic")},
    ),
    "ppo": ("algorithm={type: ppo, gamma: 0.9, lam: 0.8}", {("algorithm", "ppo"), ("lambda of estimates", "constant")}),
    "clip": (plain(clip("clip")), {("surrogate", "clip")}),
    "clip of sequences": (plain(clip("clip"), MEAN), {("surrogate", "clip")}),
    "clip sums": (plain(clip("clip"), "reduce: sequence_sum"), set()),
    "dual_clip": (plain(clip("dual_clip", ", cap: 1.5")), {("surrogate", "dual_clip")}),
    "gspo": (
        plain("level: sequence, surrogate: {type: clip, low: 0.03, high: 0.04}"),
        {("surrogate", "clip"), ("algorithm", "grpo")},
    ),
    "sapo": (plain("surrogate: soft", MEAN), {("surrogate", "soft")}),
    "gmpo": (plain("surrogate: geometric"), {("surrogate", "geometric")}),
    "constant": (plain(clip("clip"), "reduce: constant"), {("algorithm", "grpo")}),
    "kl-cov": (
        plain(
            "surrogate: unclipped",
            "terms: [{type: kl, against: {type: old, direction: unweighted}, estimator: absolute, coefficient: 1.0, "
            "weighting: {type: covariance, share: 0.2}}]",
        ),
        {("weighting of kl", "covariance")},
    ),
    "clip-cov": (
        plain(clip("clip"), "masks: [{type: covariance_clip, share: 0.99, low: 0.1, high: 0.4}]"),
        {("mask", "covariance_clip")},
    ),
    "entropy_share": (
        plain(clip("clip"), "masks: [{type: entropy_share, share: 0.5}]"),
        {("mask", "entropy_share")},
    ),
    "batch_std": (grpo("scale: batch_std"), {("scale of advantages", "batch_std")}),
    "gdpo": (grpo("components: normalise_each"), {("components", "normalise_each")}),
    "dft": ("algorithm={type: reweighted_supervised}", {("algorithm", "reweighted_supervised")}),
    "preference": ("algorithm={type: preference, beta: 0.3}", {("algorithm", "preference")}),
    "preference mixed": (
        "algorithm={type: mixed_preference, beta: 0.3, preference: 0.8, quality: 0.2, generation: 1.0}",
        {("algorithm", "mixed_preference")},
    ),
    "stepwise": (
        "algorithm={type: stepwise_preference, beta: 2.0}",
        {("algorithm", "stepwise_preference")},
    ),
    "stepwise clamped": (
        "algorithm={type: stepwise_preference, beta: 0.7, clip: 0.1}",
        {("algorithm", "stepwise_preference")},
    ),
    "gspo of tokens": (
        plain("level: sequence, surrogate: {type: clip, low: 0.03, high: 0.04}", "reduce: token_mean"),
        {("algorithm", "grpo")},
    ),
    "soft": (plain("surrogate: soft"), {("surrogate", "soft")}),
    "mirror_descent": (plain("surrogate: {type: mirror_descent, tau: 0.1}"), {("surrogate", "mirror_descent")}),
    "disco": ("algorithm={type: discriminative, tau: 0.7}", {("algorithm", "discriminative")}),
    "disco of ratios": (
        "algorithm={type: discriminative, tau: 0.7, score: ratio}",
        {("algorithm", "discriminative")},
    ),
    "discob": ("algorithm={type: discriminative, tau: null}", {("algorithm", "discriminative")}),
    "discob of ratios": (
        "algorithm={type: discriminative, tau: null, score: ratio}",
        {("algorithm", "discriminative")},
    ),
    "view": (
        plain("terms: [{type: kl, coefficient: 0.5, estimator: k3, against: {type: view, bound: 0.2, view: no_text}}]"),
        {("other policy of kl", "view")},
    ),
    "nft": (
        "algorithm={type: contrast, baseline: none, scale: none, nft_beta: 0.5, bound: 2.0}",
        {("algorithm", "contrast")},
    ),
    "nft clamped": (
        "algorithm={type: contrast, baseline: none, scale: none, nft_beta: 1.0, bound: 0.6}",
        {("algorithm", "contrast")},
    ),
    "gpg": (
        grpo("scale: none, shaping: [signal_correction], surrogate: reinforce", MEAN),
        {("advantage shaper", "signal_correction"), ("surrogate", "reinforce")},
    ),
    "grpo with demonstrations": ("algorithm=grpo", {("source", "guided_groups")}),
    "cispo": (plain(clip("cispo")), {("surrogate", "cispo")}),
    "cispo above alone": (plain("surrogate: {type: cispo, low: 1.0, high: 0.28}"), {("surrogate", "cispo")}),
    "reinforce": (plain("surrogate: reinforce"), {("surrogate", "reinforce")}),
    "divergence_mask": (
        plain("surrogate: {type: divergence_mask, bound: 0.2}"),
        {("surrogate", "divergence_mask")},
    ),
    "divergence_mask kl": (
        plain("surrogate: {type: divergence_mask, bound: 0.05, estimate: kl}"),
        {("surrogate", "divergence_mask")},
    ),
    "divergence_mask and drift": (
        plain(
            "surrogate: {type: divergence_mask, bound: 0.2}",
            "terms: [{type: kl, against: {type: old, direction: unweighted}, estimator: k2, coefficient: 0.2}]",
        ),
        {("surrogate", "divergence_mask"), ("other policy of kl", "old")},
    ),
    "log_clip": (plain("surrogate: {type: log_clip, low: 0.2, high: 0.2}", MEAN), {("surrogate", "log_clip")}),
    "clip of sequences, 0.2": (plain("surrogate: {type: clip, low: 0.2, high: 0.2}", MEAN), {("surrogate", "clip")}),
    "tapered": (plain("surrogate: tapered"), {("surrogate", "tapered")}),
    "truncated": (plain(clip("clip"), "masks: [truncated]"), {("mask", "truncated")}),
    "sum": (grpo("scale: none"), {("components", "sum")}),
    "kl reward": (
        grpo("baseline: leave_one_out, scale: none, transforms: [{type: kl_penalty, kl: {coefficient: 0.3}}]"),
        {("transform of rewards", "kl_penalty")},
    ),
    "kl returns": (
        plain("shaping: [{type: kl_returns, kl: {coefficient: 0.5, estimator: k3}}, whitening]"),
        {("advantage shaper", "kl_returns")},
    ),
    "sqrt_clip": (plain("surrogate: {type: sqrt_clip, cap: 1.5}"), {("surrogate", "sqrt_clip")}),
    "sqrt_clip unequal": (plain("surrogate: {type: sqrt_clip, low: 0.02, high: 0.01}"), {("surrogate", "sqrt_clip")}),
    "gepo": (
        plain("surrogate: {type: group_expectation, low: 0.1, high: 0.1}", MEAN),
        {("surrogate", "group_expectation")},
    ),
    "guided": (plain("surrogate: {type: guided, low: 0.2, high: 0.28, gamma: 0.1}"), {("surrogate", "guided")}),
    "guided gamma=0.5": (
        plain("surrogate: {type: guided, low: 0.2, high: 0.28, gamma: 0.5}"),
        {("surrogate", "guided")},
    ),
    "kl k3 of sequences": (
        grpo("terms: [{type: kl, coefficient: 1.0, estimator: k3}]", MEAN),
        KL,
    ),
    **{f"kl {estimator}": (kl(estimator), KL) for estimator in ("k1", "absolute", "k2", "k3")},
}
VANILLA = "compute_policy_loss_vanilla clip_ratio_c=1e9"
MPO = "_compute_loss loss_type=[sigmoid,bco_pair,sft] beta=0.3"
OFF_POLICY = "compute_token_on_off_policy_loss off_policy_reshape=p_div_p_"
# By repository and function: the configuration with the same numbers.
EQUAL = {
    "volcengine/verl": {
        "compute_grpo_outcome_advantage": "grpo",
        "compute_grpo_outcome_advantage norm_adv_by_std_in_grpo=False": "dr_grpo",
        "compute_rloo_outcome_advantage": "rloo",
        "compute_opo_outcome_advantage": "opo",
        "compute_reinforce_plus_plus_baseline_outcome_advantage": "reinforce++ baseline",
        "compute_reinforce_plus_plus_outcome_advantage gamma=1": "reinforce++",
        "compute_grpo_passk_outcome_advantage": "best_only",
        "compute_gae_advantage_return gamma=0.9 lam=0.8": "ppo",
        VANILLA: "clip",
        "compute_policy_loss_vanilla clip_ratio_c=1.5": "dual_clip",
        f"{VANILLA} seq-mean-token-mean": "clip of sequences",
        f"{VANILLA} seq-mean-token-sum": "clip sums",
        "compute_policy_loss_gspo": "gspo",
        "compute_policy_loss_sapo": "sapo",
        "compute_policy_loss_geo_mean clip_ratio_low=0.4 clip_ratio_high=0.4": "gmpo",
        "compute_policy_loss_cispo": "cispo",
        "compute_policy_loss_gpg": "reinforce",
        "kl_penalty k1": "kl k1",
        "kl_penalty abs": "kl absolute",
        "kl_penalty k2": "kl k2",
        "kl_penalty k3": "kl k3",
        "apply_kl_penalty low_var_kl compute_reinforce_plus_plus_outcome_advantage": "kl returns",
    },
    "hiyouga/EasyR1": {
        "compute_grpo_outcome_advantage": "grpo",
        "compute_rloo_outcome_advantage": "rloo",
        "compute_grpo_passk_outcome_advantage": "best_only divided",
        "compute_reinforce_plus_plus_outcome_advantage gamma=1": "reinforce++",
        "compute_policy_loss": "clip",
        "compute_policy_loss clip_ratio_dual=1.5": "dual_clip",
        "compute_policy_loss loss_avg_mode=seq": "clip of sequences",
        "compute_policy_loss loss_type=gspo": "gspo",
        "compute_policy_loss loss_type=cispo": "cispo",
        "compute_policy_loss loss_type=sapo": "sapo",
        "compute_kl kl": "kl k1",
        "compute_kl abs": "kl absolute",
        "compute_kl mse": "kl k2",
        "compute_kl low_var_kl": "kl k3",
    },
    "OpenRLHF/OpenRLHF": {
        "PolicyLoss": "clip",
        "PolicyLoss dual_clip=1.5": "dual_clip",
        "PolicyLoss token_level_loss=False": "clip of sequences",
        "PolicyLoss policy_loss_type=gspo": "gspo",
        "compute_approx_kl k1": "kl k1",
        "compute_approx_kl k2": "kl k2",
        "compute_approx_kl k3": "kl k3",
    },
    "THUDM/slime": {
        "compute_policy_loss": "clip",
        "compute_policy_loss eps_clip_c=1.5": "dual_clip",
        "compute_cispo_loss": "cispo",
        "compute_gspo_kl compute_policy_loss": "gspo",
        "compute_approx_kl k1": "kl k1",
        "compute_approx_kl k2": "kl k2",
        "compute_approx_kl k3": "kl k3",
    },
    "NovaSky-AI/SkyRL": {
        "ppo_policy_loss": "clip",
        "ppo_policy_loss sequence_mean": "clip of sequences",
        "ppo_policy_loss dual_clip": "dual_clip",
        "gspo_policy_loss": "gspo",
        "sapo_policy_loss": "sapo",
        "compute_policy_loss_cispo": "cispo",
        "dppo_policy_loss binary_tv": "divergence_mask",
        "dppo_policy_loss binary_kl": "divergence_mask kl",
        "compute_approx_kl k1": "kl k1",
        "compute_approx_kl abs": "kl absolute",
        "compute_approx_kl k2": "kl k2",
        "compute_approx_kl k3": "kl k3",
    },
    "RLinf/RLinf": {
        "compute_grpo_advantages": "grpo",
        "compute_ppo_actor_loss": "clip",
        "compute_ppo_actor_loss clip_ratio_c=1.5": "dual_clip",
    },
    "allenai/open-instruct": {
        "compute_grpo_loss dapo": "clip",
        "compute_grpo_loss cispo": "cispo above alone",
        "compute_grpo_loss kl_estimator=0": "kl k1",
        "compute_grpo_loss kl_estimator=1": "kl k2",
        "compute_grpo_loss kl_estimator=2": "kl k3",
    },
    "ElliottYan/LUFFY": {
        "compute_grpo_outcome_advantage_split": "grpo",
        f"{OFF_POLICY}0.1": "guided",
        f"{OFF_POLICY}0.5": "guided gamma=0.5",
    },
    "RUCAIBox/Passk_Training": {"compute_advantage K=2": "pass_at_k_analytic"},
    "MikeWangWZHL/PAPO": {
        "compute_dapo_outcome_advantage": "grpo",
        "compute_policy_loss": "clip",
        "compute_policy_loss clip_ratio_dual=1.5": "dual_clip",
        "compute_kl low_var_kl": "kl k3",
    },
    "PRIME-RL/Entropy-Mechanism-of-RL": {
        "compute_policy_loss": "clip",
        "compute_policy_loss_clip_cov at the first update": "clip-cov",
    },
    "PrimeIntellect-ai/prime-rl": {
        "default_loss_fn kl_tau=0": "divergence_mask",
        "default_loss_fn kl_tau=0.1": "divergence_mask and drift",
    },
    "Aiolus-X/RIPO": {
        "compute_policy_loss_vanilla clip_ratio_c=1.5": "sqrt_clip",
        "compute_policy_loss_vanilla": "sqrt_clip unequal",
    },
    "yelurebajrang/HeteroRL_GEPO": {
        "_compute_loss loss_type=gepo": "gepo",
        "_compute_loss loss_type=gspo": "gspo",
        "_compute_loss loss_type=grpo": "clip of sequences",
        "_compute_loss loss_type=dr_grpo": "constant",
        "_compute_loss loss_type=gmpo": "gmpo",
    },
}
SWIFT = "_compute_loss_and_metrics loss_type="
EQUAL["modelscope/ms-swift"] = {
    f"{SWIFT}grpo": "clip of sequences",
    f"{SWIFT}bnpo": "clip",
    f"{SWIFT}dapo": "clip",
    f"{SWIFT}dapo delta=1.5": "dual_clip",
    f"{SWIFT}dr_grpo": "constant",
    f"{SWIFT}grpo importance_sampling_level=sequence": "gspo",
    f"{SWIFT}bnpo importance_sampling_level=sequence_token": "gspo of tokens",
    f"{SWIFT}cispo epsilon_high=1.28": "cispo above alone",
    f"{SWIFT}sapo": "sapo",
    f"{SWIFT}bnpo beta=1": "kl k3",
    f"{SWIFT}dapo top_entropy_quantile=0.5": "entropy_share",
    "compute_advantages grpo scale_rewards=none": "dr_grpo",
    "compute_advantages rloo scale_rewards=none": "rloo",
    "compute_advantages grpo scale_rewards=gdpo": "gdpo",
    "compute_advantages grpo scale_rewards=none of two rewards": "sum",
    "compute_advantages rloo kl_in_reward=True beta=0.3": "kl reward",
    f"{SWIFT}bnpo overlong_filter=True": "truncated",
}
EQUAL["opendilab/LightRFT"] = {"PolicyLoss use_cpg_loss=True": "log_clip", "PolicyLoss": "clip of sequences, 0.2"}
EQUAL["OpenRLHF/OpenRLHF"]["DPOLoss beta=0.3"] = "preference"
EQUAL["allenai/open-instruct"]["dpo_loss beta=0.3"] = "preference"
EQUAL["MikeWangWZHL/PAPO"]["kl_prcp_loss kl_prcp_clipping=0.2 kl_prcp_coef=0.5"] = "view"
EQUAL |= {
    "huggingface/trl": {
        "_compute_loss loss_type=grpo": "clip of sequences",
        "_compute_loss loss_type=bnpo": "clip",
        "_compute_loss loss_type=dapo": "clip",
        "_compute_loss loss_type=dapo delta=1.5": "dual_clip",
        "_compute_loss loss_type=dr_grpo": "constant",
        "_compute_loss loss_type=grpo importance_sampling_level=sequence": "gspo",
        "_compute_loss loss_type=cispo": "cispo above alone",
        "_compute_loss loss_type=sapo": "sapo",
        "_compute_loss loss_type=dapo beta=1": "kl k3",
        "_compute_loss loss_type=dapo top_entropy_quantile=0.5": "entropy_share",
        "scale_rewards=none": "dr_grpo",
        "dft_loss": "dft",
        "_compute_loss loss_type=sigmoid beta=0.3": "preference",
        f"{MPO} of a pair": "preference mixed",
    },
    "NVIDIA-NeMo/RL": {
        "ClippedPGLossFn": "clip",
        "ClippedPGLossFn ratio_clip_c=1.5": "dual_clip",
        "ClippedPGLossFn token_level_loss=False": "clip of sequences",
        "ClippedPGLossFn sequence_level_importance_ratios=True": "gspo",
        "ClippedPGLossFn use_cispo=True": "cispo",
        "ClippedPGLossFn disable_ppo_ratio=True": "reinforce",
        "GRPOAdvantageEstimator": "grpo",
        "GRPOAdvantageEstimator use_leave_one_out_baseline=True normalize_rewards=False": "rloo",
        "GRPOAdvantageEstimator normalize_rewards=False": "dr_grpo",
        "GDPOAdvantageEstimator reward_weights=[1, 0.5]": "gdpo",
    },
    "inclusionAI/AReaL": {
        "ppo_actor_loss_fn": "clip",
        "ppo_actor_loss_fn c_clip=1.5": "dual_clip",
        "ppo_actor_loss_fn importance_sampling_level=sequence": "gspo of tokens",
        "sapo_loss_fn": "soft",
    },
    "alibaba/ROLL": {
        "_compute_ppo_loss": "clip",
        "_compute_ppo_loss dual_clip_loss=True pg_clip=0.25": "dual_clip",
        "_compute_ppo_loss seq-mean-token-mean": "clip of sequences",
        "_compute_vanilla_pg_loss": "reinforce",
        "_compute_cispo_loss": "cispo",
        "_compute_kimi15_loss": "mirror_descent",
        "_compute_topr_loss": "tapered",
        "compute_approx_kl kl": "kl k1",
        "compute_approx_kl abs": "kl absolute",
        "compute_approx_kl mse": "kl k2",
        "compute_approx_kl k3": "kl k3",
    },
    "Optimization-AI/DisCO": {
        "compute_policy_loss_disco_logL tau=0.7": "disco",
        "compute_policy_loss_disco_Lratio tau=0.7": "disco of ratios",
        "compute_policy_loss_discob_logL": "discob",
        "compute_policy_loss_discob_Lratio": "discob of ratios",
    },
    "PRIME-RL/SimpleVLA-RL": {"compute_policy_loss": "clip", "compute_grpo_outcome_advantage": "grpo"},
    "NVlabs/GDPO": {"compute_advantage grpo_no_std": "dr_grpo"},
    "NVlabs/DiffusionNFT": {
        "policy_loss beta=0.5 adv_clip_max=2": "nft",
        "policy_loss beta=1 adv_clip_max=0.6": "nft clamped",
    },
    "AMAP-ML/GPG": {"compute_loss pg_name=gpg adjust_gd=True": "gpg"},
    "om-ai-lab/VLM-R1": {"compute_loss": "clip of sequences", "compute_loss beta=1": "kl k3 of sequences"},
    "sail-sg/understand-r1-zero": {
        "compute_monte_carlo_advantages critic_type=drgrpo": "dr_grpo",
        "compute_monte_carlo_advantages critic_type=grpo": "grpo",
    },
    "SalesforceAIResearch/DiffusionDPO": {"loss of train_method=dpo beta_dpo=4": "stepwise"},
    "yk7333/d3po": {"loss of train eps=0.1 beta=0.7": "stepwise clamped"},
    "callsys/GMPO": {"critic_type_modify=gmpo cliprange=0.4": "gmpo"},
}
# Losses whose value is of another form with the same gradient: minus A sg(r) logp there, minus A sg(r) r / sg(r) here.
GRADIENT_ALONE = {"cispo", "cispo above alone", "reinforce", "gpg", "dft", "mirror_descent", "disco", "disco of ratios"}
GRADIENT_ALONE |= {"tapered"}
GRADIENT_ALONE |= {"log_clip"}  # A log p there, A (log p - log old p) here
# By repository and function: the configuration whose numbers differ; `mmrl methods` says how, and why.
DIFFERENT = {
    "volcengine/verl": {
        "compute_policy_loss_kl_cov": "kl-cov",
        f"{VANILLA} seq-mean-token-sum-norm": "constant",
    },
    "PRIME-RL/Entropy-Mechanism-of-RL": {
        "compute_policy_loss_kl_cov k_percent=20 ppo_kl_coef=1": "kl-cov",
        "compute_policy_loss_clip_cov": "clip-cov",
    },
    "huggingface/trl": {
        "scale_rewards=group": "group_std",
        "scale_rewards=batch": "batch_std",
        "multi_objective_aggregation=normalize_then_sum": "gdpo",
        MPO: "preference mixed",
    },
    "modelscope/ms-swift": {
        "compute_advantages grpo scale_rewards=group": "group_std",
        "compute_advantages grpo scale_rewards=batch": "batch_std",
    },
    "NVIDIA-NeMo/RL": {
        "ReinforcePlusPlusAdvantageEstimator": "reinforce++ baseline",
        **{f"ClippedPGLossFn reference_policy_kl_type={k}": f"kl {k}" for k in ("k1", "k2", "k3")},
    },
    "NVlabs/GDPO": {"compute_advantage gdpo": "gdpo"},
    "NVlabs/DiffusionNFT": {"PerPromptStatTracker": "group_std"},
    "yifan123/flow_grpo": {"PerPromptStatTracker": "group_std", "PerPromptStatTracker global_std=True": "batch_std"},
    "ElliottYan/LUFFY": {"compute_grpo_outcome_advantage_split of off-policy rows": "grpo with demonstrations"},
}

# By repository and function: the step of a denoising chain whose numbers are those of the function.
STEPS = {
    "yifan123/flow_grpo": {"sde_step_with_logprob noise_level=0.7": "{type: flow_sde, noise: 0.7}"},
    "XueZeyue/DanceGRPO": {"flux_step eta=0.3": "{type: dance_sde, noise: 0.3}"},
    "Fredreic1849/BranchGRPO": {"flux_step_with_split eta=0.3": "{type: dance_sde, noise: 0.3}"},
    "Tencent-Hunyuan/MixGRPO": {"flow_grpo_step eta=0.7": "{type: flow_sde, noise: 0.7}"},
    "CodeGoat24/Pref-GRPO": {
        "flow_grpo_step eta=0.7": "{type: flow_sde, noise: 0.7}",
        "dance_grpo_step eta=0.3": "{type: dance_sde, noise: 0.3}",
    },
    "IamCreateAI/FlowCPS": {"sde_step_with_logprob noise_level=0.7": "{type: cps, noise: 0.7}"},
    "kvablack/ddpo-pytorch": {"ddim_step_with_logprob eta=0.8": "{type: ddim, noise: 0.8}"},
    "yk7333/d3po": {"ddim_step_with_logprob eta=0.8": "{type: ddim, noise: 0.8}"},
    "RockeyCoss/SPO": {"ddim_step_with_logprob eta=0.8": "{type: ddim, noise: 0.8}"},
}
# By repository and function: the step with the same gradient, whose log-probability has constants that are not there.
STEPS_UP_TO_CONSTANTS = {"Tencent-Hunyuan/MixGRPO": {"dance_grpo_step eta=0.3": "{type: dance_sde, noise: 0.3}"}}
# By title and name of a method, the repositories whose numbers tests of their own show it with.
SHOWN_OTHERWISE = {
    ("likelihood", "matching"): {"scxue/advantage_weighted_matching"},
    ("advantage shaper", "divergence_weight"): {"longmalongma/TW-GRPO"},
    ("advantage shaper", "span_minimum"): {"CJReinforce/PURE"},
    ("advantage shaper", "advantage_momentum"): {"JianxXiong/AAPO"},
    ("likelihood of a masked response", "trace"): {"Gen-Verse/dLLM-RL"},
}
