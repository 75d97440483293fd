"""What a policy leaves in a folder: who may read it, and on what it depends."""

import os
import stat

import pytest

from mmrl.runtime.files import use_default_permissions
from tests.policies.conftest import PROMPTS


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_modes_that_the_user_gives_new_ones(load, tmp_path, umask, mask, mode):
    umask(mask)
    policy = load("qwen2_5_vl")
    policy.save(tmp_path, policy.module.state_dict())
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert "model.safetensors" in found and set(found.values()) == {mode}


def test_files_of_folders_below_too_and_links_are_left_alone(tmp_path, umask):
    target = tmp_path.parent / f"{tmp_path.name}-target"
    for path in (tmp_path / "a/b/c", target):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
    (tmp_path / "link").symlink_to(target)
    use_default_permissions(tmp_path)
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == 0o644
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]


def test_the_tokenizer_does_not_depend_on_what_was_tokenised_last(load, tmp_path):
    written = []
    for number, prompts in enumerate([PROMPTS[:1], PROMPTS[1:], []]):
        policy = load("qwen2_5_vl")
        if prompts:
            policy.tokens.encode(prompts)
            policy.tokens.tokenizer(["short", "rather longer than that"], padding=True, truncation=True, max_length=4)
        policy.save(tmp_path / str(number), policy.module.state_dict())
        written.append((tmp_path / str(number) / "tokenizer.json").read_bytes())
    assert written[0] == written[1] == written[2]
