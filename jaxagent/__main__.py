"""The command line. Every command is a thin door to a function that Python callers use too.

jaxagent train    --config=FILE[:ARG] --workdir=DIR [--config.KEY=VALUE ...] [--coordinator=HOST:PORT --processes=N --process=I]
jaxagent finetune --config=FILE[:ARG] --workdir=DIR [--config.KEY=VALUE ...]
jaxagent eval     --workdir=DIR [--tasks=N] [--rollouts=K] [--split=test] [--temperature=T] [--to=DIR] [--json]
jaxagent eval     --workdir=DIR --follow [--to=DIR] [...]
jaxagent eval     --workdir=DIR|--config=FILE[:ARG] --endpoint=URL --model=NAME [--key-env=VARIABLE] [...]
jaxagent generate --checkpoint=DIR --prompt=TEXT [--temperature=T] [--max-tokens=N]
jaxagent plan     --config=FILE[:ARG] [--topology=v5e:16x16] [--json] [--config.KEY=VALUE ...]
jaxagent serve    --checkpoint=DIR [--port=8000] [--host=H] [--token-file=F] [--context=N] [--slots=N]
jaxagent view     DIR [--serve] [--beside=DIR] [--port=P]
jaxagent replay   RUN --step=N [--tolerance=1e-4]
jaxagent export   --workdir=DIR --to=DIR [--dtype=float32] [--adapter]
jaxagent env      list | install NAME [--python=PATH] | check NAME | check --config=FILE[:ARG] [--config.KEY=VALUE ...]
jaxagent swe      --source SDIST|NAME==VERSION|LIST.txt ... --to=FILE [--count=N] [--seed=S] [--processes=P]
jaxagent swe      --rows=FILE --repositories=DIR --to=FILE
jaxagent retrieve --corpus=FILE [--port=8000] [--index=DIR]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from jaxagent import __version__

STORIES = ("train", "finetune")
AGAIN = 75  # the exit code of what was told to end and goes on when it is started again, as `train.EXIT_AGAIN`
CONFIGURED = (*STORIES, "plan")  # commands that take a config with overrides
OVERRIDES = "a key of the config is changed by --config.KEY=VALUE; configs/base.py lists them"
# What several processes that train together are told: flags, and the variables that say the same.
PROCESSES = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
# Each command's module is imported when it is called: --help must not wait for JAX.
_HOME = {
    "train": "jaxagent.train",
    "finetune": "jaxagent.finetune",
    "eval": "jaxagent.evaluate",
    "eval follow": "jaxagent.follow",
    "generate": "jaxagent.policy",
    "serve": "jaxagent.policy",
    "export": "jaxagent.policy",
    "plan": "jaxagent.plan",
    "view": "jaxagent.view",
    "env list": "jaxagent.envs.workers.install",
    "env install": "jaxagent.envs.workers.install",
    "env check": "jaxagent.envs.check",
    "retrieve": "jaxagent.toolbox.retriever",
    "replay": "jaxagent.replay",
    "swe": "jaxagent.data.swe",
}


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    whole = argparse.ArgumentParser("jaxagent", description=__doc__, formatter_class=formatter)
    whole.add_argument("--version", action="version", version=f"jaxagent {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    stories = {
        "train": "reinforcement learning, with a supervised warm-up",
        "finetune": "learning without a policy gradient: imitation, rejection sampling, preferences",
    }
    for name, said in stories.items():
        story = commands.add_parser(name, help=said, epilog=OVERRIDES)
        story.add_argument("--config", required=True, help="a file with get_config(arg), as FILE or FILE:ARG")
        story.add_argument("--workdir", required=True, help="folder of the run, made where it is not; a run in it goes on")
        if name == "train":
            for flag, variable in PROCESSES.items():
                story.add_argument(f"--{flag}", help=f"of several that train together; or {variable}")
    add_eval(commands.add_parser("eval", help="success on held-out tasks, with its confidence interval"))
    generate = commands.add_parser("generate", help="one answer of a checkpoint")
    generate.add_argument("--checkpoint", required=True, help="a Hugging Face checkpoint or a PEFT adapter directory")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--temperature", type=float, default=1.0)
    generate.add_argument("--max-tokens", type=count, default=256)
    plan = commands.add_parser(
        "plan", help="what would run, and whether it fits; with a topology, by the compiler's word", epilog=OVERRIDES
    )
    plan.add_argument("--config", required=True, help="as for train")
    plan.add_argument("--topology", default="", help="of chips that need not be here: v5e:4x4, v5p:4x4x4, v6e:16x16, H200:8")
    plan.add_argument(
        "--iteration-s", type=float, default=60.0, help="seconds in which the sandbox serves an iteration's calls"
    )
    plan.add_argument(
        "--layers", type=count, nargs=2, default=(), help="compile the engine at two depths, sooner, and count on from these"
    )
    plan.add_argument("--json", action="store_true")
    add_serve(commands.add_parser("serve", help="answers programs that speak OpenAI's or Anthropic's API"))
    view = commands.add_parser("view", help="writes report.html of a run, or serves a page that follows it")
    view.add_argument("workdir")
    view.add_argument(
        "--serve", action="store_true", help="on loopback, with every episode; the address that it prints is secret"
    )
    view.add_argument("--beside", default="", metavar="DIR", help="with --serve: another run, to compare")
    view.add_argument("--port", type=int, default=0, help="with --serve; 0 takes a free one")
    replay = commands.add_parser("replay", help="recomputes one training step and names the first stage that differs")
    replay.add_argument("run", help="the workdir of a run")
    replay.add_argument("--step", required=True, type=count, help="of training, from 1")
    replay.add_argument("--tolerance", type=float, default=1e-4, help="share by which a number may differ")
    export = commands.add_parser("export", help="writes a run's policy as a Hugging Face checkpoint directory")
    export.add_argument("--workdir", required=True, help="a run; its last checkpoint is taken")
    export.add_argument("--to", required=True, help="the directory to write")
    export.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    export.add_argument("--adapter", action="store_true", help="the low-rank adapters alone, in PEFT's layout")
    _add_env(commands.add_parser("env", help="worlds: which there are, what they need, whether they keep the contract"))
    swe = commands.add_parser("swe", help="makes tasks of repair from packages with tests; runs the packages' code")
    places = "directories, sdists, NAME==VERSION to fetch one beside the task file, or .txt files with one of these a line"
    made_of = swe.add_mutually_exclusive_group(required=True)
    made_of.add_argument("--source", default=(), nargs="+", help=places)
    made_of.add_argument("--rows", default="", help="rows of SWE-bench, SWE-Gym, SWE-smith or R2E-Gym, whose code does not run")
    swe.add_argument("--repositories", default="", metavar="DIR", help="with --rows: where clones of their repositories are")
    swe.add_argument("--to", required=True, help="the task file, JSONL")
    swe.add_argument("--count", type=count, default=100, help="tasks of each source at most")
    swe.add_argument("--seed", type=int, default=0, help="of the order in which bugs are tried")
    swe.add_argument("--timeout", dest="timeout_s", type=float, default=120.0, help="seconds, of one run of the tests")
    swe.add_argument("--processes", type=count, default=1, help="sources that are worked on at once")
    retrieve = commands.add_parser("retrieve", help="serves search in a corpus, as Search-R1's retriever does")
    retrieve.add_argument("--corpus", required=True, help="JSONL: title and text, or contents; and id")
    retrieve.add_argument("--port", type=count, default=8000)
    retrieve.add_argument("--host", default="127.0.0.1", help="whoever reaches it can search: it asks for no token")
    retrieve.add_argument("--index", default="", help="folder of an index on disk, for large corpora; needs jaxagent[search]")
    retrieve.add_argument("--top", type=count, default=3, help="documents, where a request does not say how many")
    return whole


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """The flags of a command. Exits with 2 where they are wrong."""
    known, unknown = parser().parse_known_args(arguments)
    options = vars(known)
    if unknown:
        hint = f"; {OVERRIDES}" if options["command"] in CONFIGURED else ""
        more = f"; see jaxagent {options['command']} --help"
        sys.exit(_refuse(f"jaxagent {options['command']} does not know {' '.join(unknown)}{hint}{more}"))
    return options


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def _add_env(env: argparse.ArgumentParser) -> None:
    actions = env.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="worlds that need a library, and whether it is there")
    install = actions.add_parser("install", help="makes the environment of a world, with what it needs")
    install.add_argument("name")
    install.add_argument("--python", default="", help="the interpreter to make it with; default: one that fits")
    check = actions.add_parser("check", help="plays a world without a policy and says whether it keeps the contract")
    which = check.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", help="a file of jaxagent/envs, or a dotted module, with its default options")
    which.add_argument("--config", help="the world of a file with get_config(arg), as FILE or FILE:ARG")


def add_eval(evaluate: argparse.ArgumentParser) -> None:
    where = evaluate.add_mutually_exclusive_group(required=True)
    where.add_argument("--workdir", default="", help="a run: its world, and its last checkpoint unless --endpoint is given")
    where.add_argument(
        "--config", default="", help="for an endpoint, without a run: a file with get_config(arg), as FILE or FILE:ARG"
    )
    evaluate.add_argument("--tasks", type=count, help="default: evaluate.final_tasks of the run")
    evaluate.add_argument("--rollouts", type=count, help="k, episodes per task; default: evaluate.rollouts of the run")
    evaluate.add_argument("--split", default="", choices=["train", "valid", "test"], help="default: test; to follow, valid")
    evaluate.add_argument(
        "--follow", action="store_true", help="every checkpoint of a run that trains meanwhile, by default as it would itself"
    )
    evaluate.add_argument("--temperature", type=float, help="default: evaluate.temperature of the run")
    evaluate.add_argument("--top-p", type=float, help="default: 1")
    evaluate.add_argument("--max-tokens", type=count, help="of a turn; default: sampling.max_tokens of the run")
    evaluate.add_argument("--to", default="", help="folder in which episodes are kept; default: evals in the workdir, or here")
    evaluate.add_argument("--json", action="store_true", help="the whole table, as it is kept there")
    evaluate.add_argument("--endpoint", default="", help="what to ask instead of a checkpoint, as https://HOST/v1")
    evaluate.add_argument("--model", default="", help="its name there")
    evaluate.add_argument("--key-env", default="", metavar="VARIABLE", help="the environment variable that holds the key")
    evaluate.add_argument("--fields", default="{}", help="JSON that is added to every request; null takes a field away")
    evaluate.add_argument("--concurrency", type=count, default=8, help="episodes that ask the endpoint at once")
    evaluate.add_argument("--attempts", type=count, default=6, help="at a request to the endpoint")
    evaluate.add_argument("--timeout-s", type=float, default=120.0, help="of a request to the endpoint")


def eval_options(options: dict[str, Any], home: Any) -> dict[str, Any]:
    """The flags of `eval`, in the groups that receive them. Raises ValueError for an endpoint that is not wholly said."""
    asked = home.Asked(**{name: options[name] for name in home.Asked.__annotations__})
    url, variable = options["endpoint"], options["key_env"]
    if options["follow"]:
        if url or options["json"] or not options["workdir"]:
            raise ValueError("--follow evaluates the checkpoints of a run: give --workdir, and no --endpoint or --json")
        return {"asked": asked}
    if bool(url) != bool(options["model"]):
        raise ValueError("--endpoint and --model belong together")
    if not url:
        return {"asked": asked}
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--endpoint={url}: a URL is wanted, as https://HOST/v1")
    if variable and not os.environ.get(variable):
        raise ValueError(f"--key-env={variable}: this environment variable is not set")
    try:
        fields = dict(json.loads(options["fields"]))
    except (TypeError, ValueError):
        raise ValueError(f"--fields={options['fields']}: a JSON object is wanted") from None
    key = os.environ[variable].strip() if variable else ""
    how = {name: options[name] for name in ("model", "attempts", "timeout_s")}
    endpoint = home.EndpointOptions(url=url, key=key, fields=fields, **how)
    return {"asked": asked, "endpoint": endpoint, "concurrency": options["concurrency"]}


def add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--checkpoint", required=True, help="a Hugging Face checkpoint or a PEFT adapter directory")
    serve.add_argument("--name", default="", help="of the model, as clients say it; default: the directory's")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one; the line that says it is ready prints it")
    serve.add_argument("--token-file", default="", help="holds the bearer token; made, mode 0600, when it is missing")
    serve.add_argument("--context", type=count, default=4096, help="most tokens of a conversation")
    serve.add_argument("--slots", type=count, default=8, help="conversations that are held at once")
    serve.add_argument("--top-logprobs", type=int, default=5, choices=range(21), metavar="N", help="most that may be asked for")
    serve.add_argument("--history", default="keep", choices=["keep", "segment"], help="as chat.history")
    serve.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    serve.add_argument("--requests", type=count, default=64, help="that are answered at once")
    serve.add_argument("--deadline-s", type=float, default=600.0, help="of one request")


def serve_options(options: dict[str, Any], home: Any) -> dict[str, Any]:
    """The flags of `serve`, in the groups that receive them."""
    kinds = {"serving": home.Serving, "limits": home.ServeLimits, "at": home.Address}
    chosen = {name: {key: options.pop(key) for key in kind.__annotations__ if key in options} for name, kind in kinds.items()}
    return options | {name: kinds[name](**given) for name, given in chosen.items()}


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a positive whole number is wanted, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. One of which nobody reads the output any more, and which has none of its own to
    tell, ends with 141, as other programs do then.
    """
    code = 0
    try:
        code = run(argv)
        if sys.stdout:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        gone = [output.fileno() for output in (sys.stdout, sys.stderr) if output and _unread(output)]
        if not gone:
            raise  # of another pipe: a fault of ours
        for output in gone:  # what is still to be written at the end of this process
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        return code or 141


