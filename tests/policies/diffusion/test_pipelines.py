"""Every supported class against diffusers' own pipeline, on tiny pipelines in fp32."""

import json
import re
import shutil
from functools import cache

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from torch import nn

from mmrl.errors import UserError
from mmrl.policies.diffusion import memory_estimate, pipelines
from mmrl.policies.diffusion.families.components import BASE_FILE
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising, DiffusionModel, ImageMatching
from mmrl.policies.settings import LoRA
from mmrl.rollouts import Prompt
from tests.helpers.tiny_pipelines import LATENT, NAMES, SIZE, ddim

CLASSES = ("sd3", "flux", "qwen_image", "aura_flow", "sd15", "sdxl")
TEXTS = ["two red cats on a box", "7"]  # of different lengths
ASKED = [ConditionInputs(text) for text in TEXTS]
STEPS, SCALE = 3, 4.0
EMBEDDED = 3.5  # the guidance that FLUX takes as an input
LORA = LoRA(rank=4, alpha=8.0)
# In the last block the text is only looked at: what would change it, or ask on its behalf, reaches no output.
UNREAD = ("add_q_proj", "norm_added_q", "to_add_out", "txt_mlp", "txt_norm2", "txt_mod")


def open_pipeline(folder, **more):
    index = json.loads((folder / "model_index.json").read_text())
    absent = {part: None for part in ("text_encoder_3", "tokenizer_3") if index.get(part) == [None, None]}
    pipe = DiffusionPipeline.from_pretrained(folder, **absent, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise(seed=0, n=2):
    return torch.randn(n, *LATENT, generator=torch.Generator().manual_seed(seed))


def answer(family, *, n=2, model=None, time=700.0):
    """What the network says of fixed latents; rows differ in latents, time and text."""
    conditions = family.encode(ASKED[:n])
    times = torch.full((n,), time) - 100 * torch.arange(n)
    return family.predict(family.module if model is None else model, noise(n=n), times, conditions, EMBEDDED)


def settings(guide, **more):
    """Deterministic steps: a rollout whose decisions are noise levels of the finished image."""
    keys = {"steps": STEPS, "evaluation_steps": STEPS, "resolution": SIZE, "embedded_guidance": EMBEDDED, **more}
    return Denoising(likelihood=ImageMatching(), guidance=SCALE if guide else 1.0, **keys)


def drawn(family, guide):
    """A rollout of the shipped policy for each text, begun at `noise()`."""
    policy = DiffusionPolicy(family, settings(guide))
    policy.denoiser.initial_noise = lambda seeds, shape=None: noise()
    return policy.rollout([Prompt(text, text) for text in TEXTS], 1, [1, 2])


def run_diffusers(name, pipe, guide, sigmas, output):
    options = {"guidance_scale": SCALE if guide else 1.0}
    latents = noise()
    if name in ("sd3", "sd3_without_t5", "aura_flow"):  # whose pipelines shift twice
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
        options |= {"sigmas": sigmas[:-1].tolist()}
    elif name.startswith("flux"):
        options = {"guidance_scale": EMBEDDED}
    elif name == "qwen_image":
        options = {"true_cfg_scale": SCALE, "negative_prompt": ["", ""]} if guide else {"true_cfg_scale": 1.0}
    else:
        pipe.scheduler = ddim(pipe)
    if name.startswith("flux") or name == "qwen_image":
        latents = pipe._pack_latents(latents, 2, *LATENT)
    size = {"height": SIZE, "width": SIZE, "num_inference_steps": STEPS}
    return pipe(TEXTS, latents=latents, output_type=output, **size, **options).images


class TestAgainstDiffusers:
    @pytest.fixture(scope="class")
    def pipe_of(self, folder_of):
        return cache(lambda name: open_pipeline(folder_of(name)))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("guide", [False, True], ids=["plain", "guided"])
    def test_a_chain_equals_the_pipelines(self, name, guide, pipe_of, shared_family):
        if guide and name.startswith("flux"):
            pytest.skip("FLUX takes its guidance as an input")
        family = shared_family(name)
        sigmas = family.grid(STEPS, LATENT).sigmas
        mine = torch.stack([sample.image for sample in drawn(family, guide).samples])
        theirs = run_diffusers(name, pipe_of(name), guide, sigmas, "pt")
        assert mine.shape == (2, 3, SIZE, SIZE)
        assert theirs.std() > 0.05
        torch.testing.assert_close(mine.clamp(0, 1), theirs, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("name", ["sd3", "sd15"])
    def test_latents_equal_the_pipelines_too(self, name, pipe_of, shared_family):
        family = shared_family(name)
        theirs = run_diffusers(name, pipe_of(name), True, family.grid(STEPS, LATENT).sigmas, "latent")
        mine = torch.stack([record.data for record in drawn(family, True).inputs])
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)

    @pytest.mark.parametrize("name", ["sd3", "flux", "sd15", "sdxl"])  # Qwen-Image's VAE clamps by itself
    def test_pixels_are_not_clamped(self, name, shared_family):
        pixels = shared_family(name).decode(5 * noise())
        assert pixels.min() < 0 and pixels.max() > 1

    def test_text_time_and_latents_all_matter(self, name, shared_family):
        family, now = shared_family(name), torch.full((1,), 500.0)
        one, other = ([condition] for condition in family.encode(ASKED))
        base = family.predict(family.module, noise(n=1), now, one, EMBEDDED)
        for x, time, condition in ((noise(n=1), now, other), (noise(n=1), now / 2, one), (noise(9, 1), now, one)):
            changed = family.predict(family.module, x, time, condition, EMBEDDED)
            assert (changed - base).abs().max() > 1e-3
        distilled = family.predict(family.module, noise(n=1), now, one, 2 * EMBEDDED)
        assert torch.equal(distilled, base) == (name != "flux")


class TestRows:
    def test_do_not_depend_on_their_batch(self, name, shared_family):
        family = shared_family(name)
        with torch.no_grad():
            torch.testing.assert_close(answer(family)[:1], answer(family, n=1), atol=3e-6, rtol=1e-6)

    def test_embeddings_do_not_depend_on_their_batch(self, name, shared_family):
        family = shared_family(name)
        for together, alone in zip(family.encode(ASKED), [family.encode([one])[0] for one in ASKED], strict=True):
            assert together.keys() == alone.keys()
            assert all(torch.equal(together[k], alone[k]) and not together[k].requires_grad for k in together)


class TestTraining:
    @pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
    def test_gradient_reaches_what_is_trained_and_nothing_else(self, name, lora, load_family):
        family = load_family(name, lora=lora)
        perturb(family)
        answer(family).square().sum().backward()
        trained = {n: p for n, p in family.module.named_parameters() if p.requires_grad}
        assert all(("lora_" in n) == (lora is not None) for n in trained)
        blind = {n for n, p in trained.items() if p.grad is None or not p.grad.any()}
        last = f"transformer_blocks.{len(getattr(family.module, 'transformer_blocks', ())) - 1}."
        assert all(n.startswith(last) and any(u in n for u in UNREAD) for n in blind), blind
        for part in family.pipe.components.values():
            if isinstance(part, nn.Module):
                assert not part.training
                others = [p for p in part.parameters() if not any(p is t for t in trained.values())]
                assert all(p.grad is None and not p.requires_grad for p in others)

    @pytest.mark.parametrize("name", ["sd3", "sd15"])
    def test_checkpointed_activations_give_the_same_gradient(self, name, load_family):
        gradients = []
        for option in (False, True):
            torch.manual_seed(0)  # of a fresh adapter
            family = load_family(name, lora=LORA, activation_checkpointing=option)
            assert family.module.is_gradient_checkpointing == option
            perturb(family)
            answer(family).square().sum().backward()
            gradients.append([p.grad for p in family.module.parameters() if p.grad is not None])
        assert len(gradients[0]) > 0
        torch.testing.assert_close(*gradients)

    def test_bfloat16_keeps_latents_and_pixels_in_float32(self, name, load_family, shared_family):
        family = load_family(name, dtype="bfloat16", lora=LORA)  # adapters too
        assert {p.dtype for p in family.module.parameters()} == {torch.bfloat16}
        rough, exact = answer(family), answer(shared_family(name))
        assert rough.dtype == torch.float32 and family.decode(noise()).dtype == torch.float32
        assert (rough - exact).norm() < 0.4 * exact.norm()  # FLUX itself rounds time and guidance to bfloat16
        assert torch.equal(family.decode(noise()), shared_family(name).decode(noise()))


@torch.no_grad()
def perturb(family):
    """Move what is trained, as training would; a fresh adapter's second matrix is 0."""
    random = torch.Generator().manual_seed(1)
    for parameter in family.module.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)


