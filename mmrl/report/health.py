"""Health checks of a run by its metrics. A finding says what is wrong and what to try.

The limits are rules of thumb. `mmrl/report/README.md` explains the metrics. "early" and "late" are the first and the
last quarter of a metric's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median

from mmrl.report.changes import find_change
from mmrl.report.records import RunRecord, Series

GOOD, WARNING, BAD = "good", "warning", "bad"
# By dtype, how far rounding alone can move the importance ratio from 1.
ROUNDING_GAP = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
MIN_VALUES = 4  # values that a check of a metric over the steps needs
MIN_PROMPTS = 20  # with fewer held-out prompts a gain cannot be distinguished from chance
MIN_RELATIVE_CHANGE = 0.05  # a smaller change of a metric's level is ignored
MAX_LOGP_GAP = 0.1  # nats a token between the log-probabilities of engine and trainer; rounding makes less


@dataclass(frozen=True)
class HealthFinding:
    """The result of one check. verdict: GOOD, WARNING or BAD; advice is empty where it is GOOD."""

    name: str
    verdict: str
    sentence: str
    advice: str = ""
    metrics: tuple[str, ...] = ()


Check = Callable[[RunRecord], Iterator[HealthFinding]]


def examine(run: RunRecord) -> list[HealthFinding]:
    """Returns the findings of all checks for which the run has metrics, the bad ones first."""
    findings = [finding for check in CHECKS for finding in check(run)]
    return sorted(findings, key=lambda finding: (BAD, WARNING, GOOD).index(finding.verdict))


def judge(
    name: str, wrong: bool, good: str, bad: str, advice: str, *metrics: str, verdict: str = WARNING
) -> HealthFinding:
    """Returns a finding with the sentence `bad`, advice and `verdict` if `wrong`, else with the sentence `good`."""
    return HealthFinding(name, verdict, bad, advice, metrics) if wrong else HealthFinding(name, GOOD, good, "", metrics)


# --- can anything be learned? ---


def rewards(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges whether each reward varies over the steps: always 0, constant, or moving."""
    for name in (n for n in run.names if n.startswith("reward/")):  # name[7:] below: without this prefix
        values = run.series(name).finite
        if len(values) < MIN_VALUES:
            continue
        low, high = min(values), max(values)
        if low == high == 0:
            sentence = f"{name} is 0 in all {len(values)} steps: no rollout was rewarded."
            advice = (
                "Look at the answers in the galleries. If none is right, begin with easier prompts, a warm start or "
                "partial credit; if some are right, the reward is wrong."
            )
            yield HealthFinding(f"Reward {name[7:]}", BAD, sentence, advice, (name,))
        elif low == high:
            sentence = f"{name} is {low:.4g} in all {len(values)} steps: it does not distinguish rollouts."
            yield HealthFinding(
                f"Reward {name[7:]}", BAD, sentence, "Try harder prompts, or a reward with more levels.", (name,)
            )
        else:
            early, late = mean(run.series(name).early), mean(run.series(name).late)
            yield HealthFinding(
                f"Reward {name[7:]}",
                GOOD,
                f"{name} moves: {early:.4g} in the first quarter of the steps, {late:.4g} in the last.",
                "",
                (name,),
            )


