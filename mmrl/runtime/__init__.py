"""The process: devices, Ray, progress, files, seeds, and what is imported late."""
