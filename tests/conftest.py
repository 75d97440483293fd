import os

import pytest


@pytest.fixture(scope="module")
def alone():
    """This process is a group of one while the module runs."""
    import deepspeed  # here, so that tests that need neither start at once
    import torch.distributed as dist

    from tests.engine.parts import model_folder

    model_folder()
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
