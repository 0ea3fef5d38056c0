"""The command line. Every command is a thin door to a function that Python callers use too.

jaxagent train    --config=FILE[:ARG] --workdir=DIR [--config.KEY=VALUE ...]
jaxagent finetune --config=FILE[:ARG] --workdir=DIR [--config.KEY=VALUE ...]
jaxagent eval     --workdir=DIR [--tasks=N] [--rollouts=K] [--split=test] [--temperature=T]
jaxagent generate --checkpoint=DIR --prompt=TEXT [--temperature=T] [--max-tokens=N]
jaxagent view     DIR
jaxagent export   --workdir=DIR --to=DIR [--dtype=float32] [--adapter]
jaxagent swe      --source=DIR|SDIST --to=FILE [--count=N] [--seed=S]
jaxagent retrieve --corpus=FILE [--port=8000] [--index=DIR]
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
    "export": "jaxagent.policy",
    "view": "jaxagent.view",
    "retrieve": "jaxagent.toolbox.retriever",
    "swe": "jaxagent.data.swe",
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
    view = commands.add_parser("view", help="writes report.html of a run")
    view.add_argument("workdir")
    export = commands.add_parser("export", help="writes a run's policy as a Hugging Face checkpoint directory")
    export.add_argument("--workdir", required=True)
    export.add_argument("--to", required=True)
    export.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    export.add_argument("--adapter", action="store_true", help="the low-rank adapters alone, in PEFT's layout")
    swe = commands.add_parser("swe", help="makes tasks of repair from a package with tests; runs the package's code")
    swe.add_argument("--source", required=True, help="a directory, an sdist, or the directory of a package with tests in it")
    swe.add_argument("--to", required=True, help="the task file, JSONL")
    swe.add_argument("--count", type=count, default=100, help="tasks at most")
    swe.add_argument("--seed", type=int, default=0, help="of the order in which bugs are tried")
    swe.add_argument("--timeout", dest="timeout_s", type=float, default=120.0, help="seconds, of one run of the tests")
    retrieve = commands.add_parser("retrieve", help="serves search in a corpus, as Search-R1's retriever does")
    retrieve.add_argument("--corpus", required=True, help="JSONL: title and text, or contents; and id")
    retrieve.add_argument("--port", type=count, default=8000)
    retrieve.add_argument("--host", default="127.0.0.1", help="whoever reaches it can search: it asks for no token")
    retrieve.add_argument("--index", default="", help="folder of an index on disk, for large corpora; needs jaxagent[search]")
    retrieve.add_argument("--top", type=count, default=3, help="documents, where a request does not say how many")
    return whole


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
    done = {"eval": "report", "view": "write_report"}.get(command, command)
    return getattr(home, done)(**options)


if __name__ == "__main__":
    sys.exit(main())
