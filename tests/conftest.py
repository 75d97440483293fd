import json
import os
import random
import sys
import tempfile
from collections import Counter
from itertools import groupby
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


SLOW_TIMEOUT_S = 900  # of a slow test with its fixtures, on a machine with other work; quick ones: pyproject.toml
TIMES = Path(__file__).parent / "times.json"  # seconds of each file on two cores; written by --record-times
TOOK: dict[str, dict[str, float]] = {}

# What needs neither a process of its own nor a model: a minute and a half in all, with the set-up done.
FAST = (
    "core/",
    "algorithms/",
    "samplers/",
    "joints/",
    "report/",
    "rewards/test_compose.py",
    "rewards/test_verifiers.py",
    "tasks/test_digits.py",
    "tasks/test_visual_qa.py",
    "house/test_floors.py",
    "prompts/test_sampler.py",
    "protocols/",
    "schedules/test_schedule.py",
    "settings/",
    "test_config.py",
    "test_rollouts.py",
)
# Half a minute to a minute each: they are begun first, so that of two processes neither is left with one at the end.
LONG = (
    "children/test_ray.py",
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
SLOWER = ("report/test_browser.py", "core/test_recurrence.py")


def pytest_addoption(parser):
    parser.addoption("--slice", help="I/N: of the slow tests (-m slow) slice I of N, from 0; all slices take as long")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and tests within a file, in a random order")
    parser.addoption("--record-times", action="store_true", help=f"write what each file took into {TIMES.name}")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    for name, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        leave_to_slow(name, list(cases))
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if place(item).startswith(name)), len(LONG)))
    for item in items:
        quick = item.get_closest_marker("slow") is None
        if quick and place(item).startswith(FAST) and not place(item).startswith(SLOWER):
            item.add_marker(pytest.mark.fast)
        if not quick and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if (seed := config.getoption("shuffle")) is not None:
        shuffle(items, seed)
    if (wanted := config.getoption("slice")) is not None:
        number, count = map(int, wanted.split("/"))
        chosen = slices({item.nodeid: place(item) for item in items if item.get_closest_marker("slow")}, count)[number]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def leave_to_slow(name, items):
    """Marks the cases of a test as slow whose parameters are none of those that its mark `quick` names."""
    mark = items[0].get_closest_marker("quick")
    if mark is None:
        return
    others = [item for item in items if item.callspec.id not in mark.args]
    if len(items) > 1 and len(others) == len(items):
        raise pytest.UsageError(f"{name}: none of its cases is one that `quick` names")
    for item in others:
        item.add_marker(pytest.mark.slow)


def place(item):
    """The file of a test, as seen from here."""
    return str(item.path.relative_to(Path(__file__).parent))


def shuffle(items, seed):
    """In place; the tests of a file stay together, as fixtures of its module want it."""
    files = list(dict.fromkeys(place(item) for item in items))
    order = random.Random(seed)
    order.shuffle(files)
    within = {item.nodeid: order.random() for item in items}
    items.sort(key=lambda item: (files.index(place(item)), within[item.nodeid]))


def slices(tests, count):
    """Sets of the names of `tests`, which are name -> file, that take about as long: the longest first, each to the
    slice that has least. A test takes its share of what its file was recorded with."""
    times = {file: took["slow"] for file, took in json.loads(TIMES.read_text()).items()}
    of_file = Counter(tests.values())
    seconds = {name: times.get(file, 10.0) / of_file[file] for name, file in tests.items()}
    found, filled = [set() for _ in range(count)], [0.0] * count
    for name in sorted(tests, key=lambda name: (-seconds[name], name)):
        least = filled.index(min(filled))
        found[least].add(name)
        filled[least] += seconds[name]
    return found


def pytest_runtest_logreport(report):
    """Adds up what each file takes, set-up and teardown included."""
    took = TOOK.setdefault(report.location[0].removeprefix("tests/"), {"quick": 0.0, "slow": 0.0})
    took["slow" if "slow" in report.keywords else "quick"] += report.duration


def pytest_sessionfinish(session):
    """Files that did not run keep what they were recorded with."""
    if not session.config.getoption("record_times") or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    known = json.loads(TIMES.read_text())
    for file, took in TOOK.items():
        known[file] = {kind: round(took[kind], 1) or known.get(file, {}).get(kind, 0.0) for kind in ("quick", "slow")}
    known = {file: took for file, took in sorted(known.items()) if (TIMES.parent / file).exists()}
    lines = (f"  {json.dumps(file)}: {json.dumps(took)}" for file, took in known.items())
    TIMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
