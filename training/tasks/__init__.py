"""Example tasks: real digits, real text, and synthetic tensors for measuring."""
