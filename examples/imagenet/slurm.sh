#!/bin/bash
# ImageNet on several machines, one task per GPU: sbatch examples/imagenet/slurm.sh --data /data/imagenet
# The tasks connect to the first host of the node list, at a port derived from the job number. Two minutes before its time
# limit the job saves a checkpoint and requeues itself, and --resume continues with the next step.
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
