"""Teachers for on-policy distillation, and measurements of a student's rollouts under them.

A teacher returns log-probabilities of the sampled decisions or of alternative tokens, or predictions of denoising
steps. The student is the policy that is trained.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.errors import UserError
from mmrl.measurements.responses import bind_step
from mmrl.prompts.views import View
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement, Weights
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs, Reference
from mmrl.protocols.teachers import Taught, TaughtTokens
from mmrl.settings import Choice, option
from mmrl.settings.origins import WeightsOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from mmrl.measurements.teacher_server import TeacherServer
    from mmrl.protocols.choices import TeacherChoices
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import DecisionColumn, Replay, Rollouts

ALTERNATIVES = "alternatives"  # the column of token ids whose log-probabilities a replay returns too


# --- teachers ---


class Teacher(Choice):
    """A model that scores a student's decisions. In YAML the type may be left out if a key implies it: `{path: FOLDER}`
    is `{type: path, path: FOLDER}`."""

    title: ClassVar[str] = "teacher"
    kinds: ClassVar[dict[str, str]] = {
        "path": "mmrl.measurements.teachers:PathTeacher",
        "server": "mmrl.measurements.teachers:ServerTeacher",
        "view": "mmrl.measurements.teachers:ViewTeacher",
        "reference": "mmrl.measurements.teachers:ReferenceTeacher",
    }
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"

    @classmethod
    def expand(cls, value: object) -> Any:
        """Returns a mapping without a type with the type that one of its keys implies; see `Choice.expand` for
        others."""
        if isinstance(value, dict) and "type" not in value:
            implied = next((key for key in ("path", "recipe", "server", "by_tag", "view") if key in value), None)
            return value if implied is None else {"type": "path" if implied == "recipe" else implied, **value}
        return super().expand(value)

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """Returns what the teacher requires of the policy and the job."""

    def check(self, policy: Any, config: JobConfig) -> None:  # noqa: B027  (a view of the policy itself always fits)
        """Raises UserError if the teacher cannot score the decisions of the job's policy, for example because its
        vocabulary differs."""

    @abstractmethod
    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the log-probabilities of the decisions, [rollout, decision] fp32 on the CPU.

        Rows of rollouts that are in none of the context's micro-batches are undefined.
        """

    @abstractmethod
    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        """Returns the `count` most likely tokens at each decision under the teacher (None: the whole vocabulary) and
        their log-probabilities. Rows as in `logp`."""


