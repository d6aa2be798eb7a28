"""Distribution of a loader's samples over processes, and the seeds of their random numbers."""
