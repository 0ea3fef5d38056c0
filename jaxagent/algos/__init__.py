"""Pure array functions of reinforcement learning: who learns from whom, how far, and how tokens are averaged."""