def signal(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges the share of groups without reward variance, and steps with a gradient of exactly 0."""
    flat = run.series("advantages/zero_variance_groups")
    if flat.finite:
        share = mean(flat.late)
        yield judge(
            "Groups without signal",
            share > 0.8,
            f"{share:.0%} of the groups in the last quarter have equal rewards and teach nothing; the others teach.",
            f"{share:.0%} of the groups in the last quarter have equal rewards, so they teach nothing.",
            "Try prompts that are neither too easy nor too hard, a larger rollout.group_size, partial credit, or "
            "rollout.dynamic_sampling={}.",
            flat.name,
        )
    norm = run.series("grad_norm")
    if len(norm.finite) >= MIN_VALUES:
        num_zero = sum(value == 0 for value in norm.finite)
        yield judge(
            "Learning at all",
            num_zero > len(norm) / 2,
            f"The gradient is above 0 in {len(norm.finite) - num_zero} of {len(norm)} steps.",
            f"The gradient is exactly 0 in {num_zero} of {len(norm)} steps, so nothing was learned in them.",
            "All rewards of every group are equal, a weight is 0, or a mask leaves nothing: look at the rewards and "
            "their weights.",
            norm.name,
            verdict=BAD,
        )


def unscored(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges the share of rollouts that no reward could score."""
    unscored_share = run.series("unscored")
    if not unscored_share.finite:
        return
    parts = [run.series(name) for name in run.names if name.startswith("unscored/")]
    # the names without "unscored/"
    causes = [f"{part.name[9:]} {mean(part.finite):.1%}" for part in parts if part.finite and max(part.finite) > 0]
    share, most = mean(unscored_share.finite), max(unscored_share.finite)
    yield judge(
        "Unscored rollouts",
        share > 0.01,
        f"{share:.1%} of the rollouts could not be scored.",
        f"{share:.1%} of the rollouts could not be scored, {most:.1%} in the worst step ({', '.join(causes)}).",
        "Warnings above the step lines say why: the reward raises, is too slow, or returns no valid number.",
        unscored_share.name,
        verdict=BAD if share > 0.2 else WARNING,
    )


# --- is it on-policy? ---


def ratio_gap(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges how far the importance ratio is from 1, where it has to be with one update a step."""
    gap = run.series("surrogate/ratio_gap_max")
    if not gap.finite:
        return
    updates = int(run.key("algorithm.epochs", 1)) * int(run.key("algorithm.minibatches", 1))
    limit, most = ROUNDING_GAP.get(str(run.key("model.dtype", "float32")), 1e-4), max(gap.finite)
    if updates > 1:
        beginning = (
            f"The largest gap of the ratio from 1 is {most:.3g}, with {updates} updates a step, of which all but "
        )
        yield judge(
            "On-policy gap",
            median(gap.late) > 10,
            f"{beginning}the first may differ.",
            f"{beginning}the first may differ; in the last quarter it is {median(gap.late):.3g} as a rule.",
            "Updates go too far: lower optim.lr, or take fewer algorithm.minibatches or algorithm.epochs.",
            gap.name,
        )
        return
    yield judge(
        "On-policy gap",
        most > limit,
        f"With one update a step the ratio has to be 1; it is, up to {most:.3g}.",
        f"With one update a step the ratio should be 1, but it is off by up to {most:.3g}: rollouts and replay do not "
        "compute the same likelihoods.",
        "If the policy is your own, its `rollout` and `replay` must run the same code on the same inputs. Otherwise "
        "please report it, with config.yaml and versions.json.",
        gap.name,
        verdict=BAD,
    )


def clipped(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges the share of decisions that PPO's clip leaves without gradient."""
    low, high = run.series("surrogate/clip_low"), run.series("surrogate/clip_high")
    if not low.finite or not high.finite:
        return
    share = mean(low.late) + mean(high.late)
    yield judge(
        "Clip shares",
        share > 0.3,
        f"{share:.1%} of the decisions are clipped in the last quarter.",
        f"{share:.1%} of the decisions are clipped in the last quarter: much of each batch is thrown away.",
        "Lower optim.lr, or take fewer algorithm.minibatches or algorithm.epochs.",
        low.name,
        high.name,
    )


def stale_engine(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges whether the engine that samples has the trained model's weights, by their log-probabilities, by a probe
    (fixed prompts after each transfer), and by the effective sample size of the correction weights."""
    gap = run.series("correction/logp_gap")
    if len(gap.finite) >= MIN_VALUES:
        early, late, change = median(gap.early), median(gap.late), find_change(gap, factors=True)
        changed = change is not None and change.factor > 3 and change.after > 0.02
        drifts = late > 3 * early and late > 0.02
        course = f"{early:.3g} in the first quarter of the steps, {late:.3g} in the last"
        if not drifts and changed and change is not None:
            course = f"{change.before:.3g} before step {change.step}, {change.after:.3g} from then on"
        yield judge(
            "Engine that samples",
            drifts or changed or late > MAX_LOGP_GAP,
            f"Its log-probabilities are {late:.3g} from the trained model's in the last quarter, and "
            f"{early:.3g} in the first.",
            f"Its log-probabilities are away from the trained model's: {course}. It looks as if it still had older "
            "weights.",
            "A stale engine: look at generation/probe_gap and at generation/staleness; allow fewer steps ahead, set "
            "model.dtype=float32, or rollout.generator=transformers.",
            gap.name,
            verdict=BAD,
        )
    probe, limit = run.series("generation/probe_gap"), run.series("generation/probe_limit")
    if probe.finite and limit.finite:
        # `not v <= most` holds for NaN, too
        over = [s for s, v, most in zip(probe.steps, probe.values, limit.values, strict=False) if not v <= most]
        yield judge(
            "Weights in the engine",
            bool(over),
            f"They were proved to have arrived in all {len(probe)} steps.",
            f"They had not arrived at step {over[0] if over else ''}: its answer to the probe is off by "
            f"{max(probe.finite):.3g}.",
            "A stale engine: the run should have stopped by itself. Restart it, and report it if it comes again.",
            probe.name,
            verdict=BAD,
        )
    size = run.series("correction/effective_sample_size")
    if size.finite:
        yield judge(
            "Effective sample size",
            mean(size.late) < 0.5,
            f"{mean(size.late):.0%} of the rollouts count in the last quarter, by the weights that correct for the "
            "engine.",
            f"Only {mean(size.late):.0%} of the rollouts count in the last quarter: few carry the step.",
            "Allow fewer steps ahead, or lower the cap in rollout.generator.correction.weight.",
            size.name,
        )


def staleness(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges how many steps ago the oldest rollouts were sampled, against the limit in the configuration."""
    age = run.series("generation/staleness_max")
    age = age if age.finite else run.series("generation/staleness")
    if not age.finite:
        return
    most, workers = max(age.finite), run.key("rollout.workers", None)
    generator = "rollout.generator" if workers is None else "rollout.workers"
    allowed = run.key(f"{generator}.partial.max_staleness", run.key(f"{generator}.async_steps", 0))
    yield judge(
        "Staleness",
        most > allowed,
        f"The oldest rollouts were made {most:.0f} steps ago, and {allowed} are allowed.",
        f"Rollouts were made up to {most:.0f} steps ago, more than the {allowed} that are allowed.",
        f"Lower {generator}.async_steps, so that rollouts come in time.",
        age.name,
    )


# --- does it hold? ---


def gradient(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges the norm of the gradient: whether it grew by a factor of 10 to more than `optim.clip_grad_norm`, or has
    peaks above this bound and 30 times its median. Below the bound growth is normal: with LoRA the norm begins near 0.
    """
    norm = run.series("grad_norm")
    positive = [value for value in norm.finite if value > 0]
    if len(positive) < MIN_VALUES:
        return
    typical, change = median(positive), find_change(norm, factors=True)
    early, late = ([value for value in part if value > 0] for part in (norm.early, norm.late))
    changed = change is not None and change.factor > 10
    bound = float(run.key("optim.clip_grad_norm", 1.0))
    grown = changed or (bool(early and late) and median(late) > 10 * median(early))
    grown &= bool(late) and max(late) > bound
    # `not v <= ...` holds for NaN, too
    peak_steps = [s for s, v in zip(norm.steps, norm.values, strict=True) if not v <= max(30 * typical, bound)]
    if grown or peak_steps:
        if grown and changed and change is not None:
            course = f"its norm was {change.before:.3g} before step {change.step}, and {change.after:.3g} from then on"
        elif grown:
            course = f"its norm was {median(early):.3g} in the first quarter, and {median(late):.3g} in the last"
        else:
            course = (
                f"its norm is {typical:.3g} as a rule, and it jumped to {max(positive):.3g} at step {peak_steps[0]}"
            )
        yield HealthFinding(
            "Gradient",
            BAD if grown else WARNING,
            f"The gradient explodes: {course}.",
            "Lower optim.lr, set optim.clip_grad_norm, or raise optim.warmup_steps; look at the rollouts of the step "
            "in the galleries.",
            (norm.name,),
        )
    else:
        yield HealthFinding(
            "Gradient", GOOD, f"Its norm is {typical:.3g} as a rule, and {max(positive):.3g} at most.", "", (norm.name,)
        )


def skipped(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges updates that were skipped, and metrics that are NaN or infinite."""
    share = run.series("updates_skipped")
    wrong = [step for step, value in zip(share.steps, share.values, strict=True) if value > 0]
    not_finite = sorted({n for n in run.names for v in run.series(n).values if not math.isfinite(v)})
    if share.finite:
        yield judge(
            "Skipped updates",
            bool(wrong),
            "No update was skipped.",
            f"Updates were skipped in {len(wrong)} steps, first in step {wrong[0] if wrong else 0}: a loss or a "
            "gradient was not finite.",
            "Lower optim.lr, and look at bad-step-*.jsonl in the run directory, which holds the rollouts.",
            share.name,
            verdict=BAD,
        )
    if not_finite:
        yield HealthFinding(
            "Values that are not finite",
            WARNING,
            f"{', '.join(not_finite[:5])} {'is' if len(not_finite) == 1 else 'are'} not finite in some steps; curves "
            "have gaps.",
            "Look at the first such step: what came before it is the cause.",
            tuple(not_finite),
        )


def entropy(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges whether the policy's entropy collapses."""
    course = run.series("entropy")
    if len(course.finite) < MIN_VALUES:
        return
    early, late = mean(course.early), mean(course.late)
    yield judge(
        "Entropy",
        early > 0 and late < 0.1 * early,
        f"It goes from {early:.3g} in the first quarter to {late:.3g} in the last.",
        f"It collapses: {early:.3g} in the first quarter, {late:.3g} in the last. The policy tries little that is new.",
        "Add an entropy term with a target, raise algorithm.surrogate.high or rollout.temperature, or stop earlier.",
        course.name,
    )


def responses(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges the share of truncated responses."""
    truncated = run.series("response/truncated")
    if truncated.finite:
        share = mean(truncated.late)
        yield judge(
            "Truncated responses",
            share > 0.5,
            f"{share:.0%} of the responses are cut off in the last quarter.",
            f"{share:.0%} of the responses are cut off in the last quarter, before they end.",
            "Raise rollout.max_response_length, set algorithm.masks=[truncated], or add the reward overlong_penalty.",
            truncated.name,
        )


# --- is the reward hacked? ---


def has_risen(series: Series) -> bool:
    """Returns whether the mean of the late values exceeds that of the early ones by more than `noise`."""
    return len(series.finite) >= MIN_VALUES and mean(series.late) > mean(series.early) + noise(series)


def has_fallen(series: Series) -> bool:
    """Returns whether the mean of the late values is below that of the early ones by more than `noise`."""
    return len(series.finite) >= MIN_VALUES and mean(series.late) < mean(series.early) - noise(series)


def noise(series: Series) -> float:
    """Returns the size up to which a change of a series is ignored: the range of its early values, or 5 % of its
    level."""
    level = max(abs(mean(series.early)), abs(mean(series.late)))
    return max(max(series.early) - min(series.early), MIN_RELATIVE_CHANGE * level, 1e-9)


def guards(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges signs of reward hacking: pixel values out of range, images of a group that look alike, and a second scorer
    or held-out accuracy that falls while the reward rises."""
    rising = [name for name in run.names if name.startswith("reward/") and has_risen(run.series(name))]
    gamut = run.series("guard/out_of_gamut")
    if len(gamut.finite) >= MIN_VALUES:
        early, late, change = mean(gamut.early), mean(gamut.late), find_change(gamut)
        course = f"{late:.0%} of the pixel values are beyond what a viewer can show, {early:.0%} in the first quarter"
        changed = change is not None and change.after > change.before + 0.25
        if changed and change is not None:
            course = (
                f"{change.after:.0%} of the pixel values are beyond what a viewer can show from step {change.step} on, "
                f"{change.before:.0%} before"
            )
        yield judge(
            "Out of gamut",
            changed or late > early + 0.25 or late > 0.8,
            f"{late:.0%} of the pixel values are beyond what a viewer can show, {early:.0%} in the first quarter.",
            f"{course}"
            f"{', while ' + ', '.join(rising) + ' rises' if rising else ''}: the reward is hacked with values that no "
            "reader can see.",
            "Add a kl term, lower optim.lr, or stop at an earlier checkpoint; look at the images before and after.",
            gamut.name,
            *rising,
            verdict=BAD,
        )
    second = run.series("guard/second_scorer")
    if len(second.finite) >= MIN_VALUES and rising:
        yield judge(
            "Second scorer",
            has_fallen(second),
            f"It does not fall while {', '.join(rising)} rises ({mean(second.early):.3g} to {mean(second.late):.3g}).",
            f"It falls from {mean(second.early):.3g} to {mean(second.late):.3g} while {', '.join(rising)} rises: what "
            "is learned is the scorer, not the task.",
            "Reward with both scorers, add a kl term, or stop at an earlier checkpoint.",
            second.name,
            *rising,
            verdict=BAD,
        )
    diversity = run.series("guard/diversity")
    if len(diversity.finite) >= MIN_VALUES:
        early, late = mean(diversity.early), mean(diversity.late)
        yield judge(
            "Diversity",
            late < 0.3 * early,
            f"Images of a group differ by {late:.3g} in the last quarter, {early:.3g} in the first.",
            f"Images of a group look alike: they differ by {late:.3g} in the last quarter, {early:.3g} in the first.",
            "Add a kl term, or raise the noise of the transition.",
            diversity.name,
        )
    accuracy = run.series("evaluation/accuracy")
    if len(accuracy.finite) >= 2 and rising:
        drop, error = accuracy.finite[0] - accuracy.finite[-1], standard_error(run)
        yield judge(
            "Held-out accuracy beside the reward",
            drop > 2 * error,
            f"It does not fall while {', '.join(rising)} rises.",
            f"It falls by {drop:.3g} while {', '.join(rising)} rises: what is rewarded is not what is wanted.",
            "Look at answers with a high reward that are wrong, in the galleries, and fix the reward.",
            accuracy.name,
            *rising,
            verdict=BAD,
        )


def standard_error(run: RunRecord) -> float:
    """Returns the standard error of the accuracy difference between the last and the first evaluation."""
    errors = run.series("evaluation/standard_error").finite
    return math.hypot(errors[0], errors[-1]) if errors else 0.0


def evaluated_prompts(run: RunRecord) -> int:
    """Returns the smaller number of prompts of the first and the last evaluation; MIN_PROMPTS if it is unknown."""
    counts = run.series("evaluation/n").finite
    return int(min(counts[0], counts[-1])) if counts else MIN_PROMPTS


def gain(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges whether the change of held-out accuracy is above two standard errors."""
    accuracy = run.series("evaluation/accuracy")
    if len(accuracy.finite) < 2:
        return
    change, error = accuracy.finite[-1] - accuracy.finite[0], standard_error(run)
    prompts, training_clause = evaluated_prompts(run), sampled_accuracy(run)
    if prompts < MIN_PROMPTS:
        difference = f"{change:+.4f} on {prompts} prompts: too few to tell a gain from chance{training_clause}."
        advice = (
            f"Evaluate on more prompts: evaluation.prompts of {MIN_PROMPTS} and more, some hundreds for small gains."
        )
        yield HealthFinding("Held-out accuracy", WARNING, f"It changes by {difference}", advice, (accuracy.name,))
        return
    difference = f"{change:+.4f}, with a standard error of {error:.4f}"
    yield judge(
        "Held-out accuracy",
        change <= 2 * error,
        f"It changes by {difference}: more than chance would give.",
        f"It changes by {difference}: that cannot be distinguished from chance{training_clause}.",
        "Train longer, or evaluate on more prompts (evaluation.prompts). Believe a gain only after three seeds and a "
        "control with task.rewards=[{name: random}].",
        accuracy.name,
    )


def sampled_accuracy(run: RunRecord) -> str:
    """Returns a clause on the accuracy of sampled training rollouts if it rises, else "". Greedy evaluation may not
    show such a rise."""
    training = run.series("accuracy")
    if not has_risen(training):
        return ""
    return f"; sampled, on training prompts, it went from {mean(training.early):.3g} to {mean(training.late):.3g}"


# --- does it run well? ---


def stragglers(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges how much longer the slowest rank takes than the median, in rollouts and updates."""
    for phase in ("rollout", "update"):
        most, typical = run.series(f"time/{phase}_max"), run.series(f"time/{phase}_median")
        if len(most.finite) < MIN_VALUES or not typical.finite:
            continue
        factor = mean(most.finite) / max(mean(typical.finite), 1e-9)
        slowest = [int(v) for v in run.series(f"time/{phase}_slowest").finite]
        rank = max(set(slowest), key=slowest.count) if slowest else 0
        often = slowest.count(rank) / max(1, len(slowest))
        yield judge(
            f"Stragglers in {phase}",
            factor > 1.5,
            f"The slowest rank takes {factor:.2f} times the median.",
            f"The slowest rank takes {factor:.2f} times the median; it is rank {rank} in {often:.0%} of the steps.",
            "If it is one rank, look at its host and device; if it changes, responses differ in length: "
            "rollout.generator.partial, or more rollouts a rank."
            if often > 0.5
            else "Work is spread unevenly: more rollouts a rank, or rollout.generator.partial.",
            most.name,
        )


FAILURE_METRICS = {
    "simulator/dropped": (
        "Episodes that the simulator lost",
        "Look at the simulator's own log, and at task.deadline_s.",
    ),
    "simulator/restarts": ("Restarts of simulators", "Look at the simulator's own log, and at task.deadline_s."),
    "simulator/nan_actions": ("Actions that are not finite", "Lower optim.lr."),
    "environment/lost": ("Conversations that the environment lost", "Warnings above the step lines say why."),
    "generation/restarts": ("Restarts of engines", "Give them more memory: rollout.generator.memory."),
}


def failures(run: RunRecord) -> Iterator[HealthFinding]:
    """Judges the sums of FAILURE_METRICS over the run, evaluations included; each should be 0."""
    for name, (title, advice) in FAILURE_METRICS.items():
        values = [*run.series(name).finite, *run.series(f"evaluation/{name}").finite]
        if values:
            yield judge(
                title, sum(values) > 0, "None.", f"{name} adds up to {sum(values):.4g} over the run.", advice, name
            )


CHECKS: tuple[Check, ...] = (
    gain,
    rewards,
    signal,
    unscored,
    ratio_gap,
    clipped,
    stale_engine,
    staleness,
    gradient,
    skipped,
    entropy,
    responses,
    guards,
    stragglers,
    failures,
)
