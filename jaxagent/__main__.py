"""The command line. Every command is a thin door to a function that Python callers use too.

jaxagent train    --config=FILE[:ARG] --workdir=DIR [--config.KEY=VALUE ...]
jaxagent finetune --config=FILE[:ARG] --workdir=DIR [--config.KEY=VALUE ...]
jaxagent eval     --workdir=DIR [--tasks=N] [--rollouts=K] [--split=test] [--temperature=T]
jaxagent generate --checkpoint=DIR --prompt=TEXT [--temperature=T] [--max-tokens=N]
jaxagent serve    --checkpoint=DIR [--port=8000] [--host=H] [--token-file=F] [--context=N] [--slots=N]
jaxagent view     DIR
jaxagent replay   RUN --step=N [--tolerance=1e-4]
jaxagent export   --workdir=DIR --to=DIR [--dtype=float32] [--adapter]
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

STORIES = ("train", "finetune")
# Each command's module is imported when it is called: --help must not wait for JAX.
_HOME = {
    "train": "jaxagent.train",
    "finetune": "jaxagent.finetune",
    "eval": "jaxagent.evaluate",
    "generate": "jaxagent.policy",
    "serve": "jaxagent.policy",
    "export": "jaxagent.policy",
    "view": "jaxagent.view",
    "replay": "jaxagent.replay",
}


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    whole = argparse.ArgumentParser("jaxagent", description=__doc__, formatter_class=formatter)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    stories = {
        "train": "reinforcement learning, with a supervised warm-up",
        "finetune": "learning without a policy gradient: imitation, rejection sampling, preferences",
    }
    for name, said in stories.items():
        story = commands.add_parser(name, help=said)
        story.add_argument("--config", required=True, help="a file with get_config(arg), as FILE or FILE:ARG")
        story.add_argument("--workdir", required=True)
    evaluate = commands.add_parser("eval", help="success on held-out tasks, with its confidence interval")
    evaluate.add_argument("--workdir", required=True)
    evaluate.add_argument("--tasks", type=count, help="default: evaluate.final_tasks of the run")
    evaluate.add_argument("--rollouts", type=count, help="k, episodes per task; default: evaluate.rollouts of the run")
    evaluate.add_argument("--split", default="test", choices=["train", "valid", "test"])
    evaluate.add_argument("--temperature", type=float, help="default: evaluate.temperature of the run")
    generate = commands.add_parser("generate", help="one answer of a checkpoint")
    generate.add_argument("--checkpoint", required=True, help="a Hugging Face checkpoint or a PEFT adapter directory")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--temperature", type=float, default=1.0)
    generate.add_argument("--max-tokens", type=count, default=256)
    add_serve(commands.add_parser("serve", help="answers programs that speak OpenAI's or Anthropic's API"))
    view = commands.add_parser("view", help="writes report.html of a run")
    view.add_argument("workdir")
    replay = commands.add_parser("replay", help="recomputes one training step and names the first stage that differs")
    replay.add_argument("run", help="the workdir of a run")
    replay.add_argument("--step", required=True, type=count, help="of training, from 1")
    replay.add_argument("--tolerance", type=float, default=1e-4, help="share by which a number may differ")
    export = commands.add_parser("export", help="writes a run's policy as a Hugging Face checkpoint directory")
    export.add_argument("--workdir", required=True)
    export.add_argument("--to", required=True)
    export.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    export.add_argument("--adapter", action="store_true", help="the low-rank adapters alone, in PEFT's layout")
    return whole


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
    """Runs a command; returns its exit code. A fault of the user's is told in a sentence, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    options = vars(parser().parse_args([a for a in arguments if not a.startswith("--config.")]))
    command = options.pop("command")
    if overrides and command not in STORIES:
        print("--config.KEY=VALUE belongs to jaxagent train and jaxagent finetune", file=sys.stderr)
        return 2
    home = importlib.import_module(_HOME[command])
    faults: tuple[type[Exception], ...] = (ValueError, *getattr(home, "FAULTS", ()))
    try:
        return call(command, home, overrides, options)
    except faults as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped" + "; the same command goes on from the last checkpoint" * (command in STORIES), file=sys.stderr)
        return 130


def call(command: str, home: Any, overrides: Sequence[str], options: dict[str, Any]) -> int:
    if command in STORIES:
        return home.run(options["config"], overrides, options["workdir"])
    if command == "serve":
        options = serve_options(options, home)
    done = {"eval": "report", "view": "write_report"}.get(command, command)
    return getattr(home, done)(**options)


if __name__ == "__main__":
    sys.exit(main())
