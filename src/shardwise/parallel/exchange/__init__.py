"""context_parallel and expert_parallel: ranks exchange keys of a sequence, or tokens."""