def trained_state(family):
    """The weights as the engine hands them over; the module's own are then spoiled, as a shard would be."""
    state = {key: value.clone() for key, value in family.module.state_dict().items()}
    with torch.no_grad():
        for parameter in family.module.parameters():
            parameter.zero_()
    return state


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "targets"), [*((name, "all-linear") for name in CLASSES), ("sd3", ["to_q", "to_v"])]
    )
    @torch.no_grad()
    def test_lora(self, name, targets, load_family, folder_of, tmp_path):
        family = load_family(name, lora=LORA.model_copy(update={"targets": targets}))
        perturb(family)
        expected = answer(family)
        family.save(tmp_path / "saved", trained_state(family))
        files = {path.name for path in (tmp_path / "saved").iterdir()}
        assert files == {"pytorch_lora_weights.safetensors", BASE_FILE}

        pipe = open_pipeline(folder_of(name))
        pipe.load_lora_weights(tmp_path / "saved")
        torch.testing.assert_close(answer(type(family)(pipe, "")), expected)

        again = pipelines.load(
            str(tmp_path / "saved"), DiffusionModel(lora=LORA.model_copy(update={"targets": targets}))
        )
        torch.testing.assert_close(answer(again), expected)
        assert all(p.requires_grad == ("lora_" in n) for n, p in again.module.named_parameters())
        again.save(tmp_path / "twice", again.module.state_dict())
        first, second = (load_file(tmp_path / f / "pytorch_lora_weights.safetensors") for f in ("saved", "twice"))
        assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)

    @torch.no_grad()
    def test_whole_pipeline(self, name, load_family, tmp_path):
        family = load_family(name)
        perturb(family)
        expected, module = answer(family), family.module
        family.save(tmp_path / "saved", trained_state(family))
        assert family.pipe.components[family.trained] is module
        found = answer(type(family)(open_pipeline(tmp_path / "saved"), ""))
        # Weights in a mapped file lie at other addresses than copies, and products round by alignment on some machines.
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class TestIdleParts:
    """Without a second device the parts can not really leave; what is tested is when they are told to."""

    @pytest.fixture
    def log(self, name, load_family, monkeypatch):
        """A family on the device `meta`, and the moves of its parts."""
        family, moves = load_family(name), []
        monkeypatch.setattr(type(family.parts), "device", torch.device("meta"))
        for part in (*family.encoders, "vae"):
            if family.pipe.components[part] is not None:
                monkeypatch.setattr(
                    family.pipe.components[part], "to", lambda device, part=part: moves.append((part, str(device)))
                )
        return family, moves

    def test_encoders_are_there_only_while_encoding(self, log, monkeypatch):
        family, moves = log
        monkeypatch.setattr(family, "_encode", lambda text: moves.append(text) or {})
        family.encode(ASKED)
        parts = [part for part in family.encoders if family.pipe.components[part] is not None]
        assert moves == [*((p, "meta") for p in parts), *TEXTS, *((p, "cpu") for p in parts)]

    def test_the_vae_is_there_only_while_decoding_even_if_that_fails(self, log, monkeypatch):
        family, moves = log

        def fail(latents):
            moves.append(latents.device.type)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(family.autoencoder, "to_pixels", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            family.decode(noise())
        assert moves == [("vae", "meta"), "meta", ("vae", "cpu")]


class TestNoiseLevels:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("sd3", [1, 0.9, 0.75, 0.5, 0]),  # 3 t / (1 + 2 t) at t = 1, 3/4, 1/2, 1/4
            ("flux_schnell", [1, 0.75, 0.5, 0.25, 0]),
        ],
    )
    def test_fixed_shift(self, name, expected, shared_family):
        grid = shared_family(name).grid(4, LATENT)
        torch.testing.assert_close(grid.sigmas, torch.tensor(expected))
        torch.testing.assert_close(grid.times, 1000 * grid.sigmas[:-1])

    def test_dynamic_shift_grows_with_the_image(self, shared_family):
        small, large = (shared_family("flux").grid(4, (4, side, side)).sigmas for side in (32, 128))
        # 256 and 4096 tokens: mu is .5 and 1.15, and at t = 1/2 the level is e^mu / (e^mu + 1)
        assert float(small[2]) == pytest.approx(0.6224593, abs=1e-6)
        assert float(large[2]) == pytest.approx(0.7595109, abs=1e-6)

    def test_qwen_image_ends_where_its_scheduler_says(self, shared_family):
        sigmas = shared_family("qwen_image").grid(5, LATENT).sigmas
        assert sigmas[[0, -1]].tolist() == [1, 0]
        assert float(sigmas[-2]) == pytest.approx(0.02, abs=1e-6)

    @pytest.mark.parametrize(("name", "last"), [("sd15", 0.00085**0.5), ("sdxl", 0)])
    def test_ddim_visits_the_schedule_with_its_offset(self, name, last, shared_family):
        """Stable Diffusion 1.5 has set_alpha_to_one=false: its chains end at the first training step's level."""
        grid = shared_family(name).grid(4, LATENT)
        assert grid.times.tolist() == [751, 501, 251, 1]
        assert grid.sigmas.dtype == torch.float64 and float(grid.sigmas[-1]) == pytest.approx(last, rel=1e-4)

    def test_levels_of_flow(self, shared_family):
        uniform = torch.tensor([0.25, 0.5])
        for name, expected in (("sd3", [0.5, 0.75]), ("flux", [0.25, 0.5])):
            sigma, time = shared_family(name).levels(uniform)
            torch.testing.assert_close(sigma, torch.tensor(expected))
            torch.testing.assert_close(time, 1000 * torch.tensor(expected))

    def test_levels_of_noise(self, shared_family):
        sigma, time = shared_family("sd15").levels(torch.tensor([0.0, 0.5004, 1 - 2**-24]))
        assert time.tolist() == [0, 500, 999]
        assert float(sigma[0]) == pytest.approx(0.00085**0.5, rel=1e-4)
        assert sigma.diff().min() > 0

    def test_latent_shape(self, name, shared_family):
        family = shared_family(name)
        assert family.latent_shape(SIZE) == LATENT
        side = 128 if name.startswith(("flux", "qwen")) else 8
        assert family.latent_shape(None) == (4, side, side)


