"""Proves that an outer job's variables do not reach a new job, and that secrets are not shown."""

from __future__ import annotations

from launcher.environment import MASK, masked, scrub, scrubbed

OUTER = {
    "SLURM_JOB_ID": "7",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SBATCH_PARTITION": "debug",
    "SUBMITIT_EXECUTOR": "slurm",
    "RANK": "3",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "DDP_ATTEMPT": "2",
}
KEPT = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "MY_SLURM_NOTE": "mine", "RANKING": "first"}


def test_scrubbing_takes_the_outer_job_and_keeps_the_rest() -> None:
    assert scrubbed(OUTER | KEPT) == KEPT


def test_scrub_puts_everything_back_afterwards() -> None:
    env = dict(OUTER | KEPT)
    with scrub(env, keep={"SBATCH_PARTITION"}):
        assert env == KEPT | {"SBATCH_PARTITION": "debug"}
    assert env == OUTER | KEPT


def test_values_of_secret_names_are_masked() -> None:
    shown = masked({"WANDB_API_KEY": "s3cret", "hf_token": "s3cret", "DB_PASSWORD": "s3cret", "RANK": "0"})
    assert shown == {"WANDB_API_KEY": MASK, "hf_token": MASK, "DB_PASSWORD": MASK, "RANK": "0"}
