"""vLLM in this process, in processes of its own, and behind an address."""
