"""The OpenAI-compatible door: what programs that are not ours ask in their dialects, and the tokens that answer them."""
