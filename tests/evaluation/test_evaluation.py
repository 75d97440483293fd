"""Evaluations in a simulator: their protocol, a line for a table, going on after a stop, workers."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.build import build_policy, build_task
from mmrl.config import load
from mmrl.evaluation.evaluate import Journal, evaluate
from mmrl.evaluation.protocol import digest, protocol, protocol_lines, rates_by_task, simulator_packages
from mmrl.report.intervals import wilson
from mmrl.rollouts import Episode, Prompt, Sample
from mmrl.sims.registry import resolved
from tests.whole_runs.parts import ROBOTS

PPO = ["algorithm={type: ppo}", "rollout={prompts: 4, group_size: 1}"]


class Alone:
    """One rank of one."""

    world, rank = 1, 0

    def gather(self, value):
        return [value]

    def sum(self, value):
        return value


def job(*overrides):
    config = load(ROBOTS, ["run_dir=unused", "evaluation={prompts: 10, micro_batch: 4, temperature: 1.5}", *overrides])
    task = build_task(config)
    return config, task, build_policy(config, task)


def episode(success=True, length=3, at_end=True, **other):
    return Episode("go", success, success and at_end, length, 1.5, **other)


def sample(name, *arguments, **options):
    return Sample(Prompt(name, "", metadata={"task": name}), "failure", episode=episode(*arguments, **options))


class TestGoingOn:
    def stopped(self, tmp_path, after):
        """An evaluation that ended in its part number `after`; what was played."""
        config, task, policy = job()
        played, respond = [], policy.respond

        def until(prompts, seeds):
            if len(played) == after:
                raise KeyboardInterrupt
            played.append(len(prompts))
            return respond(prompts, seeds)

        policy.respond = until
        with pytest.raises(KeyboardInterrupt):
            evaluate(policy, task, Alone(), 10, config, Journal(tmp_path / "parts", "x"))
        return played

    def test_gives_what_one_that_was_not_stopped_gives(self, tmp_path):
        config, task, policy = job()
        whole, samples, _ = evaluate(policy, task, Alone(), 10, config)
        assert self.stopped(tmp_path, after=2) == [4, 4]
        config, task, policy = job()
        played, respond = [], policy.respond
        policy.respond = lambda prompts, seeds: played.append(len(prompts)) or respond(prompts, seeds)
        journal = Journal(tmp_path / "parts", "x")
        assert journal.episodes == 8
        result, again, _ = evaluate(policy, task, Alone(), 10, config, journal)
        assert played == [2] and result == whole
        assert [(s.prompt, s.response, s.episode) for s in again] == [
            (s.prompt, s.response, s.episode) for s in samples
        ]
        assert len({s.episode.length for s in samples}) > 1  # so that a mix-up would show

    def test_another_protocol_and_a_torn_line_are_left_aside(self, tmp_path):
        self.stopped(tmp_path, after=2)
        file = tmp_path / "parts"
        with file.open("a") as out:
            out.write('{"digest": "x", "indices": [8')
        assert Journal(file, "x").episodes == 8 and file.read_text().endswith("]}\n")
        assert Journal(file, "y").episodes == 0 and file.read_text() == ""

    def test_the_digest_tells_protocols_and_weights_apart(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"1")
        first = digest({"seed": 0}, str(tmp_path))
        assert digest({"seed": 0}, str(tmp_path)) == first != digest({"seed": 1}, str(tmp_path))
        (tmp_path / "model.safetensors").write_bytes(b"12")
        assert digest({"seed": 0}, str(tmp_path)) != first


class TestWorkers:
    def test_one_and_eight_give_the_same(self):
        found = []
        for workers in (1, 8):
            config, task, policy = job(f"task.workers={workers}", "task.rows=8", "evaluation.micro_batch=8")
            with policy.sim:
                result, samples, _ = evaluate(policy, task, Alone(), 10, config)
            found.append((result, [s.episode for s in samples]))
            told = protocol(config, task, policy.action.chunk)
            found[-1] += (told,)
        assert found[0] == found[1]

    def test_where_it_is_played_is_no_part_of_the_protocol(self):
        config, task, _ = job("task.workers=1", "task.deadline_s=9")
        other, same, _ = job()
        told, plain = (protocol(c, t, 4) for c, t in ((config, task), (other, same)))
        assert told == plain and "workers" not in told["task"]


class TestProtocol:
    def test_says_what_papers_say(self):
        config, task, policy = job("task.tasks=[go, stay]", "task.eval_seed=40", "task.options={poison: 5.0}")
        told = protocol(config, task, policy.action.chunk)
        assert told["options"] == {"poison": 5.0, "unstartable": ()}
        assert (told["tasks"], told["episodes"], told["starts"], told["chunk"]) == (["go", "stay"], 10, [40, 44], 4)
        assert told["versions"]["torch"] == torch.__version__ or told["versions"]["torch"]
        text = "\n".join(protocol_lines(told, 0.5))
        for part in ("2: go, stay", "10, start states 40 to 44", "seed 0", "chunk 4", "temperature 0.5", "poison 5.0"):
            assert part in text

    def test_options_of_a_simulator_with_their_defaults(self):
        pytest.importorskip("mujoco")
        found = resolved("tabletop", {"image_size": 32})
        assert found["image_size"] == 32 and found["objects"] == 3 and found["reward"] == "sparse"
        assert (
            set(simulator_packages("tabletop")) == {"mujoco"}
            and simulator_packages("tests.sims.line_simulator:Line") == {}
        )

    def test_success_by_task_and_over_all(self):
        samples = [sample("a"), sample("a", False, 5), sample("b", length=7, at_end=False), sample("b", lost=True)]
        marks = torch.tensor([1.0, 0.0, 1.0, torch.nan])
        found = rates_by_task(SimpleNamespace(accuracy=lambda _: marks), samples)
        assert list(found) == ["a", "b", "all"]
        assert found["a"]["success"] == 0.5 and found["a"]["length"] == 4 and found["b"]["episodes"] == 1
        assert (found["all"]["low"], found["all"]["high"]) == wilson(2, 3)
        assert [found[name]["success_at_end"] for name in found] == [0.5, 0.0, 1 / 3]
        assert list(rates_by_task(SimpleNamespace(accuracy=lambda _: marks[:2]), samples[:2])) == ["a"]
