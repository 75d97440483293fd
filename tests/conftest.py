import os
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("MMRL_ROW_CACHE", tempfile.mkdtemp(prefix="mmrl-rows-"))  # no verdict of the user's is used


@pytest.fixture(scope="module", autouse=True)
def as_it_was():
    """What a module leaves in the environment, such as the port of its process group, is not inherited by processes
    that later modules start."""
    before = dict(os.environ)
    yield
    if "torch.distributed" in sys.modules and "RANK" in os.environ and "RANK" not in before:
        import torch.distributed as dist

        if dist.is_initialized():
            import deepspeed

            deepspeed.comm.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def alone():
    """This process is a group of one while the module runs."""
    import deepspeed  # here, so that tests that need neither start at once
    import torch.distributed as dist

    from tests.whole_runs.parts import model_folder

    model_folder()
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


# What needs neither a process of its own nor a model: a minute and a half in all, with the set-up done.
FAST = (
    "core/",
    "samplers/",
    "joints/",
    "report/",
    "rewards/test_compose.py",
    "rewards/test_verifiers.py",
    "tasks/test_digits.py",
    "tasks/test_visual_qa.py",
    "house/test_floors.py",
    "prompts/test_sampler.py",
    "protocols/test_batch.py",
    "schedules/test_schedule.py",
    "settings/",
    "test_config.py",
    "test_rollouts.py",
)
# Half a minute to a minute each: they are begun first, so that of two processes neither is left with one at the end.
LONG = (
    "runtime/test_ray.py",
    "whole_runs/test_vllm_servers.py",
    "whole_runs/test_vllm.py",
    "whole_runs/",
    "engine/",
    "workers/test_processes.py",
    "rewards/test_isolated.py",
    "policies/test_vlm.py",
    "runtime/test_lazy_imports.py",
    "sims/test_maniskill.py",
)
# Hundreds of combinations; a browser; learning to a fixed point.
SLOWER = ("joints/test_composition.py", "report/test_browser.py", "core/test_recurrence.py")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent

    def place_of(item):
        return str(item.path.relative_to(here))

    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if place_of(item).startswith(name)), len(LONG)))
    for item in items:
        place = place_of(item)
        if place.startswith(FAST) and not place.startswith(SLOWER) and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)
