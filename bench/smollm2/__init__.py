"""SmolLM2-135M-Instruct with DeepSeek Sparse Attention: a small real model."""
