"""How much a graph holds."""

from __future__ import annotations


class Saved:
    """Bytes that a forward pass keeps for the backward pass, of tensors that are not parameters."""

    def __init__(self, module):
        self.own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.kept = {}

    def __call__(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.kept[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    @property
    def bytes(self):
        return sum(storage.nbytes() for storage in self.kept.values())
