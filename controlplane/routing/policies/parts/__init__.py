"""What several of the baselines are made of: room, queues as engines report them, scores, hashed homes."""