class PathTeacher(Teacher, WeightsOrigin):
    """A model of the student's type, in a folder or on the Hugging Face Hub. It must have the student's vocabulary. It
    gets the student's tokens and pixels, uses the temperature of the rollouts, and is loaded on each rank."""

    equation: ClassVar[str] = "log pi_T(y_t | x, y_<t)"
    source: ClassVar[str] = "GKD, arXiv 2306.13649, whose rollouts are the student's"
    type: str = "path"
    view: View | None = option(None, "changed prompt that the teacher gets; null: the student's prompt")
    guidance: float | None = option(None, "guidance scale of a denoising teacher; null: denoising.guidance", ge=0)

    @property
    def needs(self) -> Needs:
        offers: set[Offer] = {Taught} if self.view is None else {Taught, "views"}
        return Needs(offers=frozenset(offers if self.guidance is None else {*offers, "velocity"}))

    def check(self, policy: Any, config: JobConfig) -> None:
        policy.teachers.check(self.existing(), self.guidance)

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        return self._replayed(rollouts, context, lambda replay: replay.logp)

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        """Returns the `count` likeliest tokens at each decision under the teacher (None: the whole vocabulary) with
        their log-probabilities, which a replay of the rollouts by the teacher computes."""
        from mmrl.protocols.choices import WholeVocabulary, top_k_choices

        teacher, changed = (
            context.policy.teachers.policy(self.folder, self.guidance),
            self._with_view(rollouts, context),
        )
        listed: TeacherChoices
        if count is None:
            listed = WholeVocabulary.from_ids(context.policy.teachers.vocabulary(), rollouts.mask.shape)
        else:
            listed = top_k_choices(changed, context.micro_batches, teacher, teacher.module, count)
        changed = replace(changed, extras={**changed.extras, ALTERNATIVES: listed})
        listed.logp = self._replayed(changed, context, lambda replay: replay.extras[ALTERNATIVES], viewed=True)
        return listed

    def prediction(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the teacher's network outputs for the student's noisy states, [rollout, decision, ...]."""
        from mmrl.rollouts import require

        return self._replayed(rollouts, context, lambda replay: require(replay.prediction, "predictions"))

    def _with_view(self, rollouts: Rollouts, context: PreparedContext) -> Rollouts:
        """Returns the rollouts with the prompts that the teacher gets."""
        view = self.view
        return rollouts if view is None else context.policy.view(rollouts, bind_step(view, context.step))

    def _replayed(
        self, rollouts: Rollouts, context: PreparedContext, column: Callable[[Replay], Tensor], viewed: bool = False
    ) -> Tensor:
        """Runs the teacher on the rollouts, in the micro-batches of the updates. Returns one output, [rollout, ...].

        column: selects the output of a replay. viewed: `rollouts` already have the prompts that the teacher gets.
        """
        import torch

        teacher = context.policy.teachers.policy(self.folder, self.guidance)
        changed = rollouts if viewed else self._with_view(rollouts, context)
        with torch.no_grad():
            outputs = [column(teacher.replay(changed.select(rows), teacher.module)) for rows in context.micro_batches]
        result = torch.full((len(rollouts), *outputs[0].shape[1:]), torch.nan)
        for rows, values in zip(context.micro_batches, outputs, strict=True):
            result[rows] = values.float().cpu()
        return result


class ServerTeacher(Teacher):
    """A model on vLLM's OpenAI-compatible server, which computes log-probabilities of the student's tokens
    (`prompt_logprobs`). The server must offer /tokenize, and its `--max-logprobs` must be at least `top_k`. It computes
    at temperature 1, so rollouts must be sampled at temperature 1. Prompts must be text only."""

    equation: ClassVar[str] = "log pi_T(y_t | x, y_<t), at temperature 1"
    source: ClassVar[str] = "vLLM's prompt_logprobs of /v1/completions"
    type: str = "server"
    server: str = option(description="address, such as http://host:8000")
    model: str = option(description="name of the model on the server")
    at_once: int = option(16, "responses per request", ge=1)
    deadline: float = option(120.0, "time limit of a request", unit="seconds", gt=0)
    retries: int = option(3, "number of retries of a failed request", ge=0)

    @model_validator(mode="after")
    def _check_address(self) -> ServerTeacher:
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server must begin with http:// or https://, got {self.server!r}")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({TaughtTokens}))

    def check(self, policy: Any, config: JobConfig) -> None:
        if (extremes := config.rollout.temperature.extremes) != (1.0, 1.0):
            raise UserError(
                f"teacher {self.server} computes at temperature 1, but rollout.temperature={extremes[1]:g}; set it to 1"
            )
        self.client.check(policy.teachers.tokenize)

    @property
    def client(self) -> TeacherServer:
        from mmrl.measurements.teacher_server import TeacherServer

        return TeacherServer(self.server, self.model, self.at_once, self.deadline, self.retries)

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        return self.client.likelihoods(rollouts, sorted_rows(context), context.policy.teachers.ids(rollouts))

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        """Returns the `count` likeliest tokens at each decision that the student may sample, with their
        log-probabilities. Raises UserError for the whole vocabulary (None)."""
        teachers = context.policy.teachers
        if count is None:
            raise UserError(
                f"teacher {self.server} is a server, which cannot return whole distributions (estimator=full); set "
                "estimator=top_k or sampled"
            )
        allowed = set(teachers.vocabulary().tolist())
        return self.client.top_k(rollouts, sorted_rows(context), teachers.ids(rollouts), count, allowed)


class OwnTeacher(Teacher):
    """Base class of teachers that are the policy itself, with another prompt or with other weights."""

    @property
    @abstractmethod
    def weights_used(self) -> Weights:
        """Returns which of the policy's weights teach."""

    @abstractmethod
    def changed(self, rollouts: Rollouts, context: PreparedContext) -> Rollouts:
        """Returns the rollouts with the prompts that the teacher gets."""

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        return self._replayed(self.changed(rollouts, context), context, "logp")

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        """Returns the `count` likeliest tokens at each decision given the teacher's prompt (None: the whole
        vocabulary), with their log-probabilities; both under the teacher's weights."""
        from mmrl.protocols.choices import WholeVocabulary, top_k_choices

        policy, changed = context.policy, self.changed(rollouts, context)
        listed: TeacherChoices
        if count is None:
            listed = WholeVocabulary.from_ids(policy.teachers.vocabulary(), rollouts.mask.shape)
        else:
            with context.weights(self.weights_used):
                listed = top_k_choices(changed, context.micro_batches, policy, policy.module, count)
        changed = replace(changed, extras={**changed.extras, ALTERNATIVES: listed})
        listed.logp = self._replayed(changed, context, ALTERNATIVES)
        return listed

    def _replayed(self, changed: Rollouts, context: PreparedContext, name: str) -> Tensor:
        """Returns the output `name` of a replay of the changed rollouts under the teacher's weights, [rollout, ...]
        fp32 on the CPU."""
        return context.replayed(changed, name, self.weights_used).float().cpu()


class ViewTeacher(OwnTeacher):
    """The policy itself with a changed prompt, such as one that contains the answer: self-distillation."""

    equation: ClassVar[str] = "log pi(y_t | view(x), y_<t), by the weights that sampled or those of the reference"
    source: ClassVar[str] = "reconstructed from SRPO's and OPSD's abstracts: the policy that knows more teaches itself"
    type: str = "view"
    view: View = option(description="changed prompt that the teacher gets")
    weights: Literal["sampling", "reference"] = option(
        "sampling", "sampling: the weights that made the step's rollouts; reference: those of the reference policy"
    )

    @property
    def needs(self) -> Needs:
        reference = Reference() if self.weights == "reference" else None
        return Needs(offers=frozenset({"views"}), reference=reference)

    @property
    def weights_used(self) -> Weights:
        return self.weights

    def changed(self, rollouts: Rollouts, context: PreparedContext) -> Rollouts:
        changed: Rollouts = context.policy.view(rollouts, bind_step(self.view, context.step))
        return changed


class ReferenceTeacher(OwnTeacher):
    """The reference policy, which training started from. With estimator=full the divergence from it is the exact KL
    divergence at each decision, which the term kl estimates from single samples."""

    equation: ClassVar[str] = "log pi_ref(y_t | x, y_<t)"
    source: ClassVar[str] = "GKD, arXiv 2306.13649, with the initial policy as the teacher"
    type: str = "reference"

    @property
    def needs(self) -> Needs:
        return Needs(reference=Reference())

    @property
    def weights_used(self) -> Weights:
        return "reference"

    def changed(self, rollouts: Rollouts, context: PreparedContext) -> Rollouts:
        return rollouts


class TaggedTeachers(Teacher):
    """Several teachers: a value of the prompt's metadata selects one. Prompts without a teacher are not distilled."""

    equation: ClassVar[str] = "the teacher of metadata[tag]"
    source: ClassVar[str] = "multi-teacher on-policy distillation (MOPD), MiMo-V2-Flash, arXiv 2601.02780"
    type: str = "by_tag"
    tag: str = option("kind", "key of the prompts' metadata")
    by_tag: dict[str, Teacher] = option(description="teachers by value of the tag")

    @property
    def needs(self) -> Needs:
        needs = Needs()
        for teacher in self.by_tag.values():
            needs |= teacher.needs
        return needs

    def check(self, policy: Any, config: JobConfig) -> None:
        for tag, teacher in self.by_tag.items():
            try:
                teacher.check(policy, config)
            except UserError as error:
                raise UserError(f"by_tag.{tag}: {error}") from None

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the log-probabilities under the teacher that a rollout's tag selects, [rollout, decision]; NaN
        without one."""
        import torch

        logp = torch.full(rollouts.mask.shape, torch.nan)
        for teacher, rows, teacher_context in self._split(rollouts, context):
            logp[rows] = teacher.logp(rollouts, teacher_context)[rows]
        return logp

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        """Returns the choices of each rollout under the teacher that its tag selects; log-probabilities are NaN for
        rollouts without a teacher."""
        import torch

        from mmrl.rollouts import require

        merged: TeacherChoices | None = None
        for teacher, rows, teacher_context in self._split(rollouts, context):
            listed = teacher.choices(rollouts, teacher_context, count)
            logp = require(listed.logp, "log-probabilities")
            if merged is None:
                merged = replace(listed, logp=torch.full_like(logp, torch.nan))
            if not listed.is_full_vocabulary:
                merged.values[rows] = listed.values[rows]
            require(merged.logp, "log-probabilities")[rows] = logp[rows]
        return require(merged, "teachers")

    def _split(self, rollouts: Rollouts, context: PreparedContext) -> Iterator[tuple[Teacher, Tensor, PreparedContext]]:
        """Yields each teacher, its rollouts as a mask [rollout] bool, and a context whose micro-batches hold only
        these."""
        import torch

        tags = [sample.prompt.metadata.get(self.tag) for sample in rollouts.samples]
        for tag, teacher in self.by_tag.items():
            has_tag = torch.tensor([str(prompt_tag) == tag for prompt_tag in tags])
            micro_batches = [rows[has_tag[rows]] for rows in context.micro_batches]
            yield teacher, has_tag, replace(context, micro_batches=[rows for rows in micro_batches if len(rows)])


def sorted_rows(context: PreparedContext) -> list[int]:
    """Returns the sorted indices of all rollouts in the context's micro-batches."""
    return sorted(row for rows in context.micro_batches for row in rows.tolist())


# the types of a teacher that is not itself one of several
ALONE_OR_BY_TAG = Teacher.kinds | {"by_tag": "mmrl.measurements.teachers:TaggedTeachers"}


# --- measurements ---


@dataclass(frozen=True)
class TeacherLikelihoods(PreparedMeasurement["DecisionColumn"]):
    """Log-probabilities [rollout, decision] of a student's decisions under a teacher; NaN if a rollout has none."""

    teacher: Teacher = field(hash=False)
    cost: ClassVar[str] = "a forward pass of the teacher"
    scores: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"teacher {self.teacher.key}"

    @property
    def offers(self) -> frozenset[Offer]:
        return self.teacher.needs.required

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(self.teacher.logp(rollouts, context))


@dataclass(frozen=True)
class TeacherDistributions(PreparedMeasurement["TeacherChoices"]):
    """Tokens at each decision and their log-probabilities under a teacher, [rollout, decision, k].

    count: the k most likely tokens; None: the whole vocabulary. A step can have only one such measurement, since a
    replay lists one set of tokens.
    """

    teacher: Teacher = field(hash=False)
    count: int | None
    requires: ClassVar[type] = TaughtTokens
    cost: ClassVar[str] = "a forward pass of the teacher, and k numbers per decision"
    scores: ClassVar[bool] = True
    name: ClassVar[str] = ALTERNATIVES

    @property
    def offers(self) -> frozenset[Offer]:
        return self.teacher.needs.required

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> TeacherChoices:
        if ALTERNATIVES in rollouts.extras:
            raise UserError(
                "two terms of algorithm.terms need other tokens of a teacher than the sampled ones, but only one may; "
                "remove one of them, or set its estimator=sampled"
            )
        return self.teacher.choices(rollouts, context, self.count)


@dataclass(frozen=True)
class TeacherPredictions(PreparedMeasurement["DecisionColumn"]):
    """A teacher's network outputs for the noisy states of the student's rollouts.

    They are stored as `Rollouts.ref_prediction` in place of the reference policy's; a replay computes distances to them
    with gradients. The column says which decisions have one, [rollout, decision] bool.
    """

    teacher: PathTeacher = field(hash=False)
    cost: ClassVar[str] = "a forward pass of the teacher"
    requires: ClassVar[type] = Taught

    @property
    def name(self) -> str:
        return f"teacher {self.teacher.key}"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        """Stores the teacher's outputs as `rollouts.ref_prediction`. Returns which decisions have one, [rollout,
        decision] bool. Raises UserError if the reference policy's outputs are stored there."""
        from mmrl.rollouts import DecisionColumn

        if rollouts.ref_prediction is not None:
            raise UserError(
                "a teacher of denoising steps takes the place of the reference policy, so a job can have only one such "
                "teacher, and no other part that needs the reference policy, such as the term kl; remove one"
            )
        rollouts.ref_prediction = self.teacher.prediction(rollouts, context)
        return DecisionColumn(rollouts.mask.clone())
