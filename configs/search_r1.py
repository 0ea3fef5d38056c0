"""Search and answer, after Search-R1 (arXiv:2503.09516): 512 questions of 5 rollouts, the search a server with its protocol.

jaxagent retrieve --corpus=CORPUS.jsonl --port=8000
jaxagent train --config=configs/search_r1.py:QUESTIONS.jsonl --config.init_from=CHECKPOINT_DIR --workdir=DIR

As there (section 5 and appendix; its `train_grpo.sh`): GRPO, learning rate 1e-6 after a warm-up of 0.285 of the run, KL 0.001
(k3) to the start, two mini-batches a step, temperature 1, 500 tokens a turn, top 3 passages of 500 tokens, at most 4 searches,
exact match in <answer> tags as the only reward, 500 steps, Qwen2.5 of 3B and 7B on 8 H100. Otherwise here: the policy calls a
tool where it wrote <search>; passages are cut by characters; the corpus and its retriever are yours, there E5 over Wikipedia of
2018.

Sizes: `jaxagent plan --config=configs/search_r1.py --config.init_from=CHECKPOINT_DIR --config.mesh.cpu_devices=8
--config.mesh.fsdp=8` forecasts 39.3 GiB of each of 8 devices for Qwen2.5-3B (H100), 86.7 for 7B (H200).
"""

from pathlib import Path

from base import get_config as base
from ml_collections import ConfigDict

RIVERS = Path(__file__).resolve().with_name("rivers.jsonl")  # sixty documents, each with a question that it answers
SYSTEM = (
    "Answer the question. Reason first; call search as often as you need, and put the answer, without explanations, between "
    "<answer> and </answer>."
)


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the task file, by default questions of rivers; "runlocal" gives a run of seconds that touches every part."""
    short = arg == "runlocal"
    c = base()
    c.env.name = "questions"
    path = str(RIVERS if short or not arg else Path(arg).resolve())
    c.env.options = ConfigDict({"path": path, "reward": "tagged_match", "system": SYSTEM, "observation_chars": 2000})
    c.env.options.toolbox = ConfigDict({"retriever": {"url": "http://127.0.0.1:8000", "top": 3}})
    c.agent.max_turns = 5  # four searches, and the answer
    c.algo.name = "grpo"
    c.algo.kl, c.algo.kl_coef = "k3_loss", 0.001
    c.optimizer.lr = c.optimizer.lr_final = 1e-6
    c.train.minibatches = 2
    c.evaluate.ablate = True  # what is answered without what was found is what the model knew before

    if short:
        c.env.options.toolbox = ConfigDict({"search": {"corpus": str(RIVERS), "chars": 40}})
        c.env.options.system, c.env.options.observation_chars = "", 60
        c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 32, 2, 1, 64
        c.agent.max_turns = 2
        c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 256
        c.sampling.max_tokens = 16
        c.engine.slots, c.engine.append_tokens = 8, (64,)
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
        return c

    c.sampling.max_tokens = 500
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 5120
    c.engine.append_tokens = (64, 512)
    c.engine.slots = 64
    c.engine.exact = False
    c.engine.dtype = c.learner.dtype = "bfloat16"
    c.learner.remat = "full"
    c.feed.prompts, c.feed.rollouts = 512, 5
    c.train.steps = 500
    c.optimizer.warmup_steps = 142
    c.evaluate.every = 50
    return c
