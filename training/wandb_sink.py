"""Weights & Biases as a projection of metrics.jsonl: one W&B run over all attempts of a run, written by rank 0 alone.

Everything of W&B happens in a thread of its own, so that a slow or dead server holds neither start nor steps, and the
end by a stated bound only. W&B's own step counter, which refuses steps that a resumed attempt repeats, is not used:
`step` is a key, and every metric is plotted over it. Nothing here raises into training, except that `log` after W&B has
failed raises into `Metrics`, which reports it once and counts.
"""

from __future__ import annotations

import netrc
import os
import queue
import re
import secrets
import shlex
import string
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .config import RunConfig, WandbConfig, to_plain
from .runfolder import RunFolder
from .telling import tell

INIT_LIMIT_S = 15
"""How long a server may take to answer before this attempt is logged offline."""
FINISH_LIMIT_S = 15
"""How long the end of an attempt may wait for uploads."""
_QUEUE_LIMIT = 100_000
_TERMINATED = 143
_ALWAYS_SECRET = re.compile(r"(^|_)(secrets?|passwords?|passwd|pwd|credentials?)(_|$)")
_SECRET_TEXT = re.compile(r"(^|_)(key|apikey|token|auth)(_|$)")


def open_sink(config: RunConfig, folder: RunFolder, attempt: int, summary: dict[str, Any]) -> WandbSink | None:
    """Start logging to W&B; for rank 0 only. None where the spec or WANDB_MODE turns it off, or wandb is not usable.

    `summary` joins the train section in the W&B config, for example resources and batch arithmetic; texts under keys
    such as token or password are masked in both. The run's id is kept in the run folder; WANDB_RUN_ID takes precedence.
    """
    section = config.wandb
    mode = "disabled" if section is None else _mode(section, os.environ)
    if section is None or mode == "disabled":
        return None
    try:
        run_id = _run_id(folder, os.environ)
        if mode == "offline":
            _say(f"logging offline; upload later with: {_sync_command(folder, run_id)}")
        # Telemetry about W&B's own errors waits for a dead server for 20 s at the end of the process.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # noqa: F401 - here and not in the thread: a fork during an import would break the child
    except Exception as error:  # noqa: BLE001 - no trouble of W&B's may stop training
        _say(f"not used: {type(error).__name__}: {error}")
        return None
    arguments = {
        "project": section.project or config.name,
        "entity": section.entity,
        "group": section.group,
        "name": section.name or folder.run_id,
        "tags": list(section.tags),
        "id": run_id,
        "resume": "allow",
        "dir": str(folder.wandb.parent),  # wandb makes its own folder `wandb` in there
        "config": masked({"train": to_plain(config.train), **summary, "attempt": attempt}),
    }
    return WandbSink(mode, arguments, _sync_command(folder, run_id))


