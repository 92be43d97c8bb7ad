"""Recipes: tasks, rewards, benchmarks and studies. `grpo_jax` never imports this package; configs name it."""
