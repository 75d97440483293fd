"""Engines in processes of their own: a batch is complete whatever happens to one of them, and training goes on while
they generate."""

import json
import re
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm.client import LOST, Server
from mmrl.generation.vllm.engine import EngineOptions, Request, bundled, last_error
from mmrl.generation.vllm.processes import command_line
from mmrl.generation.vllm.servers import RequestBatch, Servers
from mmrl.generation.weight_sync.folders import write_weights
from tests.whole_runs import vllm_workers
from tests.whole_runs.parts import call, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("server")
    call(vllm_workers.server, path, log=path / "server.log", timeout=290)
    return path


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "server.json").read_text())


@vllm_workers.needs_vllm
@pytest.mark.timeout(300)  # the first one waits for all of the fixture
@pytest.mark.slow
def test_the_next_batch_is_made_while_this_one_is_trained(folder):
    steps = [row for row in metrics(folder / "run") if "loss" in row]
    assert [row["generation/staleness"] for row in steps] == [0, 1, 1]
    assert all(row["generation/probe_gap"] < 1e-3 for row in steps if "generation/probe_gap" in row)
    assert steps[0]["correction/logp_gap_max"] < 1e-3  # made with the weights of now
    assert all(row["correction/logp_gap"] > 5e-3 for row in steps[1:])  # one step old
    assert all(row["correction/effective_sample_size"] < 1 for row in steps[1:])


@vllm_workers.needs_vllm
@pytest.mark.slow
def test_a_batch_that_was_not_trained_yet_comes_again_after_a_resume(folder, found):
    """At the checkpoint after two steps a third batch was in the making."""
    saved = json.loads((folder / "run/checkpoints/step-000002/trainer.json").read_text())
    assert saved["batches"]["drawn"] == 2 * found["prompts"]


@vllm_workers.needs_vllm
@pytest.mark.slow
def test_the_seeds_alone_decide(found):
    assert found["first"] == found["again"] and found["gap"] < 1e-3


@vllm_workers.needs_vllm
@pytest.mark.slow
def test_nobody_is_answered_without_the_key_and_no_weights_are_left(found):
    assert set(found["strangers"]) == {401} and found["left"] == []


# --- two engines, and adapters ---


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("servers")
    call(vllm_workers.servers, path, log=path / "servers.log", timeout=590)
    return json.loads((path / "servers.json").read_text())


@vllm_workers.needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_engines_answer(two):
    assert min(two["answered"]) > 0 and two["gap"] < 1e-3


@vllm_workers.needs_vllm
@pytest.mark.slow
def test_killing_an_engine_in_the_middle_of_a_batch_costs_time_only(two):
    assert two["killed"] == two["first"]
    assert two["generation/asked_again"] >= 1 and two["generation/restarts"] == 1
    assert two["generation/probe_gap"] < 1e-3 and min(two["answered_after"]) > 0


@vllm_workers.needs_vllm
@pytest.mark.slow
def test_an_engine_that_missed_the_weights_is_found(two):
    assert re.search(r"vLLM, \d+ of the 69 tensors in it are not as they were sent: ", two["stale"])


@vllm_workers.needs_vllm
@pytest.mark.slow
def test_a_slow_engine_does_not_hold_up_the_others(two):
    quick, slow = two["shares"]
    assert quick >= 2 * slow > 0 and two["slow"] == two["first"]


@vllm_workers.needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_gets_each_version_of_an_adapter_and_the_last_one_again_when_it_was_started_again(tmp_path):
    call(vllm_workers.server_with_adapters, tmp_path, log=tmp_path / "adapters.log", timeout=1100)
    found = json.loads((tmp_path / "adapters.json").read_text())
    steps = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(steps) == 4 and all(row["generation/probe_gap"] < 1e-3 for row in steps if "generation/probe_gap" in row)
    staleness = [row["generation/staleness_max"] for row in steps]
    assert staleness[0] == 0 and min(staleness[1:]) >= 1 and max(staleness) == 2
    assert found["before"] == found["killed"] and found["generation/restarts"] == 1
    assert len(found["models"]) == 2  # the model itself and one adapter
    assert "tensors in it are not as they were sent: base_model" in found["stale"]


