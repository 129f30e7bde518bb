"""What `launch --help` prints, and the parsing of arguments: a wrong one is a UsageError."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .errors import UsageError

COMMANDS = ("check", "resume", "show", "verify", "drill")
HELP = """\
usage: launch SPEC [key=value ...] [--dry-run] [--follow] [--profile NAME]
       launch check SPEC [key=value ...] [--profile NAME]
       launch show SPEC [key=value ...] [--profile NAME]
       launch resume RUN [key=value ...] [--follow] [--change]
       launch verify RUN [--deep]
       launch drill SPEC [key=value ...] [--kills N] [--seed S] [--steps N] [--keep] [--profile NAME]

Launch a training job from a spec: on Slurm where sbatch is found, else on this machine.

  SPEC            a YAML file, such as configs/ddp_2node.yaml (one named like a command: ./check)
  key=value       override a value of the spec, such as train.optim.base_lr=2e-3 executor=local

commands
  check           read and validate a spec, print its arithmetic, submit nothing
  show            print the resolved spec, and where each value came from
  resume          go on with a run that ended (its folder, or its id below ./runs), from its newest checkpoint
  verify          prove that a run (its folder, or its id below ./runs) is what its spec says
  drill           rehearse a job on this machine, shortened and with faults, and prove that they change nothing

options
  --dry-run       print the exact script and each rank's environment; write and submit nothing
  --follow        on Slurm: stay and show rank 0's output until the job ends
  --profile NAME  a profile of $XDG_CONFIG_HOME/ddp-launcher/config.yaml
  --change        for resume: also where a key=value changes what the run's steps hang on
  --deep          for verify: also train the run's last interval again, and compare bit for bit
  --kills N       for drill: so many faults, 20 unless given
  --seed S        for drill: which faults, and where; drawn and printed unless given
  --steps N       for drill: so many steps, 120 or the spec's own unless given
  --keep          for drill: keep the checkpoints of its runs when all held
  --version       print the version
  -h, --help      print this

exit codes
  0 done   2 bad spec or usage   3 rejected by the scheduler   4 scheduler not reachable
  5 the job failed, or verify or drill found something wrong
  93 gave way to a newer attempt of the same run   130 interrupted   143 stopped on a signal
"""


class Parser(argparse.ArgumentParser):
    """Of a command's arguments. Errors: UsageError."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see launch --help")
