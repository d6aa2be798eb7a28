"""Exit codes of a training script, besides 0, 1 and 128 + a signal's number; as in sysexits.h."""

from __future__ import annotations

STOOD_STILL = 70  # EX_SOFTWARE: no batch ended for too long; see HangCallback
PREEMPTED = 75  # EX_TEMPFAIL: stopped and saved after a signal; run it again
INTERRUPTED = 130  # a shell's code for Ctrl-C: it saved too, but the user does not want it restarted
