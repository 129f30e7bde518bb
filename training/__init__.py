"""The training package: data order, loop, schedules, checkpoints. It runs on compute nodes and needs only torch.

Importing it costs nothing: torch is imported by the modules that use it, so that the launcher can share the
torch-free ones (`config`, `runfolder`, `schedule`, `progress`).
"""
