"""What a typed spec must keep to, beyond types: each file checks one part and reports every fault it finds."""
