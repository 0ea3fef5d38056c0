"""Configs: load, override, check, save, compare. A config is an ml_collections tree, locked and typed.

A fault in a config is found before anything is compiled, and all faults are told at once.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxagent.algos.table import Algorithm, Choice, inert_columns


class ConfigError(ValueError):
    """All faults of a config, one per line."""

    def __init__(self, faults: Sequence[str]):
        self.faults = list(faults)
        super().__init__("\n".join(f"config: {fault}" for fault in faults))


OPEN = ("env.options", "reward", "alarms.limits")  # sections whose keys belong to a component that is chosen by name
_DTYPES = ("float32", "bfloat16")
_COUNTS = (
    *("model.width", "model.layers", "model.heads", "model.kv_heads", "model.head_width", "model.ffn_width"),
    *("mesh.cpu_devices", "sampling.max_tokens", "engine.slots", "engine.decode_tokens", "engine.append_rows"),
    *("learner.batch_rows", "learner.row_tokens", "learner.head_chunk", "warmup.demos", "warmup.batch"),
    *("evaluate.tasks", "evaluate.final_tasks", "evaluate.rollouts", "checkpoint.every", "checkpoint.keep"),
)
_OPEN_PREFIXES = tuple(f"{section}." for section in OPEN)


def load(spec: str, overrides: Sequence[str] = ()) -> tuple[ConfigDict, list[str]]:
    """The config of `path` or `path:arg` with overrides `key.path=value`, and every fault found on the way.

    The file may import its neighbours, as the experiments import base. An override that does nothing as the other keys
    stand is a fault, and so is a change that the file makes to the base.py beside it; what an override switches off, as
    another algorithm does with the file's clip range, is none. Raises ConfigError where the tree is not complete enough to
    be checked further.
    """
    path, _, arg = spec.partition(":")
    if not Path(path).is_file():
        raise ConfigError([f"--config names a Python file with get_config(arg), got {path!r}: no such file"])
    config = _run(Path(path), arg)
    plain = copy.deepcopy(config)
    faults = [fault for override in overrides if (fault := _override(config, override))]
    changed = {override.partition("=")[0] for override in overrides}
    base = Path(path).with_name("base.py")
    if base.is_file():
        defaults = leaves(_run(base, ""))
        mine = leaves(config)
        missing = [f"missing key {key!r}; start from configs/base.py" for key in defaults if key not in mine]
        unknown = [key for key in mine if key not in defaults and not key.startswith(_OPEN_PREFIXES)]
        faults += [f"unknown key {key!r}{nearest(key, defaults)}" for key in unknown]
        if missing:
            raise ConfigError([*faults, *missing])
        idle, theirs = dict(_inert(plain)), leaves(plain)
        changed |= {key for key in idle if key in defaults and theirs[key] != defaults[key]}
    values = leaves(config)
    faults += [f"{key}={values[key]} does nothing: {why}" for key, why in sorted(_inert(config)) if key in changed]
    return config, faults


def _run(path: Path, arg: str) -> ConfigDict:
    """Calls the file's get_config; the neighbours it imports are its own, whatever was imported under their names."""
    neighbours = {file.stem for file in path.parent.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in neighbours if name in sys.modules}
    sys.path.insert(0, str(path.parent))
    try:
        found = runpy.run_path(str(path))
        if "get_config" not in found:
            raise ConfigError([f"{path} has no function get_config(arg)"])
        config = found["get_config"](arg)
    except (SyntaxError, ImportError, LookupError, NameError, AttributeError, TypeError) as error:
        raise ConfigError([_fault_of_file(path, error)]) from error
    finally:
        sys.path.remove(str(path.parent))
        for name in neighbours:
            sys.modules.pop(name, None)
        sys.modules.update(others)
    if not isinstance(config, ConfigDict):
        raise ConfigError([f"{path}: get_config(arg) must return a ConfigDict, got {type(config).__name__}"])
    return config.lock()


