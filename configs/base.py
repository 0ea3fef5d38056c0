"""The complete tree: every key, its default, its unit, and why it is there. An experiment is this plus a few assignments.

A section is named for the component that receives it, and its keys are that component's keyword arguments.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" is understood by the experiments, not here."""
    c = ConfigDict()
    c.seed = 0  # fixes tasks, draws, demonstrations and initial weights
    c.init_from = ""  # HF checkpoint, or PEFT adapter, directory to start from; empty starts from scratch with `model`

    c.model = ConfigDict()  # the shape of a policy from scratch (Qwen3's), used where init_from is empty
    c.model.width = 128  # D
    c.model.layers = 4  # L
    c.model.heads = 4  # N
    c.model.kv_heads = 1  # K: one key head keeps the cache small enough for a CPU's second-level cache
    c.model.head_width = 32  # H
    c.model.ffn_width = 256  # F
    c.model.rope_theta = 1e4  # base of the rotary embedding; short rows need no more
    c.model.tied_head = True  # the output head is the embedding

    c.lora = ConfigDict()  # low-rank adapters: with them they alone are trained, and the engine samples from W + alpha/rank A B
    c.lora.rank = 0  # 0 is off
    c.lora.alpha = 16.0  # scale of the adapters' part: alpha / rank
    c.lora.targets = "all-linear"  # globs with commas on linear maps: q_proj,v_proj or self_attn.*; all-linear is all of them

    c.mesh = ConfigDict()  # how devices are laid out: axes are the sizes by which arrays are cut
    c.mesh.cpu_devices = 2  # CPU only: virtual devices; small programs use one core each
    c.mesh.data = 0  # axis sizes; 0 takes the devices that the other axes leave
    c.mesh.fsdp = 1  # weights, their gradient and moments, and rows
    c.mesh.tensor = 1  # heads, feed-forward and vocabulary; the axis that talks most
    c.mesh.expert = 1  # experts of a mixture; rows are cut by it too
    c.mesh.context = 1  # positions of a row, for rows of 100,000 tokens

    c.env = ConfigDict()  # the world that the policy acts in
    c.env.name = "chain"  # a file of jaxagent/envs, or a dotted module
    c.env.options = ConfigDict()  # keyword arguments of the world, checked against its signature

    c.agent = ConfigDict()  # budgets of an episode
    c.agent.max_turns = 8  # of the policy; an episode that needs more is stopped
    c.agent.max_tokens = 1024  # of a whole row: prompt, turns, observations

    c.chat = ConfigDict()  # how messages become tokens
    c.chat.history = "refuse"  # or keep, segment: where the checkpoint's chat template rewrites what was said before

    c.sampling = ConfigDict()  # of training rollouts; evaluation has its own
    c.sampling.temperature = 1.0  # 1 samples the policy itself; logits are divided by it, in the loss as well
    c.sampling.top_k = 0  # 0 is off; truncated sampling is refused for training, its ratios would be wrong
    c.sampling.top_p = 1.0  # 1 is off; refused below it for training, as top_k
    c.sampling.max_tokens = 256  # per turn

    c.rollout = ConfigDict()  # playing episodes
    c.rollout.concurrency = 256  # episodes played at once
    c.rollout.deadline_s = 600.0  # of one episode
    c.rollout.attempts = 3  # of an episode that the infrastructure broke

    c.feed = ConfigDict()  # what a step trains on, and what is played ahead of it
    c.feed.prompts = 16  # groups of a step
    c.feed.rollouts = 8  # trajectories of a group
    c.feed.branches = 0  # continuations of turns of a group, where its rollouts differ; for anchor_gae
    c.feed.max_rounds = 3  # of replacing groups without a signal, where the algorithm selects mixed groups
    c.feed.min_group = 0  # 0 waits for all of a group; above, who is late where so many are over is dropped: leans to the short
    c.feed.max_staleness = 0  # most versions between sampling and training; above 0 later steps are played meanwhile
    c.feed.max_repeats = 0  # 0 takes tasks as they come; above, by value p (1 - p), each so often in a round of all

    # Shaping in training, none by default; evaluation sees outcomes only. `progressive` (alphas) or `staged` (0 and 1), each
    # for an equal share of the run, let form fade into outcome; weights of overlong, failed_calls, efficiency, otc add costs.
    c.reward = ConfigDict()

    c.algo = ConfigDict()  # what the columns mean, and all that they can be, stands in algos/table.py
    c.algo.name = "grpo"  # a row of that table; the keys below replace its columns where they are given
    c.algo.advantage = placeholder(str)  # within a group: plain, centred, normalised, leave_one_out
    c.algo.turns = placeholder(str)  # turns are compared too: with those of the same index or state, or all; or none
    c.algo.gamma = placeholder(float)  # discount per turn, or per token where tokens are the steps
    c.algo.gae_lambda = placeholder(float)  # with a critic: 1 trusts returns, 0 values
    c.algo.aggregate = placeholder(str)  # token_mean, sequence_mean, sequence_sum, sequence_sum_norm, turn_mean
    c.algo.select = placeholder(str)  # all groups, or mixed: only those whose rewards differ
    c.algo.clip_low = placeholder(float)  # the ratio may fall to 1 - this, where the algorithm bounds it
    c.algo.clip_high = placeholder(float)  # and rise to 1 + this
    c.algo.length = placeholder(float)  # tokens, the constant of sequence_sum_norm
    c.algo.kl = placeholder(str)  # to the policy at the start of reinforcement: k1_reward, k2_loss, k3_loss, ...
    c.algo.kl_coef = placeholder(float)  # 0 is off, and then no reference is kept; 0.001 is usual
    c.algo.entropy_coef = placeholder(float)  # 0.001 or less where it is used
    c.algo.importance = placeholder(str)  # weight old / sampler: token_truncated, token_masked, ...; needs old_logprob=trainer
    c.algo.importance_bounds = placeholder(tuple)  # (low, high)
    c.algo.filter = placeholder(str)  # of sequences too far from what sampled them: geometric, k2, k3, unlikely_negative
    c.algo.filter_bounds = placeholder(tuple)  # (low, high); of all but geometric only high counts, 0.01 for k3
    c.algo.drop_overlong = placeholder(bool)  # rollouts that ran out of tokens leave the loss

    c.critic = ConfigDict()  # of the algorithms that have one
    c.critic.lr = 1e-5  # peak; ten times a policy's is usual
    c.critic.warmup_steps = 0  # training steps before the policy moves

    c.engine = ConfigDict()  # the sampler: its cache, and the shapes that are compiled
    c.engine.slots = 32  # trajectories resident at once, per replica
    c.engine.slot_tokens = 1024  # longest trajectory
    c.engine.decode_tokens = 16  # tokens per call of the device
    c.engine.append_rows = 8  # rows per prefill call
    c.engine.append_tokens = (64,)  # prefill lengths that are compiled
    c.engine.chunk = 128  # cache positions read at once; equal to slot_tokens reads the slot in one pass
    c.engine.pages = 0  # of chunk tokens, that slots share and take as they grow; 0: each slot keeps slot_tokens of its own
    c.engine.exact = True  # no bit of a trajectory depends on its neighbours; false computes rows and positions in use only
    c.engine.draft_tokens = 0  # guessed from what a group said and heard, and verified in one forward; 0: none; not with exact
    c.engine.offload_after_s = 0.0  # a tool this slow loses its slot, if wanted, to host memory; 0: for want of pages only
    c.engine.recompute = False  # cached keys of trajectories in flight are computed again under new weights, else kept
    c.engine.dtype = "float32"  # of the sampler's weights and cache

    c.learner = ConfigDict()  # the forward and backward pass
    c.learner.batch_rows = 8  # packed rows of a micro-batch
    c.learner.row_tokens = 1024  # tokens of a packed row
    c.learner.head_chunk = 1024  # tokens whose logits exist at once
    c.learner.remat = "none"  # what the backward pass computes again: none, dots, attention, full; less memory, more work
    c.learner.dtype = "float32"  # of the forward and backward pass; trained weights and moments stay float32
    c.learner.train_only = ""  # globs with commas on weights: blocks.*_norm,norm; empty is all, or with adapters these alone
    c.learner.freeze = ""  # globs with commas on weights that are not trained: embed,head
    c.learner.frozen_dtype = "float32"  # of weights not trained; bfloat16 halves them, exact if init_from or dtype is bfloat16
    c.learner.replay_routing = False  # mixtures of experts: train through the experts that sampled
    c.learner.router_aux_coef = 0.0  # mixtures: weight of the balance loss
    c.learner.router_z_coef = 0.0  # mixtures: weight of the loss that keeps router logits small
    c.learner.attention = "auto"  # back end: xla, splash (TPU), cudnn (GPU), context (cut rows); a run says which and why

    c.finetune = ConfigDict()  # learning without a policy gradient, by `jaxagent finetune`
    c.finetune.mode = ""  # sft, raft, rest_em, search, rest_mcts or dpo; empty is for `jaxagent train`
    c.finetune.path = ""  # dialogues, pairs or stored trajectories; empty samples
    c.finetune.batch = 32  # rows, or pairs, of a step
    c.finetune.rounds = 1  # of sampling; train.steps are shared among them
    c.finetune.threshold = ()  # rewards to reach, one phase after the other; empty takes the best of each group
    c.finetune.beta = 0.1  # of DPO

    c.train = ConfigDict()  # the loop
    c.train.steps = 100  # of reinforcement, or of fine-tuning
    c.train.minibatches = 1  # optimizer steps per batch of groups
    c.train.old_logprob = "sampler"  # or "trainer": one more forward pass; against which ratios are taken
    c.train.max_broken = 0.5  # share of episodes lost to infrastructure that ends the run with a message

    c.optimizer = ConfigDict()  # AdamW of reinforcement, or of fine-tuning
    c.optimizer.lr = 1e-6  # peak; 1e-6 is for checkpoints, policies from scratch want 1e-4 and more, adapters 1e-5
    c.optimizer.lr_final = 0.0  # at the last update, reached along a cosine
    c.optimizer.warmup_steps = 10  # updates over which the rate rises; Adam's first ones would be of full size everywhere
    c.optimizer.b2 = 0.99  # decay of the second moment; runs of some hundred updates are too short for 0.999
    c.optimizer.weight_decay = 0.0  # of AdamW, times the rate; it would pull a checkpoint towards zero
    c.optimizer.clip_norm = 1.0  # most that the norm of a gradient may be; it is scaled down to it

    c.warmup = ConfigDict()  # supervised learning on the world's demonstrations, before reinforcement
    c.warmup.steps = 0  # 0 is none, for a checkpoint that knows the format
    c.warmup.demos = 1000  # that are made; every batch is drawn from them
    c.warmup.batch = 32  # demonstrations per step

    c.warmup_optimizer = ConfigDict()  # AdamW of the warm-up
    c.warmup_optimizer.lr = 3e-3  # peak
    c.warmup_optimizer.lr_final = 3e-4  # at the last step of the warm-up
    c.warmup_optimizer.warmup_steps = 0  # over which its rate rises

    c.evaluate = ConfigDict()  # success on tasks that are never trained on
    c.evaluate.every = 20  # steps between evaluations on validation tasks; 0 is never
    c.evaluate.tasks = 128  # validation tasks
    c.evaluate.final_tasks = 256  # test tasks, before and after
    c.evaluate.rollouts = 1  # k, episodes per task
    c.evaluate.temperature = 1.0  # of evaluation alone; the rest of its sampling is fixed, see evaluate.held_out
    c.evaluate.ablate = True  # also score with tool results, or a world without tools, made to say nothing

    c.alarms = ConfigDict()  # warn, and end the run where they are named in `stop`
    # of kl of one step, of entropy's share of its start, of zero_variance's of groups; else 0.1, 0.05, 0.9
    c.alarms.limits = ConfigDict()
    c.alarms.stop = "tools"  # kl, entropy, zero_variance, parse_errors, held_out, gap, tools, gradient, compiled; or all

    c.metrics = ConfigDict()  # who hears the metrics besides metrics.jsonl
    c.metrics.echoes = ""  # with commas: tensorboard, wandb, mlflow, trackio, otel, trace; they hear what metrics.jsonl says

    c.checkpoint = ConfigDict()  # what a killed run goes on from
    c.checkpoint.every = 20  # steps
    c.checkpoint.keep = 2  # the newest; older ones are deleted

    c.sandbox = ConfigDict()  # where tools and programs run
    # of a running server, of several by commas, or a fleet file (launch/fleets/*.toml); empty starts the embedded one
    c.sandbox.url = ""
    c.sandbox.token_file = ""  # the bearer token; needed with URLs, while a fleet file names its own
    c.sandbox.code = "auto"  # embedded server: auto, require or off; see sandbox-server --help
    c.sandbox.min_isolation = "L2"  # embedded server: weakest level at which code may run
    c.sandbox.timeout_s = 30.0  # of a request, retries included, unless a fleet file says another
    return c
