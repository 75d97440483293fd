"""What OpenVLA-OFT publishes beside a tiny OpenVLA, written without mmrl; what it computes; an arm that it moves."""

import json

import numpy as np
import torch
import torch.nn.functional as F

from tests.policies.vla import tiny_openvla as openvla
from tests.sims.line_simulator import Line

WIDTH, CHUNK, ACTION, STATE = openvla.WIDTH, 4, 3, 2
HEAD, PROJECTOR = "action_head--150000_checkpoint.pt", "proprio_projector--150000_checkpoint.pt"
STATISTICS = {
    "arm": {
        "action": {"q01": [-0.2, -1.0, 5.0], "q99": [0.1, 3.0, 7.0], "mask": [True, True, False]},
        "proprio": {"q01": [-0.5, 0.25], "q99": [1.5, 0.25]},  # the second one never moved
    }
}


class Arm(Line):
    """The line, moved by the first of three numbers, with a second number in its state and two noisy cameras."""

    action_dim, state_dim, image_shape, cameras = ACTION, STATE, (6, 10, 3), ("front", "wrist")

    def __init__(self, count):
        super().__init__(count)
        self.told = []  # all three numbers of every action

    def _shown(self, moved):
        moved.state = np.stack([moved.state[:, 0], 0.25 + moved.state[:, 0] - 0.3], 1).astype(np.float32)
        for row, (image, state) in enumerate(zip(moved.images, moved.state, strict=True)):
            moved.images[row] = np.random.default_rng(int(abs(state[0]) * 1e3)).integers(0, 256, image.shape)
        return moved

    def reset(self, rows, seeds, tasks):
        return self._shown(super().reset(rows, seeds, tasks))

    def step(self, rows, actions):
        self.told.append(actions.copy())
        return self._shown(super().step(rows, actions[..., :1]))


def parts(seed=3):
    """Of both, under the published names, random; actions go beyond [-1, 1]."""
    wide = WIDTH * ACTION
    sizes = {
        HEAD: {
            "model.layer_norm1": (wide,),
            "model.fc1": (WIDTH, wide),
            "model.mlp_resnet_blocks.0.ffn.0": (WIDTH,),
            "model.mlp_resnet_blocks.0.ffn.1": (WIDTH, WIDTH),
            "model.mlp_resnet_blocks.1.ffn.0": (WIDTH,),
            "model.mlp_resnet_blocks.1.ffn.1": (WIDTH, WIDTH),
            "model.layer_norm2": (WIDTH,),
            "model.fc2": (ACTION, WIDTH),
        },
        PROJECTOR: {"fc1": (WIDTH, STATE), "fc2": (WIDTH, WIDTH)},
    }
    generator, found = torch.Generator().manual_seed(seed), {}
    for file, layers in sizes.items():
        found[file] = {}
        for name, size in layers.items():
            weight = torch.randn(size, generator=generator)
            found[file][f"{name}.weight"] = 1 + 0.3 * weight if len(size) == 1 else 1.5 * weight / size[-1] ** 0.5
            found[file][f"{name}.bias"] = 0.3 * torch.randn(size[0], generator=generator)
    return found


def write(folder, *, state=True, names=("tiny_dino", "tiny_siglip")):
    """Returns the weights in float64: of the model, of the head, and of the projector."""
    weights, made = openvla.write(folder, names), parts()
    for file in (HEAD, PROJECTOR) if state else (HEAD,):
        torch.save({f"module.{name}": t for name, t in made[file].items()}, folder / file)
    (folder / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    return (weights, *({name: t.double() for name, t in made[file].items()} for file in (HEAD, PROJECTOR)))


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w, name, x):
    apart = x - x.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def actions(weights, head, projector, images, ids, state=None, chunk=CHUNK):
    """The normalised chunk [chunk, ACTION]: images of each camera [height, width, 3], all ids of the prompt, and the
    state in the robot's units, where it is read. Action places are zeros, and everything sees everything."""
    seen = [openvla.prompt(weights, image, ids) for image in images]
    patches = len(seen[0]) - len(ids)
    before = [seen[0][:1], *(one[1 : 1 + patches] for one in seen)]
    if state is not None:
        low, high = (torch.tensor(STATISTICS["arm"]["proprio"][k], dtype=torch.float64) for k in ("q01", "q99"))
        numbers = (2 * (torch.as_tensor(state).double() - low) / (high - low + 1e-8) - 1).clamp(-1, 1)
        before.append(linear(projector, "fc2", F.gelu(linear(projector, "fc1", numbers)))[None])
    before = torch.cat([*before, seen[0][1 + patches :]])
    end = weights["language_model.model.embed_tokens.weight"][2:3]
    hidden = openvla.llama(weights, torch.cat([before, before.new_zeros(chunk * ACTION, WIDTH), end]), causal=False)
    first = len(before) - 1  # the published code begins at the token before the first place
    found = []
    for k in range(chunk):
        x = torch.cat([hidden[first + k * ACTION + a] for a in range(ACTION)])
        x = linear(head, "model.fc1", norm(head, "model.layer_norm1", x)).relu()
        for block in ("model.mlp_resnet_blocks.0.ffn", "model.mlp_resnet_blocks.1.ffn"):
            x = x + linear(head, f"{block}.1", norm(head, f"{block}.0", x)).relu()
        found.append(linear(head, "model.fc2", norm(head, "model.layer_norm2", x)))
    return torch.stack(found)


def to_robot(normalised):
    told = STATISTICS["arm"]["action"]
    found = np.array(normalised, float)
    for a, scaled in enumerate(told["mask"]):
        if scaled:
            found[..., a] = (found[..., a] + 1) / 2 * (told["q99"][a] - told["q01"][a]) + told["q01"][a]
    return found