class WandbSink:
    """A sink of `Metrics`. Records wait in a queue for the thread that owns the W&B run."""

    def __init__(self, mode: str, arguments: dict[str, Any], sync_command: str) -> None:
        self._mode = mode
        self._arguments = arguments
        self._sync_command = sync_command
        self._queue: queue.SimpleQueue[Mapping[str, Any] | int] = queue.SimpleQueue()
        self._failure: str | None = None
        self._opened = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand a record over; returns at once. Errors: RuntimeError when W&B has failed or lags too far behind."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self._queue.qsize() >= _QUEUE_LIMIT:
            raise RuntimeError(f"{_QUEUE_LIMIT} records wait for W&B")
        self._queue.put(dict(record))

    def finish(self, exit_code: int) -> None:
        """End the W&B run with this exit code; 143 marks it as preempted, so that it does not show as crashed.

        Returns within FINISH_LIMIT_S, and what is left of INIT_LIMIT_S where the server has not answered yet.
        """
        self._queue.put(exit_code)
        limit = float(FINISH_LIMIT_S)
        if not self._opened.is_set():
            limit += max(0.0, self._started + INIT_LIMIT_S - time.monotonic())
        self._thread.join(limit)
        if self._thread.is_alive():
            _say(f"not finished after {limit:.0f} s; upload what is missing with: {self._sync_command}")

    def _work(self) -> None:
        try:
            run = self._open()
            self._opened.set()
            while not isinstance(item := self._queue.get(), int):
                run.log(item)
            if item == _TERMINATED:
                run.mark_preempting()
            run.finish(exit_code=item)
        except Exception as error:  # noqa: BLE001 - no trouble of W&B's may stop training
            self._failure = f"{type(error).__name__}: {error}"
            self._opened.set()
            _say(f"stopped: {self._failure}")

    def _open(self) -> Any:
        try:
            return self._init(self._mode)
        except Exception as error:
            if self._mode == "offline":
                raise
            first = str(error).partition("\n")[0]
            _say(f"no answer ({first}); logging offline; upload later with: {self._sync_command}")
        import wandb

        wandb.teardown()  # the id stays in use otherwise
        return self._init("offline")

    def _init(self, mode: str) -> Any:
        import wandb

        wanted = {
            "console": "off",
            "quiet": True,
            "silent": True,
            "disable_git": True,
            "disable_code": True,
            "allow_val_change": True,  # a later attempt may run on other resources
            "init_timeout": INIT_LIMIT_S,
            "login_timeout": INIT_LIMIT_S,
            "x_service_wait": INIT_LIMIT_S,
            "finish_timeout": FINISH_LIMIT_S - 1,
        }
        settings = wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})  # type: ignore[arg-type]
        run = wandb.init(mode="online" if mode == "online" else "offline", settings=settings, **self._arguments)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


def masked(value: Any, name: str = "") -> Any:
    """A copy without secrets: values under keys such as password, texts under keys such as token, passwords in URLs.

    Keys count by whole words: `api_key` and `hfToken` are secret, `tokenizer` and the number `key_heads: 8` are not.
    """
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    plain_number = isinstance(value, bool | int | float) or value is None
    if value is not None and (_ALWAYS_SECRET.search(words) or (_SECRET_TEXT.search(words) and not plain_number)):
        return "***"
    if isinstance(value, Mapping):
        return {str(key): masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]+@", r"\1***@", value) if isinstance(value, str) else value


def _mode(section: WandbConfig, env: Mapping[str, str]) -> str:
    asked = section.mode
    if asked == "auto":
        named = {"dryrun": "offline", "run": "online"}.get(env.get("WANDB_MODE", ""), env.get("WANDB_MODE", ""))
        if named in ("offline", "disabled"):
            return named
    if asked in ("offline", "disabled"):
        return asked
    if _has_key(env):
        return "online"
    _say("no API key: WANDB_API_KEY is not set and `wandb login` has left none in netrc")
    return "offline"


def _has_key(env: Mapping[str, str]) -> bool:
    """Whether W&B can log in without asking: a key or identity token in the environment, or an entry in netrc."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    places = [Path(env["NETRC"])] if env.get("NETRC") else [Path("~/.netrc"), Path("~/_netrc")]
    for place in places:
        try:
            entry = netrc.netrc(place.expanduser()).authenticators(host)
        except FileNotFoundError:
            continue
        except (netrc.NetrcParseError, OSError, RuntimeError) as error:
            _say(f"{place}: {error}")
            continue
        if entry and entry[2]:
            return True
    return False


def _run_id(folder: RunFolder, env: Mapping[str, str]) -> str:
    """The W&B id of this run: the same for every attempt."""
    try:
        kept = folder.wandb_id.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        kept = ""
    alphabet = string.ascii_lowercase + string.digits
    run_id = env.get("WANDB_RUN_ID") or kept or "".join(secrets.choice(alphabet) for _ in range(8))
    if run_id != kept:
        staged = folder.wandb_id.with_name(f".{folder.wandb_id.name}.{os.getpid()}")
        staged.write_text(run_id + "\n", encoding="utf-8")
        staged.rename(folder.wandb_id)
    return run_id


def _sync_command(folder: RunFolder, run_id: str) -> str:
    return f"wandb sync {shlex.quote(str(folder.wandb))}/*run-*-{shlex.quote(run_id)}"


def _say(text: str) -> None:
    tell(f"wandb: {text}")
