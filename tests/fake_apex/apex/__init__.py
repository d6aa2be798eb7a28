"""The part of NVIDIA Apex (release 25.05) that runnerkit depends on; each call is recorded in `calls`."""

calls: list[str] = []