@vllm_workers.needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_servers_do_not_know_is_named(tmp_path):
    config = {"architectures": ["NobodysForConditionalGeneration"], "model_type": "qwen2"}
    made = Servers(
        tmp_path,
        EngineOptions(context=16, settings=VLLMServer(timeout=300)),
        describe=lambda path: (path / "config.json").write_text(json.dumps(config)) and None,
        gather=lambda value: [value],
    )
    with pytest.raises(UserError, match="Nobodys.*vLLM .* and transformers .* are installed") as error:
        made.load([("a", torch.ones(2))])
    made.close()
    assert "\n" not in str(error.value)


# --- without an engine ---


def test_of_a_long_log_the_line_that_says_what_went_wrong_is_shown():
    log = (
        "INFO started\nValueError: no such model\n  File x, line 3\nRuntimeError: Engine core initialization failed.\n"
    )
    assert last_error(log) == "ValueError: no such model"
    assert last_error("one\ntwo\n") == "two" and last_error("") == "nothing"
    assert len(last_error("Error: " + "x" * 1000)) < 310


def servers(folder, addresses, timeout=1.0):
    return Servers(
        folder,
        EngineOptions(context=16, settings=VLLMServer(addresses=addresses, timeout=timeout)),
        describe=lambda path: None,
        gather=lambda value: [value],
    )


def test_an_address_that_does_not_answer_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"server at http://127.0.0.1:9 did not answer within rollout.generator.timeout=1 s"
    ):
        servers(tmp_path, ["http://127.0.0.1:9"]).load([("a", torch.ones(2))])


def test_a_server_that_is_not_set_up_for_training_is_told_how(tmp_path):
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="has no /weight_info; start it with VLLM_SERVER_DEV_MODE=1"):
            servers(tmp_path, [f"http://127.0.0.1:{server.server_port}"]).load([("a", torch.ones(2))])
        server.shutdown()


def test_a_problem_on_rank_0_stops_every_rank(tmp_path):
    made = servers(tmp_path, ["http://127.0.0.1:9"])
    made.rank, made.gather = 1, lambda value: [value, "the disk is full"]
    with pytest.raises(UserError, match="the disk is full"):
        made.load(iter([("a", torch.ones(2))]))
    assert not list(tmp_path.iterdir())  # only rank 0 writes


def test_a_folder_that_can_not_be_written_is_named_and_other_ranks_are_not_left_waiting(tmp_path):
    (tmp_path / "file").write_text("")
    parts = iter([("a", torch.ones(2)), ("b", torch.ones(2))])  # each may be a collective of all ranks
    with pytest.raises(UserError, match=r"weights-1 cannot be written .*rollout.generator.exchange"):
        servers(tmp_path / "file", ["http://127.0.0.1:9"]).load(parts)
    assert next(parts, None) is None


class Scripted(Server):
    """A server of one line: what becomes of each request."""

    def __init__(self, answer):
        super().__init__(lambda: "http://scripted", 1.0)
        self.answer = answer

    def post(self, path, body):
        return self.answer(body)

    def refresh(self, weights, give, hopeful):
        raise UserError("it did not come back")


def groups():
    """Three prompts with two responses each."""
    ids = [torch.tensor([i]) for i in range(3)]
    return [Request(str(i), [i], (), ids[i], seed=10 * i + k, limit=2) for i in range(3) for k in range(2)]


def asked(tmp_path, *answers):
    made = servers(tmp_path, [f"http://127.0.0.1:{9 + i}" for i in range(len(answers))])
    made.servers = [Scripted(partial(answer, made)) for answer in answers]
    return made.generate(groups(), sampling=Sampling(), eos=(99,))


