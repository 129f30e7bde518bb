"""The launcher: reads job specs, submits them to Slurm or runs them here, and is the thin shell around each rank.

Never imports torch. The way of a job through the files: cli, specfile, validate, submit, executors, script | host,
worker, rendezvous.
"""
