"""Example tasks: real digits, real text, and synthetic tensors for measuring. Free of torch, unlike its modules."""

OPTIONS: dict[str, dict[str, type]] = {
    "digits": {"hidden": int, "depth": int, "dropout": float},
    "text": {"context": int, "width": int, "depth": int, "heads": int, "max_bytes": int, "held_out_bytes": int},
    "synthetic": {"samples": int, "features": int, "width": int, "depth": int, "classes": int},
}
"""What `train.options` may say for each built-in task: the keyword arguments of its class, which a test compares."""
