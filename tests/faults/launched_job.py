"""Run the job of the drills in two processes, under plain python, torchrun or mpirun; its argument is the logdir."""

import sys

import torch

from tests.faults import job

if __name__ == "__main__":
    torch.set_num_threads(1)
    job.run(sys.argv[1], num_processes=2)
