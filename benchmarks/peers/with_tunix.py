"""google-tunix for compare.py: its GRPO learners with its in-process ("vanilla") sampler; runs in google-tunix's environment.

Every call of the sampler is given a seed of its own: as shipped it begins from the same random key at each call, and agentic
episodes, which it samples one at a time, would all be equal. A turn ends where the workload has it end: the loop's limit, which
is data, is lowered, and the end token written there; the shapes, which decide what is compiled, stay the package's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.perf.experimental import constants
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.agents import model_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.parser.chat_template_parser import parser as chat_parser
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from workload import RESULT, Report, Tools, Workload, arguments, distinct, reward, workload_of


def main() -> None:
    """Runs and prints a JSON line."""
    workload = workload_of(arguments(__doc__).parse_args())
    report, tools = Report("tunix", workload), Tools()
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    cluster = cluster_of(workload, tokenizer)
    generation = Generation(cluster, tokenizer, workload, report)
    Updates(cluster, workload, report, generation, tools)
    learner = (agentic if workload.agentic else single)(workload, tokenizer, cluster, report, tools)
    asked = workload.asked()
    prompts = np.array(asked["messages" if workload.agentic else "texts"])  # a list of str fails in the tokenizer

    def batches() -> Iterator[dict[str, Any]]:
        for _ in range(workload.steps):
            yield {"prompts": prompts, "question": prompts} if workload.agentic else {"prompts": prompts}

    report.begin()
    with contextlib.redirect_stdout(sys.stderr):
        learner.train(batches())
    versions = {name: metadata.version(name) for name in ("google-tunix", "jax", "flax", "transformers")}
    report.print(versions=versions)
    os._exit(0)  # the agentic learner leaves a loop running in a thread


def cluster_of(workload: Workload, tokenizer: Any) -> rl_cluster.RLCluster:
    """Policy, reference and sampler on one device. The prompts' length must hold the conversation before the last turn."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shape = shape_of(workload)
    load = lambda: qwen3_params.create_model_from_safe_tensors(str(workload.model), shape, mesh, dtype=jnp.float32)  # noqa: E731
    with mesh:
        actor, reference = load(), load() if workload.beta else None
    fed = workload.asked()["tokens"] + (workload.budget if workload.agentic else 1)  # 1: it puts a token before all
    new = workload.budget if workload.agentic else workload.new_tokens
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    whole = {} if workload.agentic else {"rollout_micro_batch_size": workload.prompts}  # the rollout is one batch of all rows
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6),
        max_steps=workload.steps,
        eval_every_n_steps=10**9,
        mini_batch_size=workload.prompts,
        train_micro_batch_size=workload.micro,
        compute_logps_micro_batch_size=None if workload.agentic else workload.micro,
        **whole,
    )
    sampling = base_rollout.RolloutConfig(
        max_tokens_to_generate=new,
        max_prompt_length=fed,
        kv_cache_size=fed + new + (fed if workload.agentic else 0),
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        return_logprobs=workload.agentic,
        data_type=jnp.float32,
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine="vanilla", training_config=training, rollout_config=sampling
    )
    return rl_cluster.RLCluster(actor=actor, reference=reference, tokenizer=tokenizer, cluster_config=config)


def shape_of(workload: Workload) -> qwen3.ModelConfig:
    """It has no reader of config.json."""
    hf = json.loads((workload.model / "config.json").read_text())
    theta = hf.get("rope_theta") or hf.get("rope_parameters", {}).get("rope_theta", 10000.0)
    return qwen3.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(theta),
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=True,
    )


