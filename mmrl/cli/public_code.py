"""Public code whose numbers tests compare with those of mmrl: `tests/joints/*_numbers.json` hold
them, and `tests/joints/test_public_numbers.py` checks that this table names what is
compared."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Repository:
    """A repository at a commit. equal: by title of a choice, the names of the methods that give the numbers of its
    code, separated by spaces. differs: by title and name, how the numbers of its code differ, and why."""

    commit: str
    equal: dict[str, str] = field(default_factory=dict)
    differs: dict[tuple[str, str], str] = field(default_factory=dict)


WIDER_DIVISOR = (
    "its divisor is the standard deviation plus 1e-4, here plus 1e-6, so that small differences of rewards keep their "
    "advantage"
)
REPOSITORIES = {
    "volcengine/verl": Repository(
        "b178a3cd",
        equal={
            "lambda of estimates": "constant",
            "control": "adaptive",
            "advantage shaper": "kl_returns token_baseline whitening",
            "algorithm": "grpo ppo",
            "baseline": "greedy leave_one_out length_weighted mean none",
            "loss term": "kl",
            "scale of advantages": "group_std none",
            "surrogate": "cispo clip dual_clip geometric reinforce soft",
            "transform of rewards": "best_only",
        },
        differs={
            ("weighting of kl", "covariance"): (
                "the covariance there is of the log-probabilities of the present policy, here of those before the "
                "step, so that the choice does not depend on the minibatch"
            ),
            ("algorithm", "grpo"): (
                "seq-mean-token-sum-norm is a sum over rollouts there; reduce=constant is their mean, so that the "
                "loss does not grow with the batch"
            ),
        },
    ),
    "huggingface/trl": Repository(
        "f2cd5771",
        equal={
            "algorithm": "distillation grpo mixed_preference preference reweighted_supervised",
            "baseline": "mean",
            "estimator of distillation": "full",
            "loss term": "kl",
            "mask": "entropy_share",
            "scale of advantages": "none",
            "surrogate": "cispo clip dual_clip soft",
        },
        differs={
            ("algorithm", "mixed_preference"): (
                "equal for a batch of one pair; of several, the generation loss is a mean over the tokens of all "
                "chosen responses there, here the mean over pairs of each response's mean, as in the paper"
            ),
            ("scale of advantages", "group_std"): WIDER_DIVISOR,
            ("scale of advantages", "batch_std"): WIDER_DIVISOR,
            ("components", "normalise_each"): WIDER_DIVISOR,
        },
    ),
    "597358816/EFRame": Repository("173b698f", equal={"mask": "small_advantages", "source": "advantage_replay"}),
    "Aiolus-X/RIPO": Repository(
        "6482fd66",
        equal={"surrogate": "sqrt_clip"},
    ),
    "akanazawa/fpo": Repository("418c2554", equal={"algorithm": "matching", "likelihood": "matching"}),
    "alibaba/ROLL": Repository(
        "8eb27cc2",
        equal={
            "loss term": "kl",
            "surrogate": "cispo clip dual_clip mirror_descent reinforce tapered",
        },
    ),
    "allenai/open-instruct": Repository(
        "e6c3044a",
        equal={
            "algorithm": "preference",
            "loss term": "kl",
            "surrogate": "cispo clip",
        },
    ),
    "AMAP-ML/GPG": Repository(
        "e096da8c",
        equal={"advantage shaper": "signal_correction", "surrogate": "reinforce"},
    ),
    "apple/ml-diffucoder": Repository("f735e013", equal={"likelihood of a masked response": "coupled"}),
    "callsys/GMPO": Repository(
        "205b2bf4",
        equal={"surrogate": "geometric"},
    ),
    "CJReinforce/PURE": Repository(
        "41f9363b",
        equal={"advantage shaper": "span_minimum"},
    ),
    "CodeGoat24/Pref-GRPO": Repository(
        "3e787f6d",
        equal={"transition": "dance_sde flow_sde"},
    ),
    "dllm-reasoning/d1": Repository("837888f2", equal={"likelihood of a masked response": "one_step"}),
    "ElliottYan/LUFFY": Repository(
        "01f4ae06",
        equal={"algorithm": "grpo", "scale of advantages": "group_std", "surrogate": "guided"},
        differs={
            ("source", "guided_groups"): (
                "mean and standard deviation of a group are of the policy's own rollouts alone there; here "
                "demonstrations count too, as in the paper"
            ),
        },
    ),
    "Fredreic1849/BranchGRPO": Repository(
        "19fbb9fc",
        equal={"transition": "dance_sde"},
    ),
    "Gen-Verse/dLLM-RL": Repository(
        "10b4fd1c",
        equal={"likelihood of a masked response": "trace"},
    ),
    "hiyouga/EasyR1": Repository(
        "b44b311b",
        equal={
            "advantage shaper": "whitening",
            "algorithm": "grpo",
            "baseline": "leave_one_out none",
            "loss term": "kl",
            "scale of advantages": "group_std",
            "surrogate": "cispo clip dual_clip soft",
            "transform of rewards": "best_only",
        },
    ),
    "huggingface/lerobot": Repository(
        "7427f318",
        equal={"algorithm": "soft_actor_critic", "loss term": "q_gradient"},
        differs={
            ("algorithm", "soft_actor_critic"): (
                "the loss of the entropy's weight has the weight there, here its logarithm as in Stable-Baselines3, so "
                "that its gradient there is the weight times as large; the weight is adapted to further actions at "
                "the drawn observations there, here to those at the next ones, which are sampled anyway"
            ),
        },
    ),
    "IamCreateAI/FlowCPS": Repository(
        "b402c7a3",
        equal={"transition": "cps"},
    ),
    "Indolent-Kawhi/View-R1": Repository(
        "093f2d82",
        equal={"advantage shaper": "long_wrong", "weighting of kl": "difficulty"},
    ),
    "Infini-AI-Lab/GRESO": Repository(
        "b2778431",
        equal={"prompt sampler": "skip_flat"},
        differs={
            ("prompt sampler", "skip_flat"): (
                "equal up to six visits in a row with explore=0.5: a hundredth of all visits is never skipped there"
            ),
        },
    ),
    "irom-princeton/dppo": Repository("cc7234ad", equal={"algorithm": "advantage_weighted"}),
    "inclusionAI/AReaL": Repository(
        "4aef98d8",
        equal={"algorithm": "grpo", "surrogate": "clip dual_clip soft"},
    ),
    "JianxXiong/AAPO": Repository(
        "b8aac37c",
        equal={"advantage shaper": "advantage_momentum"},
    ),
    "kvablack/ddpo-pytorch": Repository(
        "1958463f",
        equal={"transition": "ddim"},
    ),
    "kpahwa16/pass-k-policy-optimization": Repository("1b0928e6", equal={"transform of rewards": "pass_at_k"}),
    "liziniu/ReMax": Repository("536ba49c", equal={"baseline": "greedy"}),
    "longmalongma/TW-GRPO": Repository(
        "aa529ffc",
        equal={"advantage shaper": "divergence_weight"},
    ),
    "McGill-NLP/VinePPO": Repository("efe72284", equal={"advantage shaper": "segment_values"}),
    "MikeWangWZHL/PAPO": Repository(
        "fb63bf45",
        equal={
            "algorithm": "grpo",
            "loss term": "kl",
            "other policy of kl": "view",
            "scale of advantages": "group_std",
            "surrogate": "clip dual_clip",
        },
    ),
    "Mini-o3/Mini-o3": Repository(
        "8654dbf4",
        differs={
            ("mask", "over_turn"): (
                "mean and standard deviation of a group are of all its rollouts there, here of those that are kept"
            ),
        },
    ),
    "ML-GSAI/LLaDA": Repository(
        "b7e6c356",
        equal={"likelihood of a masked response": "elbo", "order of unmasking": "confidence"},
    ),
    "modelscope/ms-swift": Repository(
        "3602360a",
        equal={
            "transform of rewards": "kl_penalty",
            "algorithm": "grpo",
            "baseline": "leave_one_out mean",
            "components": "normalise_each sum",
            "loss term": "kl",
            "mask": "entropy_share truncated",
            "scale of advantages": "none",
            "surrogate": "cispo clip dual_clip soft",
        },
        differs={
            ("estimator of distillation", "sampled"): (
                "equal at the first update of a step; at later ones its log-ratio to the teacher is that of the policy "
                "that sampled, as an advantage with PPO's clip, here that of the present policy, without a clip"
            ),
            ("scale of advantages", "group_std"): WIDER_DIVISOR,
            ("scale of advantages", "batch_std"): WIDER_DIVISOR,
        },
    ),
    "multimodal-art-projection/TreePO": Repository(
        "f0555239",
        equal={"advantage shaper": "subtree_advantages"},
        differs={
            ("advantage shaper", "subtree_advantages"): (
                "equal where sets of rollouts branch at each segment; a set that does not branch within a segment "
                "counts once more there, here once"
            ),
        },
    ),
    "nakamotoo/dsrl_pi0": Repository(
        "7f48937d",
        differs={
            ("algorithm", "soft_actor_critic"): (
                "the mean of the errors of the Q networks there, here their sum; by default it bootstraps from the "
                "mean of the Q networks and without entropy, here always from the least"
            ),
        },
    ),
    "NovaSky-AI/SkyRL": Repository(
        "a9564572",
        equal={
            "algorithm": "grpo",
            "loss term": "kl",
            "surrogate": "cispo clip divergence_mask dual_clip soft",
        },
    ),
    "NVIDIA-NeMo/RL": Repository(
        "7ea279ab",
        equal={
            "algorithm": "grpo",
            "baseline": "leave_one_out mean",
            "components": "normalise_each",
            "scale of advantages": "group_std none",
            "surrogate": "cispo clip dual_clip reinforce",
        },
        differs={
            ("advantage shaper", "whitening"): "its variance is over n decisions, here over n - 1, as in verl",
            ("loss term", "kl"): (
                "the gradient there has a second part, the estimate times the gradient of the log-probability, "
                "since the samples come from the policy; here, as in GRPO, that of the estimate alone"
            ),
        },
    ),
    "NVlabs/DiffusionNFT": Repository(
        "24af5554",
        equal={"algorithm": "contrast"},
        differs={
            ("scale of advantages", "group_std"): (
                "its standard deviation is that of n, plus 1e-4; here of n - 1, as in GRPO's other code, plus "
                "1e-6: advantages are sqrt((n - 1) / n) times those there"
            ),
        },
    ),
    "NVlabs/GDPO": Repository(
        "b080e63d",
        equal={"baseline": "mean", "scale of advantages": "none"},
        differs={
            ("components", "normalise_each"): (
                "the second normalization is over tokens there, so that long responses count more; here over "
                "rollouts, as in the paper, TRL and NeMo RL"
            ),
        },
    ),
    "om-ai-lab/VLM-R1": Repository(
        "90052f47",
        equal={"loss term": "kl", "surrogate": "clip"},
    ),
    "OpenRLHF/OpenRLHF": Repository(
        "3c3be623",
        equal={
            "algorithm": "grpo preference",
            "loss term": "kl",
            "surrogate": "clip dual_clip",
        },
    ),
    "opendilab/LightRFT": Repository("49e62cb6", equal={"surrogate": "clip log_clip"}),
    "Optimization-AI/DisCO": Repository(
        "bd2b0781",
        equal={"algorithm": "discriminative"},
    ),
    "PRIME-RL/Entropy-Mechanism-of-RL": Repository(
        "88505792",
        equal={"mask": "covariance_clip", "surrogate": "clip"},
        differs={
            ("weighting of kl", "covariance"): (
                "the covariance there is of the log-probabilities of the present policy, here of those before the step"
            ),
            ("mask", "covariance_clip"): (
                "equal at the first update of a step; at later ones the covariance there is of the "
                "log-probabilities of the present policy, here of those before the step, and decisions that PPO's "
                "clip already stops are left out there"
            ),
        },
    ),
    "PRIME-RL/PRIME": Repository("18ad596f", equal={"advantage shaper": "implicit_process"}),
    "PRIME-RL/SimpleVLA-RL": Repository(
        "7c51662d",
        equal={"algorithm": "grpo", "scale of advantages": "group_std", "surrogate": "clip"},
    ),
    "PrimeIntellect-ai/prime-rl": Repository(
        "559b4477",
        equal={"other policy of kl": "old", "surrogate": "divergence_mask"},
    ),
    "ReinFlow/ReinFlow": Repository("aed28193", equal={"likelihood": "learned"}),
    "RLinf/RLinf": Repository(
        "a3816b59",
        equal={
            "algorithm": "advantage_conditioned grpo implicit_q_learning",
            "scale of advantages": "group_std",
            "surrogate": "clip dual_clip",
        },
        differs={
            ("algorithm", "advantage_conditioned"): (
                "the whole data set is labelled once there, and a step at the bound itself is good; here the share of "
                "good steps is of each batch, and its bound moves with the critic. Rewards of N steps plus the "
                "critic's next value may be compared there, here always the return of the rest of the episode"
            ),
            ("algorithm", "soft_actor_critic"): (
                "the mean of the errors of the Q networks there, here their sum; the entropy's weight is adapted to "
                "further actions at the drawn observations there, here to those at the next ones"
            ),
        },
    ),
    "RockeyCoss/SPO": Repository(
        "27a86428",
        equal={"algorithm": "candidate_preference", "transition": "ddim"},
    ),
    "RUCAIBox/Passk_Training": Repository(
        "c3ba575e",
        equal={"transform of rewards": "pass_at_k_analytic"},
    ),
    "sail-sg/understand-r1-zero": Repository(
        "dfca49dd",
        equal={"algorithm": "grpo", "baseline": "mean", "scale of advantages": "group_std none"},
    ),
    "SalesforceAIResearch/DiffusionDPO": Repository(
        "5233e759",
        equal={"algorithm": "stepwise_preference"},
    ),
    "satrams/rent-rl": Repository("5d4d38a7", equal={"transform of rewards": "certainty"}),
    "scxue/advantage_weighted_matching": Repository(
        "be513723",
        equal={"likelihood": "matching"},
    ),
    "SiliangZeng/Multi-Turn-RL-Agent": Repository(
        "7dbdd08b",
        differs={
            ("advantage shaper", "turn_returns"): (
                "its divisors are standard deviations plus 1e-4, here plus 1e-6; a rollout without a call of the tool "
                "gets the advantage of the sum of both rewards there, here those of its turn and of its outcome"
            ),
        },
    ),
    "SkyworkAI/Skywork-OR1": Repository(
        "64e96afa",
        equal={"control": "additive"},
        differs={
            ("control", "additive"): "equal except at the target itself, where the value falls there and stays here"
        },
    ),
    "Tencent-Hunyuan/MixGRPO": Repository(
        "e5cdd6a4",
        equal={"transition": "flow_sde"},
        differs={
            ("transition", "dance_sde"): (
                "its log-probabilities lack the constants of the density; ratios and gradients are the same"
            ),
            ("window", "sliding"): (
                "at the end its window shrinks to one step and then to none before it begins again, here it "
                "begins again at once; numbers of training steps are rounded up there, here to the nearest"
            ),
        },
    ),
    "THUDM/TreeRL": Repository(
        "f0edbea6",
        differs={
            ("advantage shaper", "node_gains"): (
                "without division by leaves its values are G / (G - 1) times those with whole=1, since it compares "
                "each leaf with the group's other leaves; with it, the value of each node is divided by the root of "
                "its own number of leaves before differences are taken there, here the difference is divided, as in "
                "the paper; a mean over tokens is subtracted there, and a gain of 0 is replaced by that of the node "
                "before"
            ),
        },
    ),
    "TIGER-AI-Lab/Pixel-Reasoner": Repository(
        "a3a6c3a5",
        differs={
            ("advantage shaper", "curiosity"): (
                "the bonus is divided by the share there, times a fourth, and less 0.05 for each further call, and it "
                "is a part of the reward; here it is the paper's, beside the advantage"
            ),
        },
    ),
    "tulerfeng/Video-R1": Repository(
        "59d65c34",
        equal={"transform of rewards": "view_contrast"},
        differs={
            ("transform of rewards", "view_contrast"): (
                "equal where answers are right or wrong; of graded ones all above 0.1 get the bonus there, here those "
                "with accuracy 1"
            ),
        },
    ),
    "turboLJY/FSPO": Repository("3e21fbe9", equal={"advantage shaper": "span_signs"}),
    "THUDM/slime": Repository(
        "624b824a",
        equal={
            "algorithm": "grpo",
            "loss term": "kl",
            "surrogate": "cispo clip dual_clip",
        },
    ),
    "vwxyzjn/cleanrl": Repository(
        "fe8d8a03",
        equal={"action head": "gaussian"},
        differs={("action head", "squashed_gaussian"): "1e-6 is added to the slope of tanh there, here nothing"},
    ),
    "xingzhejun/GCPO": Repository("ea6cc4d7", equal={"algorithm": "grpo"}),
    "XueZeyue/DanceGRPO": Repository(
        "15cc71d5",
        equal={"transition": "dance_sde"},
    ),
    "yelurebajrang/HeteroRL_GEPO": Repository(
        "97000a87",
        equal={"algorithm": "grpo", "surrogate": "clip geometric group_expectation"},
    ),
    "vyseian/stable-baselines3-dsrl_dp": Repository("09115c57", equal={"loss term": "q_gradient"}),
    "yuchen-zhu-zyc/DMPO": Repository("96af1a47", equal={"algorithm": "distribution_matching"}),
    "yifan123/flow_grpo": Repository(
        "ac4c86e8",
        equal={"transition": "flow_sde"},
        differs={
            ("scale of advantages", "group_std"): (
                "its standard deviation is that of n, plus 1e-4; here of n - 1, as in GRPO's other code, plus "
                "1e-6: advantages are sqrt((n - 1) / n) times those there"
            ),
            ("scale of advantages", "batch_std"): (
                "its standard deviation is that of n, plus 1e-4; here of n - 1, as in GRPO's other code, plus "
                "1e-6: advantages are sqrt((n - 1) / n) times those there"
            ),
        },
    ),
    "yk7333/d3po": Repository(
        "40d31758",
        equal={"algorithm": "stepwise_preference", "transition": "ddim"},
    ),
}


def compared_with(title: str, name: str) -> list[str]:
    """Returns the repositories whose code gives the same numbers as this method of the choice `title`."""
    return [repository for repository, code in REPOSITORIES.items() if name in code.equal.get(title, "").split()]


def differs_from(title: str, name: str) -> dict[str, str]:
    """Returns, by repository, how the numbers of its code differ from those of this method, and why."""
    key = (title, name)
    return {repository: code.differs[key] for repository, code in REPOSITORIES.items() if key in code.differs}


def lines_of(title: str, name: str) -> list[str]:
    """Returns the lines of `mmrl methods` about public code: the repositories with equal numbers, as OWNER/NAME@COMMIT,
    and each difference with its reason."""
    named = {repository: f"{repository}@{code.commit}" for repository, code in REPOSITORIES.items()}
    equal = ", ".join(named[repository] for repository in compared_with(title, name))
    differences = [f"differs from {named[repository]}: {how}" for repository, how in differs_from(title, name).items()]
    return [*([f"equal by value to {equal} (tests/joints/test_*_numbers.py)"] if equal else []), *differences]


def note_of(title: str, name: str) -> str:
    """Returns the note about public code in the overview, such as " (as verl and 2 others)"; "" without any."""
    names = [repository.rpartition("/")[2] for repository in compared_with(title, name)]
    others = {0: "", 1: " and 1 other"}.get(len(names) - 1, f" and {len(names) - 1} others")
    return f" (as {names[0]}{others})" if names else ""
