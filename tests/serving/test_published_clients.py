"""`mmrl serve` for robots, asked by the clients that the field publishes. They pin other packages, so they run in an
environment of their own, which OPENPI_CLIENT names:

    uv venv --python 3.11 .venv-openpi
    git clone https://github.com/Physical-Intelligence/openpi
    uv pip install --python .venv-openpi/bin/python openpi/packages/openpi-client typing_extensions
    OPENPI_CLIENT=.venv-openpi/bin/python scripts/test.sh tests/serving
"""

import json
import os
import subprocess

import numpy as np
import pytest

from tests.policies.vla.conftest import backbones, make  # noqa: F401  (fixtures)
from tests.serving.test_robot import played, policy, server  # noqa: F401  (fixtures)

ASK = """
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

port, observations = json.load(sys.stdin)
client = WebsocketClientPolicy(host="127.0.0.1", port=port, api_key="secret")
chunks = []
for observation in observations:
    images = {name: np.array(image, np.uint8) for name, image in observation["images"].items()}
    state = np.array(observation["state"], np.float32)
    answer = client.infer({**images, "observation/state": state, "prompt": observation["prompt"]})
    chunks.append(answer["actions"].tolist())
try:
    client.infer({"prompt": "go"})
except RuntimeError as error:
    print(json.dumps([client.get_server_metadata(), chunks, str(error)]))
"""


def test_openpis_client_gets_what_an_evaluation_does(server, policy):  # noqa: F811
    python = os.environ.get("OPENPI_CLIENT")
    if python is None:
        pytest.skip("OPENPI_CLIENT names no Python with openpi-client")
    record = played(policy)
    observations = [
        {
            "images": {f"observation/{name}": seen.image(name)[0].tolist() for name in seen.cameras},
            "state": seen.state[0].tolist(),
            "prompt": seen.instructions[0],
        }
        for seen, _ in record
    ]
    asked = subprocess.run(
        [python, "-c", ASK],
        input=json.dumps([server.port, observations]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    facts, chunks, error = json.loads(asked.stdout)
    assert facts["cameras"] == ["wrist", "front"]
    np.testing.assert_allclose(chunks, [actions for _, actions in record], rtol=0, atol=1e-6)
    assert error.splitlines() == [
        "Error in inference server:",
        "observation/front: the image of this camera is missing; there are prompt",
    ]
