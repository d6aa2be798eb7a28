#!/bin/bash
# ImageNet on several machines, a task for each GPU: sbatch examples/imagenet/slurm.sh --data /data/imagenet
# They meet on the first host of the node list, at a port made from the job's number. Two minutes before its time is up the
# job saves and goes back into the queue, where --resume goes on with the next step.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=9
#SBATCH --time=08:00:00
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
#SBATCH --output=imagenet-%j.txt
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --wait=60 python examples/imagenet/main.py --resume "$@"
code=$?
[ $code = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
