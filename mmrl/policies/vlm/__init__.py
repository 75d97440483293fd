"""Vision-language models as policies: each response token is a decision."""
