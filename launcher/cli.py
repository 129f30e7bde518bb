"""The command `launch`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .errors import BAD_SPEC, DONE, INTERRUPTED, LaunchError, UsageError

if TYPE_CHECKING:
    from . import specfile
    from .script import Submission

_COMMANDS = ("check", "resume", "show", "verify")
_HELP = """\
usage: launch SPEC [key=value ...] [--dry-run] [--follow] [--profile NAME]
       launch check SPEC [key=value ...] [--profile NAME]
       launch show SPEC [key=value ...] [--profile NAME]
       launch resume RUN [key=value ...] [--follow] [--change]
       launch verify RUN [--deep]

Launch a training job from a spec: on Slurm where sbatch is found, else on this machine.

  SPEC            a YAML file, such as configs/ddp_2node.yaml (one named like a command: ./check)
  key=value       override a value of the spec, such as train.optim.base_lr=2e-3 executor=local

commands
  check           read and validate a spec, print its arithmetic, submit nothing
  show            print the resolved spec, and where each value came from
  resume          go on with a run that ended (its folder, or its id below ./runs), from its newest checkpoint
  verify          prove that a run (its folder, or its id below ./runs) is what its spec says

options
  --dry-run       print the exact script and each rank's environment; write and submit nothing
  --follow        on Slurm: stay and show rank 0's output until the job ends
  --profile NAME  a profile of $XDG_CONFIG_HOME/ddp-launcher/config.yaml
  --change        for resume: also where a key=value changes what the run's steps hang on
  --deep          for verify: also train the run's last interval again, and compare bit for bit
  --version       print the version
  -h, --help      print this

exit codes
  0 done   2 bad spec or usage   3 rejected by the scheduler   4 scheduler not reachable
  5 the job failed, or verify found something wrong
  130 interrupted   143 stopped on a signal
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see launch --help")


def main(arguments: list[str]) -> int:
    """Run a command line; returns the exit code. A user's mistake is a message, never a traceback."""
    _mend_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns how a child ended
    try:
        return _run(arguments)
    except LaunchError as error:
        print(f"launch: {error}" if not _has_places(error) else str(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except FileNotFoundError as error:
        if Path("/proc/self/cwd").readlink().name.endswith(" (deleted)"):
            print("launch: the folder that you are in was removed; go to one that exists", file=sys.stderr)
            return BAD_SPEC
        raise error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output left; nothing more to say to it
        return DONE


def _mend_streams() -> None:
    """A closed stdout or stderr, or an encoding that lacks a character, must not end a run that has started."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as we run
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_HELP, end="")
        return DONE if arguments else BAD_SPEC
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"ddp-launcher {version('ddp-launcher')}")
        return DONE
    command = arguments[0] if arguments[0] in _COMMANDS else "launch"
    if command == "launch":
        _refuse_misspelt_command(arguments[0])
    if command == "verify":
        return _verify(arguments[1:])
    if command == "resume":
        return _resume(arguments[1:])
    options = _parse(arguments[1:] if command in _COMMANDS else arguments)
    if command != "launch" and (options.dry_run or options.follow):
        raise UsageError(f"{'--dry-run' if options.dry_run else '--follow'} is not for launch {command}")
    if command == "check":
        return _check(options)
    if command == "show":
        return _show(options)
    return _launch(options)


def _refuse_misspelt_command(word: str) -> None:
    """`launch chek spec.yaml` is no spec named chek."""
    import difflib

    close = difflib.get_close_matches(word, _COMMANDS, n=1)
    if close and not Path(word).exists():
        raise UsageError(f"{word!r} is neither a command nor a file; did you mean {close[0]!r}?")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="launch", add_help=False, allow_abbrev=False)
    parser.add_argument("spec", metavar="SPEC", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--profile")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--follow", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if options.spec is None:
        raise UsageError("the SPEC is missing: give a YAML file; see launch --help")
    for override in options.overrides:
        if "=" not in override:
            raise UsageError(f"{override!r} is neither an option nor key=value; see launch --help")
    return options


def _check(options: argparse.Namespace) -> int:
    from . import specfile, summary

    resolved = specfile.resolve(Path(options.spec), options.overrides, options.profile)
    print(f"{options.spec}: ok")
    for line in [summary.resources(resolved.spec), *summary.arithmetic(resolved.spec)]:
        print(line)
    return DONE


def _show(options: argparse.Namespace) -> int:
    from . import show, specfile

    print(show.text(specfile.resolve(Path(options.spec), options.overrides, options.profile)), end="")
    return DONE


def _verify(arguments: list[str]) -> int:
    parser = _Parser(prog="launch verify", add_help=False, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--deep", action="store_true")
    options = parser.parse_args(arguments)
    from . import verify

    return verify.verify(options.run, options.deep)


def _launch(options: argparse.Namespace) -> int:
    from . import specfile, submit, summary

    resolved = specfile.resolve(Path(options.spec), options.overrides, options.profile)
    executor = submit.choose_executor(resolved.spec)
    workdir = Path.cwd()
    if options.dry_run:
        from . import dryrun

        for line in summary.arithmetic(resolved.spec):
            print(line)
        print(dryrun.text(resolved.spec, submit.planned(resolved, workdir), executor, os.environ))
        return DONE
    submit.check_slurm(executor)
    return _start(resolved, executor, lambda: submit.prepare(resolved, workdir), options.follow)


def _resume(arguments: list[str]) -> int:
    parser = _Parser(prog="launch resume", add_help=False, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--change", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    from . import resume, submit, verify

    resolved, submission = resume.prepare(verify.find(options.run), options.overrides, options.change)
    executor = submit.choose_executor(resolved.spec)
    submit.check_slurm(executor)
    os.chdir(submission.workdir)
    return _start(resolved, executor, lambda: submission, options.follow)


def _start(resolved: specfile.Resolved, executor: str, prepared: Callable[[], Submission], follow_job: bool) -> int:
    from . import submit, summary

    if executor == "local":
        return _run_here(resolved, prepared)
    started = submit.submit_slurm(resolved, prepared())
    print(summary.where(resolved.spec, started), flush=True)
    if follow_job:
        from . import follow, screen

        return follow.follow_slurm(started, screen.Screen.of(started.folder))
    print("\n".join(summary.arithmetic(resolved.spec) + summary.hints(started)), flush=True)
    return DONE


def _run_here(resolved: specfile.Resolved, prepared: Callable[[], Submission]) -> int:
    """A local run is minded to its end."""
    from . import follow, screen, submit, summary

    with follow.Interrupts() as asked:
        started = submit.start_local(resolved, prepared())
        shown = screen.Screen.of(started.folder)
        shown.line(summary.where(resolved.spec, started))
        return follow.follow_local(started, shown, asked)


def _has_places(error: LaunchError) -> bool:
    return bool(getattr(error, "faults", None))
