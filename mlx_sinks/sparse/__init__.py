"""Learned selections that keep the sinks: DeepSeek Sparse Attention."""