def _fault_of_file(path: Path, error: Exception) -> str:
    """What went wrong in a config file, and in which line of it or of a neighbour."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    home = path.resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}, line {f.lineno}: " for f in frames if Path(f.filename).resolve().parent == home]
    hint = "; an experiment stands beside configs/base.py" if isinstance(error, ImportError) and error.name == "base" else ""
    return f"{lines[-1] if lines else f'{path}: '}{type(error).__name__}: {error}{hint}"


def _override(config: ConfigDict, override: str) -> str:
    key, equals, text = override.partition("=")
    section, _, name = key.rpartition(".")
    if not equals:
        return f"{override!r}: write key.path=value"
    if section not in OPEN and key not in leaves(config):
        return f"unknown key {key!r}{nearest(key, leaves(config))}"
    node = config
    for part in section.split(".") if section else []:
        node = node[part]
    old = node.get(name)
    wanted = node.get_type(name) if name in node else object
    value = parse(text, old)
    flag_for_number = isinstance(value, bool) and wanted in (int, float)
    if flag_for_number or (value is None and old is not None):
        return f"{key} wants {wanted.__name__}, got {text!r}"
    try:
        with node.unlocked():
            node[name] = value
    except TypeError:
        return f"{key} wants {wanted.__name__}, got {text!r}"
    return ""


def world_of(spec: str, overrides: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Name and options of a config's world. Raises ConfigError where the file or an override is wrong."""
    config, faults = load(spec, overrides)
    if faults:
        raise ConfigError(faults)
    return config.env.name, dict(config.env.options)


def place_in(config: ConfigDict, step: int) -> str:
    """A step as the line of progress says it, which begins anew after the warm-up."""
    warmup, steps = config.warmup.steps, config.train.steps
    return f"warm-up {step}/{warmup}" if step <= warmup else f"step {step - warmup}/{steps}"


def parse(text: str, old: Any) -> Any:
    """A command-line value: JSON or a Python word, or the text itself where a string is wanted."""
    if isinstance(old, str):
        return text
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        value = json.loads(text.replace("(", "[").replace(",)", "]").replace(")", "]"))
    except json.JSONDecodeError:
        return text
    if isinstance(value, list):
        return tuple(value)
    return float(value) if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool) else value


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by their dotted key."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            found.update(leaves(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def nearest(key: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A hint at the nearest known key, or at all of them where none is near."""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if len(known) <= 12 else ""


