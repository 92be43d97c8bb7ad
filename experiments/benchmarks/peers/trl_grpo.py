"""The work with TRL's GRPOTrainer: `python -m experiments.benchmarks.peers.trl_grpo WORK.json`, in TRL's environment.

As somebody would set it up for one machine without an accelerator: the whole batch in one forward pass and no gradient
checkpointing, since memory is not short; generation by transformers, since TRL's vLLM needs a GPU.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from experiments.benchmarks.peers.work import Rewards, Work, read_work, say_step, say_versions


class Speaker(TrainerCallback):
    """Says each step when its optimiser update is done."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            say_step(state.global_step - 1, logs["reward"])


def settings(work: Work, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": work.dtype},
        bf16=work.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        seed=work.seed,
        max_steps=work.steps,
        per_device_train_batch_size=work.prompts_per_step * work.group_size,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=work.group_size,
        max_completion_length=work.max_tokens,
        temperature=work.temperature,
        shuffle_dataset=False,  # the problems are in order already
        loss_type="dapo",  # token mean over the batch
        scale_rewards=False,
        beta=0.0,
        epsilon=work.clip_low,
        epsilon_high=work.clip_high,
        delta=work.dual_clip,
        learning_rate=max(work.learning_rates),
        adam_beta1=work.beta1,
        adam_beta2=work.beta2,
        adam_epsilon=work.eps,
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    work = read_work()
    say_versions("trl", "torch", "transformers", "peft", "accelerate")
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    rewards = Rewards(work)

    def reward(completions: list[Any], completion_ids: list[list[int]], problem: list[int], **_: Any) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(problem), work.group_size):
            group = slice(start, start + work.group_size)
            texts = [completion[0]["content"] for completion in completions[group]]
            scores += rewards.score(problem[start], texts, completion_ids[group], tokenizer.eos_token_id)
        return scores

    rows = [{"prompt": problem["messages"], "problem": i} for i, problem in enumerate(work.problems)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=work.model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=settings(work, folder),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM",
                r=work.rank,
                lora_alpha=work.alpha,
                use_rslora=work.rslora,
                target_modules=work.targets,
                lora_dropout=0.0,
            ),
            callbacks=[Speaker()],
        )
        optimizer = trainer.create_optimizer()
        peak = max(work.learning_rates)
        # One value beyond the last: the scheduler is stepped once more after the last update.
        factors = [rate / peak for rate in [*work.learning_rates, 0.0]]
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
        trainer.train()


if __name__ == "__main__":
    main()