class TestBadInput:
    def refused(self, match, path, **options):
        with pytest.raises(UserError, match=match) as error:
            pipelines.load(str(path), DiffusionModel(**options))
        assert "\n" not in str(error.value)

    @pytest.fixture
    def copied(self, folder_of, tmp_path):
        """A copy of a pipeline's folder, with parts of its index replaced."""

        def copy(name, **parts):
            folder = shutil.copytree(folder_of(name), tmp_path / name)
            index = json.loads((folder / "model_index.json").read_text())
            (folder / "model_index.json").write_text(json.dumps(index | parts))
            return folder

        return copy

    def test_a_class_that_is_not_supported(self, copied):
        path = copied("sd15", _class_name="KandinskyPipeline")
        self.refused(
            "is a KandinskyPipeline, which is not supported; take one of StableDiffusion3Pipeline, FluxPipeline", path
        )

    @pytest.mark.parametrize("damaged", [["list"], None, {"a": 1}])
    def test_a_class_that_is_no_name(self, copied, damaged):
        path = copied("sd15", _class_name=damaged)
        self.refused(
            re.escape(f"is a {damaged}, which is not supported; take one of StableDiffusion3Pipeline, FluxPipeline"),
            path,
        )
        with pytest.raises(UserError, match=re.escape(f"is a {damaged}, which is not supported; take")):
            memory_estimate.parts(str(path))

    @pytest.mark.parametrize("part", ["scheduler", "unet", "text_encoder"])
    def test_code_that_comes_with_a_folder_does_not_run(self, copied, part):
        """diffusers would import it as a custom part if it trusted the folder."""
        path = copied("sd15", **{part: ["own_part", "OwnPart"]})
        trap = path / "trap"
        code = f"from pathlib import Path\nPath({str(trap)!r}).touch()\nclass OwnPart: pass\n"
        for name in ("own_part.py", f"{part}/own_part.py", "pipeline.py"):
            (path / name).write_text(code)
        with pytest.raises(UserError) as error:
            pipelines.load(str(path), DiffusionModel())
        assert "\n" not in str(error.value) and not trap.exists()

    def test_an_index_without_a_class(self, copied):
        path = copied("sd15")
        index = json.loads((path / "model_index.json").read_text())
        del index["_class_name"]
        (path / "model_index.json").write_text(json.dumps(index))
        self.refused("is a None, which is not supported; take", path)
        with pytest.raises(UserError, match="is a None, which is not supported; take"):
            memory_estimate.parts(str(path))

    @pytest.mark.parametrize("part", ["vae", "text_encoder", "tokenizer", "unet"])
    def test_a_part_that_the_index_does_not_name(self, part, copied):
        self.refused(f"sd15 has no {part}, which StableDiffusionPipeline needs", copied("sd15", **{part: [None, None]}))

    @pytest.mark.parametrize("part", ["vae", "text_encoder", "unet"])
    def test_a_part_whose_files_are_gone(self, part, copied):
        path = copied("sd15")
        shutil.rmtree(path / part)
        self.refused(f"sd15 has no {part}, which StableDiffusionPipeline needs", path)

    def test_no_pipeline(self, tmp_path):
        self.refused("is not a diffusers pipeline", tmp_path)
        self.refused("is not a diffusers pipeline", tmp_path / "nowhere")
        self.refused("model.path=nowhere: there is no folder nowhere, and a name on the Hugging Face hub", "nowhere")

    def test_a_network_that_predicts_velocity_of_a_noise_schedule(self, copied):
        path = copied("sd15")
        file = path / "scheduler" / "scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"prediction_type": "v_prediction"}))
        self.refused("predicts v_prediction", path)

    @pytest.mark.parametrize(
        ("match", "options"),
        [
            (r"model.lora.targets=\['nothing'\]", {"lora": LoRA(targets=["nothing"])}),
            ("model.attention=eager", {"attention": "eager"}),
        ],
    )
    def test_settings_that_do_not_apply(self, match, options, folder_of):
        self.refused(match, folder_of("sd3"), **options)

    def test_an_adapter_without_its_base_or_of_another_rank(self, load_family, tmp_path):
        family = load_family("sd15", lora=LORA)
        family.save(tmp_path, family.module.state_dict())
        self.refused("has rank 4 and alpha 8.0; set model.lora", tmp_path, lora=LoRA(rank=8))
        (tmp_path / BASE_FILE).write_text(json.dumps({"base": "/moved/away"}))
        self.refused("whose base is /moved/away, is not a diffusers pipeline", tmp_path)

    def test_sizes_steps_and_guidance(self, shared_family):
        with pytest.raises(UserError, match="resolution 18 is not a multiple of 4"):
            shared_family("flux").latent_shape(18)
        with pytest.raises(UserError, match="denoising.evaluation_steps is 1, too few"):
            shared_family("qwen_image").grid(1, LATENT)
        family = shared_family("flux")
        with pytest.raises(UserError, match="needs a guidance scale as an input; set denoising.embedded_guidance"):
            family.predict(family.module, noise(n=1), torch.ones(1), family.encode(ASKED[:1]), None)