def faults_of(config: ConfigDict, builders: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Contradictions between sections, and what the components refuse.

    Args:
        builders: per section, what is built from its keys; a ValueError of it is a fault. What a partial is given already,
            no key gives.
    """
    faults = list(_rule_faults(config))
    for section, build in builders.items():
        node = config
        for part in section.split("."):
            node = node[part]
        given = getattr(build, "keywords", {})
        known = [name for name in inspect.signature(build).parameters if name not in given]
        unknown = [key for key in node if key not in known]
        faults += [f"unknown key '{section}.{key}'{nearest(key, known)}" for key in unknown]
        if not unknown:
            faults += [f"{section}: {fault}" for fault in _refusals(section, build, dict(node))]
    return faults


def _refusals(section: str, build: Callable[..., Any], values: dict[str, Any]) -> Iterator[str]:
    """All that a component refuses: the key that it names gets its default, and it is asked again."""
    while True:
        try:
            build(**values)
            return
        except (ValueError, TypeError) as error:
            yield str(error)
            named = next((key for key in values if f"{section}.{key} " in f"{error} "), None)
            default = inspect.signature(build).parameters[named].default if named else inspect.Parameter.empty
            if named is None or default is inspect.Parameter.empty or values.pop(named) == default:
                return


def _rule_faults(c: ConfigDict) -> Iterator[str]:
    """Contradictions between sections."""
    at_least = {1: _COUNTS, 0: ("seed", "train.steps", "warmup.steps", "evaluate.every")}
    values = leaves(c)
    yield from (
        f"{key} must be at least {least}, got {values[key]}"
        for least, keys in at_least.items()
        for key in keys
        if values[key] < least
    )
    yield from (
        f"{key} must be one of {', '.join(_DTYPES)}, got {values[key]!r}"
        for key in ("engine.dtype", "learner.dtype", "learner.frozen_dtype")
        if values[key] not in _DTYPES
    )
    if c.agent.max_tokens > c.engine.slot_tokens:
        yield f"agent.max_tokens={c.agent.max_tokens} does not fit engine.slot_tokens={c.engine.slot_tokens}"
    if c.agent.max_tokens > c.learner.row_tokens:
        yield f"agent.max_tokens={c.agent.max_tokens} does not fit learner.row_tokens={c.learner.row_tokens}"
    if c.sampling.max_tokens >= c.agent.max_tokens:
        yield (
            f"sampling.max_tokens={c.sampling.max_tokens} (per turn) must be below "
            f"agent.max_tokens={c.agent.max_tokens} (per episode)"
        )
    if c.sampling.temperature <= 0:
        yield f"sampling.temperature must be positive to explore, got {c.sampling.temperature}"
    if c.sampling.top_k or c.sampling.top_p < 1:
        yield "sampling.top_k and sampling.top_p must be off for training: the trainer's ratios are over all tokens"
    if c.feed.min_group and c.engine.exact:
        yield "feed.min_group must be 0 where engine.exact promises equal runs: who is late depends on time"
    yield from _algorithm_faults(c)
    if c.train.old_logprob not in ("sampler", "trainer"):
        yield f"train.old_logprob must be sampler or trainer, got {c.train.old_logprob!r}"
    if c.train.minibatches < 1 or c.train.minibatches > c.feed.prompts:
        yield f"train.minibatches must be 1 to feed.prompts={c.feed.prompts}, got {c.train.minibatches}"
    phases = c.finetune.rounds * max(1, len(c.finetune.threshold))
    if c.finetune.mode and c.finetune.rounds > 0 and c.train.steps % phases:
        yield (
            f"train.steps={c.train.steps} must be a multiple of finetune.rounds={c.finetune.rounds} times the "
            f"{max(1, len(c.finetune.threshold))} thresholds: every phase gets its share of the steps"
        )
    yield from _sandbox_faults(c)
    if c.sandbox.code not in ("auto", "require", "off"):
        yield f"sandbox.code must be auto, require or off, got {c.sandbox.code!r}"


def servers_of(url: str) -> list[str]:
    """The addresses, or the one fleet file, that `sandbox.url` names."""
    return [name.strip().rstrip("/") for name in url.split(",") if name.strip()]


def is_fleet(url: str) -> bool:
    """Whether `sandbox.url` names a fleet file, which says of its servers what is to be said."""
    return any(name.endswith(".toml") and "://" not in name for name in servers_of(url))


def _sandbox_faults(c: ConfigDict) -> Iterator[str]:
    names = servers_of(c.sandbox.url)
    if is_fleet(c.sandbox.url):
        if len(names) > 1:
            yield f"sandbox.url must be one fleet file or the URLs of servers, got {c.sandbox.url!r}: list all in the file"
        return
    if names and not c.sandbox.token_file:
        yield "sandbox.url needs sandbox.token_file, the file with the server's bearer token"
    for name in names:
        if not name.startswith(("http://", "https://")):
            yield f"sandbox.url must be URLs, by commas, or one fleet file (*.toml), got {name!r}"
    if len(set(names)) < len(names):
        yield f"sandbox.url must name each server once, got {c.sandbox.url!r}"


def algorithm_of(c: ConfigDict) -> Algorithm | None:
    """The row that a config asks for; None where there is no such row, which the table itself tells."""
    try:
        return Choice(**c.algo).row
    except (ValueError, TypeError):
        return None


def _algorithm_faults(c: ConfigDict) -> Iterator[str]:
    """What an algorithm wants of other sections."""
    row = algorithm_of(c)
    if row is None:
        return
    if c.feed.branches and row.anchored and c.reward:
        yield "feed.branches must be 0 where reward shapes whole episodes: a continuation is only the end of one"
    if c.feed.rollouts == 1 and (row.compares or row.select == "mixed"):
        yield f"feed.rollouts must be at least 2, a group of one has no baseline in {c.algo.name}; got 1"
    if c.finetune.mode:  # no policy gradient is taken
        return
    if row.old_matters and c.train.old_logprob == "sampler":
        yield (
            f"train.old_logprob must be trainer for algo.importance={row.importance} and algo.filter={row.filter}: what the "
            "sampler said of its own tokens corrects nothing"
        )
    if c.feed.max_staleness and c.train.old_logprob == "trainer" and row.importance == row.filter == "none":
        yield (
            f"feed.max_staleness={c.feed.max_staleness} with train.old_logprob=trainer needs algo.importance or algo.filter: "
            "ratios to the policy at the start of the step are 1 however old a token is, and nothing corrects for its age"
        )
    if row.has_critic and c.critic.warmup_steps >= c.train.steps > 0:
        yield f"critic.warmup_steps={c.critic.warmup_steps} must be below train.steps={c.train.steps}: the policy never moves"


def _inert(c: ConfigDict) -> Iterator[tuple[str, str]]:
    """The keys that do nothing as the others stand, and why."""
    row = algorithm_of(c)
    remote = bool(c.sandbox.url)
    mode = c.finetune.mode
    offline = bool(mode and c.finetune.path)
    tuned = f"finetune.mode={mode} has no policy gradient"
    nothing = "finetune.path gives what is learnt from; nothing is sampled to train on"
    all_trained = not (c.lora.rank or c.learner.train_only or c.learner.freeze)
    inert = {
        "lora.alpha": (not c.lora.rank, "lora.rank is 0"),
        "lora.targets": (not c.lora.rank, "lora.rank is 0"),
        "learner.frozen_dtype": (all_trained, "no weight is frozen"),
        "model.": (bool(c.init_from), "init_from gives the model's shape"),
        "chat.history": (not c.init_from, "the template of a policy from scratch rewrites nothing"),
        "warmup.": (not c.warmup.steps, "warmup.steps is 0"),
        "warmup_optimizer.": (not c.warmup.steps, "warmup.steps is 0"),
        "feed.branches": (
            bool(mode) or (row is not None and not row.anchored),
            "the algorithm knows no continuations of turns",
        ),
        "feed.min_group": (mode == "rest_mcts", "a search waits for each of its simulations"),
        "feed.max_rounds": (row is not None and row.select != "mixed", "the algorithm keeps all groups"),
        "engine.recompute": (
            not c.feed.max_staleness,
            "feed.max_staleness is 0: nothing is in flight when weights are published",
        ),
        "critic.warmup_steps": (mode == "rest_mcts", "what guides a search is taught beside the policy"),
        "critic.": (row is not None and not row.has_critic and mode != "rest_mcts", f"{c.algo.name} has no critic"),
        "finetune.": (not mode, "finetune.mode is empty"),
        "finetune.threshold": (mode in ("sft", "dpo"), f"finetune.mode={mode} chooses by no threshold"),
        "finetune.rounds": (mode == "sft", "a file is learnt from in one round"),
        "finetune.beta": (bool(mode) and mode != "dpo", "only finetune.mode=dpo has it"),
        "algo.": (bool(mode), tuned),
        "train.minibatches": (bool(mode), tuned),
        "train.old_logprob": (bool(mode), tuned),
        "learner.replay_routing": (bool(mode), "what is imitated takes the experts that the router gives it"),
        "feed.": (offline, nothing),
        "feed.max_staleness": (bool(mode), "every round samples what it learns from when it begins"),
        "train.max_broken": (offline, nothing),
        "reward.": (offline, nothing),
        "alarms.limits.kl": (bool(mode), tuned),
        "alarms.limits.": (offline, nothing),
        "sandbox.token_file": (
            not remote or is_fleet(c.sandbox.url),
            "the fleet file names its servers' token" if remote else "the embedded server makes its own token",
        ),
        "sandbox.code": (remote, "sandbox.url names a server that has its own rules"),
        "sandbox.min_isolation": (remote, "sandbox.url names a server that has its own rules"),
    }
    for key in leaves(c):
        whys = (why for prefix, (dead, why) in inert.items() if dead and key.startswith(prefix))
        if key not in ("warmup.steps", "finetune.mode") and (why := next(whys, "")):
            yield key, why
    if not mode:
        yield from ((f"algo.{column}", why) for column, why in inert_columns(c.algo.name, dict(c.algo)))


def save(config: ConfigDict, path: Path) -> None:
    """Writes a config whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(config.to_json(indent=2, sort_keys=True) + "\n")
    partial.rename(path)


def read(path: Path) -> ConfigDict:
    """A saved config; JSON's lists are tuples again."""

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tuples(inner) for name, inner in value.items()}
        return tuple(value) if isinstance(value, list) else value

    if not path.is_file():
        raise ConfigError([f"{path}: no saved config; is this the workdir of a run?"])
    return ConfigDict(tuples(json.loads(path.read_text()))).lock()


_BESIDE = {"metrics.echoes"}  # a run may be resumed with others: they change nothing of it


def differences(config: ConfigDict, path: Path) -> list[str]:
    """The keys in which a config differs from the saved one, as `key: saved -> now`."""
    saved = json.loads(path.read_text())
    now = json.loads(config.to_json())
    flat_saved, flat_now = leaves(ConfigDict(saved)), leaves(ConfigDict(now))
    keys = sorted({*flat_saved, *flat_now} - _BESIDE)
    return [f"{key}: {flat_saved.get(key)} -> {flat_now.get(key)}" for key in keys if flat_saved.get(key) != flat_now.get(key)]
