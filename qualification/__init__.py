"""What must be shown about a memory-admission policy, and the proof of it."""
