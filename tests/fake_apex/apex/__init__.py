"""A stand-in for the part of NVIDIA Apex (release 25.05) that runnerkit uses; `calls` records each call."""

calls: list[str] = []
