"""Distillation from a teacher on the student's own rollouts: from the YAML keys through the trainer's path to numbers
that transformers' own logits give."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mmrl import job
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.measurements.teachers import PathTeacher, ViewTeacher
from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
from mmrl.prompts.views import MaskedPatches, NoText
from mmrl.tasks.visual_qa.tiny import model as tiny_model
from mmrl.training.metrics import Metrics
from mmrl.training.preparation import Preparation
from tests.joints.parts import close
from tests.whole_runs.parts import TINY, distance, final, gradient, make, metrics, release, timeless, train, under

pytestmark = pytest.mark.usefixtures("alone")
QUIET = "task.rewards=[{name: 'tests.whole_runs.parts:spread', weight: 0.0}]"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of the student's vocabulary, of another size and other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    write(folder, tiny_model.build_tokenizer(), Sizes(width=192, layers=2), seed=7)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A trainer, and rollouts of one step that are not prepared yet."""
    trainer = make(tmp_path_factory.mktemp("student"), QUIET)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    yield trainer, rollouts
    release(trainer)


def prepared(student, algorithm, *overrides):
    """The trainer under an algorithm, and its micro-batches; their rollouts are those of the student."""
    trainer, rollouts = student
    config = load(TINY, [f"run_dir={trainer.config.run_dir}", QUIET, f"algorithm={algorithm}", *overrides])
    probe = under(trainer, config)
    probe.preparation = Preparation(config, trainer.policy, trainer.task, trainer.engine, None, None)
    copied = replace(rollouts, extras={}, old_logp=None, mask=rollouts.mask.clone())
    shuffle = torch.Generator().manual_seed(0)
    parts, _ = probe.preparation.minibatches(copied, 0, shuffle, Metrics(trainer.engine))
    return probe, parts


def distribution(policy, model, tokens):
    """log p of the tokens that may be sampled, [decision, token], by transformers' own logits of one rollout."""
    logits = model(**policy.runner.collate([tokens], padding_side="right")).logits[
        0, len(tokens.prompt) - 1 : -1, : len(policy.tokens.tokenizer)
    ]
    return logits.index_fill(1, torch.tensor(policy.tokens.suppressed), -torch.inf).log_softmax(1)