def answers(made, body):
    """Each response is the prompt's token and its seed."""
    token, wanted = body["token_ids"][0], body["sampling_params"]
    seeds = range(wanted["seed"], wanted["seed"] + wanted["n"])
    logprobs, version = {"content": [{"logprob": -0.5}] * 2}, [{"version": made.current.version}]
    choices = [{"token_ids": [token, seed], "logprobs": logprobs, "weight_versions": version} for seed in seeds]
    return {"prompt_token_ids": [token], "choices": choices}


def goes_away(made, body):
    raise LOST("gone")


def refuses(made, body):
    raise UserError("too long")


def surprises(made, body):
    return {}


def test_what_a_lost_server_had_is_answered_by_another(tmp_path):
    found = [answer.ids.tolist() for answer in asked(tmp_path, goes_away, answers)]
    assert found == [[0, 0], [0, 1], [1, 10], [1, 11], [2, 20], [2, 21]]


def test_a_group_is_one_request():
    ids, image = torch.tensor([7]), (object(),)
    first = Request("a", [7], image, ids, seed=3, limit=5)

    def counts(*others, most=8):
        return [request.count for request in bundled([first, *others], most)]

    follows = partial(replace, first, seed=4)
    assert counts(follows(), replace(first, seed=5)) == [3]
    assert bundled([first, follows()], 8)[0] == replace(first, count=2)
    assert counts(follows(), replace(first, seed=5), most=2) == [2, 1]
    for other in (
        replace(first, seed=5),
        follows(limit=4),
        follows(marked=[8]),
        follows(images=(image[0],)),
        follows(ids=torch.tensor([8])),
        replace(first, seed=2),
    ):
        assert counts(other) == [1, 1]


def test_every_engine_gets_a_part_of_a_single_group(tmp_path):
    made = servers(tmp_path, [f"http://127.0.0.1:{9 + i}" for i in range(4)])
    bodies = []

    def kept(body):
        bodies.append(body)
        return answers(made, body)

    made.servers = [Scripted(kept)] * 4
    request = Request("a", [7], (), torch.tensor([7]), seed=0, limit=2)
    found = made.generate([replace(request, seed=i) for i in range(8)], sampling=Sampling(), eos=(99,))
    assert [answer.ids.tolist() for answer in found] == [[7, i] for i in range(8)]
    assert [body["sampling_params"]["n"] for body in bodies] == [2] * 4


@pytest.mark.parametrize(
    ("what", "words"),
    [(goes_away, "did not come back"), (refuses, "too long"), (surprises, "did not come back")],
)
def test_a_batch_that_can_not_be_answered_ends(tmp_path, what, words):
    with pytest.raises(UserError, match=words):
        asked(tmp_path, what)


def test_a_batch_hands_out_each_request_once_and_takes_back_what_was_lost():
    batch = RequestBatch([], [{"n": i} for i in range(3)])
    first, second = batch.take(), batch.take()
    batch.give_back(first)
    batch.put(second, 0, [second])
    left = [batch.take(), batch.take()]
    assert sorted([second, *left]) == [0, 1, 2] and batch.unfinished()
    for place in left:
        batch.put(place, 0, [place])
    assert batch.take() is None and batch.answers == [[0], [1], [2]]


def test_arguments_become_options():
    made = command_line({"max_model_len": 8, "enforce_eager": True, "log": False, "limit": {"image": 1}, "none": None})
    assert made == ["--max-model-len", "8", "--enforce-eager", "--no-log", "--limit", '{"image": 1}']


def test_weights_are_written_in_parts_that_hold_all(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr("mmrl.generation.weight_sync.folders.SHARD", 40)
    weights = {str(i): torch.full((3, 2), float(i)).T for i in range(5)}  # 24 bytes each, not contiguous
    write_weights(tmp_path, weights.items())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == weights.keys() and all(torch.equal(found[n], weights[n]) for n in weights)
