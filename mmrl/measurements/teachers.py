"""Teachers, and what they say of the decisions of a student's rollouts: log-probabilities, of the decision itself or of
alternatives to it, and predictions of denoising steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.errors import UserError
from mmrl.prompts.views import View
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement
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

ALTERNATIVES = "alternatives"  # the column whose log-probabilities a replay of tokens returns too


# --- teachers ---


class Teacher(Choice):
    """Another policy that says how likely a student's decisions are. A key of its own stands for the type: `{path:
    FOLDER}` is `{type: path, path: FOLDER}`."""

    title: ClassVar[str] = "teacher"
    kinds: ClassVar[dict[str, str]] = {
        "path": "mmrl.measurements.teachers:PathTeacher",
        "server": "mmrl.measurements.teachers:ServerTeacher",
        "view": "mmrl.measurements.teachers:ViewTeacher",
    }
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"

    @classmethod
    def expand(cls, value: object) -> Any:
        if isinstance(value, dict) and "type" not in value:
            named = next((kind for kind in ("path", "recipe", "server", "by_tag", "view") if kind in value), None)
            return value if named is None else {"type": "path" if named == "recipe" else named, **value}
        return super().expand(value)

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """Returns what the teacher needs of the job beside the measurement."""

    def check(self, policy: Any, config: JobConfig) -> None:  # noqa: B027  (a view of the policy itself always fits)
        """Raises UserError in one line for a teacher that can not judge what the job's policy decides."""

    @abstractmethod
    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the log-probabilities of decisions, [rollout, decision] fp32 on the CPU. Rollouts outside of the
        context's micro-batches may hold anything."""

    @abstractmethod
    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        """Returns the likeliest alternatives to each decision under the teacher, `count` or all that there are;
        as in `logp`."""


class PathTeacher(Teacher, WeightsOrigin):
    """A model of the student's kind, in a folder or on a hub. It reads the tokens and pixels of the student, whose
    vocabulary it has to share, at the temperature of the rollouts, and lies beside the student on each rank."""

    equation: ClassVar[str] = "log pi_T(y_t | x, y_<t)"
    source: ClassVar[str] = "GKD, arXiv 2306.13649, whose rollouts are the student's"
    type: str = "path"
    view: View | None = option(None, "the view of the prompt that the teacher reads; null: what the student reads")
    guidance: float | None = option(None, "guidance of a teacher that denoises; null: denoising.guidance", ge=0)

    @property
    def needs(self) -> Needs:
        offers: set[Offer] = {Taught} if self.view is None else {Taught, "views"}
        return Needs(offers=frozenset(offers if self.guidance is None else {*offers, "velocity"}))

    def check(self, policy: Any, config: JobConfig) -> None:
        policy.teachers.check(self.existing())

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        return self._replayed(rollouts, context, lambda replay: replay.logp)

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        from mmrl.protocols.choices import WholeVocabulary, top_k_choices

        teacher, changed = context.policy.teachers.policy(self.folder, self.guidance), self._viewed(rollouts, context)
        listed: TeacherChoices
        if count is None:
            listed = WholeVocabulary.from_ids(context.policy.teachers.vocabulary(), rollouts.mask.shape)
        else:
            listed = top_k_choices(changed, context.micro_batches, teacher, teacher.module, count)
        changed = replace(changed, extras={**changed.extras, ALTERNATIVES: listed})
        listed.logp = self._replayed(changed, context, lambda replay: replay.extras[ALTERNATIVES], viewed=True)
        return listed

    def prediction(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the teacher's predictions of denoising steps from the student's states, [rollout, decision, ...]."""
        from mmrl.rollouts import require

        return self._replayed(rollouts, context, lambda replay: require(replay.prediction, "predictions"))

    def _viewed(self, rollouts: Rollouts, context: PreparedContext) -> Rollouts:
        view = self.view
        return rollouts if view is None else context.policy.view(rollouts, view.changed)

    def _replayed(
        self, rollouts: Rollouts, context: PreparedContext, column: Callable[[Replay], Tensor], viewed: bool = False
    ) -> Tensor:
        """Returns a column of the teacher's replay, in the micro-batches of the updates. viewed: it is under the view
        already."""
        import torch

        teacher = context.policy.teachers.policy(self.folder, self.guidance)
        changed = rollouts if viewed else self._viewed(rollouts, context)
        with torch.no_grad():
            parts = [column(teacher.replay(changed.select(rows), teacher.module)) for rows in context.micro_batches]
        whole = torch.full((len(rollouts), *parts[0].shape[1:]), torch.nan)
        for rows, values in zip(context.micro_batches, parts, strict=True):
            whole[rows] = values.float().cpu()
        return whole


class ServerTeacher(Teacher):
    """A model behind vLLM's OpenAI-compatible server, which computes log-probabilities of the student's tokens
    (`prompt_logprobs`). The server has to answer /tokenize, and its `--max-logprobs` has to allow `top_k` alternatives.
    It computes at temperature 1, so rollouts have to be sampled at 1, and reads prompts of text."""

    equation: ClassVar[str] = "log pi_T(y_t | x, y_<t), at temperature 1"
    source: ClassVar[str] = "vLLM's prompt_logprobs of /v1/completions"
    type: str = "server"
    server: str = option(description="address, such as http://host:8000")
    model: str = option(description="name of the model on the server")
    at_once: int = option(16, "responses in a request", ge=1)
    deadline: float = option(120.0, "for the answer to a request", unit="seconds", gt=0)
    retries: int = option(3, "further requests where none was answered", ge=0)

    @model_validator(mode="after")
    def _is_an_address(self) -> ServerTeacher:
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"expected an address that begins with http:// or https://, not {self.server!r}")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({TaughtTokens}))

    def check(self, policy: Any, config: JobConfig) -> None:
        if (extremes := config.rollout.temperature.extremes) != (1.0, 1.0):
            raise UserError(
                f"teacher {self.server} computes at temperature 1; set rollout.temperature={extremes[1]:g} to 1"
            )
        self.client.check(policy.teachers.spelled)

    @property
    def client(self) -> TeacherServer:
        from mmrl.measurements.teacher_server import TeacherServer

        return TeacherServer(self.server, self.model, self.at_once, self.deadline, self.retries)

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        return self.client.likelihoods(rollouts, rows_of(context), context.policy.teachers.ids(rollouts))

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        teachers = context.policy.teachers
        if count is None:
            raise UserError("teacher.server gives no whole distributions; use the estimator top_k or sampled")
        sampled = set(teachers.vocabulary().tolist())
        return self.client.top_k(rollouts, rows_of(context), teachers.ids(rollouts), count, sampled)


class ViewTeacher(Teacher):
    """The policy itself under another view of the prompt, such as with the answer in it: self-distillation."""

    equation: ClassVar[str] = "log pi(y_t | view(x), y_<t), by the weights that sampled or those of the reference"
    source: ClassVar[str] = "reconstructed from SRPO's and OPSD's abstracts: the policy that knows more teaches itself"
    type: str = "view"
    view: View = option(description="the view of the prompt")
    weights: Literal["sampling", "reference"] = option("sampling", "of the step's rollouts, or of the job's reference")

    @property
    def needs(self) -> Needs:
        reference = Reference() if self.weights == "reference" else None
        return Needs(offers=frozenset({"views"}), reference=reference)

    def logp(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        return self._replayed(context.policy.view(rollouts, self.view.changed), context, "logp")

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        from mmrl.protocols.choices import WholeVocabulary, top_k_choices

        policy, changed = context.policy, context.policy.view(rollouts, self.view.changed)
        listed: TeacherChoices
        if count is None:
            listed = WholeVocabulary.from_ids(policy.teachers.vocabulary(), rollouts.mask.shape)
        else:
            listed = top_k_choices(changed, context.micro_batches, policy, policy.module, count)
        changed = replace(changed, extras={**changed.extras, ALTERNATIVES: listed})
        listed.logp = self._replayed(changed, context, ALTERNATIVES)
        return listed

    def _replayed(self, changed: Rollouts, context: PreparedContext, name: str) -> Tensor:
        from contextlib import nullcontext

        with context.reference() if self.weights == "reference" else nullcontext():
            return context.replayed(changed, name).float().cpu()


class TaggedTeachers(Teacher):
    """A teacher for each kind of prompt, by a value of its metadata; a prompt without one teaches nothing."""

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
        import torch

        logp = torch.full(rollouts.mask.shape, torch.nan)
        for teacher, rows, inside in self._parts(rollouts, context):
            logp[rows] = teacher.logp(rollouts, inside)[rows]
        return logp

    def choices(self, rollouts: Rollouts, context: PreparedContext, count: int | None) -> TeacherChoices:
        import torch

        from mmrl.rollouts import require

        merged: TeacherChoices | None = None
        for teacher, rows, inside in self._parts(rollouts, context):
            listed = teacher.choices(rollouts, inside, count)
            logp = require(listed.logp, "log-probabilities")
            if merged is None:
                merged = replace(listed, logp=torch.full_like(logp, torch.nan))
            if not listed.is_full_vocabulary:
                merged.values[rows] = listed.values[rows]
            require(merged.logp, "log-probabilities")[rows] = logp[rows]
        return require(merged, "teachers")

    def _parts(self, rollouts: Rollouts, context: PreparedContext) -> Iterator[tuple[Teacher, Tensor, PreparedContext]]:
        """Yields each teacher, the rows that it teaches [rollout] bool, and a context with these in micro-batches."""
        import torch

        tags = [sample.prompt.metadata.get(self.tag) for sample in rollouts.samples]
        for tag, teacher in self.by_tag.items():
            rows = torch.tensor([str(own) == tag for own in tags])
            parts = [part[rows[part]] for part in context.micro_batches]
            yield teacher, rows, replace(context, micro_batches=[part for part in parts if len(part)])


def rows_of(context: PreparedContext) -> list[int]:
    """Returns the rollouts of the context's micro-batches, in rising order."""
    return sorted(row for part in context.micro_batches for row in part.tolist())


ALONE_OR_BY_TAG = Teacher.kinds | {"by_tag": "mmrl.measurements.teachers:TaggedTeachers"}


# --- what a step asks of them ---


@dataclass(frozen=True)
class TeacherLikelihoods(PreparedMeasurement["DecisionColumn"]):
    """Log-probabilities [rollout, decision] of a student's decisions under a teacher; NaN where a rollout has none."""

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
    """Alternatives to a student's decisions and their log-probabilities under a teacher, [rollout, decision, k]. count:
    the k likeliest; None: all. A step has one such measurement, for a replay lists one set of alternatives."""

    teacher: Teacher = field(hash=False)
    count: int | None
    requires: ClassVar[type] = TaughtTokens
    cost: ClassVar[str] = "a forward pass of the teacher, and k numbers a decision"
    scores: ClassVar[bool] = True
    name: ClassVar[str] = ALTERNATIVES

    @property
    def offers(self) -> frozenset[Offer]:
        return self.teacher.needs.required

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> TeacherChoices:
        if ALTERNATIVES in rollouts.extras:
            raise UserError(
                "two parts of the algorithm list alternatives to a decision; leave one out, or give one of them the "
                "estimator sampled"
            )
        return self.teacher.choices(rollouts, context, self.count)


@dataclass(frozen=True)
class TeacherPredictions(PreparedMeasurement["DecisionColumn"]):
    """A teacher's predictions of denoising steps from the states of the student's rollouts. They take the place of the
    job's reference (`Rollouts.ref_prediction`), from which a replay computes distances with their gradient; the column
    says which decisions have one, [rollout, decision] bool."""

    teacher: PathTeacher = field(hash=False)
    cost: ClassVar[str] = "a forward pass of the teacher"
    requires: ClassVar[type] = Taught

    @property
    def name(self) -> str:
        return f"teacher {self.teacher.key}"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        if rollouts.ref_prediction is not None:
            raise UserError(
                "a teacher of denoising steps takes the place of the reference, and another part of the algorithm "
                "needs one; leave out either"
            )
        rollouts.ref_prediction = self.teacher.prediction(rollouts, context)
        return DecisionColumn(rollouts.mask.clone())