def distributions(policy, folder, rows, view=lambda row: row):
    """The student's and the teacher's log p of all decisions, [decision, token that may be sampled]."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ours = torch.cat([distribution(policy, policy.module.model, row) for row in rows])
    with torch.no_grad():
        theirs = torch.cat([distribution(policy, model, view(row)) for row in rows])
    sampled = ours[0].isfinite()
    return ours[:, sampled], theirs[:, sampled], sampled.nonzero()[:, 0]


def divergence(ours, theirs, direction):
    one, other = (ours, theirs) if direction == "reverse" else (theirs, ours)
    return (one.exp() * (one - other)).sum(1)


def slope(value, policy):
    found = torch.autograd.grad(value, [p for p in policy.module.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("estimator", ["full", "{type: top_k, k: 5}", "sampled"])
def test_the_loss_and_its_gradient_are_those_of_an_exact_computation(student, teacher, estimator, direction):
    """Temperature 1; the loss is the mean over decisions, its gradient that of torch through transformers."""
    algorithm = f"{{type: distillation, teacher: {{path: {teacher}}}, estimator: {estimator}, direction: {direction}}}"
    probe, parts = prepared(student, algorithm)
    micro, policy = parts[0][0], probe.policy
    ours, theirs, ids = distributions(policy, teacher, micro.inputs)
    if estimator == "full":
        expected = divergence(ours, theirs, direction)
    elif estimator == "sampled":
        index = (ids == torch.cat([row.response for row in micro.inputs])[:, None]).nonzero()[:, 1:]
        logp, likely = ours.gather(1, index)[:, 0], theirs.gather(1, index)[:, 0]
        gap = logp - likely
        weight = gap.detach() if direction == "reverse" else -(likely - logp.detach()).exp()
        expected = weight * (logp if direction == "reverse" else gap)
        shown = gap if direction == "reverse" else weight * gap
    else:
        best = theirs.topk(5, 1).indices
        listed = [
            torch.cat([p.gather(1, best), (1 - p.exp().gather(1, best).sum(1, keepdim=True)).log()], 1)
            for p in (ours, theirs)
        ]
        expected = divergence(*listed, direction)
    shown = expected if estimator != "sampled" else shown
    losses, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    close(sum(losses.values()).detach(), shown.mean().detach(), atol=1e-5)
    close(statistics["distillation/kl"][micro.mask], shown.detach(), atol=1e-4)
    found, right = gradient(probe, micro), slope(expected.mean(), policy)
    assert right.norm() > 0.01
    close(found, right, atol=1e-4 * float(right.norm()))


def test_a_later_minibatch_weighs_by_its_ratio(student, teacher):
    """After an update in between, the policy of the second minibatch is not the one that sampled."""
    probe, parts = prepared(student, f"{{type: distillation, teacher: {{path: {teacher}}}, minibatches: 2}}")
    micro, policy = parts[1][0], probe.policy
    before = policy.replay(micro, policy.module).logp.detach()
    close(micro.old_logp, before)
    kept = {name: value.clone() for name, value in policy.module.state_dict().items()}
    policy.module.load_state_dict({n: v * 1.05 if v.is_floating_point() else v for n, v in kept.items()})
    logp = policy.replay(micro, policy.module).logp.detach()
    _, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    policy.module.load_state_dict(kept)
    likely = policy.teachers.policy(str(teacher))
    theirs = likely.replay(micro, likely.module).logp.detach()
    expected = ((logp - before).exp() * (logp - theirs))[micro.mask]
    assert ((logp - before).exp()[micro.mask] - 1).abs().max() > 0.01
    close(statistics["distillation/kl"][micro.mask], expected, atol=1e-4)


def test_as_a_term_it_adds_to_what_rewards_teach(student, teacher):
    """The gradient of GRPO with the term is GRPO's and twice the divergence's."""
    one = f"{{type: distillation, teacher: {{path: {teacher}}}, estimator: full, coefficient: 2.0}}"
    both, parts = prepared(student, f"{{type: grpo, terms: [{one}]}}")
    alone, apart = prepared(student, "{type: grpo}")
    only, distilled = prepared(student, f"{{type: distillation, teacher: {{path: {teacher}}}, estimator: full}}")
    sums = [gradient(probe, part[0][0]) for probe, part in ((both, parts), (alone, apart), (only, distilled))]
    close(sums[0], sums[1] + 2 * sums[2], atol=1e-4)


@pytest.mark.parametrize("level", ["decision", "sequence"])
def test_a_ratio_to_the_teacher_weighs_what_the_teacher_prefers(student, teacher, level):
    """algorithm.surrogate=teacher_ratio (RLAD): before the first update r = (pi / pi_T)^share, of a decision or as the
    mean of a rollout; a decision whose ratio is beyond its bound has no gradient."""
    chosen = f"{{type: teacher_ratio, teacher: {{path: {teacher}}}, share: 0.25, low: 0.1, high: 0.15}}"
    probe, parts = prepared(student, f"{{type: grpo, level: {level}, surrogate: {chosen}}}")
    micro, policy = parts[0][0], probe.policy
    likely = policy.teachers.policy(str(teacher))
    with torch.no_grad():
        gaps = 0.25 * (policy.replay(micro, policy.module).logp - likely.replay(micro, likely.module).logp)
    gaps = gaps.where(micro.mask, 0)
    if level == "sequence":
        gaps = (gaps.sum(1, keepdim=True) / micro.mask.sum(1, keepdim=True)).expand_as(gaps)
    ratio, signed = gaps.exp(), torch.tensor([2.0, -1.0, 0.5][: len(micro)])[:, None].expand_as(gaps)
    micro.advantages = signed.clone()
    clipped = ratio.clamp(0.9, 1.15)
    values = torch.maximum(-ratio * signed, -clipped * signed)
    cut = (torch.where(signed > 0, ratio > 1.15, ratio < 0.9) & micro.mask).sum()
    assert 0 < cut < micro.mask.sum() and ratio[micro.mask].std() > 0.05
    shares = micro.mask / micro.mask.sum()
    if level == "sequence":
        shares = micro.mask / micro.mask.sum(1, keepdim=True) / len(micro)
    losses, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    close(sum(losses.values()).detach(), (values * shares).sum(), atol=1e-5)
    close(statistics["surrogate/ratio_gap"][micro.mask], torch.zeros(int(micro.mask.sum())))  # to the old policy
    moves = torch.where(signed > 0, ratio <= 1.15, ratio >= 0.9) & micro.mask
    logp = policy.replay(micro, policy.module).logp
    if level == "sequence":
        logp = (logp.where(micro.mask, 0).sum(1, keepdim=True) / micro.mask.sum(1, keepdim=True)).expand_as(logp)
    right = slope(-(ratio * signed * shares * moves * logp).sum(), policy)
    assert right.norm() > 0.01
    close(gradient(probe, micro), right, atol=1e-4 * float(right.norm()))


def test_a_teacher_with_no_share_leaves_the_ratio_as_it_is(student, teacher):
    chosen = f"{{type: teacher_ratio, teacher: {{path: {teacher}}}, share: 0.0}}"
    probe, parts = prepared(student, f"{{type: grpo, surrogate: {chosen}}}")
    plain, same = prepared(student, "{type: grpo, surrogate: clip}")
    close(gradient(probe, parts[0][0]), gradient(plain, same[0][0]), atol=1e-6)


def test_prompts_without_a_teacher_have_the_ratio_of_ppo(student, teacher):
    tagged = f"{{by_tag: {{sum: {{path: {teacher}}}}}, tag: kind}}"
    probe, parts = prepared(
        student, f"{{type: grpo, surrogate: {{type: teacher_ratio, teacher: {tagged}, share: 1.0}}}}"
    )
    taught = 0
    for micro in parts[0]:
        sums = torch.tensor([sample.prompt.metadata["kind"] == "sum" for sample in micro.samples])
        _, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
        anchors = statistics["surrogate/anchor"]
        assert not anchors[~sums][micro.mask[~sums]].any()
        taught += int((anchors[sums][micro.mask[sums]] != 0).sum())
    assert taught > 4


def test_teachers_by_tag_teach_their_own_prompts(student, teacher):
    """Only questions about a sum have a teacher; the others have no divergence and no gradient."""
    tagged = f"{{by_tag: {{sum: {{path: {teacher}}}}}, tag: kind}}"
    for estimator in ("sampled", "full"):
        probe, parts = prepared(student, f"{{type: distillation, teacher: {tagged}, estimator: {estimator}}}")
        plain, same = prepared(student, f"{{type: distillation, teacher: {{path: {teacher}}}, estimator: {estimator}}}")
        taught = 0
        for micro, other in zip(parts[0], same[0], strict=True):
            sums = torch.tensor([sample.prompt.metadata["kind"] == "sum" for sample in micro.samples])
            taught += int(sums.sum())
            (losses, said), (_, whole) = (
                p.losses(m, p.algorithm.denominators(m)) for p, m in ((probe, micro), (plain, other))
            )
            assert said["distillation/kl"][~sums].isnan().all()
            close(said["distillation/kl"][sums][micro.mask[sums]], whole["distillation/kl"][sums][micro.mask[sums]])
            expected = whole["distillation/kl"].where(micro.mask & sums[:, None], 0).sum() / micro.mask.sum()
            close(sum(losses.values()).detach(), expected, atol=1e-5)
        assert 0 < taught < 16


def test_each_of_several_teachers_has_its_own_prompts(student, teacher, tmp_path):
    """Sums have one teacher, questions of another kind a second: the values are those of each alone."""
    second = tmp_path / "second"
    write(second, tiny_model.build_tokenizer(), Sizes(width=64, layers=1), seed=3)
    kinds = [sample.prompt.metadata["kind"] for sample in student[1].samples]
    folders = {"sum": teacher, next(kind for kind in kinds if kind != "sum"): second}
    tagged = ", ".join(f"{kind}: {{path: {folder}}}" for kind, folder in folders.items())
    for estimator in ("sampled", "{type: top_k, k: 3}"):
        distilled = "{type: distillation, teacher: %s, estimator: " + estimator + "}"
        probe, parts = prepared(student, distilled % f"{{by_tag: {{{tagged}}}, tag: kind}}")
        together = [probe.losses(m, probe.algorithm.denominators(m))[1]["distillation/kl"] for m in parts[0]]
        for kind, folder in folders.items():
            alone, same = prepared(student, distilled % f"{{path: {folder}}}")
            for micro, values in zip(same[0], together, strict=True):
                own = torch.tensor([sample.prompt.metadata["kind"] == kind for sample in micro.samples])
                rows = own[:, None] & micro.mask
                close(
                    values[rows], alone.losses(micro, alone.algorithm.denominators(micro))[1]["distillation/kl"][rows]
                )
    assert len(set(kinds)) > 1


@pytest.mark.parametrize("teacher", ["view", "path"])
def test_a_random_view_of_a_teacher_is_new_in_every_step(student, teacher):
    """The teacher's images at steps 0 and 3 are those of the view at these steps, which differ."""
    trainer, rollouts = student
    view = MaskedPatches(patch=8, share=0.5)
    made = ViewTeacher(view=view) if teacher == "view" else PathTeacher(path="unread", view=view)
    change = made.changed if isinstance(made, ViewTeacher) else made._with_view
    pixels = {}
    for step in (0, 3):
        changed = change(rollouts, SimpleNamespace(policy=trainer.policy, step=step))
        pixels[step] = [row.images["pixel_values"] for row in changed.inputs]
        expected = trainer.policy.view(rollouts, lambda prompt, step=step: view.at(step).change(prompt))
        for row, found in zip(expected.inputs, pixels[step], strict=True):
            assert torch.equal(row.images["pixel_values"], found)
    assert not any(torch.equal(one, other) for one, other in zip(pixels[0], pixels[3], strict=True))


