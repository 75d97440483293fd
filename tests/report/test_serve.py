"""The report in a browser while the run goes on: on loopback, written anew, for nobody by another name."""

import http.client
import json
import threading

import pytest

from mmrl.errors import UserError
from mmrl.report.html.serve import ReportServer
from tests.report.made import healthy, write_run


@pytest.fixture
def served(tmp_path):
    folder = write_run(tmp_path / "run", healthy(4), [], end=None)
    with ReportServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, server
        server.shutdown()
        thread.join()


def asked(server, path="/", host=None):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.getheader("Refresh"), answer.read().decode()


def test_a_look_shows_the_steps_so_far(served):
    folder, server = served
    assert server.server_address[0] == "127.0.0.1"
    status, refresh, page = asked(server)
    assert status == 200 and "<b>4 of 40</b>" in page
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(healthy(5)[-1]) + "\n")
    assert "<b>5 of 40</b>" in asked(server)[2]


def test_a_run_that_has_ended_is_not_asked_for_again(served):
    folder, server = served
    (folder / "end.json").write_text(json.dumps({"state": "finished", "sentence": "It reached its end, step 40."}))
    assert asked(server)[:2] == (200, None)


@pytest.mark.parametrize("path, host", [("/metrics.jsonl", None), ("/", "example.com"), ("/../config.yaml", None)])
def test_nothing_else_is_given_away(served, path, host):
    assert asked(served[1], path, host)[0] == 404


def test_a_folder_that_is_missing_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        ReportServer(tmp_path / "nowhere")
