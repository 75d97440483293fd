"""Networks of the action heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from mmrl.policies.embeddings import sinusoids


class Attention(nn.Module):
    """Multi-head attention of `x` to `context`, which may have another width."""

    def __init__(self, width: int, context_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context_width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns [n, t, width]. x: [n, t, width]; context: [n, s, context width]; mask: [n, s] bool, True where the
        context is attended to."""
        q = rearrange(self.query(x), "n t (h d) -> n h t d", h=self.heads)
        k, v = rearrange(self.key_value(context), "n s (two h d) -> two n h s d", two=2, h=self.heads)
        attention_mask = None if mask is None else rearrange(mask, "n s -> n 1 1 s")
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.out(rearrange(out, "n h t d -> n t (h d)"))


class Feedforward(nn.Sequential):
    """The MLP of a transformer block, with four times the width inside."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class ExpertBlock(nn.Module):
    """A transformer block with cross-attention to a context, modulated by the noise level (adaLN of DiT, arXiv
    2212.09748)."""

    def __init__(self, width: int, context_width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.modulation = nn.Linear(width, 6 * width)  # shift, scale and gate of self-attention and of the MLP
        # self-attention of the chunk, and its cross-attention to the context
        self.own, self.cross = Attention(width, width, heads), Attention(width, context_width, heads)
        self.mlp = Feedforward(width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Tensor, conditioning: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Returns [n, t, width]. h: [n, t, width]; conditioning: embedding of noise level and state, [n, width];
        context: [n, s, context width]; mask: [n, s] bool, True where the context is attended to."""
        modulation = self.modulation(F.silu(conditioning))[:, None].chunk(6, -1)
        shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = modulation
        attention_input = self.norms[0](h) * (1 + scale_attention) + shift_attention
        h = h + (1 + gate_attention) * self.own(attention_input, attention_input)
        h = h + self.cross(self.norms[1](h), context, mask)
        return h + (1 + gate_mlp) * self.mlp(self.norms[2](h) * (1 + scale_mlp) + shift_mlp)


class Expert(nn.Module):
    """The action expert: a transformer that predicts the velocity of a noisy chunk of actions, given the backbone's
    hidden states. Names of parameters are those of saved policies."""

    def __init__(
        self, chunk: int, action_dim: int, state_dim: int, context_width: int, width: int, depth: int, learned: bool
    ) -> None:
        """learned: whether the expert also predicts the standard deviation of a denoising step."""
        super().__init__()
        heads = max(1, width // 32)
        self.actions = nn.Linear(action_dim, width)
        self.places = nn.Parameter(torch.randn(chunk, width) * 0.02)
        self.state = nn.Linear(state_dim, width) if state_dim else None
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(ExpertBlock(width, context_width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.leave = nn.Linear(width, action_dim)
        self.spread = nn.Linear(width, action_dim) if learned else None
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(
        self, x: Tensor, sigma: Tensor, state: Tensor, context: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the velocity, shaped like x, and the learned log standard deviation scaled to (-1, 1), shaped like x;
        None if it is not learned. x: noisy chunks [n, chunk, action]; sigma: noise levels [n]; state: [n, state];
        context: the backbone's last layer, [n, s, context width]; mask: [n, s] bool."""
        h = self.actions(x) + self.places
        conditioning = self.time(sinusoids(sigma, 64).to(h))
        if self.state is not None:
            conditioning = conditioning + self.state(state)
        for block in self.blocks:
            h = block(h, conditioning, context, mask)
        h = self.norm(h)
        return self.leave(h), None if self.spread is None else torch.tanh(self.spread(h))


class BridgeBlock(nn.Module):
    """A transformer block with bridge attention (VLA-Adapter, arXiv 2509.09372).

    It concatenates three attentions of the chunk: to the prefix in one layer of the backbone, gated by tanh(g) with
    g = 0 before training; to the learned queries in that layer; and to the chunk itself."""

    def __init__(self, width: int, context_width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        # attention to the prefix (raw), to the learned queries, and to the chunk itself (own)
        self.raw, self.queries = Attention(width, context_width, heads), Attention(width, context_width, heads)
        self.own = Attention(width, width, heads)
        self.gate = nn.Parameter(torch.zeros(1))
        self.join = nn.Linear(3 * width, width)
        self.mlp = Feedforward(width)
        self.register_load_state_dict_pre_hook(_widen_gate)  # for weights that older versions saved

    def forward(self, h: Tensor, prefix: Tensor, mask: Tensor, queries: Tensor) -> Tensor:
        """Returns the chunk's hidden states after this block, [n, chunk, width]. h: before it, in the same shape;
        prefix: [n, s, context width] with mask [n, s] bool; queries: [n, query, context width]."""
        normed = self.norms[0](h)
        to_prefix = self.raw(normed, prefix, mask) * torch.tanh(self.gate)
        attended = [to_prefix, self.queries(normed, queries), self.own(normed, normed)]
        h = h + self.join(torch.cat(attended, -1))
        return h + self.mlp(self.norms[1](h))


def _widen_gate(block: nn.Module, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
    """Reshapes the gate in `state` to [1]: older versions saved a scalar, which DeepSpeed cannot broadcast."""
    if (gate := state.get(f"{prefix}gate")) is not None:
        state[f"{prefix}gate"] = gate.reshape(1)
