"""How a script that trains ends, beside 0, 1 and 128 + a signal's number; as in sysexits.h."""

from __future__ import annotations

STOOD_STILL = 70  # EX_SOFTWARE: no batch ended for too long; see HangCallback
PREEMPTED = 75  # EX_TEMPFAIL: a signal asked it to stop, and it saved; to be run again
INTERRUPTED = 130  # as a shell says of Ctrl-C: it saved too, but whoever pressed it does not want it run again