class Generation:
    """Stands between cluster and sampler: a seed of its own for every call, the workload's lengths for turns, and counts."""

    def __init__(self, cluster: Any, tokenizer: Any, workload: Workload, report: Report):
        self.generate, self.sample = cluster.generate, cluster.rollout.generate
        self.decode = cluster.rollout._sampler._compiled_decode_fn
        self.end, self.workload, self.report = tokenizer.eos_token_id, workload, report
        self.turns: Counter[tuple[int, int]] = Counter()  # of an episode, those that were begun
        self.seeds, self.wanted = itertools.count(1), threading.local()
        self.said: list[list[int]] = []
        self.seconds = 0.0
        cluster.generate, cluster.rollout.generate = self._generate, self._sample
        if workload.agentic:
            cluster.rollout._sampler._compiled_decode_fn = self._decode

    def _generate(self, prompts: Any, *given: Any, trace_tags: Any = None, **more: Any) -> Any:
        if self.workload.agentic:
            group, member = trace_tags[constants.GROUP_ID], trace_tags[constants.PAIR_INDEX]
            step, prompt = divmod(group, self.workload.prompts)
            episode = self.workload.lengths(step)[prompt * self.workload.group + member]
            self.wanted.tokens = episode[self.turns[group, member]]
            self.turns[group, member] += 1
        began = time.perf_counter()
        out = self.generate(prompts, *given, trace_tags=trace_tags, **more)
        self.seconds += time.perf_counter() - began
        turns = [[int(token) for token in turn] for turn in out.tokens]
        self.said += turns
        ended = len(turns) if self.workload.agentic else 0  # it leaves away the end token, which was sampled
        self.report.sampled += sum(map(len, turns)) + ended
        return out

    def _sample(self, prompts: Any, config: Any, **more: Any) -> Any:
        return self.sample(prompts, dataclasses.replace(config, seed=next(self.seeds)), **more)

    def _decode(self, params: Any, state: Any) -> Any:
        last = int(state.num_input_tokens) + self.wanted.tokens - 1
        out = self.decode(params, dataclasses.replace(state, total_sampling_steps=np.int32(last)))
        tokens = np.array(out.token_buffer)
        tokens[:, last] = self.end
        return dataclasses.replace(out, token_buffer=tokens)

    def take(self) -> dict[str, Any]:
        """Of the step that ends."""
        told = {"generate_s": self.seconds, "model_calls": len(self.said), "distinct": distinct(self.said)}
        self.said, self.seconds = [], 0.0
        return told


class Updates:
    """Stands for the cluster's update: a step ends with its last micro-batch. Counts what XLA compiles."""

    def __init__(self, cluster: Any, workload: Workload, report: Report, generation: Generation, tools: Tools):
        self.update, self.cluster, self.report = cluster.update_actor, cluster, report
        self.generation, self.tools = generation, tools
        self.parts, self.done, self.compiled = max(1, workload.prompts // workload.micro), 0, 0
        cluster.update_actor = self._update
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _: float, **__: Any) -> None:
        self.compiled += event.endswith("backend_compile_duration")

    def _update(self, *given: Any, **more: Any) -> Any:
        out = self.update(*given, **more)
        jax.block_until_ready(jax.tree.leaves(nnx.state(self.cluster.actor_trainer.model)))
        self.done += 1
        if self.done % self.parts == 0:
            self.report.step(**self.tools.take(), **self.generation.take(), compiled=self.compiled)
            self.compiled = 0
        return out


def single(workload: Workload, tokenizer: Any, cluster: Any, report: Report, tools: Tools) -> Any:
    config = grpo_learner.GRPOConfig(num_generations=workload.group, num_iterations=1, beta=workload.beta)
    rewards = lambda prompts, completions, **_: [reward(said) for said in completions]  # noqa: E731
    return grpo_learner.GRPOLearner(rl_cluster=cluster, reward_fns=rewards, algo_config=config)


def agentic(workload: Workload, tokenizer: Any, cluster: Any, report: Report, tools: Tools) -> Any:
    class Asking(base_environment.BaseTaskEnv):
        """Whatever a turn says is a call of the tool; the last turn ends the episode."""

        def __init__(self, task: Any = None, **more: Any):
            super().__init__(task=dict(task or {}), max_steps=workload.turns, **more)

        def _initial_observation(self) -> dict[str, str]:
            text = str(np.ravel(self.task["prompts"])[0])
            return {"question": text, "prompts": text}  # the learner asks the first observation for the prompts

        def _step_impl(self, action: Any) -> Any:
            if self.step_count == workload.turns:
                return base_environment.EnvStepResult("", reward(str(action)), True, {})
            with tools.call():
                time.sleep(workload.tool_ms[len(report.steps)] / 1e3)
            return base_environment.EnvStepResult(RESULT, 0.0, False, {})

    class Agent(model_agent.ModelAgent):
        def _observation_to_messages(self, observation: Any, reward: float, done: bool, info: Any) -> None:
            if text := observation["question"] if isinstance(observation, dict) else observation:
                self._messages.append({"role": "user", "content": text})

    config = agentic_grpo_learner.GRPOConfig(
        num_generations=workload.group,
        num_iterations=1,
        beta=workload.beta,
        max_response_length=workload.budget,
        max_concurrency=workload.episodes,
        system_prompt="s",
    )
    return agentic_grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=config,
        chat_parser=chat_parser.QwenChatTemplateParser(tokenizer, enable_thinking=True),
        agent_class=Agent,
        env_class=Asking,
    )


if __name__ == "__main__":
    main()