def test_the_student_itself_teaches_under_a_view(student):
    """Without its text the prompt is another one: the divergence is that of the same weights under it."""
    probe, parts = prepared(student, "{type: distillation, teacher: {view: {type: no_text}}, estimator: full}")
    micro, policy = parts[0][0], probe.policy
    changed = policy.view(micro, NoText().changed)
    ours = torch.cat([distribution(policy, policy.module.model, row) for row in micro.inputs])
    theirs = torch.cat([distribution(policy, policy.module.model, row) for row in changed.inputs])
    sampled = ours[0].isfinite()
    expected = divergence(ours[:, sampled], theirs[:, sampled], "reverse").detach()
    _, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    assert expected.mean() > 0.001
    close(statistics["distillation/kl"][micro.mask], expected, atol=1e-4)


# --- behind a server ---


class Published(BaseHTTPRequestHandler):
    """Answers as vLLM's OpenAI-compatible server does: /tokenize, and prompt_logprobs of /v1/completions."""

    policy = model = None
    faults: list = []
    requests: list = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(body)
        if type(self).faults:
            self.answer(type(self).faults.pop(), {"error": "busy"})
        elif self.path == "/tokenize":
            ids = self.policy.tokens.ids(body["prompt"])
            self.answer(200, {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None})
        else:
            self.complete(body)

    def complete(self, body):
        choices = [
            {
                "index": i,
                "text": "",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": self.likelihoods(ids, body["prompt_logprobs"]),
            }
            for i, ids in enumerate(body["prompt"])
        ]
        self.answer(
            200, {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": choices[::-1]}
        )

    def likelihoods(self, ids, count):
        """null, then the token itself and the likeliest ones, each with its rank."""
        with torch.no_grad():
            logp = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(1)
        entries = [None]
        for place, token in enumerate(ids[1:]):
            order = logp[place].argsort(descending=True).tolist()
            listed = dict.fromkeys([token, *order[:count]])
            entries.append(
                {
                    str(i): {"logprob": float(logp[place, i]), "rank": order.index(i) + 1, "decoded_token": "?"}
                    for i in listed
                }
            )
        return entries

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def address(student, teacher):
    trainer, _ = student
    Published.policy, Published.faults, Published.requests = trainer.policy, [], []
    Published.model = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Published)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def without_images(student):
    """The same responses to prompts of text alone."""
    trainer, rollouts = student
    return trainer, trainer.policy.view(rollouts, lambda prompt: replace(prompt, images=()))


