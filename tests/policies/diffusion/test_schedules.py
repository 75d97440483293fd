"""Every scheduler class of diffusers gets a verdict from every family, and what is read visits the levels it should."""

import inspect
import json
import shutil

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, HeunDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from mmrl.errors import UserError
from mmrl.policies.diffusion import pipelines
from mmrl.policies.diffusion.families import schedules
from mmrl.policies.diffusion.families.images import AuraFlow, Flux, StableDiffusion, StableDiffusionXL
from mmrl.policies.diffusion.families.videos import HunyuanVideo, Wan
from mmrl.policies.diffusion.settings import DiffusionModel
from mmrl.samplers.guidance import guided, with_norm
from mmrl.samplers.transitions import coefficients, gaussian_step

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
FAMILIES = sorted(set(pipelines.CLASSES.values()), key=lambda family: family.__name__)


def every_class():
    named = ((name, getattr(diffusers, name)) for name in dir(diffusers) if name.endswith("Scheduler"))
    return {name: kind for name, kind in named if inspect.isclass(kind) and issubclass(kind, SchedulerMixin)}


def fault(family, scheduler):
    return family.schedules.problem(type(scheduler).__name__, scheduler.config)


def test_every_class_has_a_verdict_of_every_family():
    classes = every_class()
    assert len(classes) > 40
    for family in FAMILIES:
        flow = family.space == "velocity"
        read = {name for name, kind in classes.items() if name in family.schedules.kinds and not fault(family, kind())}
        # Solvers are read where they are of flows; of their own default prediction they are not.
        assert read == set(schedules.FLOW if flow else schedules.NOISE) - clipping(family), family
        for name in classes.keys() - read - set(family.schedules.kinds):
            assert "it is not supported" in family.schedules.problem(name, {})


def clipping(family):
    """Those whose default clips what the network predicts, which no pipeline of latents wants."""
    return {name for name in schedules.NOISE if name.startswith("DD")} if family is StableDiffusionXL else set()


@pytest.mark.parametrize("name", sorted(schedules.NOISE))
def test_levels_are_those_of_the_class_itself(name, load_family):
    """By value, for a file that leaves everything to its class: its alphas, its spacing."""
    scheduler = getattr(diffusers, name)()
    pipe = load_family("sd15").pipe
    pipe.register_modules(scheduler=scheduler)
    grid = StableDiffusion(pipe, "").grid(4, (4, 8, 8))
    betas = torch.linspace(scheduler.config.beta_start, scheduler.config.beta_end, 1000)
    signal = (1 - betas.double()).cumprod(0)[grid.times.long()]
    torch.testing.assert_close(grid.sigmas[:-1].double(), (1 - signal).sqrt(), atol=1e-5, rtol=1e-5)
    spaced = {"leading": [750, 500, 250, 0], "linspace": [999, 666, 333, 0]}
    assert grid.times.tolist() == spaced[scheduler.config.timestep_spacing]


@pytest.mark.parametrize(
    ("family", "scheduler", "words"),
    [
        (StableDiffusion, DDIMScheduler(**BETAS, rescale_betas_zero_snr=True), "zero terminal SNR"),
        (StableDiffusion, EulerDiscreteScheduler(rescale_betas_zero_snr=True), "zero terminal SNR"),
        (StableDiffusion, DDIMScheduler(prediction_type="v_prediction"), "predicts v_prediction"),
        (
            StableDiffusion,
            DDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
            "predicts v_prediction",
        ),
        (StableDiffusion, DDIMScheduler(prediction_type="sample"), "predicts sample"),
        (StableDiffusion, EulerDiscreteScheduler(use_karras_sigmas=True), "use_karras_sigmas=True is not supported"),
        (StableDiffusion, EulerDiscreteScheduler(use_exponential_sigmas=True), "use_exponential_sigmas=True"),
        (StableDiffusion, HeunDiscreteScheduler(use_beta_sigmas=True), "use_beta_sigmas=True"),
        (StableDiffusion, EulerDiscreteScheduler(sigma_max=80.0), "sigma_max=80.0 is not supported. Set it to null"),
        (StableDiffusion, EulerDiscreteScheduler(timestep_type="continuous"), "Set it to discrete"),
        (StableDiffusion, diffusers.DDPMScheduler(beta_schedule="sigmoid"), "Set it to linear"),
        (StableDiffusion, DDIMScheduler(thresholding=True), "thresholding=True"),
        (StableDiffusion, FlowMatchEulerDiscreteScheduler(), "it is not supported"),
        (StableDiffusion, diffusers.LCMScheduler(), "it is not supported"),
        (StableDiffusion, diffusers.EDMEulerScheduler(), "it is not supported"),
        (StableDiffusionXL, DDIMScheduler(**BETAS), "clip_sample=True is not supported"),
        (Flux, DDIMScheduler(), "Supported are FlowMatchEulerDiscreteScheduler"),
        (Flux, diffusers.FlowMatchHeunDiscreteScheduler(), "it is not supported"),
        (Flux, FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "invert_sigmas=True"),
        (Flux, FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), "stochastic_sampling=True"),
        (AuraFlow, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "use_dynamic_shifting=True"),
        (HunyuanVideo, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "use_dynamic_shifting=True"),
        (Wan, FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True), "use_karras_sigmas=True"),
        (Wan, FlowMatchEulerDiscreteScheduler(shift_terminal=0.02), "shift_terminal=0.02"),
        (
            Wan,
            diffusers.UniPCMultistepScheduler(),
            "prediction_type=epsilon is not supported. Set it to flow_prediction",
        ),
        (
            Wan,
            diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction"),
            "use_flow_sigmas=False is not supported. Set it to True",
        ),
    ],
)
def test_what_is_not_read_is_named(family, scheduler, words):
    assert words in fault(family, scheduler)


