#!/usr/bin/env bash
# A run on the nodes of a job, one peer and one training script on each:
#
#   sbatch deploy/slurm.sh python train.py
#   RUN=mine sbatch deploy/slurm.sh python train.py      a run that the next such job goes on with
#
# Needs atoll on the PATH of all nodes, and a home directory that they share: there the batch script
# makes the run's secret, and each node has a folder with its peer's home. Where that disk is slow,
# put PEER_HOMES on another one.
#
# Checked by shellcheck (make check-deploy); run by tests/processes/test_deploy.py, under Slurm itself
# where slurmctld and slurmd are installed, else with an srun that starts the same.

#SBATCH --job-name=atoll
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -euo pipefail

peer() {
    export ATOLL_HOME=$PEER_HOMES/$SLURM_NODEID
    atoll up --from slurm &
    local daemon=$! status=0
    # The training script needs a daemon that answers.
    until atoll status > /dev/null 2>&1; do
        kill -0 "$daemon" 2> /dev/null || { wait "$daemon"; exit; }
        sleep 1
    done
    "$@" || status=$?
    kill "$daemon" 2> /dev/null || true
    wait "$daemon" || status=$?
    exit "$status"
}

export ATOLL_RUN=${RUN:-slurm-$SLURM_JOB_ID}
export ATOLL_ON_TERM=keep # for the next job; when all have left a run, it is over
export PEER_HOMES=${PEER_HOMES:-$HOME/.local/state/atoll-slurm/$ATOLL_RUN}
export ATOLL_SECRET_FILE=$PEER_HOMES/secret

# Nothing that Slurm tells everybody (the job's number, the nodes) can be the secret.
umask 077
mkdir -p "$PEER_HOMES"
[[ -s $ATOLL_SECRET_FILE ]] || atoll secret > "$ATOLL_SECRET_FILE"

# The batch script is on the first node only, so the others get the function itself.
srun bash -c "$(declare -f peer); peer \"\$@\"" peer "$@"