def of_listed(policy, ours, theirs, token):
    """The divergence over the five likeliest that the student may sample of those that the server lists."""
    listed = {token, *theirs.topk(5).indices.tolist()} - set(policy.tokens.suppressed)
    best = sorted(listed, key=lambda i: -theirs[i])[:5]
    p, q = ours[best].exp(), theirs[best].exp()
    return (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()


@pytest.mark.parametrize("estimator", ["sampled", "{type: top_k, k: 5}"])
def test_a_server_says_what_its_model_does(student, teacher, address, estimator):
    """Three responses in a request, the first request answered at the second try; over all tokens, as vLLM does."""
    served = f"{{server: '{address}', model: tiny, at_once: 3}}"
    text = without_images(student)
    Published.faults.append(503)
    probe, parts = prepared(text, f"{{type: distillation, teacher: {served}, estimator: {estimator}}}")
    micro, policy = parts[0][0], probe.policy
    _, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    collated = [policy.runner.collate([row], padding_side="right") for row in micro.inputs]
    logits = [
        Published.model(**c).logits[0, len(row.prompt) - 1 : -1] for c, row in zip(collated, micro.inputs, strict=True)
    ]
    theirs = torch.cat(logits).log_softmax(1).detach()
    ours = torch.cat([distribution(policy, policy.module.model, row) for row in micro.inputs]).detach()
    tokens = torch.cat([row.response for row in micro.inputs]).tolist()
    expected = [
        one[token] - other[token] if estimator == "sampled" else of_listed(policy, one, other, token)
        for one, other, token in zip(ours, theirs, tokens, strict=True)
    ]
    close(statistics["distillation/kl"][micro.mask], torch.stack(expected), atol=1e-4)
    assert [len(body["prompt"]) for body in Published.requests[1:]] == [3, 3, 3, 3, 3, 1]


# --- refused before anything is slow ---


def test_another_vocabulary_is_refused_before_the_start(tmp_path):
    folder = tmp_path / "other"
    write(folder, train_tokenizer(["which digit is the largest"] * 9, 400), Sizes(), seed=0)
    with pytest.raises(UserError, match=r"^algorithm.teacher: teacher .*other has another vocabulary than the model: "):
        make(tmp_path, f"algorithm={{type: distillation, teacher: {{path: {folder}}}}}")
    with pytest.raises(UserError, match="cannot be read"):
        make(tmp_path, "algorithm={type: distillation, teacher: {path: nowhere/at/all}}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0.7", "computes at temperature 1, but rollout.temperature=0.7; set it to 1"),
        ("algorithm.teacher.server=http://127.0.0.1:9/", "did not answer"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_the_start(tmp_path, address, override, message):
    served = f"{{server: '{address}', model: tiny, retries: 0}}"
    with pytest.raises(UserError, match=message):
        make(tmp_path, f"algorithm={{type: distillation, teacher: {served}}}", override)


def test_a_server_of_another_vocabulary_is_refused(tmp_path, address, monkeypatch):
    monkeypatch.setattr(
        Published, "policy", type("Other", (), {"tokens": type("Ids", (), {"ids": lambda self, text: [1, 2]})()})()
    )
    with pytest.raises(UserError, match="has another vocabulary than the model: it splits a string of"):
        make(tmp_path, f"algorithm={{type: distillation, teacher: {{server: '{address}', model: tiny}}}}")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("{type: distillation}", "algorithm.teacher"),
        ("{type: distillation, teacher: {path: x}, estimator: velocity}", "predictions of a denoiser"),
        ("{type: distillation, teacher: {view: no_text}, estimator: velocity}", "needs teacher.path"),
        ("{type: distillation, teacher: {paht: x}}", "teacher"),
    ],
)
def test_a_teacher_that_the_job_does_not_have_is_refused(tmp_path, algorithm, message):
    with pytest.raises(UserError, match=message):
        load(TINY, [f"run_dir={tmp_path}", f"algorithm={algorithm}"])


