"""Components of tiny diffusers pipelines for tests and examples, built in code without downloads.

The pipelines are of diffusers' own classes, and diffusers can load their folders. Text encoders are random and frozen,
with hidden states of unit scale. The VAE is the identity, or halves height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

PAD, UNKNOWN, START, END = "<pad>", "<unknown>", "<start>", "<end>"
MARGIN = 1000.0  # value of the constant channels, by which norms in the identity VAE divide by a constant


class Convolution(Protocol):
    """A layer whose weights are set by hand."""

    weight: Tensor
    bias: Tensor


def word_tokenizer(words: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per word, which lower-cases text and ignores commas and full stops."""
    vocabulary = {token: i for i, token in enumerate((PAD, UNKNOWN, START, END, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(",", " "), normalizers.Replace(".", " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, vocabulary[START]), (END, vocabulary[END])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        model_max_length=max_length,
    )


def clip_text_encoder(
    tokenizer: PreTrainedTokenizerFast, width: int = 32, *, projection: bool = True
) -> CLIPTextModelWithProjection | CLIPTextModel:
    """Builds a random CLIP text encoder whose hidden states have unit scale. The default initialisation gives small
    ones (std 0.08 after the first layer), from which a network learns several times more slowly."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)
    for name, parameter in encoder.named_parameters():
        if "token_embedding" in name:
            nn.init.normal_(parameter, std=1.0)
        elif "position_embedding" in name:
            nn.init.normal_(parameter, std=0.5)
    return encoder


def identity_vae(channels: int, size: int, *, halving: bool = False) -> AutoencoderKL:
    """Builds an AutoencoderKL whose latents are the pixels [channels, size, size], by weights that are set by hand;
    with `halving`, latents are the means of 2 x 2 pixels, and decoding repeats them.

    The hidden channels are x, -x and margins of constant M and -M. As long as x is small beside M, a group norm divides
    all of them by a constant. The activation is undone by silu(y) - silu(-y) = y. Residual blocks add 0.
    """
    hidden, blocks = 4 * channels, 1 + halving  # channels: x, -x and as many margins
    vae: Any = AutoencoderKL(
        in_channels=channels,
        out_channels=channels,
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(hidden,) * blocks,
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=size,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
    )
    silence_blocks(vae, ("conv2",))
    # gain: the root mean square of the hidden channels, by which the norm divides; half of them are 0 beside M
    for half in (vae.encoder, vae.decoder):
        pass_through(half.conv_in, half.conv_norm_out, half.conv_out, channels, gain=MARGIN * 0.5**0.5)
    if halving:
        average_pairs(vae.encoder.down_blocks[0].downsamplers[0].conv, hidden)
        copy_channels(vae.decoder.up_blocks[0].upsamplers[0].conv, hidden, (1, 1))
    return vae


def silence_blocks(module: nn.Module, last: tuple[str, ...]) -> None:
    """Sets the convolutions with the names `last`, the last ones of residual blocks, to 0, so that residual blocks
    return their input."""
    for name, part in module.named_modules():
        if name.rsplit(".", 1)[-1] in last and isinstance(part, nn.Conv2d | nn.Conv3d):
            nn.init.zeros_(part.weight)
            assert part.bias is not None
            nn.init.zeros_(part.bias)


@torch.no_grad()
def pass_through(
    conv_in: Convolution, norm: nn.Module, conv_out: Convolution, channels: int, gain: float, margins: int | None = None
) -> None:
    """Sets weights so that conv_in outputs x, -x and constant margins, the norm multiplies by `gain`, and conv_out
    outputs x.

    channels: the number of channels of x. margins: number of constant channels; None: all that are left. A convolution
    over time uses only the current frame, its last tap.
    """
    for part in (conv_in, conv_out):
        part.weight.zero_()
        part.bias.zero_()
    for name, parameter in norm.named_parameters():  # a group norm's weight and bias, or an RMS norm's gamma
        parameter.fill_(0.0 if name == "bias" else gain)
    sizes = conv_in.weight.shape[2:]
    center = tuple(size - 1 if len(sizes) == 3 and i == 0 else size // 2 for i, size in enumerate(sizes))
    for c in range(channels):
        conv_in.weight[(c, c, *center)] = 1.0
        conv_in.weight[(channels + c, c, *center)] = -1.0
        conv_out.weight[(c, c, *center)] = 1.0
        conv_out.weight[(c, channels + c, *center)] = -1.0
    last = None if margins is None else 2 * channels + margins
    constant = conv_in.bias[2 * channels : last]
    constant.copy_(torch.tensor([MARGIN, -MARGIN]).repeat(len(constant) // 2))


def umt5_text_encoder(tokenizer: PreTrainedTokenizerFast, width: int = 32) -> UMT5EncoderModel:
    """Builds a random UMT5 encoder; its last norm gives hidden states of unit scale."""
    encoder = UMT5EncoderModel(UMT5Config(**_t5(tokenizer, width)))
    nn.init.normal_(encoder.shared.weight, std=1.0)
    return encoder


def t5_text_encoder(tokenizer: PreTrainedTokenizerFast, width: int = 32) -> T5EncoderModel:
    """Builds a random T5 encoder; its last norm gives hidden states of unit scale."""
    encoder = T5EncoderModel(T5Config(**_t5(tokenizer, width)))
    nn.init.normal_(encoder.shared.weight, std=1.0)
    return encoder


def _t5(tokenizer: PreTrainedTokenizerFast, width: int) -> dict[str, Any]:
    """Returns the configuration of a T5 encoder with one layer."""
    return dict(
        vocab_size=len(tokenizer),
        d_model=width,
        d_ff=2 * width,
        d_kv=width // 2,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


@torch.no_grad()
def halving_wan_vae(channels: int = 3) -> AutoencoderKLWan:
    """Builds an AutoencoderKLWan that halves height and width and keeps all frames, by weights that are set by hand.
    Latents are the means of 2 x 2 pixels, and decoding repeats them; videos made of cells of 2 x 2 pixels are decoded
    exactly. See `identity_vae` for the method; here an RMS norm acts on x, -x and two constant channels (margins)."""
    used = 2 * channels + 2  # channels: x, -x and two margins
    width = 2 * used  # its upsampling halves the channels
    vae: Any = AutoencoderKLWan(
        in_channels=channels,
        out_channels=channels,
        base_dim=used,
        decoder_base_dim=width,
        z_dim=channels,
        dim_mult=[1, 1],
        num_res_blocks=0,
        temperal_downsample=[False],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        scale_factor_temporal=1,
        scale_factor_spatial=2,
    )
    silence_blocks(vae, ("conv2", "proj"))
    for half, size in ((vae.encoder, used), (vae.decoder, width)):
        gain = MARGIN * (2 / size) ** 0.5  # the root mean square of `size` channels, two of which are M and -M
        pass_through(half.conv_in, half.norm_out, half.conv_out, channels, gain, margins=2)
    for part in (vae.quant_conv, vae.post_quant_conv):
        copy_channels(part, part.weight.shape[0], (0, 0, 0))
    halves: Any = next(part for part in vae.encoder.down_blocks if isinstance(part, WanResample))
    average_pairs(halves.resample[1], used)
    copy_channels(vae.decoder.up_blocks[0].upsamplers[0].resample[1], used, (1, 1))
    copy_channels(vae.decoder.up_blocks[1].resnets[0].conv_shortcut, used, (0, 0, 0))
    return vae


@torch.no_grad()
def copy_channels(convolution: Convolution, count: int, tap: tuple[int, ...]) -> None:
    """Sets a convolution to copy its first `count` channels: its kernel is 1 at the index `tap` from each channel to
    itself, and 0 elsewhere."""
    convolution.weight.zero_()
    convolution.bias.zero_()
    for channel in range(count):
        convolution.weight[(channel, channel, *tap)] = 1.0


@torch.no_grad()
def average_pairs(convolution: Convolution, count: int) -> None:
    """Sets a convolution of stride 2, padded at the right and bottom, to average 2 x 2 pixels of its first `count`
    channels."""
    copy_channels(convolution, count, (0, 0))
    for row, column in ((0, 1), (1, 0), (1, 1)):
        convolution.weight[:, :, row, column] = convolution.weight[:, :, 0, 0]
    convolution.weight.mul_(0.25)
