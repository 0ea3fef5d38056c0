"""TRL's GRPOTrainer for compare.py, with its own tool loop and generation by transformers, on CPU; runs in TRL's environment.

A random model writes no call, so the tokenizer reads every turn as one call of the tool; and as TRL knows one budget for the
episode and none for a turn, the end token is made certain where the workload has a turn end. Two of its defaults are off, which
are wrong for a CPU: bfloat16 (a hundred times slower there) and computing activations again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait would count as CPU seconds

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import RESULT, Report, Tools, Workload, arguments, distinct, reward, workload_of


class Ending(LogitsProcessor):
    """The end token, and no other, where a row has its length."""

    def __init__(self, fed: int, lengths: list[int], end: int):
        self.fed, self.lengths, self.end = fed, torch.tensor(lengths), end

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        last = self.lengths == input_ids.shape[1] - self.fed + 1
        scores[last] = -torch.inf
        scores[last, self.end] = 0.0
        return scores


class Generation:
    """Stands in for the model's `generate`: tells every turn its length, and counts."""

    def __init__(self, model: Any, tokenizer: Any, workload: Workload, report: Report):
        self.generate, self.end = model.generate, tokenizer.eos_token_id
        self.workload, self.report = workload, report
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.turn, self.seconds, self.decoded, self.said = 0, 0.0, [], []

    def __call__(self, **given: Any) -> torch.Tensor:
        fed = given["input_ids"].shape[1]
        lengths = [turns[self.turn] for turns in self.workload.lengths(len(self.report.steps))]
        if len(lengths) != len(given["input_ids"]):
            raise RuntimeError(
                f"turn {self.turn} has {len(given['input_ids'])} rows, {len(lengths)} are wanted: one has no room"
            )
        if self.workload.agentic:
            given["logits_processor"] = [Ending(fed, lengths, self.end)]
        began = time.perf_counter()
        out = self.generate(**given)
        self.seconds += time.perf_counter() - began
        self.decoded.append(out.shape[1] - fed)
        rows = [row[: row.index(self.end) + 1] if self.end in row else row for row in out[:, fed:].tolist()]
        self.said += rows
        self.report.sampled += sum(map(len, rows))
        self.turn += 1
        return out


class Steps(TrainerCallback):
    """Reports every step."""

    def __init__(self, report: Report, generation: Generation, tools: Tools):
        self.report, self.generation, self.tools = report, generation, tools

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.report.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        g = self.generation
        found = {"generate_s": g.seconds, "model_calls": g.turn, "decode_steps": sum(g.decoded), "distinct": distinct(g.said)}
        self.report.step(**self.tools.take(), **found)
        g.begin()


def tool_of(workload: Workload, report: Report, tools: Tools) -> Any:
    def look_up(query: str) -> str:
        """Looks something up.

        Args:
            query: What to look up.
        """
        with tools.call():
            time.sleep(workload.tool_ms[len(report.steps)] / 1e3)
        return RESULT

    return look_up


def reads_calls(tokenizer: Any) -> None:
    """Has the tokenizer read every turn as one call of the tool."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"query": "x"}}}

    class Reading(type(tokenizer)):  # type: ignore[misc]
        def parse_response(self, response: Any, *_: Any, **__: Any) -> Any:
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            many = len(response) and isinstance(response[0], list | tuple)
            return [dict(turn) for _ in response] if many else turn

    tokenizer.__class__ = Reading
    tokenizer.response_schema = {"type": "object"}


def main() -> None:
    """Runs and prints a JSON line."""
    workload = workload_of(arguments(__doc__).parse_args())
    report, tools = Report("trl", workload), Tools()
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    asked = workload.asked()
    prompts = [[{"role": "user", "content": said}] for said in asked["messages"]] if workload.agentic else asked["texts"]
    loop: dict[str, Any] = {}
    if workload.agentic:
        reads_calls(tokenizer)
        loop["tools"] = [tool_of(workload, report, tools)]
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(sys.stderr):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completion_ids, **_: [reward(str(ids)) for ids in completion_ids],
            args=config(workload, place),
            train_dataset=Dataset.from_dict({"prompt": prompts * workload.steps}),
            processing_class=tokenizer,
            **loop,
        )
        trainer.model.generate = generation = Generation(trainer.model, tokenizer, workload, report)
        trainer.add_callback(Steps(report, generation, tools))
        trainer.train()
    report.print(versions={name: metadata.version(name) for name in ("trl", "torch", "transformers")})


def config(workload: Workload, place: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=place,
        per_device_train_batch_size=workload.episodes,
        num_generations=workload.group,
        max_completion_length=workload.budget if workload.agentic else workload.new_tokens,
        max_steps=workload.steps,
        beta=workload.beta,
        learning_rate=1e-6,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=10**6,
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        **({"max_tool_calling_iterations": workload.turns - 1} if workload.agentic else {}),
    )


if __name__ == "__main__":
    main()
