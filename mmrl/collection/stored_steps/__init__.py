"""Policy steps of earlier episodes, stored on disk by each rank."""