@pytest.mark.parametrize(
    ("family", "scheduler"),
    [
        (StableDiffusion, DDIMScheduler(**BETAS, timestep_spacing="trailing")),
        (StableDiffusionXL, DDIMScheduler(**BETAS, clip_sample=False)),
        (Wan, diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3)),
        (Wan, FlowMatchEulerDiscreteScheduler(shift=3)),
        (Flux, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, use_karras_sigmas=True)),
    ],
)
def test_what_is_read(family, scheduler):
    assert fault(family, scheduler) is None


def test_a_file_is_refused_before_weights_are_read(folder_of, tmp_path):
    for part in folder_of("sd15").iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "scheduler").unlink()
    (tmp_path / "unet").unlink()
    (tmp_path / "unet").mkdir()  # its weights would be missing
    DDIMScheduler(**BETAS, rescale_betas_zero_snr=True).save_pretrained(tmp_path / "scheduler")
    (tmp_path / "model_index.json").unlink()
    index = json.loads((folder_of("sd15") / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match="StableDiffusionPipeline is a DDIMScheduler: with rescale_betas_zero_snr"
    ) as error:
        pipelines.load(str(tmp_path), DiffusionModel())
    assert "\n" not in str(error.value)
    index["scheduler"] = ["somewhere", "MyScheduler"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is a MyScheduler: it is not supported"):
        pipelines.load(str(tmp_path), DiffusionModel())


@pytest.mark.parametrize(("name", "largest"), [("sd3", 32), ("aura_flow", 16)])
def test_sides_beyond_the_position_table(name, largest, shared_family):
    family = shared_family(name)
    assert family.latent_shape(largest)[1:] == (largest // 2, largest // 2)
    for size in ((largest + 4, 16), (16, largest + 4)):
        with pytest.raises(UserError, match=f"resolution {largest + 4} is beyond .* end at {largest} pixels per side"):
            family.latent_shape(size)


def test_guidance_that_a_model_holds(shared_family):
    assert "denoising.embedded_guidance" in shared_family("flux").notes.distilled_guidance
    assert "its guidance scale: none" in shared_family("flux_schnell").notes.distilled_guidance
    assert all(shared_family(name).notes.distilled_guidance is None for name in ("sd3", "qwen_image", "sd15", "sdxl"))
    (line,) = shared_family("sd3").notes.differences
    assert "shift=3 once" in line and shared_family("flux").notes.differences == ()


def test_norms_of_patches_by_hand():
    conditional = torch.tensor([[[[3.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 2.0]]]])  # norms 5 and 2
    unconditional = torch.tensor([[[[2.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]]])
    # u + 7 (c - u) is [9, 4] and [14]: norms sqrt(97) and 14.
    found = guided(conditional, lambda: unconditional, torch.tensor([7.0]), 2)
    by_hand = torch.tensor([[[[9 * 5 / 97**0.5, 0, 0, 0], [4 * 5 / 97**0.5, 0, 0, 2.0]]]])
    torch.testing.assert_close(found, by_hand)
    nothing = torch.zeros(1, 1, 2, 2)
    assert torch.equal(with_norm(nothing, nothing, 2), nothing)
    assert torch.equal(guided(conditional, lambda: unconditional, torch.tensor([1.0]), 2), conditional)


@pytest.mark.parametrize(
    ("spacing", "to_one", "last"), [("leading", True, 0), ("leading", False, 0.00085**0.5), ("linspace", False, 0)]
)
def test_the_last_step_of_ddim_is_the_schedulers(spacing, to_one, last, folder_of, tmp_path):
    """With spacing linspace diffusers' last step leads from the first training step to itself, ours to the data."""
    shutil.copytree(folder_of("sd15"), tmp_path / "sd15")
    file = tmp_path / "sd15" / "scheduler" / "scheduler_config.json"
    changed = {"set_alpha_to_one": to_one, "timestep_spacing": spacing}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    family = pipelines.load(str(tmp_path / "sd15"), DiffusionModel())
    now, after = family.grid(4, family.latent_shape(16)).sigmas[-2:]
    assert float(after) == pytest.approx(last, rel=1e-4)
    if spacing == "leading":
        scheduler = DDIMScheduler.from_config(family.pipe.scheduler.config, clip_sample=False)
        scheduler.set_timesteps(4)
        x, e, z = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
        theirs = scheduler.step(e, 1, x, eta=1.0, variance_noise=z).prev_sample
        ours = gaussian_step(x, e, coefficients("ddim", now, after, noise=1.0), noise=z)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert (theirs - x).abs().max() > 0.02
