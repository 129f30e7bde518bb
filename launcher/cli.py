"""The command `launch`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BAD_SPEC, DONE, INTERRUPTED, LaunchError, UsageError
from .usage import COMMANDS, HELP, Parser

if TYPE_CHECKING:
    from . import specfile
    from .script import Submission


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
        print(HELP, end="")
        return DONE if arguments else BAD_SPEC
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"ddp-launcher {version('ddp-launcher')}")
        return DONE
    command = arguments[0] if arguments[0] in COMMANDS else "launch"
    if command == "launch":
        _refuse_misspelt_command(arguments[0])
    if command == "verify":
        return _verify(arguments[1:])
    if command == "resume":
        return _resume(arguments[1:])
    if command == "drill":
        return _drill(arguments[1:])
    options = _parse(arguments[1:] if command in COMMANDS else arguments)
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

    close = difflib.get_close_matches(word, COMMANDS, n=1)
    if close and not Path(word).exists():
        raise UsageError(f"{word!r} is neither a command nor a file; did you mean {close[0]!r}?")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("launch")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--follow", action="store_true")
    return _parse_spec(parser, arguments)


def _parse_spec(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """Add SPEC, key=value and --profile, and parse."""
    parser.add_argument("spec", metavar="SPEC", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--profile")
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
    parser = Parser("launch verify")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--deep", action="store_true")
    options = parser.parse_args(arguments)
    from . import verify

    return verify.verify(options.run, options.deep)


def _drill(arguments: list[str]) -> int:
    parser = Parser("launch drill")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep", action="store_true")
    options = _parse_spec(parser, arguments)
    from . import drill

    return drill.drill(drill.Asked(**vars(options)))


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
    parser = Parser("launch resume")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--change", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    from . import resume, submit, verify
    from .amend import take_back

    resolved, submission = resume.prepare(verify.find(options.run), options.overrides, options.change)
    executor = submit.choose_executor(resolved.spec)
    submit.check_slurm(executor)
    os.chdir(submission.workdir)
    code = _start(resolved, executor, lambda: submission, options.follow)
    if code == BAD_SPEC and (refused := take_back(submission.folder)) is not None:
        print(f"launch: attempt {refused} could not begin so: the spec is what it was before", file=sys.stderr)
    return code


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
