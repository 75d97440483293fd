"""The denoiser that reads sentences, against its formula, and within a pipeline."""

import subprocess
import sys

import pytest
import torch

from mmrl.policies.diffusion.sentences import SentenceDenoiser, sentence


@pytest.fixture
def denoiser():
    torch.manual_seed(0)
    made = SentenceDenoiser(4, 2, joint_attention_dim=6, width=16, depth=2)
    with torch.no_grad():  # a fresh one's last layer is 0
        made.body.leave.weight.normal_(std=0.3)
    return made


def test_a_sentence_is_the_direction_of_the_mean_of_its_tokens():
    states = torch.tensor([[[3.0, 0.0], [3.0, 8.0], [0.0, 0.0]], [[0.0, -2.0], [0.0, 0.0], [0.0, 0.0]]])
    # the first's two tokens have the mean (3, 4), of length 5; sqrt(2) makes it unit numbers
    expected = torch.tensor([[0.6, 0.8], [0.0, -1.0]]) * 2**0.5
    torch.testing.assert_close(sentence(states), expected)


def test_padding_changes_nothing(denoiser):
    x, time, said = torch.randn(3, 2, 4, 4), torch.tensor([0.2, 0.5, 0.9]), torch.randn(3, 2, 6)
    padded = torch.cat([said, torch.zeros(3, 4, 6)], 1)
    torch.testing.assert_close(denoiser(x, said, time)[0], denoiser(x, padded, time)[0])


def test_it_predicts_data_and_gives_a_velocity(denoiser):
    x, said = torch.randn(1, 2, 4, 4), torch.randn(1, 3, 6)
    torch.nn.init.zeros_(denoiser.body.leave.weight)
    denoiser.body.leave.bias.data.fill_(0.25)  # the data, whatever is asked
    (found,) = denoiser(x, said, torch.tensor([0.5]))
    torch.testing.assert_close(found, (x - 0.25) / 0.5)
    # one Euler step from there to noise level 0 ends at the data
    torch.testing.assert_close(x - 0.5 * found, torch.full_like(x, 0.25))


def test_prompt_noise_level_and_image_all_matter(denoiser):
    x, said, time = torch.randn(1, 2, 4, 4), torch.randn(1, 3, 6), torch.tensor([0.5])
    base = denoiser.body.run_blocks(x, denoiser.condition(torch.randn(1, 38)))
    assert (denoiser.body.run_blocks(x, denoiser.condition(torch.randn(1, 38))) - base).abs().max() > 1e-4
    (one,), (other,) = denoiser(x, said, time), denoiser(x, torch.randn(1, 3, 6), time)
    assert (one - other).abs().max() > 1e-4
    later = denoiser(x, said, torch.tensor([0.6]))[0] * 0.6  # x - data, so that only the data differ
    assert (later - one * 0.5).abs().max() > 1e-4


def test_files_give_the_same_weights_back(denoiser, tmp_path):
    denoiser.save_pretrained(tmp_path)
    again = SentenceDenoiser.from_pretrained(tmp_path)
    assert again.config["width"] == 16 and again.config["depth"] == 2
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in denoiser.state_dict().items())


@pytest.mark.slow
def test_a_process_that_loads_pipelines_has_imported_it():
    """Or diffusers, which imports no module that a folder names, does not load it."""
    told = "import sys, mmrl.policies.diffusion.pipelines; print('mmrl.policies.diffusion.sentences' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "True"