def test_a_recipe_runs_first_and_its_final_weights_teach(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(job, "finish_run", lambda key, path: asked.append((key, path)))
    config = job.run_warm_start(load("digits_distilled", [f"run_dir={tmp_path}"]))
    assert [(key, Path(path).stem) for key, path in asked] == [
        ("model.warm_start", "digits_student_warm_start"),
        ("algorithm.teacher.recipe", "digits_teacher"),
    ]
    assert config.algorithm.teacher.folder == "runs/warm_starts/vlm/digits_teacher/final"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="algorithm.teacher: recipe=digits_teacher has not been run"):
        make(tmp_path, "algorithm={type: distillation, teacher: {recipe: digits_teacher}}")


# --- whole runs ---


def test_a_student_comes_nearer_however_it_is_cut_and_goes_on_exactly(tmp_path, teacher):
    """Its rewards are worth nothing: what it learns is the teacher's."""
    options = [
        QUIET,
        "engine.micro_batch=8",
        f"algorithm={{type: distillation, teacher: {{path: {teacher}}}, estimator: {{type: top_k, k: 20}}}}",
    ]
    train(tmp_path / "whole", *options)
    train(tmp_path / "cut", *options, "engine.micro_batch=16")
    train(tmp_path / "parts", *options, "steps=2", "checkpoint.every=2")
    train(tmp_path / "parts", *options, "checkpoint.every=2", resume=True)
    rows, again = ([r for r in timeless(metrics(tmp_path / name)) if "loss" in r] for name in ("whole", "parts"))
    assert rows == again and distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    assert distance(final(tmp_path / "whole"), final(tmp_path / "cut")) < 1e-5
    assert rows[-1]["distillation/kl"] < 0.95 * rows[0]["distillation/kl"]