def _unread(output: TextIO) -> bool:
    """Whether the reader of an output is gone."""
    end = select.poll()
    end.register(output, 0)
    return bool(end.poll(0))


def run(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. A fault of the user's is told in a sentence, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    if bare := next((override for override in overrides if "=" not in override), None):
        return _refuse(f"--config.{bare}: a value is wanted in the same word, as --config.{bare}=VALUE")
    options = _options([a for a in arguments if not a.startswith("--config.")])
    command = options.pop("command")
    if command == "env":
        command = f"env {options.pop('action')}"
    if overrides and command not in CONFIGURED and not options.get("config"):
        return _refuse(f"--config.KEY=VALUE belongs to jaxagent {', '.join(CONFIGURED)} and env check --config")
    if command == "eval" and options["follow"]:
        command = "eval follow"
    try:
        with _ended_by_sigterm(command in STORIES):
            return _told(command, overrides, options)
    except KeyboardInterrupt:
        print(f"stopped{_goes_on(command, options.get('workdir', ''))}", file=sys.stderr)
        return 130
    except Terminated as error:
        print(f"{error}: stopped{_goes_on(command, options['workdir'])}", file=sys.stderr)
        return AGAIN


class Terminated(SystemExit):
    """SIGTERM before there is anything to save, or after it has been."""

    def __str__(self) -> str:
        return "SIGTERM while nothing was trained"


@contextmanager
def _ended_by_sigterm(story: bool) -> Iterator[None]:
    """SIGTERM raises Terminated. A story has a hearer of its own while there is something to save (`train.story`)."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt what the first one closes
        raise Terminated(AGAIN)

    if not story or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _told(command: str, overrides: Sequence[str], options: dict[str, Any]) -> int:
    """Calls a command; what it does not take is told in a sentence."""
    home = importlib.import_module(_HOME[command])
    faults: tuple[type[Exception], ...] = (ValueError, *getattr(home, "FAULTS", ()))
    try:
        return call(command, home, overrides, options)
    except faults as error:
        print(error, file=sys.stderr)
        return 2


def _goes_on(command: str, workdir: str) -> str:
    """What becomes of a command that Ctrl-C has stopped."""
    if command in ("eval", "eval follow"):
        return "; the same command goes on from the episodes that are kept"
    if command not in STORIES:
        return ""
    saved = [int(path.name) for path in Path(workdir, "checkpoints").glob("*") if path.name.isdecimal()]  # whole ones
    if not saved and any(path.stat().st_size for path in Path(workdir, "journal").rglob("*") if path.is_file()):
        return " before the first checkpoint; the same command begins anew, with the episodes and turns that the journal holds"
    if not saved:
        return " before anything was saved; the same command begins anew"
    try:
        configs = importlib.import_module("jaxagent.config")
        config = configs.read(Path(workdir, "config.json"))
        place = f" ({configs.place_in(config, max(saved))})" if config.warmup.steps else ""
    except (ValueError, AttributeError):  # no config is there, or one that cannot be read
        place = ""
    return f"; the same command goes on from the last checkpoint, step {max(saved)}{place}"


def call(command: str, home: Any, overrides: Sequence[str], options: dict[str, Any]) -> int:
    if command in STORIES:
        os.environ.update({PROCESSES[flag]: options[flag] for flag in PROCESSES if options.get(flag)})
        return home.run(options["config"], overrides, options["workdir"])
    if command == "plan":
        return home.plan(overrides=overrides, as_json=options.pop("json"), **options)
    if command == "env check":
        name, spec = options["name"], options["config"]
        env = importlib.import_module("jaxagent.config").world_of(spec, overrides) if spec else (name, {})
        return home.report(*env)
    if command == "view":
        return _view(home, **options)
    if command == "serve":
        options = serve_options(options, home)
    if command == "eval":
        options = {**eval_options(options, home), "overrides": overrides, "as_json": options["json"]}
    if command == "eval follow":
        options = eval_options(options, home)
    done = {
        "eval": "report",
        "eval follow": "follow",
        "env list": "report_list",
        "env install": "report_install",
    }.get(command, command)
    return getattr(home, done)(**options)


def _view(home: Any, workdir: str, serve: bool, beside: str, port: int) -> int:
    if serve:
        return int(importlib.import_module("jaxagent.live").watch(workdir, beside, port))
    if beside or port:
        raise ValueError("--beside and --port belong to jaxagent view --serve")
    return int(home.write_report(workdir))


if __name__ == "__main__":
    sys.exit(main())
