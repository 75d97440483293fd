"""Tests and measurements on a GPU in about an hour; see scripts/gpu_day.sh."""
