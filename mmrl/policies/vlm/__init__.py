"""Vision-language models as policies: one decision a response token."""
